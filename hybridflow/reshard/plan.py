"""Who sends which box of which tensor to whom. Pure planning: no torch, no communication, the same on every rank.

Cut a tensor at every edge of its source and target parts. On each such cell the ranks that hold it and those that need
it are the same for all elements, and over all tensors there are few different pairs of them: a ``Stream`` is all that
one set of ranks holds and another needs, in one fixed order. Planning deals bytes of streams to the holders; boxes come
last, and only of the rank that asks.

A rank takes what it holds from its own memory. What is held in its node comes from there. The rest enters a node once:
the ranks of the node that need it fetch a share each and pass it on in a second wave. Which holder sends what is
balanced to the least possible load of the busiest (``balance``).
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hybridflow.errors import ReshardError
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.reshard.balance import balance, busiest_limit
from hybridflow.reshard.holdings import Holdings, Part
from hybridflow.reshard.spec import ITEM_BYTES, Box, ModelSpec, TensorSpec, flat_boxes, intersect, num_elements

VERSION = 2
"""Part of the digest: raise it when equal input gives another plan."""

WAVES = 2
"""First from the ranks that held a piece, then from those that just received it to others of their node."""

SNAP_SHARE = 256
"""A share of a stream may grow or shrink by a 256th to end between two tensors rather than within one."""

MAX_BUCKET_BYTES = 64 << 20
MIN_BUCKET_BYTES = 64 << 10
BUCKETS_IN_DESTINATION = 64

BUCKETS_EACH_WAY = 2
"""While one is on the wire, the other is packed or unpacked."""


class Copy(NamedTuple):
    """One box of one tensor, from a rank that holds it to a rank that needs it.

    Attributes:
        tensor: Index into the model's tensors.
        source: Global rank that holds the box before.
        destination: Global rank that needs it; the source itself for a copy in its own memory.
        box: In logical coordinates, never empty.
    """

    tensor: int
    source: int
    destination: int
    box: Box


@dataclass(frozen=True, kw_only=True)
class Wave:
    """What one rank sends and receives in a wave; in each peer's wave the same copies stand in the same order.

    Attributes:
        sends: Copies to other ranks.
        receives: Copies from other ranks.
    """

    sends: tuple[Copy, ...]
    receives: tuple[Copy, ...]


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """The part of a plan that concerns one rank.

    Attributes:
        rank: The rank that has this part.
        local: Copies within the rank's own memory.
        waves: ``WAVES`` exchanges. The first reads what the sources held; the second reads what the first delivered,
            and never leaves a node.
    """

    rank: int
    local: tuple[Copy, ...]
    waves: tuple[Wave, ...]


class Flow(NamedTuple):
    """Bytes of one stream from one rank to another.

    Attributes:
        stream: Index into the plan's streams.
        source: Global rank that sends.
        destination: Global rank that receives.
        wave: 0 or 1.
        start: First byte of the stream.
        stop: One past its last byte.
    """

    stream: int
    source: int
    destination: int
    wave: int
    start: int
    stop: int


@dataclass
class Block:
    """Equal boxes of several tensors.

    Attributes:
        box: In logical coordinates.
        box_bytes: Bytes of one box.
        row_bytes: Bytes of a row along its last dim, or of one element if it has one dim: a box is split only between
            rows.
        tensors: Indices into the model's tensors, ascending.
    """

    box: Box
    box_bytes: int
    row_bytes: int
    tensors: list[int] = field(default_factory=list)


@dataclass
class Stream:
    """All elements that one set of ranks holds and another needs: its blocks, one after the other.

    Attributes:
        output_ranks: Global ranks that hold it.
        needers: Global ranks that need it.
        order: Sorts the streams alike on every rank, whichever of them a rank looks at.
        blocks: Its boxes.
        ends: Where each block ends, in bytes from the start of the stream.
    """

    output_ranks: tuple[int, ...]
    needers: tuple[int, ...]
    order: tuple[int, int]
    blocks: list[Block] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    _edges: dict[int, list[int]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Return the length of the stream."""
        return self.ends[-1]

    def snap(self, position: int, tolerance: int) -> int:
        """Return the nearest place at which the stream can be cut: between boxes if one is within ``tolerance``."""
        if not 0 < position < self.num_bytes:
            return min(max(position, 0), self.num_bytes)
        index = bisect.bisect_right(self.ends, position)
        block, start = self.blocks[index], self.ends[index - 1] if index else 0
        for unit in (block.box_bytes, block.row_bytes):
            place = start + (position - start + unit // 2) // unit * unit
            if abs(place - position) <= tolerance or unit == block.row_bytes:
                return place
        raise AssertionError("unreachable")

    def edges(self, parts: int) -> list[int]:
        """Return the cuts of the stream into almost equal parts, from 0 to its end."""
        found = self._edges.get(parts)
        if found is None:
            step = self.num_bytes / parts
            cuts = [self.snap(round(step * part), round(step) // SNAP_SHARE) for part in range(1, parts)]
            found = self._edges[parts] = [0, *cuts, self.num_bytes]
        return found

    def pieces(self, start: int, stop: int) -> Iterator[tuple[Sequence[int], Box]]:
        """Yield the boxes between two bytes, each with the tensors of which it is a part."""
        begin = 0
        for block, end in zip(self.blocks, self.ends, strict=True):
            if begin < stop and start < end:
                yield from _pieces(block, max(start, begin) - begin, min(stop, end) - begin)
            begin = end


def _pieces(block: Block, start: int, stop: int) -> Iterator[tuple[Sequence[int], Box]]:
    size = block.box_bytes
    item = block.row_bytes // max(1, block.box[-1][1] - block.box[-1][0]) if len(block.box) > 1 else block.row_bytes
    first, last = -(-start // size), stop // size
    if first > last:
        boxes = flat_boxes(block.box, start % size // item, stop % size // item)
        yield from ((block.tensors[last : last + 1], box) for box in boxes)
        return
    for box in flat_boxes(block.box, start % size // item, size // item) if start % size else ():
        yield block.tensors[first - 1 : first], box
    if first < last:
        yield block.tensors[first:last], block.box
    for box in flat_boxes(block.box, 0, stop % size // item):
        yield block.tensors[last : last + 1], box


@dataclass
class Line:
    """Streams that the same ranks can send, laid end to end, once for each group of ranks that takes one.

    Attributes:
        senders: The ranks that can send all of it.
        entries: Index of a stream, and the groups that take it. A group is one rank that gets the stream from its own
            node, or all ranks of a node that need it from elsewhere, each of which fetches a share.
        starts: Where each entry starts on the line, in bytes.
        length: Length of the line, in bytes.
        cuts: Where each sender's stretch ends.
    """

    senders: tuple[int, ...]
    entries: list[tuple[int, list[tuple[int, ...]]]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    length: int = 0
    cuts: list[int] = field(default_factory=list)

    def add(self, stream: int, groups: list[tuple[int, ...]], num_bytes: int) -> None:
        """Append an entry of a stream of so many bytes."""
        self.entries.append((stream, groups))
        self.starts.append(self.length)
        self.length += len(groups) * num_bytes


class Flows:
    """A plan in bytes, of all ranks or of the source stages that concern one rank.

    Args:
        model: The tensors.
        source: Where they are.
        target: Where they are to be.
        rank: Leave out the source stages that neither hold nor need anything of this global rank; None: all ranks.

    Attributes:
        streams: What moves.
        busiest_limit: What the busiest sender of the first wave sends at the least, in bytes.

    Raises:
        ReshardError: As ``plan``.
    """

    def __init__(self, model: ModelSpec, source: Holdings, target: Holdings, rank: int | None = None) -> None:
        if source.mesh.ranks_per_node != target.mesh.ranks_per_node:
            raise ReshardError(
                f"{source.mesh.name} has ranks_per_node={source.mesh.ranks_per_node}, {target.mesh.name} "
                f"{target.mesh.ranks_per_node}; make both meshes with the job's own"
            )
        stages = None if rank is None else _stages_near(model, source, target, rank)
        self.streams = _streams(model, source, target, stages)
        self._ranks_per_node = source.mesh.ranks_per_node
        self._nodes: dict[tuple[int, ...], dict[int, tuple[int, ...]]] = {}
        lines: dict[tuple[int, ...], Line] = {}
        for index, stream in enumerate(self.streams):
            for senders, groups in self._demands(stream):
                line = lines.get(senders)
                if line is None:
                    line = lines[senders] = Line(senders)
                line.add(index, groups, stream.num_bytes)
        self._lines = list(lines.values())
        totals = [line.length for line in self._lines]
        shares = balance(list(lines), totals)
        self.busiest_limit = busiest_limit(list(lines), totals, shares)
        for line, share in zip(self._lines, shares, strict=True):
            self._cut(line, share)

    def all(self) -> list[Flow]:
        """Return the flows of all ranks."""
        return self._in_order(list(self.in_any_order()))

    def in_any_order(self) -> Iterator[Flow]:
        """Yield the flows of all ranks, of which there are many in a large job, in no order of use."""
        for line in self._lines:
            yield from self._walk(line, 0, line.length)
        for index, stream in enumerate(self.streams):
            for group in self._entering(stream):
                yield from self._relays(index, group, group)

    def of(self, rank: int) -> list[Flow]:
        """Return the flows that one rank sends or receives, in an order that is the same on all ranks."""
        found: list[Flow] = []
        for line in self._lines:
            if rank in line.senders:
                place = line.senders.index(rank)
                found += self._walk(line, line.cuts[place - 1] if place else 0, line.cuts[place])
            for (index, groups), start in zip(line.entries, line.starts, strict=True):
                stream = self.streams[index]
                if rank in self._by_node(stream.needers).get(rank // self._ranks_per_node, ()):
                    found += self._received(line, groups, start, stream, rank)
        for index, stream in enumerate(self.streams):
            group = self._entering_with(stream, rank)
            if group is not None:
                found += self._relays(index, group, (rank,))
        return self._in_order(found)

    def _in_order(self, found: list[Flow]) -> list[Flow]:
        return sorted(found, key=lambda flow: (flow.wave, self.streams[flow.stream].order, flow))

    def _demands(self, stream: Stream) -> Iterator[tuple[tuple[int, ...], list[tuple[int, ...]]]]:
        """Yield the groups that take a stream, by who may send it to them."""
        output_ranks, needers = self._by_node(stream.output_ranks), self._by_node(stream.needers)
        for node in output_ranks.keys() & needers.keys() if len(output_ranks) < len(needers) else needers:
            near = output_ranks.get(node)
            if near is not None:
                missing: list[tuple[int, ...]] = [(rank,) for rank in needers[node] if rank not in near]
                if missing:
                    yield near, missing
        far = self._entering(stream)
        if far:
            yield stream.output_ranks, far

    def _entering(self, stream: Stream) -> list[tuple[int, ...]]:
        """Return the needers of each node that holds nothing of a stream."""
        output_ranks = self._by_node(stream.output_ranks)
        return [ranks for node, ranks in self._by_node(stream.needers).items() if node not in output_ranks]

    def _entering_with(self, stream: Stream, rank: int) -> tuple[int, ...] | None:
        """Return the group of ``_entering`` that has a rank."""
        node = rank // self._ranks_per_node
        group = self._by_node(stream.needers).get(node, ())
        return group if rank in group and node not in self._by_node(stream.output_ranks) else None

    def _by_node(self, ranks: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
        found = self._nodes.get(ranks)
        if found is None:
            nodes: dict[int, list[int]] = {}
            for rank in ranks:
                nodes.setdefault(rank // self._ranks_per_node, []).append(rank)
            found = self._nodes[ranks] = {node: tuple(members) for node, members in nodes.items()}
        return found

    def _cut(self, line: Line, shares: Sequence[int]) -> None:
        """Give each sender a stretch as long as its share, up to where the streams can be cut."""
        if len(line.senders) == 1:
            line.cuts.append(line.length)
            return
        tolerance = line.length // len(line.senders) // SNAP_SHARE
        for cut in itertools.accumulate(shares):
            if 0 < cut < line.length:
                entry = bisect.bisect_right(line.starts, cut) - 1
                stream = self.streams[line.entries[entry][0]]
                position = (cut - line.starts[entry]) % stream.num_bytes
                cut += stream.snap(position, tolerance) - position
            line.cuts.append(cut)

    def _walk(self, line: Line, start: int, stop: int) -> Iterator[Flow]:
        """Yield the flows between two places of a line."""
        sender, entry = bisect.bisect_right(line.cuts, start), bisect.bisect_right(line.starts, start) - 1
        while start < stop:
            index, groups = line.entries[entry]
            stream = self.streams[index]
            turn, position = divmod(start - line.starts[entry], stream.num_bytes)
            group = groups[turn]
            edges = stream.edges(len(group))
            place = bisect.bisect_right(edges, position) - 1
            end = min(stop, line.cuts[sender], start - position + edges[place + 1])
            yield Flow(index, line.senders[sender], group[place], 0, position, position + end - start)
            start = end
            while sender + 1 < len(line.senders) and line.cuts[sender] <= start:
                sender += 1
            if start >= line.starts[entry] + len(groups) * stream.num_bytes:
                entry += 1

    def _received(
        self, line: Line, groups: list[tuple[int, ...]], start: int, stream: Stream, rank: int
    ) -> Iterator[Flow]:
        """Yield the flows of one entry of a line to one rank."""
        for turn, group in enumerate(groups):
            if rank in group:
                edges, place = stream.edges(len(group)), group.index(rank)
                begin = start + turn * stream.num_bytes
                yield from self._walk(line, begin + edges[place], begin + edges[place + 1])

    def _relays(self, index: int, group: tuple[int, ...], of: tuple[int, ...]) -> Iterator[Flow]:
        """Yield what members of a group pass on to each other of a stream, for the given members."""
        edges = self.streams[index].edges(len(group))
        for (place, source), destination in itertools.product(enumerate(group), group):
            if source != destination and (source in of or destination in of) and edges[place] < edges[place + 1]:
                yield Flow(index, source, destination, 1, edges[place], edges[place + 1])


def plan(model: ModelSpec, source: Holdings, target: Holdings, rank: int) -> RankPlan:
    """Plan one rank's part in turning the holdings of one mesh into those of another.

    Every element that a rank needs is written once; it travels only if the rank does not hold it already, so each rank
    receives the least that it can.

    Args:
        model: The tensors.
        source: Where they are.
        target: Where they are to be: on the same ranks, others, or some of both.
        rank: Global rank whose part is wanted; in neither mesh, it has no copies.

    Raises:
        ReshardError: A mesh does not cut some tensor into equal parts, or the meshes disagree about the nodes.
    """
    found = Flows(model, source, target, rank)
    local: list[Copy] = []
    waves: list[tuple[list[Copy], list[Copy]]] = [([], []) for _ in range(WAVES)]
    for stream in found.streams:
        if rank in stream.output_ranks and rank in stream.needers:
            local += _copies(stream.pieces(0, stream.num_bytes), rank, rank)
    boxes: dict[tuple[int, int, int], list[tuple[Sequence[int], Box]]] = {}
    for index, sender, receiver, wave, start, stop in found.of(rank):
        pieces = boxes.get((index, start, stop))
        if pieces is None:
            pieces = boxes[index, start, stop] = list(found.streams[index].pieces(start, stop))
        waves[wave][receiver == rank].extend(_copies(pieces, sender, receiver))
    return RankPlan(
        rank=rank,
        local=tuple(local),
        waves=tuple(Wave(sends=tuple(sends), receives=tuple(receives)) for sends, receives in waves),
    )


def _copies(pieces: Iterable[tuple[Sequence[int], Box]], source: int, destination: int) -> list[Copy]:
    return [Copy(tensor, source, destination, box) for tensors, box in pieces for tensor in tensors]


def _stages_near(model: ModelSpec, source: Holdings, target: Holdings, rank: int) -> frozenset[int]:
    """Return the source stages that hold something with a rank or for it.

    Stages that hold a tensor together share the sending of it, so they come together.
    """
    near: set[int] = set()
    if rank in source.mesh:
        near.add(source.mesh.coordinate(rank).pp)
    if rank in target.mesh:
        stage = target.mesh.coordinate(rank).pp
        for tensor in model.places:
            if stage in target.stages(tensor):
                near.update(source.stages(tensor))
    for tensor in model.places:
        stages = source.stages(tensor)
        if len(stages) > 1 and not near.isdisjoint(stages):
            near.update(stages)
    return frozenset(near)


def _streams(model: ModelSpec, source: Holdings, target: Holdings, stages: frozenset[int] | None) -> list[Stream]:
    """Return the streams that some or all source stages hold."""
    streams: dict[tuple[tuple[int, ...], tuple[int, ...]], Stream] = {}
    alike: dict[object, list[Block]] = {}
    for index, tensor in enumerate(model.tensors):
        if stages is not None and stages.isdisjoint(source.stages(tensor)):
            continue
        key = source.key(tensor), target.key(tensor)
        blocks = alike.get(key)
        if blocks is None:
            blocks = alike[key] = []
            cells = _cells(tensor, source.parts(tensor), target.parts(tensor))
            for place, (box, output_ranks, needers) in enumerate(cells):
                stream = streams.get((output_ranks, needers))
                if stream is None:
                    stream = streams[output_ranks, needers] = Stream(output_ranks, needers, (index, place))
                size = num_elements(box) * ITEM_BYTES[tensor.dtype]
                row = size if len(box) > 1 else ITEM_BYTES[tensor.dtype]
                for start, stop in box[:-1]:
                    row //= stop - start
                stream.blocks.append(Block(box, size, row))
                blocks.append(stream.blocks[-1])
        for block in blocks:
            block.tensors.append(index)
    for stream in streams.values():
        stream.ends = list(itertools.accumulate(block.box_bytes * len(block.tensors) for block in stream.blocks))
    return list(streams.values())


def _cells(
    tensor: TensorSpec, held: tuple[Part, ...], needed: tuple[Part, ...]
) -> Iterator[tuple[Box, tuple[int, ...], tuple[int, ...]]]:
    """Yield the overlaps of source and target parts, each with its holders and its needers."""
    dim = tensor.tp_dim or 0
    first = 0
    is_sorted = all(
        one.box[dim][1] <= other.box[dim][0] for parts in (held, needed) for one, other in itertools.pairwise(parts)
    )
    for box, needers in needed:
        low, high = box[dim]
        while is_sorted and held[first].box[dim][1] <= low:
            first += 1
        for other, output_ranks in itertools.islice(held, first if is_sorted else 0, None):
            if is_sorted and other[dim][0] >= high:
                break
            cell = []
            for (a, b), (c, d) in zip(box, other, strict=True):
                start, stop = a if a > c else c, b if b < d else d
                if start >= stop:
                    break
                cell.append((start, stop))
            else:
                yield tuple(cell), output_ranks, needers


def shares_storage(one: DeviceMesh, other: DeviceMesh) -> bool:
    """Return whether every rank holds the same shards in both meshes, so that one storage serves both."""
    return one.key == other.key


def participants(source_mesh: DeviceMesh, target_mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the ranks of either mesh, ascending."""
    return tuple(sorted({*source_mesh.ranks, *target_mesh.ranks}))


def held_bytes(model: ModelSpec, holdings: Holdings, rank: int) -> int:
    """Return the bytes of a rank's tensors, padding included; 0 outside the mesh."""
    if rank not in holdings.mesh:
        return 0
    return sum(
        math.prod(region.local_shape) * ITEM_BYTES[tensor.dtype]
        for tensor in model.tensors
        for region in holdings.regions(tensor, rank)
    )


def received_limit(model: ModelSpec, source: Holdings, target: Holdings, rank: int) -> int:
    """Return the least bytes that a rank can receive: its target less what it already holds. Found without a plan."""
    if rank not in target.mesh:
        return 0
    least = 0
    for tensor in model.tensors:
        held = source.regions(tensor, rank) if rank in source.mesh else ()
        for needed in target.regions(tensor, rank):
            missing = num_elements(needed.box) - sum(num_elements(intersect(needed.box, mine.box)) for mine in held)
            least += missing * ITEM_BYTES[tensor.dtype]
    return least


def bucket_bytes(model: ModelSpec, target: Holdings) -> int:
    """Return a bucket's bytes, equal on all ranks: a 64th of what the least loaded target stage's ranks hold."""
    sums = Counter[int]()
    for tensor in model.tensors:
        for stage in target.stages(tensor):
            sums[stage] += tensor.num_bytes // target.num_shares(tensor)
    least = min(sums.values(), default=0) // BUCKETS_IN_DESTINATION
    return min(MAX_BUCKET_BYTES, max(MIN_BUCKET_BYTES, least)) // 512 * 512


def digest(model: ModelSpec, source: Holdings, target: Holdings) -> str:
    """Return the sha256 of all that a plan depends on: two ranks of equal digest have parts of one plan."""
    text = json.dumps([VERSION, model.digest(), source.identity(), target.identity()])
    return hashlib.sha256(text.encode()).hexdigest()


def aliases(model: ModelSpec, source: Holdings, target: Holdings, rank: int) -> frozenset[str]:
    """Return the tensors of which a rank holds the same in both, padding included: one storage can serve both."""
    if rank not in source.mesh or rank not in target.mesh:
        return frozenset()
    return frozenset(
        tensor.name
        for tensor in model.tensors
        if (held := source.regions(tensor, rank)) and held == target.regions(tensor, rank)
    )
