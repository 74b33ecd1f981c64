"""Which factors a LoRA adapter has, from arithmetic alone: no torch, so that a login node can plan with them.

A factor is named after the weight that it updates, as ``checkpoint.formats.lora`` has it. The weight that two factors
stand for is W + scale * B A (arXiv 2106.09685): A ``[rank, in]`` is cut as the weight's columns, B ``[out, rank]`` as
its rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from hybridflow.config.roles import LoRAConfig
from hybridflow.families.model import ModelConfig
from hybridflow.models.shapes import model_spec
from hybridflow.reshard.spec import ModelSpec, TensorSpec

FACTOR = re.compile(r"(.+)\.lora(?:\.(q|k|v|gate|up|qkv|z|b|a))?\.([AB])")
"""The name of a factor: that of its linear layer, which part of it, which of the two."""

MODULES: Mapping[str, tuple[str, str]] = {
    "q_proj": ("self_attention.linear_qkv", "q"),
    "k_proj": ("self_attention.linear_qkv", "k"),
    "v_proj": ("self_attention.linear_qkv", "v"),
    "qkv_proj": ("self_attention.linear_qkv", ""),
    "o_proj": ("self_attention.linear_proj", ""),
    "in_proj_qkv": ("self_attention.in_proj", "qkv"),
    "in_proj_z": ("self_attention.in_proj", "z"),
    "in_proj_b": ("self_attention.in_proj", "b"),
    "in_proj_a": ("self_attention.in_proj", "a"),
    "out_proj": ("self_attention.out_proj", ""),
    "gate_proj": ("mlp.linear_fc1", "gate"),
    "up_proj": ("mlp.linear_fc1", "up"),
    "gate_up_proj": ("mlp.linear_fc1", ""),
    "down_proj": ("mlp.linear_fc2", ""),
}
"""What Hugging Face calls a linear layer -> what megatron-core calls it, and which part of it that is; "": all."""


OF_LINEAR_ATTENTION = tuple(name for name in MODULES if name.startswith("in_proj_") or name == "out_proj")
"""Those of layers with linear attention."""


def is_factor(name: str) -> bool:
    """Return whether a logical tensor is a factor of an adapter."""
    return FACTOR.fullmatch(name) is not None


def parts_of(targets: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return linear layer -> the parts of it that have factors, in the order of its rows."""
    found: dict[str, tuple[str, ...]] = {}
    for target, (linear, part) in MODULES.items():
        if target in targets:
            found[linear] = (*found.get(linear, ()), part)
    return found


def base_spec(whole: ModelSpec) -> ModelSpec:
    """Return the tensors of a model with adapters that it has without them."""
    return _only(whole, factors=False)


def factor_spec(whole: ModelSpec) -> ModelSpec:
    """Return the adapter factors of a model."""
    return _only(whole, factors=True)


def _only(whole: ModelSpec, *, factors: bool) -> ModelSpec:
    tensors = tuple(tensor for tensor in whole.tensors if is_factor(tensor.name) == factors)
    return ModelSpec(tensors=tensors, num_layers=whole.num_layers, is_part=len(tensors) < len(whole.tensors))


def adapter_spec(model: ModelConfig, lora: LoRAConfig) -> ModelSpec:
    """Return how every factor of a model's adapters is cut, in the order of the model."""
    tensors = [factor for weight in model_spec(model).tensors for factor in _factors_of(weight, model, lora)]
    return ModelSpec(tensors=tuple(tensors), num_layers=model.num_layers, is_part=True)


def whole_spec(model: ModelConfig, *, has_value_head: bool = False, lora: LoRAConfig | None = None) -> ModelSpec:
    """Return how every tensor of a model is cut, adapters included, in the order of the model.

    Args:
        model: Its settings, the vocabulary included.
        has_value_head: Values instead of logits.
        lora: Its adapters.
    """
    spec = model_spec(model, has_value_head=has_value_head)
    if lora is None:
        return spec
    tensors: list[TensorSpec] = []
    waiting: list[TensorSpec] = []
    for tensor in spec.tensors:
        # A bias stands between the weight and its factors.
        if not tensor.name.endswith(".bias"):
            tensors, waiting = [*tensors, *waiting], []
        tensors.append(tensor)
        waiting += _factors_of(tensor, model, lora)
    return ModelSpec(tensors=(*tensors, *waiting), num_layers=spec.num_layers)


def _factors_of(weight: TensorSpec, model: ModelConfig, lora: LoRAConfig) -> Iterator[TensorSpec]:
    for linear, parts in parts_of(lora.targets).items():
        if weight.name.endswith(f".{linear}.weight"):
            yield from _factors(weight, model, parts, lora.rank)


def _factors(weight: TensorSpec, model: ModelConfig, parts: Sequence[str], rank: int) -> Iterator[TensorSpec]:
    if isinstance(weight.place, int):
        model = model.of_layer(weight.place)
    queries, keys = model.query_rows, model.query_groups * model.head_size
    rows = {"q": queries, "k": keys, "v": keys, "gate": model.ffn_hidden_size, "up": model.ffn_hidden_size}
    rows |= {"qkv": model.linear_channels, "z": model.linear_values}
    rows |= dict.fromkeys("ba", model.linear_value_heads or 0)
    cuts_columns = weight.tp_dim == len(weight.shape) - 1
    for part in parts:
        if part == "v" and model.keys_as_values:
            continue
        stem = ".".join(filter(None, (weight.name.removesuffix(".weight"), "lora", part)))
        for side, sizes, tp_dim in (
            ("A", (rank, weight.shape[-1]), 1 if cuts_columns else None),
            # All rows of gate and up stay apart, as in their weight.
            ("B", (*((rows[part],) if part else weight.shape[:-1]), rank), None if cuts_columns else -2),
        ):
            yield TensorSpec(
                name=f"{stem}.{side}",
                shape=sizes,
                dtype=weight.dtype,
                tp_dim=len(sizes) + tp_dim if tp_dim is not None and tp_dim < 0 else tp_dim,
                place=weight.place,
            )
