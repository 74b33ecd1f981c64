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
    for key in ("num_attention_heads", "ffn_hidden_size", "dense_ffn_hidden_size"):
        if (getattr(model, key) or 0) % tp:
            raise LayoutError(f"{name}: tp={tp} does not divide model.{key}={getattr(model, key)}; choose a divisor")
    if groups % tp and tp % groups:
        raise LayoutError(
            f"{name}: tp={tp} neither divides nor is a multiple of model.num_query_groups={groups}; change one"
        )
    if model.num_layers % pp:
        raise LayoutError(f"{name}: pp={pp} does not divide model.num_layers={model.num_layers}; choose a divisor")
    if ep > 1 and (model.num_experts is None or model.num_experts % ep):
        found = "null" if model.num_experts is None else model.num_experts
        raise LayoutError(f"{name}: ep={ep} does not divide model.num_experts={found}; choose a divisor, or set ep=1")
