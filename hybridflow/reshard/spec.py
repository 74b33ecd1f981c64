"""How the tensors of a model are cut by a layout. Pure arithmetic: no torch, so that a login node can use it.

A logical tensor is described in the view in which every cut is one box: gate/up of SwiGLU is ``[2, ffn, hidden]`` cut
on dim 1; the fused QKV weight is ``[rows, hidden]`` cut on dim 0, since megatron-core gives each rank equally many
consecutive rows: whole query groups when ``tp`` divides the groups, a part of one group when the groups divide ``tp``.
Each expert of a mixture has tensors of its own.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import json
import math
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from hybridflow.errors import LayoutError, ReshardError
from hybridflow.layout.mesh import Coordinate
from hybridflow.layout.parallel_layout import ParallelLayout

DType = Literal["fp32", "bf16", "fp16"]
ITEM_BYTES: dict[DType, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
DTYPE_WORDS: dict[DType, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

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
        offset: Where in the rank's flat storage of this tensor the view begins, in elements.
    """

    box: Box
    local_shape: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor of the whole model and how a layout cuts it.

    Attributes:
        name: Unique in the model, the same in every layout.
        shape: Shape of the whole tensor in the view in which its cut is a box, without padding.
        dtype: What its elements are counted in, and travel as.
        tp_dim: The dim cut into ``tp`` equal parts; None: every tensor-parallel rank holds all of it.
        place: Which pipeline stage holds it.
        also_held_by: A second place, for embeddings tied to the output; one copy where both are the same stage.
        padded_to: ``tp_dim`` is padded to a multiple of ``padded_to * tp``; None: it is not padded.
        expert: Which expert of how many a tensor inside an expert belongs to. The expert-parallel rank whose block of
            experts has it holds it, and ``etp`` cuts it instead of ``tp``.

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
    expert: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ReshardError(f"{self.name}: dtype {self.dtype!r}: expected one of {', '.join(ITEM_BYTES)}")
        if not self.shape or any(size < 1 for size in self.shape):
            raise ReshardError(f"{self.name}: shape {list(self.shape)}: expected a dim or more, of at least 1 each")
        if self.tp_dim is not None and not 0 <= self.tp_dim < len(self.shape):
            raise ReshardError(f"{self.name}: tp_dim={self.tp_dim} is not a dim of shape {list(self.shape)}")
        if self.padded_to is not None and (self.tp_dim is None or self.padded_to < 1):
            raise ReshardError(
                f"{self.name}: padded_to={self.padded_to} with tp_dim={self.tp_dim}: expected at least 1, "
                "and a tp_dim to pad"
            )
        if self.expert is not None and not 0 <= self.expert[0] < self.expert[1]:
            raise ReshardError(f"{self.name}: expert {self.expert[0]} is not one of {self.expert[1]}")

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the whole tensor, without padding."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def places(self) -> tuple[Place, ...]:
        """Return the one or two places along the pipeline that hold it."""
        return (self.place,) if self.also_held_by is None else (self.place, self.also_held_by)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Every tensor of a model, and how many layers its pipeline stages share.

    Attributes:
        tensors: Their descriptions, in the order of the model.
        num_layers: Transformer layers.
        is_part: Whether the model has other tensors beside these.

    Raises:
        ReshardError: Two tensors have one name, or one belongs to a layer that the model does not have.
    """

    tensors: tuple[TensorSpec, ...]
    num_layers: int
    is_part: bool = False

    def __post_init__(self) -> None:
        names: set[str] = set()
        for spec in self.tensors:
            if spec.name in names:
                raise ReshardError(f"{spec.name}: described twice; each logical tensor has one description")
            names.add(spec.name)
            for place in spec.places:
                if isinstance(place, int) and not 0 <= place < self.num_layers:
                    raise ReshardError(f"{spec.name}: layer {place} is not one of the model's {self.num_layers} layers")

    @functools.cached_property
    def places(self) -> tuple[TensorSpec, ...]:
        """Return the first tensor of each place, or pair of places, along the pipeline."""
        first: dict[tuple[Place, ...], TensorSpec] = {}
        for spec in self.tensors:
            first.setdefault(spec.places, spec)
        return tuple(first.values())

    def digest(self) -> str:
        """Return the sha256 of the description as JSON: equal exactly for equal descriptions."""
        rows = [[getattr(spec, field.name) for field in fields(spec)] for spec in self.tensors]
        return hashlib.sha256(json.dumps([self.num_layers, rows]).encode()).hexdigest()


def shard(spec: TensorSpec, layout: ParallelLayout, coordinate: Coordinate, num_layers: int) -> Shard | None:
    """Return the part of a tensor that the rank at a coordinate of a layout holds.

    Args:
        spec: The tensor.
        layout: How the model is cut.
        coordinate: The rank's place in a mesh of this layout; data and context parallel ranks hold the same.
        num_layers: Layers of the whole model.

    Returns:
        The shard, or None where another rank's stage or block of experts holds the tensor.

    Raises:
        ReshardError: The layout does not cut this tensor into equal parts.
    """
    if all(stage_of(place, layout, num_layers, spec.name) != coordinate.pp for place in spec.places):
        return None
    if spec.expert is None:
        return cut(spec, layout.tp, coordinate.tp)
    index, block = expert_place(layout, coordinate)
    return cut(spec, layout.expert_tp, index) if block == expert_block(spec, layout) else None


def cut(spec: TensorSpec, parts: int, index: int) -> Shard:
    """Return part ``index`` of a tensor cut into ``parts`` along its ``tp_dim``; the whole tensor if it has none.

    Raises:
        ReshardError: The parts would not be equal.
    """
    box = [(0, size) for size in spec.shape]
    local_shape = list(spec.shape)
    dim = spec.tp_dim
    if dim is not None:
        size = spec.shape[dim]
        unit = parts if spec.padded_to is None else spec.padded_to * parts
        if spec.padded_to is None and size % parts != 0:
            raise ReshardError(
                f"{spec.name}: dim {dim} of {list(spec.shape)} cannot be cut into tp={parts} equal parts; "
                f"choose a tp that divides {size}"
            )
        local_size = -(-size // unit) * unit // parts
        start, stop = index * local_size, (index + 1) * local_size
        box[dim] = (min(start, size), min(stop, size))
        local_shape[dim] = local_size
    return Shard(tuple(box), tuple(local_shape))


def stage_of(place: Place, layout: ParallelLayout, num_layers: int, name: str) -> int:
    """Return the pipeline stage of a place; chunk ``c`` of stage ``s`` is virtual stage ``c * pp + s``.

    Raises:
        ReshardError: The layers cannot be dealt to the stages; names the tensor ``name``.
    """
    if place == "embedding":
        return 0
    if place == "output":
        return layout.pp - 1
    num_stages = layout.pp * layout.vpp
    if layout.layers is None and num_layers % num_stages == 0:
        return place // (num_layers // num_stages) % layout.pp
    try:
        counts = layout.layer_counts(num_layers, name)
    except LayoutError as error:
        raise ReshardError(str(error)) from None
    return bisect.bisect_right(list(itertools.accumulate(counts)), place) % layout.pp


def expert_place(layout: ParallelLayout, coordinate: Coordinate) -> tuple[int, int]:
    """Return the tensor parallel index inside experts, and the block of experts, of the rank at a coordinate.

    As in megatron-core the ranks of a stage are counted through with the experts' own tensor parallel index fastest,
    then the block of experts, then their replicas.
    """
    index = coordinate.tp + layout.tp * (coordinate.cp + layout.cp * coordinate.dp)
    return index % layout.expert_tp, index // layout.expert_tp % layout.ep


def replica_of(layout: ParallelLayout, coordinate: Coordinate, *, of_expert: bool) -> int:
    """Return the number of the rank at a coordinate among the replicas, to the distributed optimizer.

    Args:
        layout: Parallelism.
        coordinate: Where the rank is.
        of_expert: Count the replicas of its block of experts, not those of the other tensors.
    """
    replica = coordinate.cp + layout.cp * coordinate.dp
    return (coordinate.tp + layout.tp * replica) // (layout.expert_tp * layout.ep) if of_expert else replica


def expert_block(spec: TensorSpec, layout: ParallelLayout) -> int:
    """Return which of the ``ep`` blocks of experts has the tensor's expert.

    Raises:
        ReshardError: The experts cannot be dealt to equal blocks.
    """
    assert spec.expert is not None, f"{spec.name} is in no expert"
    index, count = spec.expert
    if count % layout.ep:
        raise ReshardError(
            f"{spec.name}: {count} experts cannot be dealt to ep={layout.ep} equal blocks; choose a divisor of {count}"
        )
    return index // (count // layout.ep)


def slices(box: Box) -> tuple[slice, ...]:
    """Return the index of a box in its tensor."""
    return tuple(slice(start, stop) for start, stop in box)


def num_elements(box: Box) -> int:
    """Return the elements in a box; 0 where it is empty."""
    count = 1
    for start, stop in box:
        count *= max(0, stop - start)
    return count


def intersect(one: Box, other: Box) -> Box:
    """Return the elements in both boxes, possibly none."""
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def flat_boxes(box: Box, start: int, stop: int) -> list[Box]:
    """Return elements ``start`` to ``stop`` of a box, counted in row-major order, as boxes in that order.

    There is one for whole rows, and at most two more for each dim but the last.
    """
    if start >= stop:
        return []
    low, rest = box[0][0], box[1:]
    row = num_elements(rest)
    first, last = start // row, stop // row
    if first == last or not rest:
        if not rest:
            return [((low + start, low + stop),)]
        return [((low + first, low + first + 1), *inner) for inner in flat_boxes(rest, start % row, stop % row)]
    boxes: list[Box] = []
    if start % row:
        boxes += [((low + first, low + first + 1), *inner) for inner in flat_boxes(rest, start % row, row)]
        first += 1
    if first < last:
        boxes.append(((low + first, low + last), *rest))
    boxes += [((low + last, low + last + 1), *inner) for inner in flat_boxes(rest, 0, stop % row)]
    return boxes
