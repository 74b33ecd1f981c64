"""The forward pass of a dense model on a CPU, in fp32, in few calls of ``kernels.c``: for decoding.

The same mathematics on the same weights as the training model's modules, which take many small operations: here all
layers are one call, from weights in a layout of their own. Where tensor-parallel ranks share the weights it is a call
for each half of a layer, with the sum over the ranks between. Tests hold the two together.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn.functional import pad

from hybridflow.models.experts import ExpertLayer
from hybridflow.models.gated import kernel_gate
from hybridflow.models.gpt import Transformer
from hybridflow.models.lora import merged_weight
from hybridflow.models.norm import ProjectionNorm
from hybridflow.models.shapes import LAYER_SCALAR
from hybridflow.rollout.blocks import PANEL
from hybridflow.rollout.cpu.kernels import Batch, Layer, Shape, Slots, Step, Vocabulary, load_kernels
from hybridflow.rollout.paged import PagedAttention, PagedCache, cache_shapes, state_bytes

_GATES = {(0, 0.0, 0.0): 1, (1, 0.0, 0.0): 2}
"""``kernel_gate`` → ``GATED_SILU`` and ``GATED_GELU`` of kernels.c."""


def runs_on_cpu(model: Transformer) -> bool:
    """Return whether ``CpuTransformer`` can compute this model."""
    config = model.config
    shapes = set(cache_shapes(model).values())
    return (
        load_kernels() is not None
        and config.params_dtype is torch.float32
        and next(model.parameters()).device.type == "cpu"
        and not model.has_latent_attention
        and not config.attention_output_gate
        and not state_bytes(model)
        and len(shapes) == 1
        and all(head % 16 == 0 for _, head in shapes)
        and all(2 * pairs == head for pairs in model.rotated_pairs for _, head in shapes)
        and not config.rotary_interleaved
        and config.num_query_groups >= config.tensor_model_parallel_size
        and not config.add_bias_linear
        and kernel_gate(config) in _GATES
        and all(_is_plain(layer) for layer in model.decoder.layers)
    )


def _is_plain(layer: TransformerLayer) -> bool:
    """Return whether a layer is dense, and normalizes its inputs.

    It may normalize queries and keys, each head by itself. It has no sinks, and no factor on its output.
    """
    attention = layer.self_attention
    is_dense = not isinstance(layer.mlp, ExpertLayer)
    has_norms = not isinstance(layer.input_layernorm, IdentityOp)
    has_other_norms = isinstance(attention.q_layernorm, ProjectionNorm) or attention.has_value_norm
    has_more = attention.core_attention.softmax_offset is not None or hasattr(layer, LAYER_SCALAR)
    return is_dense and has_norms and not has_other_norms and not has_more


class CpuTransformer:
    """A stage and shard of a model, computed as ``Transformer.forward`` computes it; all weights as they are now.

    Args:
        model: Whose weights are taken, with the updates of adapters in them: matrices copied into another layout.
        group: Its tensor-parallel ranks.
        vocab_size: True vocabulary.

    Attributes:
        matrices: The copies, ``[panels, inputs, PANEL]`` each.
    """

    def __init__(self, model: Transformer, group: dist.ProcessGroup, vocab_size: int) -> None:
        kernels = load_kernels()
        assert kernels is not None, "see runs_on_cpu"
        self.matrices: list[Tensor] = []
        # What the kernels read by its address has to stay where it is.
        self._others: list[Tensor] = []
        self._kernels = kernels
        self._model = model
        self._group = group if group.size() > 1 else None
        config, layers = model.config, model.decoder.layers
        groups, head = next(iter(cache_shapes(model).values()))
        sharers = config.num_attention_heads // config.num_query_groups
        hidden, inner = config.hidden_size, layers[0].mlp.linear_fc1.weight.shape[0] // 2
        self._shape = Shape(
            *(hidden, groups, sharers, head, inner, _GATES[kernel_gate(config)]),
            config.layernorm_epsilon,
            1.0 if config.layernorm_zero_centered_gamma else 0.0,
        )
        self._row_width = hidden + (3 * sharers + 2) * groups * head + inner
        tables = model.rotary_tables()
        self._layers = (Layer * len(layers))(*(self._layer(each, tables[at]) for at, each in enumerate(layers)))
        self._vocabulary = self._describe_vocabulary(vocab_size)

    def __call__(self, tokens: Tensor, attention: PagedAttention, rows: Tensor) -> Tensor:
        """Compute as ``Transformer.forward``.

        Hidden states come in by ``set_input_tensor`` of the model. Collective: tp.
        """
        model, width = self._model, self._shape.hidden
        hidden = self._input(tokens, attention)
        product = torch.empty_like(hidden)
        step, _space = self._step(attention, hidden, product)
        num_halves = 2 * len(self._layers)
        for half in range(0, num_halves, num_halves if self._group is None else 1):
            end = num_halves if self._group is None else half + 1
            self._kernels.hf_layers(*map(ctypes.addressof, (self._shape, self._layers, step)), half, end)
            if self._group is not None:
                dist.all_reduce(product, group=self._group)
        chosen = rows if model.post_process else None
        num = len(hidden) if chosen is None else len(chosen)
        output, sums = _empty(num, self._vocabulary.outputs), _empty(num, width)
        self._kernels.hf_output(
            *_addresses(output, sums),
            *map(ctypes.addressof, (self._shape, self._vocabulary)),
            *(*_addresses(hidden, product, chosen), num),
        )
        return output if model.post_process else sums[:, None]

    def decode(
        self, cache: PagedCache, tables: np.ndarray, chosen: np.ndarray, most: int, version: int, **arrays: np.ndarray
    ) -> np.ndarray:
        """Sample up to ``most`` next tokens of each of some slots in one call.

        The model must be whole on this rank.

        Args:
            cache: All but the last token of each slot, with room for the tokens to come.
            tables: Blocks of each slot, ``[slots, blocks]`` int32.
            chosen: Slots, ``[chosen]`` int64.
            most: Tokens of each, if it does not end before.
            version: To be noted beside the tokens.
            arrays: What is known of all slots, and written to: the other fields of ``slots`` of kernels.c.

        Returns:
            Of each slot, ``[slots]`` int64: 0, or what stood in the place of a token that could not be sampled.
        """
        num, width, model = len(chosen), self._shape.hidden, self._model
        self._vocabulary.embedding = model.embedding.word_embeddings.weight.data_ptr()
        hidden, product, sums = _empty(3, num, width)
        logits = _empty(num, self._vocabulary.outputs)
        places = torch.empty(2, num, dtype=torch.int64)
        attention = PagedAttention(cache, torch.from_numpy(tables), *places)
        step, _space = self._step(attention, hidden, product)
        failures = np.zeros(len(tables), np.int64)
        known = {**arrays, "failures": failures}
        slots = Slots(
            *(arrays["tokens"].shape[1], arrays["stops"].shape[1], version),
            **{name: known[name].ctypes.data for name, *_ in Slots._fields_ if name in known},
        )
        batch = Batch(step, *_addresses(*places, sums, logits))
        self._kernels.hf_decode(
            *(*map(ctypes.addressof, (self._shape, self._layers)), len(self._layers)),
            *(*map(ctypes.addressof, (self._vocabulary, slots, batch)), chosen.ctypes.data, most),
        )
        return failures

    def _step(self, attention: PagedAttention, hidden: Tensor, product: Tensor) -> tuple[Step, Tensor]:
        """Return the kernels' arguments for some tokens, and the buffer that they use meanwhile."""
        cache, tables, space = attention.cache, attention.tables, _empty(len(hidden), self._row_width)
        step = Step(
            *(len(hidden), tables.shape[1], *_addresses(attention.sequences, attention.positions, tables)),
            *(cache.keys[0].data_ptr(), cache.stride, *_addresses(hidden, product, space)),
        )
        return step, space

    def _input(self, tokens: Tensor, attention: PagedAttention) -> Tensor:
        """Return the input of this stage, ``[tokens, hidden]``, as a buffer that may be overwritten."""
        model = self._model
        if not model.pre_process:
            received: Tensor = model.decoder.input_tensor
            return received[:, 0].clone()
        if self._group is None:
            hidden: Tensor = model.embedding.word_embeddings.weight.index_select(0, tokens)
        else:
            if model.sequence_switch is not None:
                # Training may have left it on.
                model.sequence_switch.turn(False)
            hidden = model.embedding(input_ids=tokens[None], position_ids=attention.positions[None])[:, 0]
        if model.has_scaled_embeddings:
            hidden = hidden * hidden.new_tensor(hidden.shape[-1] ** 0.5)
        return hidden.contiguous()

    def _describe_vocabulary(self, vocab_size: int) -> Vocabulary:
        model, width = self._model, self._shape.hidden
        found = Vocabulary(
            product_norm=self._layers[-1].output_norm, factor=width**0.5 if model.has_scaled_embeddings else 1.0
        )
        if model.post_process:
            shared = model.share_embeddings_and_output_weights
            output = model.shared_embedding_or_output_weight() if shared else model.output_layer.weight
            found.norm, found.output = self._keep(model.decoder.final_layernorm.weight), self._matrix(pack(output))
            found.outputs, found.real, found.cap = len(output), vocab_size, model.logit_softcap or 0.0
        return found

    def _layer(self, layer: TransformerLayer, rotary: Tensor) -> Layer:
        attention, mlp = layer.self_attention, layer.mlp
        scoring, bias = attention.core_attention.scoring, attention.linear_qkv.bias
        return Layer(
            input_norm=self._norm(layer.input_layernorm),
            qkv=self._matrix(pack(merged_weight(attention.linear_qkv))),
            qkv_bias=None if bias is None else self._keep(pad(bias.detach(), (0, -len(bias) % PANEL))),
            query_norm=self._norm(attention.q_layernorm),
            key_norm=self._norm(attention.k_layernorm),
            projection=self._matrix(pack(merged_weight(attention.linear_proj))),
            attention_norm=self._norm(getattr(attention, "post_layernorm", None)),
            mlp_norm=self._norm(layer.pre_mlp_layernorm),
            gate_up=self._matrix(pack_gated(merged_weight(mlp.linear_fc1))),
            down=self._matrix(pack(merged_weight(mlp.linear_fc2))),
            output_norm=self._norm(getattr(mlp, "post_layernorm", None)),
            rotary=self._keep(rotary),
            scale=scoring.scale,
            softcap=scoring.softcap or 0.0,
            window=scoring.window or 0,
        )

    def _norm(self, norm: torch.nn.Module | None) -> int | None:
        if norm is None or isinstance(norm, IdentityOp):
            return None
        return self._keep(norm.get_parameter("weight").clone())

    def _matrix(self, laid_out: Tensor) -> int:
        self.matrices.append(laid_out)
        return laid_out.data_ptr()

    def _keep(self, other: Tensor) -> int:
        self._others.append(other.detach())
        return other.data_ptr()


def pack(weight: Tensor, panel: int = PANEL) -> Tensor:
    """Return a matrix ``[outputs, inputs]`` in panels, ``[panels, inputs, panel]``, the last padded with zeros."""
    filled = pad(weight.detach(), (0, 0, 0, -len(weight) % panel))
    panels: Tensor = filled.unflatten(0, (-1, panel))  # type: ignore[no-untyped-call]
    return panels.transpose(1, 2).contiguous()


def pack_gated(weight: Tensor) -> Tensor:
    """Return panels that are half gate and half up, from a weight that has gate above up."""
    return torch.cat([pack(half, PANEL // 2) for half in weight.chunk(2)], dim=-1)


def _addresses(*tensors: Tensor | None) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def _empty(*shape: int) -> Tensor:
    """Return a buffer of the kernels' numbers, whatever torch's default is: a thread that loads a model changes it."""
    return torch.empty(shape, dtype=torch.float32)
