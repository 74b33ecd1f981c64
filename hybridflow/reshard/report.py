"""What a plan moves, holds and takes, in numbers for a person to judge before any rank is started. No torch.

Ranks that hold alike and are to hold alike are looked at once, and so are tensors that are cut alike.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from hybridflow.layout.mesh import DeviceMesh
from hybridflow.observe.console import format_bytes, format_seconds
from hybridflow.observe.table import format_table
from hybridflow.reshard.holdings import Holdings, tensors_alike
from hybridflow.reshard.messages import divide
from hybridflow.reshard.plan import (
    BUCKETS_EACH_WAY,
    WAVES,
    Copy,
    Flows,
    Stream,
    aliases,
    bucket_bytes,
    held_bytes,
    participants,
    received_limit,
)
from hybridflow.reshard.spec import ModelSpec, expert_place


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """What a rank can send, and at the same time receive, in GB/s.

    Attributes:
        node: Bytes to ranks of its node.
        network: Bytes to ranks of other nodes.
    """

    node: float = 450.0
    network: float = 50.0


class Spread(NamedTuple):
    """A quantity over ranks, or over nodes.

    Attributes:
        least: The least of any rank.
        median: The lower of the middle ones.
        most: The most of any rank.
        total: The sum of all ranks.
    """

    least: int
    median: int
    most: int
    total: int


@dataclass(frozen=True, kw_only=True)
class ReshardReport:
    """The numbers of a plan, in bytes where nothing else is said.

    Attributes:
        model_bytes: All tensors, once.
        own: By rank: held already, in the rank's own memory.
        within: By rank: received from ranks of its node.
        within_limit: The least that all ranks together can receive so, if nothing enters a node twice.
        between: By rank: received from other nodes.
        entering: By node: received from other nodes.
        entering_limit: The least that can enter all nodes together: what a node's ranks need and none of them holds.
        received: By rank: from all other ranks.
        received_limit: The least that all ranks together can receive.
        sent: By rank: sent of what it held before, which is all but what ranks of a node pass on to each other.
        sent_limit: The least that the busiest sender can send of that.
        before: By rank: its tensors in the source.
        after: By rank: its tensors in the target.
        shared: By rank: those of equal shards, where one storage serves both.
        buckets: Bytes of a rank's buckets, to send and receive through.
        messages: By rank: about how many it sends and receives, if all travels in messages.
        time_s: Estimated: in either wave the links of the slowest rank are busy all the time, those within the node and
            those between nodes at once. Copies in a rank's own memory are not counted.
    """

    model_bytes: int
    own: Spread
    within: Spread
    within_limit: int
    between: Spread
    entering: Spread
    entering_limit: int
    received: Spread
    received_limit: int
    sent: Spread
    sent_limit: int
    before: Spread
    after: Spread
    shared: Spread
    buckets: int
    messages: Spread
    time_s: float

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            name: value._asdict() if isinstance(value, Spread) else value
            for name, value in ((name, getattr(self, name)) for name in asdict(self))
        }


class Traffic(NamedTuple):
    """Bytes from one rank to another in one wave."""

    source: int
    destination: int
    wave: int


def report(model: ModelSpec, source: Holdings, target: Holdings, bandwidth: Bandwidth) -> ReshardReport:
    """Report the numbers of the plan from one holding of a model to another.

    Raises:
        ReshardError: As ``plan.plan``.
    """
    flows = Flows(model, source, target)
    mesh, ranks = source.mesh, participants(source.mesh, target.mesh)
    sums = traffic(flows)
    within, between, sent = ({rank: 0 for rank in ranks} for _ in range(3))
    entering = {mesh.node(rank): 0 for rank in ranks}
    for (sender, receiver, wave), number in sums.items():
        if mesh.node(sender) == mesh.node(receiver):
            within[receiver] += number
        else:
            between[receiver] += number
            entering[mesh.node(receiver)] += number
        if wave == 0:
            sent[sender] += number
    least, entering_limit = sum(_limits(model, source, target).values()), sum(_entering_limits(flows.streams, mesh))
    before, after, shared = _memory(model, source, target)
    return ReshardReport(
        model_bytes=sum(tensor.num_bytes for tensor in model.tensors),
        own=_spread(_own(flows.streams, ranks).values()),
        within=_spread(within.values()),
        within_limit=least - entering_limit,
        between=_spread(between.values()),
        entering=_spread(entering.values()),
        entering_limit=entering_limit,
        received=_spread(within[rank] + between[rank] for rank in ranks),
        received_limit=least,
        sent=_spread(sent.values()),
        sent_limit=flows.busiest_limit,
        before=_spread(before.values()),
        after=_spread(after.values()),
        shared=_spread(shared.values()),
        buckets=2 * BUCKETS_EACH_WAY * bucket_bytes(model, target),
        messages=_spread(message_counts(flows, model, source, target).values()),
        time_s=_time_s(sums, mesh, bandwidth),
    )


def reshard_seconds(model: ModelSpec, source: Holdings, target: Holdings, bandwidth: Bandwidth) -> float:
    """Return the seconds of the plan from one holding of a model to another, as ``report`` has them.

    Raises:
        ReshardError: As ``plan.plan``.
    """
    return _time_s(traffic(Flows(model, source, target)), source.mesh, bandwidth)


def traffic(flows: Flows) -> Counter[Traffic]:
    """Return the bytes of each pair of ranks and wave."""
    sums: Counter[Traffic] = Counter()
    for flow in flows.in_any_order():
        sums[Traffic(flow.source, flow.destination, flow.wave)] += flow.stop - flow.start
    return sums


def message_counts(flows: Flows, model: ModelSpec, source: Holdings, target: Holdings) -> dict[int, int]:
    """Estimate how many messages each rank sends and receives.

    Long runs of memory are messages of their own and the rest is packed into buckets, as ``messages.divide`` has it for
    whole boxes; a box that is itself divided counts by its bytes.
    """
    bucket = bucket_bytes(model, target)
    wire = [_Wire(flows, model, source, target, bucket, wave) for wave in range(WAVES)]
    sums: dict[Traffic, list[float]] = {}
    for flow in flows.in_any_order():
        total = sums.setdefault(Traffic(flow.source, flow.destination, flow.wave), [0.0, 0.0])
        until = wire[flow.wave].until
        for sign, position in ((1, flow.stop), (-1, flow.start)):
            for place, number in enumerate(until(flow.stream, position)):
                total[place] += sign * number
    counts = dict.fromkeys(participants(source.mesh, target.mesh), 0)
    for each, (runs, packed_bytes) in sums.items():
        count = math.ceil(round(runs, 6)) + math.ceil(round(packed_bytes) / bucket)
        counts[each.source] += count
        counts[each.destination] += count
    return counts


class _Wire:
    """How the blocks of streams travel in one wave: as runs, or packed."""

    def __init__(
        self, flows: Flows, model: ModelSpec, source: Holdings, target: Holdings, bucket: int, wave: int
    ) -> None:
        self._streams = flows.streams
        self._model, self._bucket, self._wave = model, bucket, wave
        # The second wave is among those that received.
        self._ends = (source if wave == 0 else target), target
        self._tables: dict[int, list[tuple[int, int]]] = {}

    def until(self, stream: int, position: int) -> tuple[float, float]:
        """Return messages of runs, and packed bytes, from the start of a stream to a byte of it."""
        table = self._tables.get(stream)
        if table is None:
            table = self._tables[stream] = list(self._sums(self._streams[stream]))
        ends = self._streams[stream].ends
        index = min(bisect.bisect_right(ends, position), len(ends) - 1)
        start = ends[index - 1] if index else 0
        share = (position - start) / (ends[index] - start)
        (runs, packed), (runs_after, packed_after) = table[index : index + 2]
        return runs + share * (runs_after - runs), packed + share * (packed_after - packed)

    def _sums(self, stream: Stream) -> Iterator[tuple[int, int]]:
        """Yield both sums at the start of the stream, and at the end of each block."""
        runs = packed = 0
        sender = (stream.output_ranks if self._wave == 0 else stream.needers)[0]
        yield runs, packed
        for block in stream.blocks:
            copy = Copy(block.tensors[0], sender, stream.needers[0], block.box)
            number = self._runs(copy, block.box_bytes)
            runs += number * len(block.tensors)
            packed += 0 if number else block.box_bytes * len(block.tensors)
            yield runs, packed

    def _runs(self, copy: Copy, num_bytes: int) -> int:
        """Return the messages of a box that travels in runs; 0 if it is packed and shares a large bucket."""
        if len(divide(self._model, [copy, copy], *self._ends, 2 * num_bytes, is_plain=True)) == 1:
            return 0
        return len(divide(self._model, [copy], *self._ends, self._bucket, is_plain=True))


def _time_s(sums: Mapping[Traffic, int], mesh: DeviceMesh, bandwidth: Bandwidth) -> float:
    """Return seconds for the busiest link of each wave, one wave after the other."""
    total = 0.0
    for wave in range(WAVES):
        busy: Counter[tuple[int, str, bool]] = Counter()
        for each, number in sums.items():
            if each.wave == wave:
                link = "node" if mesh.node(each.source) == mesh.node(each.destination) else "network"
                busy[each.source, link, True] += number
                busy[each.destination, link, False] += number
        total += max((number / (1e9 * getattr(bandwidth, link)) for (_, link, _), number in busy.items()), default=0.0)
    return total


def _own(streams: Iterable[Stream], ranks: Iterable[int]) -> dict[int, int]:
    own = dict.fromkeys(ranks, 0)
    for stream in streams:
        for rank in set(stream.output_ranks).intersection(stream.needers):
            own[rank] += stream.num_bytes
    return own


def _entering_limits(streams: Iterable[Stream], mesh: DeviceMesh) -> Iterator[int]:
    """Yield for each stream its bytes times the nodes that need it and hold nothing of it."""
    for stream in streams:
        nodes = {mesh.node(rank) for rank in stream.needers}.difference(map(mesh.node, stream.output_ranks))
        yield stream.num_bytes * len(nodes)


def _limits(model: ModelSpec, source: Holdings, target: Holdings) -> dict[int, int]:
    """Return the least that each rank can receive, found without the plan."""
    alike = tensors_alike(model, source, target)
    least = {}
    for ranks in _ranks_alike(source.mesh, target.mesh):
        number = sum(count * received_limit(one, source, target, ranks[0]) for one, count in alike)
        least.update(dict.fromkeys(ranks, number))
    return least


def _memory(
    model: ModelSpec, source: Holdings, target: Holdings
) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """Return by rank the bytes held in the source, in the target, and in one storage for both."""
    alike = tensors_alike(model, source, target)
    before: dict[int, int] = {}
    after: dict[int, int] = {}
    shared: dict[int, int] = {}
    for ranks in _ranks_alike(source.mesh, target.mesh):
        rank, sums = ranks[0], [0, 0, 0]
        for one, count in alike:
            number = held_bytes(one, target, rank)
            sums[0] += count * held_bytes(one, source, rank)
            sums[1] += count * number
            sums[2] += count * number * len(aliases(one, source, target, rank))
        for result, number in zip((before, after, shared), sums, strict=True):
            result.update(dict.fromkeys(ranks, number))
    return before, after, shared


def _ranks_alike(source: DeviceMesh, target: DeviceMesh) -> Iterable[list[int]]:
    """Group the ranks of both meshes that hold the same in both."""
    groups: dict[object, list[int]] = {}
    for rank in participants(source, target):
        groups.setdefault((_place(source, rank), _place(target, rank)), []).append(rank)
    return groups.values()


def _place(mesh: DeviceMesh, rank: int) -> object:
    """Return the only facts on which a rank's holdings depend."""
    if rank not in mesh:
        return None
    place = mesh.coordinate(rank)
    return place.pp, place.tp, expert_place(mesh.layout, place), place.dp % mesh.layout.fsdp


