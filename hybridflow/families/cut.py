"""Whether a layout can split a model."""

from __future__ import annotations

from hybridflow.errors import LayoutError
from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout


def check_cut(model: ModelConfig, layout: ParallelLayout, name: str) -> None:
    """Refuse a layout that does not cut a model into equal parts.

    Args:
        model: The settings.
        layout: How the model is to be cut.
        name: Name of the layout's owner, for the message.

    Raises:
        LayoutError: A part would be empty or not like the others.
    """
    tp, pp, ep, groups = layout.tp, layout.pp, layout.ep, model.query_groups
    if model.num_experts is None and layout.etp is not None:
        raise LayoutError(f"{name}: etp={layout.etp} without experts in the model; leave etp out")
    inner = "tp" if model.num_experts is None or layout.etp is None else "etp"
    widths = ("num_attention_heads", "shared_ffn_hidden_size", "dense_ffn_hidden_size")
    for axis, key in (*(("tp", key) for key in widths), (inner, "ffn_hidden_size")):
        size, width = getattr(layout, axis), getattr(model, key)
        if width is not None and width % size:
            raise LayoutError(f"{name}: {axis}={size} does not divide model.{key}={width}; choose a divisor")
    if groups % tp and tp % groups:
        raise LayoutError(
            f"{name}: tp={tp} neither divides nor is a multiple of model.num_query_groups={groups}; change one"
        )
    if model.num_layers % pp:
        raise LayoutError(f"{name}: pp={pp} does not divide model.num_layers={model.num_layers}; choose a divisor")
    if layout.is_sharded and model.router_bias:
        raise LayoutError(
            f"{name}: {layout} with model.router_bias=true: FSDP has no place for the routers' biases; use dp and ep"
        )
    if ep > 1 and (model.num_experts is None or model.num_experts % ep):
        found = "null" if model.num_experts is None else model.num_experts
        raise LayoutError(f"{name}: ep={ep} does not divide model.num_experts={found}; choose a divisor, or set ep=1")
