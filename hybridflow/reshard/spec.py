"""How the tensors of a model are cut by a layout. Pure arithmetic: no torch, so that a login node can use it.

A logical tensor is described in the view in which every cut is one box: gate/up of SwiGLU is ``[2, ffn, hidden]`` cut
on dim 1; the fused QKV weight is ``[rows, hidden]`` cut on dim 0, since megatron-core gives each rank equally many
consecutive rows: whole query groups when ``tp`` divides the groups, a part of one group when the groups divide ``tp``.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

from hybridflow.errors import ReshardError
from hybridflow.parallel.layout import ParallelLayout
from hybridflow.parallel.mesh import Coordinate

DType = Literal["fp32", "bf16", "fp16"]
ITEM_BYTES: dict[DType, int] = {"fp32": 4, "bf16": 2, "fp16": 2}

Place = int | Literal["embedding", "output"]
"""Where along the pipeline: a global layer index; the embedding, on the first stage; or the output, on the last, which
is also the place of the final norm and of every head."""

Box = tuple[tuple[int, int], ...]
"""``(start, stop)`` for each dim, in logical coordinates."""


class Shard(NamedTuple):
    """What one rank holds of a logical tensor.

    Attributes:
        box: The elements held, without padding; empty where the rank holds padding alone.
        local_shape: The rank's parameter in the logical view, padding included; ``parameter.view(local_shape)``. The
            box lies at its origin, padding after it.
    """

    box: Box
    local_shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor of the whole model and how a layout cuts it.

    Attributes:
        name: Unique in the model, the same in every layout.
        shape: Of the whole tensor in the view in which its cut is a box, without padding.
        dtype: What its elements are counted in, and travel as.
        tp_dim: The dim cut into ``tp`` equal parts; None: every tensor-parallel rank holds all of it.
        place: Which pipeline stage holds it.
        also_held_by: A second place, for embeddings tied to the output; one copy where both are the same stage.
        padded_to: ``tp_dim`` is padded to a multiple of ``padded_to * tp``; None: it is not padded.

    Raises:
        ReshardError: The description contradicts itself.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    tp_dim: int | None
    place: Place
    also_held_by: Place | None = None
    padded_to: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ReshardError(f"{self.name}: dtype {self.dtype!r}: expected one of {', '.join(ITEM_BYTES)}")
        if any(size < 1 for size in self.shape):
            raise ReshardError(f"{self.name}: shape {list(self.shape)}: expected sizes of at least 1")
        if self.tp_dim is not None and not 0 <= self.tp_dim < len(self.shape):
            raise ReshardError(f"{self.name}: tp_dim={self.tp_dim} is not a dim of shape {list(self.shape)}")
        if self.padded_to is not None and (self.tp_dim is None or self.padded_to < 1):
            raise ReshardError(
                f"{self.name}: padded_to={self.padded_to} with tp_dim={self.tp_dim}: expected at least 1, "
                "and a tp_dim to pad"
            )


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Every tensor of a model, and how many layers its pipeline stages share.

    Raises:
        ReshardError: Two tensors have one name, or one belongs to a layer that the model does not have.
    """

    tensors: tuple[TensorSpec, ...]
    num_layers: int

    def __post_init__(self) -> None:
        names: set[str] = set()
        for spec in self.tensors:
            if spec.name in names:
                raise ReshardError(f"{spec.name}: described twice; each logical tensor has one description")
            names.add(spec.name)
            for place in _places(spec):
                if isinstance(place, int) and not 0 <= place < self.num_layers:
                    raise ReshardError(f"{spec.name}: layer {place} is not one of the model's {self.num_layers} layers")

    def digest(self) -> str:
        """The sha256 of the description as canonical JSON: equal exactly for equal descriptions."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def shard(spec: TensorSpec, layout: ParallelLayout, coordinate: Coordinate, num_layers: int) -> Shard | None:
    """What the rank at a coordinate of a layout holds of a tensor.

    Args:
        spec: The tensor.
        layout: How the model is cut.
        coordinate: The rank's place in a mesh of this layout; data and context parallel ranks hold the same.
        num_layers: Layers of the whole model, shared by the pipeline stages in equal consecutive blocks.

    Returns:
        The shard, or None where another pipeline stage holds the tensor.

    Raises:
        ReshardError: The layout does not cut this tensor into equal parts.
    """
    if all(stage_of(place, layout, num_layers, spec.name) != coordinate.pp for place in _places(spec)):
        return None
    box = [(0, size) for size in spec.shape]
    local_shape = list(spec.shape)
    dim = spec.tp_dim
    if dim is not None:
        size = spec.shape[dim]
        unit = layout.tp if spec.padded_to is None else spec.padded_to * layout.tp
        if spec.padded_to is None and size % layout.tp != 0:
            raise ReshardError(
                f"{spec.name}: dim {dim} of {list(spec.shape)} cannot be cut into tp={layout.tp} equal parts; "
                f"choose a tp that divides {size}"
            )
        local_size = -(-size // unit) * unit // layout.tp
        start, stop = coordinate.tp * local_size, (coordinate.tp + 1) * local_size
        box[dim] = (min(start, size), min(stop, size))
        local_shape[dim] = local_size
    return Shard(tuple(box), tuple(local_shape))


def stage_of(place: Place, layout: ParallelLayout, num_layers: int, name: str) -> int:
    """The pipeline stage of a place.

    Raises:
        ReshardError: The layers cannot be dealt to the stages; names the tensor ``name``.
    """
    if layout.vpp > 1:
        raise ReshardError(f"{name}: layout {layout}: virtual pipeline chunks cannot be resharded yet; set vpp=1")
    if num_layers % layout.pp != 0:
        raise ReshardError(
            f"{name}: {num_layers} layers cannot be dealt to pp={layout.pp} equal stages; "
            f"choose a pp that divides {num_layers}"
        )
    if place == "embedding":
        return 0
    if place == "output":
        return layout.pp - 1
    return place // (num_layers // layout.pp)


def num_elements(box: Box) -> int:
    """Elements in a box; 0 where it is empty."""
    count = 1
    for start, stop in box:
        count *= max(0, stop - start)
    return count


def intersect(one: Box, other: Box) -> Box:
    """The elements in both boxes, possibly none."""
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def _places(spec: TensorSpec) -> tuple[Place, ...]:
    return (spec.place,) if spec.also_held_by is None else (spec.place, spec.also_held_by)
