"""Whether a layout can split a model."""

from __future__ import annotations

from hybridflow.errors import LayoutError
from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout


def check_cut(model: ModelConfig, layout: ParallelLayout, name: str) -> None:
    """Refuse a layout that cannot cut a model: its layers into stages, all else into equal parts.

    Args:
        model: The sizes.
        layout: How the model is to be cut.
        name: Name of the layout's owner, for the message.

    Raises:
        LayoutError: A part would be empty, or a tensor's parts not alike.
    """
    check_heads(model, layout.tp, name)
    _check_widths(model, layout, name)
    _check_stages(model.num_layers, layout, name)
    if layout.cp > 1 and model.linear_layers:
        raise LayoutError(
            f"{name}: cp={layout.cp} with model.linear_layers={list(model.linear_layers)}: linear attention goes "
            "through a sequence token by token, so that ranks cannot share one; use tp and dp"
        )
    if layout.is_sharded and model.router_bias and model.implementation == "megatron":
        raise LayoutError(
            f"{name}: {layout} with model.router_bias=true: FSDP has no place for the routers' biases; use dp and ep, "
            "or model.implementation=transformers for a model of a directory"
        )
    if layout.is_sharded and model.layer_scalars and model.implementation == "megatron":
        raise LayoutError(
            f"{name}: {layout} with model.layer_scalars=true: FSDP has no place for the layers' numbers; use tp, pp "
            "and dp, or model.implementation=transformers for a model of a directory"
        )


def check_heads(model: ModelConfig, tp: int, name: str) -> None:
    """Refuse a number of tensor parallel ranks that cannot share the heads of attention; as ``check_cut``."""
    if model.num_attention_heads % tp:
        raise LayoutError(
            f"{name}: tp={tp} does not divide model.num_attention_heads={model.num_attention_heads}; choose a divisor"
        )
    for key, groups in (("num_query_groups", model.query_groups), ("global_query_groups", model.global_query_groups)):
        if groups is not None and groups % tp and tp % groups:
            raise LayoutError(f"{name}: tp={tp} neither divides nor is a multiple of model.{key}={groups}; change one")


def _check_widths(model: ModelConfig, layout: ParallelLayout, name: str) -> None:
    """Refuse a layout whose ranks cannot share all else of a layer."""
    ep = layout.ep
    if model.num_experts is None and layout.etp is not None:
        raise LayoutError(f"{name}: etp={layout.etp} without experts in the model; leave etp out")
    inner = "tp" if model.num_experts is None or layout.etp is None else "etp"
    widths = ("linear_key_heads", "shared_ffn_hidden_size", "dense_ffn_hidden_size")
    for axis, key in (*(("tp", key) for key in widths), (inner, "ffn_hidden_size")):
        size, width = getattr(layout, axis), getattr(model, key)
        if width is not None and width % size:
            raise LayoutError(f"{name}: {axis}={size} does not divide model.{key}={width}; choose a divisor")
    if ep > 1 and (model.num_experts is None or model.num_experts % ep):
        found = "null" if model.num_experts is None else model.num_experts
        raise LayoutError(f"{name}: ep={ep} does not divide model.num_experts={found}; choose a divisor, or set ep=1")


def _check_stages(num_layers: int, layout: ParallelLayout, name: str) -> None:
    """Refuse stages without layers, and layers that are not the model's."""
    num_stages, which = layout.pp * layout.vpp, f"pp={layout.pp}"
    if layout.vpp > 1:
        which = f"pp·vpp={layout.pp}·{layout.vpp}={num_stages}"
    if num_stages > num_layers:
        raise LayoutError(
            f"{name}: {which} is above model.num_layers={num_layers}, and each virtual stage needs a layer; lower "
            f"{'pp' if layout.vpp == 1 else 'pp or vpp'}"
        )
    if layout.layers is None and num_layers % num_stages:
        raise LayoutError(
            f"{name}: {which} does not divide model.num_layers={num_layers}; choose a divisor, or say with layers how "
            "many each stage has: layers: auto, or a list"
        )
    if isinstance(layout.layers, tuple) and (min(layout.layers) < 1 or sum(layout.layers) != num_layers):
        raise LayoutError(
            f"{name}: layers={list(layout.layers)}: expected at least one layer on each stage, and the model's "
            f"model.num_layers={num_layers} together; found {sum(layout.layers)}"
        )
