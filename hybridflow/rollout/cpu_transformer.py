"""The forward pass of a dense model on a CPU, in fp32, with few large operations: for decoding.

The same mathematics on the same weights as the training model's modules, which take five times as many operations: the
matrix products by oneDNN, from weights that it has laid out for itself, each with what follows it (the activation, the
gate, the residual) fused in; what stands between them by ``kernels.c``. Tests hold the two together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from hybridflow.models.attention import Scoring
from hybridflow.models.experts import ExpertLayer
from hybridflow.models.gpt import Transformer
from hybridflow.models.lora import merged_weight
from hybridflow.rollout.kernels import load_kernels
from hybridflow.rollout.paged import PagedAttention, cache_shape

_ROWS = 64
"""Rows for which oneDNN lays out the weights; others run too."""

_linear = torch.ops.mkldnn._linear_pointwise.default
_linear_binary = torch.ops.mkldnn._linear_pointwise.binary


@dataclass(frozen=True)
class _Layer:
    """Weights of a layer, laid out for oneDNN, and norms."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    scoring: Scoring
    projection: Tensor
    attention_norm: Tensor | None
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    output_norm: Tensor | None


def runs_on_cpu(model: Transformer) -> bool:
    """Whether this model is one that ``CpuTransformer`` computes."""
    config = model.config
    head = cache_shape(model)[1]
    layers = model.decoder.layers
    return (
        load_kernels() is not None
        and torch.backends.mkldnn.is_available()
        and config.params_dtype is torch.float32
        and next(model.parameters()).device.type == "cpu"
        and head % 16 == 0
        and 2 * len(model.rotary_pos_emb.inv_freq) == head
        and config.num_query_groups >= config.tensor_model_parallel_size
        and not any(isinstance(layer.mlp, ExpertLayer) for layer in layers)
    )


