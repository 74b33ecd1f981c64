"""How megatron-core cuts each tensor of a model, read off an uncut one.

A logical name is a tensor's name in the whole model: global layer and expert indices, the same in every layout and
with and without Transformer Engine. The cut itself is what megatron-core 0.16.1 writes on its parameters
(``tensor_model_parallel``, ``partition_dim``, ``partition_stride``), which LoRA factors carry too. Two things it does
not write there, and they are asked of the modules: which expert a parameter is in, and that the rows of a gated
MLP's ``linear_fc1`` are gate and up (Transformer Engine's grouped layers leave ``partition_stride`` at 1).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from torch import Tensor, nn

from hybridflow.errors import ReshardError
from hybridflow.families.family import EMBEDDING, OUTPUT
from hybridflow.models.gpt import ValueHead
from hybridflow.models.layers import Chunks, chunks_of
from hybridflow.models.user_model import Uncut
from hybridflow.reshard.spec import ModelSpec, Place, TensorSpec
from hybridflow.reshard.views import DTYPE_NAMES

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
# An expert's tensor in a SequentialMLP, and in a TEGroupedMLP, which numbers the weights of one module.
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(?P<index>\d+)\.(?P<rest>.*)")
_GROUPED = re.compile(r"mlp\.experts\.(?P<rest>linear_fc[12]\.(?:weight|bias))(?P<index>\d+)")
# Transformer Engine fuses a norm into the linear layer behind it.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


class Logical(NamedTuple):
    """A tensor of this rank and which tensor of the whole model it is a part of.

    Attributes:
        name: Logical name.
        place: Where along the pipeline.
        expert: Which expert of how many, of a tensor inside one.
        tensor: The parameter, or the persistent buffer.
    """

    name: str
    place: Place
    expert: tuple[int, int] | None
    tensor: Tensor


def logical_parameters(model: GPTModel | Chunks | Sequence[GPTModel]) -> dict[str, nn.Parameter]:
    """Return this rank's parameters by logical name, in the order of the model; of all its virtual pipeline chunks.

    Raises:
        ReshardError: A parameter is in no known part of the model.
    """
    tensors = logical_tensors(model)
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}


def logical_tensors(model: GPTModel | Chunks | Sequence[GPTModel]) -> dict[str, Tensor]:
    """Return ``logical_parameters`` plus the buffers that belong to the weights, such as a router's ``expert_bias``."""
    chunks = chunks_of(model) if isinstance(model, nn.Module) else model
    return {logical.name: logical.tensor for chunk in chunks for logical in _logical(chunk)}


def describe(whole: GPTModel, *, vocab_divisible_by: int = 1) -> ModelSpec:
    """Describe how every tensor of a model is cut, in every layout.

    Args:
        whole: The model uncut and with its vocabulary unpadded, on any device; ``meta`` needs no memory.
        vocab_divisible_by: In a layout the vocabulary is padded to a multiple of this times ``tp``.

    Raises:
        ReshardError: The model is cut, or what megatron-core states of a tensor describes no cut.
    """
    config = whole.config
    sizes = {
        axis: getattr(config, f"{axis}_parallel_size")
        for axis in ("tensor_model", "pipeline_model", "expert_model", "expert_tensor")
    }
    if any(size not in (None, 1) for size in sizes.values()):
        raise ReshardError(f"a model is described uncut; found parallel sizes {sizes}; build it with all of them 1")
    gated = _gated(whole)
    tensors = tuple(_describe(logical, whole, gated, vocab_divisible_by) for logical in _logical(whole))
    return ModelSpec(tensors=tensors, num_layers=config.num_layers)


def pipeline_layers(config: TransformerConfig) -> tuple[int, ...]:
    """Return the layers of each of the ``pp * vpp`` virtual stages by megatron-core's rule: ``ParallelLayout.layers``.

    Args:
        config: megatron-core's, with its own ways to deal layers: ``num_layers_in_first_pipeline_stage`` and ``last``,
            ``account_for_embedding_in_pipeline_split`` and ``loss``, ``virtual_pipeline_model_parallel_size``,
            ``pipeline_model_parallel_layout``.

    Raises:
        ReshardError: megatron-core cannot deal the layers.
    """
    pp, vpp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    custom = config.pipeline_model_parallel_layout
    layers: list[int] = []
    for virtual_stage in range(pp * (vpp or 1)):
        chunk, stage = divmod(virtual_stage, pp)
        if custom is not None:
            # Its own functions ask megatron-core's globals, which are never set here.
            layers.append(custom.layout[stage][chunk].count(LayerType.decoder))
            continue
        place = config, None if vpp is None else chunk, stage
        try:
            count, offset = get_num_layers_to_build(*place), get_transformer_layer_offset(*place)
        except (AssertionError, ZeroDivisionError) as error:
            reason = " ".join(str(error).split())
            raise ReshardError(
                f"{config.num_layers} layers on pp={pp}, vpp={vpp}: megatron-core cannot deal them: {reason}; "
                "change the stages, or list them in pipeline_model_parallel_layout"
            ) from error
        assert count == 0 or offset == sum(layers), f"virtual stage {virtual_stage} begins with layer {offset}"
        layers.append(count)
    if sum(layers) != config.num_layers:
        raise ReshardError(
            f"megatron-core deals {sum(layers)} layers to pp={pp}, vpp={vpp}, the model has {config.num_layers}; "
            "make the two equal"
        )
    return tuple(layers)


