"""How megatron-core's distributed optimizer deals its state and gradients to replicas. Pure arithmetic: no torch.

Each rank lays the parameters of one of its model chunks end to end in a buffer, the last first, and cuts each bucket of
the buffer into as many equal ranges as there are replicas. A replica steps what lies in its range, so its state of a
tensor is a flat range of the local shard, which may begin and end anywhere, in the padding too.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.reshard.holdings import Part, WeightHoldings
from hybridflow.reshard.spec import (
    Box,
    ModelSpec,
    Shard,
    TensorSpec,
    cut,
    expert_block,
    expert_place,
    flat_boxes,
    num_elements,
    replica_of,
    stage_of,
)

PARAMETER_ALIGNMENT = 64
BUCKET_ALIGNMENT = 128
"""In elements, where megatron-core starts a parameter and ends a bucket; a bucket also divides by the replicas."""


class FlatRange(NamedTuple):
    """What one replica steps of a local shard.

    Attributes:
        replica: Index along the data and context parallel axes; of an expert, among the replicas of its block.
        start: First element of the shard, padding included, in row-major order.
        stop: One past its last.
    """

    replica: int
    start: int
    stop: int


class OptimizerHoldings:
    """Moments, master weights or reduced gradients where megatron-core's distributed optimizer keeps them.

    A rank's storage of a tensor is its ``FlatRange`` of the local shard. Where the optimizer is not distributed, each
    rank keeps whole shards: that is ``WeightHoldings``.

    Args:
        model: The tensors that are trained, in the order of the model's parameters; those of one dtype share a buffer.
        mesh: Where they are.
        bucket_size: Elements that fill a bucket, as ``training.Trainable`` was given them; None: buckets have no limit.
    """

    def __init__(self, model: ModelSpec, mesh: DeviceMesh, bucket_size: int | None = None) -> None:
        self.mesh = mesh
        self._model = model
        self._bucket_size = bucket_size
        self._weights = WeightHoldings(model, mesh)

    @functools.cached_property
    def _ranges(self) -> dict[str, tuple[FlatRange, ...]]:
        return flat_ranges(self._model, self.mesh.layout, self._bucket_size)

    @functools.cached_property
    def _by_replica(self) -> dict[str, dict[int, FlatRange]]:
        return {name: {dealt.replica: dealt for dealt in ranges} for name, ranges in self._ranges.items()}

    def stages(self, tensor: TensorSpec) -> tuple[int, ...]:
        """See ``Holdings.stages``."""
        return self._weights.stages(tensor)

    def key(self, tensor: TensorSpec) -> Hashable:
        """See ``Holdings.key``."""
        return self._weights.key(tensor), self._ranges[tensor.name]

    def parts(self, tensor: TensorSpec) -> tuple[Part, ...]:
        """See ``Holdings.parts``."""
        layout = self.mesh.layout
        number = 1 if tensor.tp_dim is None else layout.tp if tensor.expert is None else layout.expert_tp
        return tuple(
            Part(region.box, self._output_ranks(tensor, None if tensor.tp_dim is None else index, dealt.replica))
            for index in range(number)
            for dealt in self._ranges[tensor.name]
            for region in flat_regions(cut(tensor, number, index), dealt.start, dealt.stop)
            if num_elements(region.box) > 0
        )

    def regions(self, tensor: TensorSpec, rank: int) -> tuple[Shard, ...]:
        """See ``Holdings.regions``; those of padding alone have an empty box."""
        whole = self._weights.regions(tensor, rank)
        dealt = self.flat_range(tensor, rank)
        return () if dealt is None else tuple(flat_regions(whole[0], dealt.start, dealt.stop))

    def flat_range(self, tensor: TensorSpec, rank: int) -> FlatRange | None:
        """Return the range of its shard of a tensor that a rank of the mesh steps; None where it steps nothing."""
        if not self._weights.regions(tensor, rank):
            return None
        place = self.mesh.coordinate(rank)
        replica = replica_of(self.mesh.layout, place, of_expert=tensor.expert is not None)
        return self._by_replica[tensor.name].get(replica)

    def num_elements(self, rank: int) -> int:
        """Return how many elements of all tensors a rank of the mesh steps: the sum of its flat ranges."""
        layout, place = self.mesh.layout, self.mesh.coordinate(rank)
        _, block = expert_place(layout, place)
        in_none = self._stepped[place.pp, None, replica_of(layout, place, of_expert=False)]
        return in_none + self._stepped[place.pp, block, replica_of(layout, place, of_expert=True)]

    @functools.cached_property
    def _stepped(self) -> Counter[tuple[int, int | None, int]]:
        """Return the elements by stage, block of experts (None: in no expert) and replica."""
        found = Counter[tuple[int, int | None, int]]()
        # Not kept: the ranges of a large model take much more memory than their sums.
        ranges = flat_ranges(self._model, self.mesh.layout, self._bucket_size)
        for tensor in self._model.tensors:
            block = None if tensor.expert is None else expert_block(tensor, self.mesh.layout)
            for stage in self.stages(tensor):
                for dealt in ranges[tensor.name]:
                    found[stage, block, dealt.replica] += dealt.stop - dealt.start
        return found

    def num_shares(self, tensor: TensorSpec) -> int:
        """See ``Holdings.num_shares``."""
        layout = self.mesh.layout
        model_parallel = layout.tp if tensor.expert is None else layout.expert_tp * layout.ep
        replicas = layout.tp * layout.cp * layout.dp // model_parallel
        return self._weights.num_shares(tensor) * replicas

    def identity(self) -> list[object]:
        """See ``Holdings.identity``."""
        return ["distributed optimizer", *self._weights.identity()[1:], self._model.digest(), self._bucket_size]

    def _output_ranks(self, tensor: TensorSpec, index: int | None, replica: int) -> tuple[int, ...]:
        """Return the ranks of a replica that hold part ``index`` of a tensor; None: all hold the whole tensor."""
        layout = self.mesh.layout
        size, width, first = layout.tp * layout.cp * layout.dp, layout.tp, replica * layout.tp
        if tensor.expert is not None:
            width = layout.expert_tp
            first = width * (expert_block(tensor, layout) + layout.ep * replica)
        places = range(width) if index is None else (index,)
        return tuple(self.mesh.ranks[stage * size + first + place] for stage in self.stages(tensor) for place in places)


def bucket_elements(layout: ParallelLayout) -> int | None:
    """Return how many elements fill a bucket on a GPU, so that its reduction overlaps with the backward pass.

    megatron-core's default: with many replicas a smaller bucket would take its time in latency. None: there is one
    replica, and nothing is reduced.
    """
    replicas = layout.dp * layout.cp
    return None if replicas == 1 else max(40_000_000, 1_000_000 * replicas)


def flat_ranges(
    model: ModelSpec, layout: ParallelLayout, bucket_size: int | None = None
) -> dict[str, tuple[FlatRange, ...]]:
    """Return how the local shard of each tensor is dealt to replicas, the same for all tensor parallel ranks.

    Source: ``_ParamAndGradBuffer`` and ``DistributedOptimizer._build_model_gbuf_range`` of megatron-core 0.16.1. Only
    the first stage has buckets of limited size: the others wait for its backward pass anyway.

    Raises:
        ReshardError: The layout cannot cut some tensor.
    """
    chunks = replace(layout, pp=layout.pp * layout.vpp, vpp=1)
    # Experts that are cut as the rest is lie among it.
    is_apart = layout.ep > 1 or layout.expert_tp != layout.tp
    buffers: dict[tuple[int, int | None, str], list[TensorSpec]] = {}
    for tensor in model.tensors:
        # Of a tied embedding one end will do: over stages it has a bucket of its own on both.
        stage = stage_of(tensor.place, chunks, model.num_layers, tensor.name)
        block = expert_block(tensor, layout) if tensor.expert is not None and is_apart else None
        buffers.setdefault((stage, block, tensor.dtype), []).append(tensor)
    dealt: dict[str, tuple[FlatRange, ...]] = {}
    for (stage, block, _), tensors in buffers.items():
        fills = bucket_size if stage % layout.pp == 0 else None
        parts = layout.tp if block is None else layout.expert_tp
        replicas = layout.tp * layout.cp * layout.dp // (parts * (1 if block is None else layout.ep))
        shards = [(tensor, math.prod(cut(tensor, parts, 0).local_shape)) for tensor in tensors]
        dealt.update(_deal(shards, replicas, fills, is_pipeline=layout.pp > 1))
    return dealt


def _deal(
    shards: Iterable[tuple[TensorSpec, int]], replicas: int, bucket_size: int | None, *, is_pipeline: bool
) -> Iterator[tuple[str, tuple[FlatRange, ...]]]:
    """Lay the shards of one buffer, each with its elements, into buckets, and cut those into equal ranges."""
    bucket: list[tuple[str, int, int]] = []
    place = 0
    for tensor, size in reversed(list(shards)):
        place = _up(place, PARAMETER_ALIGNMENT)
        # Embeddings tied over stages have a bucket of their own, so that both ends deal them alike.
        is_alone = tensor.also_held_by is not None and is_pipeline
        if is_alone:
            yield from _cut_bucket(bucket, replicas)
            bucket, place = [], 0
        bucket.append((tensor.name, place, place + size))
        place += size
        if is_alone or (bucket_size is not None and place >= bucket_size):
            yield from _cut_bucket(bucket, replicas)
            bucket, place = [], 0
    yield from _cut_bucket(bucket, replicas)


def _cut_bucket(bucket: list[tuple[str, int, int]], replicas: int) -> Iterator[tuple[str, tuple[FlatRange, ...]]]:
    if not bucket:
        return
    width = _up(bucket[-1][2], math.lcm(replicas, BUCKET_ALIGNMENT)) // replicas
    for name, start, stop in bucket:
        owners = range(start // width, (stop - 1) // width + 1)
        yield (
            name,
            tuple(
                FlatRange(owner, max(owner * width, start) - start, min((owner + 1) * width, stop) - start)
                for owner in owners
            ),
        )


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def flat_regions(whole: Shard, start: int, stop: int) -> Iterator[Shard]:
    """Yield elements ``start`` to ``stop`` of a rank's parameter as shards, each a box with the padding behind it."""
    offset = 0
    for local in flat_boxes(tuple((0, size) for size in whole.local_shape), start, stop):
        yield Shard(_logical(local, whole.box), tuple(stop - start for start, stop in local), offset)
        offset += num_elements(local)


def _logical(local: Box, box: Box) -> Box:
    """Return a box of a rank's parameter in logical coordinates, without padding."""
    return tuple(
        (min(low + start, high), min(low + stop, high)) for (start, stop), (low, high) in zip(local, box, strict=True)
    )