class CpuTransformer:
    """A stage and shard of a model, computed as ``Transformer.forward`` computes it; all weights as they are now.

    Args:
        model: Whose weights are taken, with the updates of adapters in them: copied, into another layout.
        group: Its tensor-parallel ranks.
    """

    def __init__(self, model: Transformer, group: dist.ProcessGroup) -> None:
        kernels = load_kernels()
        assert kernels is not None, "see runs_on_cpu"
        self._kernels = kernels
        self._model = model
        self._group = group if group.size() > 1 else None
        self._groups, self._head = cache_shape(model)
        config = model.config
        self._sharers = config.num_attention_heads // config.num_query_groups
        self._eps = config.layernorm_epsilon
        self._centre = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self._activation = _ACTIVATIONS[config.activation_func.__name__]
        self._layers = [_layer(layer) for layer in model.decoder.layers]
        self._output = None
        if model.post_process:
            shared = model.share_embeddings_and_output_weights
            self._output = _pack(model.shared_embedding_or_output_weight() if shared else model.output_layer.weight)
        self._rotary = _rotary_table(model)

    def __call__(self, tokens: Tensor, attention: PagedAttention, rows: Tensor) -> Tensor:
        """As ``Transformer.forward``; hidden states come in by ``set_input_tensor`` of the model. Collective: tp."""
        model = self._model
        if model.pre_process:
            hidden = model.embedding(input_ids=tokens[None], position_ids=attention.positions[None])[:, 0]
            if model.has_scaled_embeddings:
                hidden = hidden * hidden.new_tensor(hidden.shape[-1] ** 0.5)
            hidden = hidden.contiguous()
        else:
            hidden = model.decoder.input_tensor[:, 0]
        for index, layer in enumerate(self._layers):
            hidden = self._attention_block(index, layer, hidden, attention)
            hidden = self._feed_forward_block(layer, hidden)
        if not model.post_process:
            return hidden[:, None]
        normed = self._norm(hidden[rows].contiguous(), model.decoder.final_layernorm.weight)
        output = _linear(normed, self._output, None, "none", [], "")
        cap = model.logit_softcap
        return output if cap is None else cap * torch.tanh(output / cap)

    def _attention_block(self, index: int, layer: _Layer, hidden: Tensor, attention: PagedAttention) -> Tensor:
        mixed = _linear(self._norm(hidden, layer.input_norm), layer.qkv, layer.qkv_bias, "none", [], "")
        num_rows, width = len(hidden), self._groups * self._sharers * self._head
        queries, context = torch.empty(num_rows, width), torch.empty(num_rows, width)
        keys, values = attention.cache.keys[index], attention.cache.values[index]
        sizes = (num_rows, self._groups, self._sharers, self._head)
        self._kernels.hf_store(
            *_addresses(queries, keys, values, mixed, self._rotary, attention.positions, attention.places),
            *sizes,
            *_addresses(layer.query_norm, layer.key_norm),
            self._eps,
            self._centre,
        )
        scoring = layer.scoring
        self._kernels.hf_attend(
            *_addresses(context, queries, keys, values, attention.tables),
            attention.tables.shape[1],
            *_addresses(attention.sequences, attention.positions),
            *sizes,
            scoring.scale,
            scoring.softcap or 0.0,
            scoring.window or 0,
        )
        return self._add(context, hidden, layer.projection, layer.attention_norm)

    def _feed_forward_block(self, layer: _Layer, hidden: Tensor) -> Tensor:
        normed = self._norm(hidden, layer.mlp_norm)
        gated = _linear(normed, layer.gate, None, *self._activation)
        gated = _linear_binary(normed, gated, layer.up, None, "mul")
        return self._add(gated, hidden, layer.down, layer.output_norm)

    def _add(self, inner: Tensor, hidden: Tensor, weight: Tensor, norm: Tensor | None) -> Tensor:
        """The product with a row-parallel weight, normalized where the model does, added to the residual."""
        if self._group is None and norm is None:
            return _linear_binary(inner, hidden, weight, None, "add")
        product = _linear(inner, weight, None, "none", [], "")
        if self._group is not None:
            dist.all_reduce(product, group=self._group)
        return hidden + (product if norm is None else self._norm(product, norm))

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        normed = torch.empty_like(hidden)
        self._kernels.hf_rms_norm(*_addresses(normed, hidden, weight), *hidden.shape, self._eps, self._centre)
        return normed


_ACTIVATIONS: dict[str, tuple[str, list[Any], str]] = {
    "silu": ("swish", [], ""),
    "_gelu_tanh": ("gelu", [], "tanh"),
}


def _layer(layer: TransformerLayer) -> _Layer:
    attention, mlp = layer.self_attention, layer.mlp
    gate, up = merged_weight(mlp.linear_fc1).chunk(2)
    return _Layer(
        input_norm=layer.input_layernorm.weight,
        qkv=_pack(merged_weight(attention.linear_qkv)),
        qkv_bias=attention.linear_qkv.bias,
        query_norm=_norm_weight(attention.q_layernorm),
        key_norm=_norm_weight(attention.k_layernorm),
        scoring=attention.core_attention.scoring,
        projection=_pack(merged_weight(attention.linear_proj)),
        attention_norm=_norm_weight(getattr(attention, "post_layernorm", None)),
        mlp_norm=layer.pre_mlp_layernorm.weight,
        gate=_pack(gate),
        up=_pack(up),
        down=_pack(merged_weight(mlp.linear_fc2)),
        output_norm=_norm_weight(getattr(mlp, "post_layernorm", None)),
    )


def _norm_weight(norm: torch.nn.Module | None) -> Tensor | None:
    return None if norm is None or isinstance(norm, IdentityOp) else norm.weight


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)


def _rotary_table(model: Transformer) -> Tensor:
    """Cosines and sines of each position, ``[context, 2, head / 2]``."""
    angles = torch.outer(torch.arange(model.max_sequence_length).float(), model.rotary_pos_emb.inv_freq)
    return torch.stack([angles.cos(), angles.sin()], dim=1).contiguous()


def _addresses(*tensors: Tensor | None) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]