def _logical(chunk: GPTModel | Uncut) -> Iterator[Logical]:
    """Yield parameters in the order of the model, then buffers that are saved with them."""
    if isinstance(chunk, Uncut):
        yield from (Logical(name, "embedding", None, tensor) for name, tensor in chunk.tensors())
        return
    saved = chunk.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in chunk.named_buffers() if name in saved]
    for name, tensor in [*chunk.named_parameters(), *buffers]:
        match = _LAYER.fullmatch(name)
        if match is not None:
            layer = chunk.decoder.layers[int(match[1])]
            place = layer.layer_number - 1
            rest, expert = _in_layer(match[2], layer)
            yield Logical(f"decoder.layers.{place}.{rest}", place, expert, tensor)
        elif name.startswith("embedding."):
            yield Logical(name, "embedding", None, tensor)
        elif name == OUTPUT and chunk.share_embeddings_and_output_weights:
            yield Logical(EMBEDDING, "embedding", None, tensor)
        elif name.startswith("output_layer."):
            head = "value_head" if isinstance(chunk.output_layer, ValueHead) else "output_layer"
            yield Logical(name.replace("output_layer", head, 1), "output", None, tensor)
        elif name.startswith("decoder.final_layernorm."):
            yield Logical(name, "output", None, tensor)
        else:
            raise ReshardError(
                f"{name}: in neither the embedding, a decoder layer, the final norm nor the output layer, so its "
                "pipeline stage is unknown; take it out of the model, or give it a place in hybridflow/models/specs.py"
            )


def _in_layer(name: str, layer: TransformerLayer) -> tuple[str, tuple[int, int] | None]:
    """Return the logical name of a tensor within its layer, and its expert."""
    if not isinstance(layer.mlp, BaseMoELayer) or not name.startswith("mlp.experts."):
        return _FUSED_NORMS.get(name, name), None
    match = _EXPERT.fullmatch(name) or _GROUPED.fullmatch(name)
    if match is None:
        raise ReshardError(
            f"decoder.layers.{layer.layer_number - 1}.{name}: not the tensor of one expert, but of "
            f"{type(layer.mlp.experts).__name__}; use SequentialMLP or TEGroupedMLP "
            "(moe_use_legacy_grouped_gemm=False), which keep experts apart"
        )
    index = layer.mlp.local_expert_indices[int(match["index"])]
    return f"mlp.experts.{index}.{match['rest']}", (index, layer.config.num_moe_experts)


def _gated(whole: GPTModel) -> set[int]:
    """Return ids of the parameters whose rows are the gate's, then the same number of the up projection's."""
    found: set[int] = set()
    for module in whole.modules():
        if isinstance(module, MLP | TEGroupedMLP) and module.config.gated_linear_unit:
            rows = [parameter for parameter in module.linear_fc1.parameters() if _tp_dim(parameter) == 0]
            # A LoRA factor of gate or up alone has half as many.
            both = max((parameter.shape[0] for parameter in rows), default=0)
            found |= {id(parameter) for parameter in rows if parameter.shape[0] == both}
    return found


def _tp_dim(tensor: Tensor) -> int | None:
    if not getattr(tensor, "tensor_model_parallel", False):
        return None
    dim: int = tensor.partition_dim  # type: ignore[attr-defined]
    return dim


def _describe(logical: Logical, whole: GPTModel, gated: set[int], vocab_divisible_by: int) -> TensorSpec:
    name, place, expert, tensor = logical
    shape, tp_dim = tuple(tensor.shape), _tp_dim(tensor)
    if tensor.dtype not in DTYPE_NAMES:
        raise ReshardError(f"{name}: {tensor.dtype}; expected one of {', '.join(map(str, DTYPE_NAMES))}")
    if tp_dim is not None and not 0 <= tp_dim < len(shape):
        raise ReshardError(
            f"{name}: marked tensor_model_parallel with partition_dim={tp_dim}, which is no dim of {list(shape)}; "
            "give the parameter its partition_dim"
        )
    stride = getattr(tensor, "partition_stride", 1)
    if stride not in ((1, 2) if id(tensor) in gated else (1,)):
        raise ReshardError(
            f"{name}: partition_stride={stride}; expected 1, or 2 for gate and up in linear_fc1 of a gated MLP; "
            "keep the pieces in parameters of their own"
        )
    has_vocab = place in ("embedding", "output") and tp_dim is not None and shape[tp_dim] == whole.vocab_size
    if id(tensor) in gated:
        shape, tp_dim = (2, shape[0] // 2, *shape[1:]), 1
    return TensorSpec(
        name=name,
        shape=shape,
        dtype=DTYPE_NAMES[tensor.dtype],
        tp_dim=tp_dim,
        place=place,
        also_held_by="output" if name == EMBEDDING and whole.share_embeddings_and_output_weights else None,
        padded_to=vocab_divisible_by if has_vocab else None,
        expert=expert,
    )
