"""Whether a layout can split a model."""

from __future__ import annotations

from typing import Protocol

from hybridflow.errors import LayoutError
from hybridflow.layout.parallel_layout import ParallelLayout


class CutSizes(Protocol):
    """The sizes of a model that layouts cut, as ``ModelConfig`` and ``ModelShape`` have them."""

    @property
    def num_layers(self) -> int:
        """Return the layers."""

    @property
    def num_attention_heads(self) -> int:
        """Return the query heads."""

    @property
    def query_groups(self) -> int:
        """Return the key/value heads."""

    @property
    def ffn_hidden_size(self) -> int:
        """Return the width of a feed-forward block, or of an expert."""

    @property
    def dense_ffn_hidden_size(self) -> int | None:
        """Return the width of the dense blocks beside experts; 0 or None: there are none."""

    @property
    def shared_ffn_hidden_size(self) -> int | None:
        """Return the width of the shared expert; 0 or None: there is none."""

    @property
    def num_experts(self) -> int | None:
        """Return the experts of a layer; None: a dense model."""

    @property
    def router_bias(self) -> bool:
        """Return whether routers add a bias."""


def check_cut(model: CutSizes, layout: ParallelLayout, name: str) -> None:
    """Refuse a layout that cannot cut a model: its layers into stages, all else into equal parts.

    Args:
        model: The sizes.
        layout: How the model is to be cut.
        name: Name of the layout's owner, for the message.

    Raises:
        LayoutError: A part would be empty, or a tensor's parts not alike.
    """
    tp, ep, groups = layout.tp, layout.ep, model.query_groups
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
    _check_stages(model.num_layers, layout, name)
    if layout.is_sharded and model.router_bias:
        raise LayoutError(
            f"{name}: {layout} with model.router_bias=true: FSDP has no place for the routers' biases; use dp and ep"
        )
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