def _spread(numbers: Iterable[int]) -> Spread:
    values = list(numbers)
    return Spread(min(values), statistics.median_low(values), max(values), sum(values))


# --- As text ----------------------------------------------------------------------------------------------------------


def as_text(found: ReshardReport, bandwidth: Bandwidth) -> str:
    """Format the report as a table, with the limit beside what has one."""
    rows = [
        ("", "least", "median", "most", "together", "limit", "ratio"),
        ("a rank", *[""] * 6),
        _row("finds in its own memory", found.own),
        _row("receives within its node", found.within, found.within.total, found.within_limit),
        _row("receives from other nodes", found.between, found.between.total, found.entering_limit),
        _row("receives in all", found.received, found.received.total, found.received_limit),
        _row("sends of what it held", found.sent, found.sent.most, found.sent_limit),
        ("a node", *[""] * 6),
        _row("receives from other nodes", found.entering, found.entering.total, found.entering_limit),
        ("memory of a rank", *[""] * 6),
        _row("weights before", found.before),
        _row("weights after", found.after),
        _row("of these in the storage of before", found.shared),
        ("  buckets", "", "", format_bytes(found.buckets), "", "", ""),
        ("messages of a rank, about", *map(str, found.messages), "", ""),
    ]
    return "\n".join([*format_table(rows, num_left=1), "", _time(found, bandwidth)])


def _row(label: str, spread: Spread, found: int | None = None, limit: int | None = None) -> tuple[str, ...]:
    cells = [f"  {label}", *map(format_bytes, spread)]
    if found is None or limit is None:
        return (*cells, "", "")
    ratio = f"{found / limit:.3f}" if limit else "1.000" if found == 0 else "∞"
    return (*cells, format_bytes(limit), ratio)


def _time(found: ReshardReport, bandwidth: Bandwidth) -> str:
    return (
        f"estimated time: {format_seconds(found.time_s)}, at {bandwidth.node:g} GB/s a rank within a node and "
        f"{bandwidth.network:g} GB/s between nodes"
    )
