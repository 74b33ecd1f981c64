"""Carrying out a plan: read what lies in the node, pack, exchange and unpack the rest."""

from __future__ import annotations

import bisect
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hybridflow.errors import ReshardError
from hybridflow.parallel.world import World
from hybridflow.reshard.holdings import Holdings
from hybridflow.reshard.memory import room_for
from hybridflow.reshard.messages import Message, Pair, divide, slots
from hybridflow.reshard.peers import NodePeers, bytes_to_move, room_to_share
from hybridflow.reshard.plan import (
    BUCKETS_EACH_WAY,
    WAVES,
    Copy,
    RankPlan,
    Wave,
    aliases,
    bucket_bytes,
    digest,
    participants,
    plan,
    received_limit,
)
from hybridflow.reshard.spec import ITEM_BYTES, ModelSpec, flat_boxes, num_elements
from hybridflow.reshard.transport import Exchange, Leg, MpiTransport, TorchTransport, Transport, mpi_device
from hybridflow.reshard.views import TORCH_DTYPES, Moves, Shards, as_one_run, check_storages, check_tensors, local_sizes

TransportName = Literal["auto", "torch", "shared", "mpi"]

_ROLES = "source", "target"

_NOT_SHARED = OSError, RuntimeError, ReshardError
"""What a system that does not let processes read each other's memory answers."""

ALIGNED_BYTES = 64

SCRATCH_BYTES = 1 << 20
"""Through so much at a time goes a copy between two tensors of which neither has the traveling dtype."""

MAX_STEPS_AHEAD = 64
"""More messages at once keep sockets busy; a group of operations that NCCL starts at once must stay far below 1,024."""


@dataclass(frozen=True, kw_only=True)
class ReshardStats:
    """What one run cost this rank.

    Attributes:
        time_s: From the first copy to the last, waits for other ranks included.
        received_bytes: From other ranks, in messages or read from their memory.
        sent_bytes: To other ranks, likewise.
        local_bytes: Copied within this rank's memory.
        limit_bytes: The least that this rank could receive: what it is to hold less what it holds.
        extra_bytes: Allocated beside the tensors, and kept between runs.
        messages: Sent to other ranks.
    """

    time_s: float
    received_bytes: int
    sent_bytes: int
    local_bytes: int
    limit_bytes: int
    extra_bytes: int
    messages: int


_Traffic = dict[Pair, list[Message]]
"""The messages of each pair of ranks of which this one is an end."""


class _Turn(NamedTuple):
    """What one rank sends to and receives from another, global rank and message."""

    send: tuple[int, Message] | None
    receive: tuple[int, Message] | None


@dataclass
class _Ring:
    """Room in buckets, given to one step after the other, round and round."""

    num_bytes: int
    head: int = 0
    taken: list[tuple[int, int, int]] = field(default_factory=list)

    def reserve(self, num_bytes: int, number: int) -> tuple[int, int]:
        """Return the start of the room for step ``number``, and how many steps must be finished before it is free."""
        size = -(-num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
        assert size <= self.num_bytes, f"a message of {num_bytes} bytes has no room in buckets of {self.num_bytes}"
        start = self.head if self.head + size <= self.num_bytes else 0
        self.head = start + size
        before = [entry for entry in self.taken if entry[0] < self.head and start < entry[1]]
        self.taken = [entry for entry in self.taken if entry not in before] + [(start, self.head, number)]
        return start, max((user + 1 for _, _, user in before), default=0)


class _Step(NamedTuple):
    """At most one message out and one in, at once; it starts when the first ``after`` steps are finished."""

    exchange: Exchange
    pack: Moves
    unpack: Moves
    after: int

    def finish(self) -> None:
        self.exchange.wait()
        self.unpack.carry_out()


class Resharder:
    """Turns a model's shards in one mesh into its shards in another, again and again over the same buffers.

    Collective: all ranks of either mesh make it together, with equal arguments but for the tensors, and call ``run``
    together; ``world.make_groups`` has been called with ``plan.participants`` of the meshes.

    Args:
        world: The job, of which this rank is in at least one of the meshes.
        model: The logical tensors; they travel in their described dtypes.
        source: How they lie before.
        target: How they are to lie.
        source_tensors: Logical name -> this rank's tensor in the source, contiguous, of any float dtype, and of any
            shape with the elements of its regions; None where the rank holds nothing there. They are on this rank's
            device or in host memory. They are bound: each run reads their values of that time. Where peers of the node
            read them, their storages move into shared memory.
        target_tensors: Likewise in the target; overwritten by ``run``. One that has the memory of a source tensor and
            holds the same of it is left alone; any other overlap is an error.
        transport: ``"shared"``: ranks of a node read each other's memory; ``"torch"``: all messages go over
            torch.distributed; ``"mpi"``: over MPI. ``"auto"``: shared within the node where the system allows it, else
            MPI for tensors in host memory in a job that MPI started, else torch.distributed.

    Raises:
        ReshardError: A mesh cannot cut some tensor, a tensor is missing, unknown, of another size or not contiguous,
            the ranks do not agree about the plan, there is no room, or the transport cannot be had. On every rank.
        DeadlineError: A rank did not come.
    """

    def __init__(
        self,
        world: World,
        model: ModelSpec,
        source: Holdings,
        target: Holdings,
        *,
        source_tensors: Mapping[str, Tensor] | None,
        target_tensors: Mapping[str, Tensor] | None,
        transport: TransportName = "auto",
    ) -> None:
        self._name = f"reshard {source.mesh.name} to {target.mesh.name}"
        self._world, self._model, self._holdings = world, model, (source, target)
        self._tensors = dict(source_tensors or {}), dict(target_tensors or {})
        self._ranks = participants(source.mesh, target.mesh)
        self._buckets: dict[str, Tensor] = {}
        self._node: NodePeers | None = None
        self._readers: tuple[int, ...] = ()

        part = self._agree_on_plan(transport)
        readable = {}
        if transport in ("auto", "shared"):
            readable = self._open_peers(part.waves[0], must_open=transport == "shared")
        waves = self._schedule(self._divide(part, readable))
        carrier = self._carrier(transport)
        self._shards = tuple(
            Shards(model, holdings, world.rank, tensors)
            for holdings, tensors in zip(self._holdings, self._tensors, strict=True)
        )
        problem = None
        try:
            self._bind_memory(part, readable)
            self._steps = [self._bind_wave(index, wave, carrier) for index, wave in enumerate(waves)]
        except (ReshardError, RuntimeError) as error:
            problem = str(error)
        self._raise_any(self._gather(problem))
        self._stats = self._count(part, waves)

    @torch.no_grad()
    def run(self) -> ReshardStats:
        """Fill the target tensors with what the source tensors hold; their padding becomes 0.

        Collective: all ranks of either mesh.

        Raises:
            ReshardError: A tensor was released and not restored; nothing was sent or written.
            DeadlineError: A rank did not come; the target is undefined, the source intact.
        """
        for role, tensors in zip(_ROLES, self._tensors, strict=True):
            check_storages(f"{self._name}: {role}", tensors)
        start_s = time.perf_counter()
        if self._node is not None:
            self._synchronize()
            self._node.signal(self._readers, "ready")
        first, second = (_carry(steps) for steps in self._steps)
        # What needs no other rank while the first messages are on the wire.
        next(first)
        self._local.carry_out()
        if self._padding:
            torch._foreach_zero_(self._padding)
        self._read_peers()
        for _ in itertools.chain(first, second):
            pass
        self._synchronize()
        if self._node is not None:
            self._node.wait(self._readers, "done")
        return replace(self._stats, time_s=time.perf_counter() - start_s)

    def _read_peers(self) -> None:
        if self._node is None:
            return
        for rank, moves in self._reads.items():
            self._node.wait([rank], "ready")
            moves.carry_out()
        self._synchronize()
        self._node.signal(self._reads, "done")

    def _synchronize(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.current_stream(self._world.device).synchronize()

    def _gather(self, value: Any) -> dict[int, Any]:
        """Gather every rank's JSON value, by rank."""
        values = self._world.coordinator(self._ranks).gather(value, self._name)
        return dict(zip(self._ranks, values, strict=True))

    def _raise_any(self, problems: Mapping[int, str | None]) -> None:
        """Raise on every rank if some rank has a problem: its own, or the first rank's."""
        mine = problems[self._world.rank]
        if mine is not None:
            raise ReshardError(mine)
        for rank, problem in problems.items():
            if problem is not None:
                raise ReshardError(f"rank {rank} cannot take part: {problem}")

    def _agree_on_plan(self, transport: TransportName) -> RankPlan:
        """Return this rank's part of the plan, once all ranks have the same plan and the tensors for it."""
        source, target = self._holdings
        rank, problem = self._world.rank, None
        part = RankPlan(rank=rank, local=(), waves=(Wave(sends=(), receives=()),) * WAVES)
        try:
            if transport == "mpi" and not self._world.uses_mpi:
                raise ReshardError(
                    f"{self._name}: transport 'mpi' in a job that MPI did not start; start it with mpirun or srun "
                    "--mpi, or use 'auto', 'torch' or 'shared'"
                )
            part = plan(self._model, source, target, rank)
            self._bucket_bytes = bucket_bytes(self._model, target)
            for role, holdings, tensors in zip(_ROLES, self._holdings, self._tensors, strict=True):
                check_tensors(f"{self._name}: {role}", local_sizes(self._model, holdings, rank), tensors)
        except ReshardError as error:
            problem = str(error)
        # What is staged in host memory needs buckets at this end.
        is_staged = transport == "mpi" and problem is None and mpi_device(self._world) != self._world.device
        plain = [not is_staged and self._is_plain(tensors) for tensors in self._tensors]
        facts = self._gather([digest(self._model, source, target) + transport, problem, *plain])
        usual, count = Counter(fact[0] for fact in facts.values()).most_common(1)[0]
        if count < len(facts):
            raise ReshardError(
                f"{self._name}: ranks {[rank for rank in facts if facts[rank][0] != usual]} have another plan than the "
                f"rest of {list(facts)}; start all ranks with the same recipe and the same version of hybridflow"
            )
        self._raise_any({rank: fact[1] for rank, fact in facts.items()})
        self._plain = tuple({rank for rank, fact in facts.items() if fact[side]} for side in (2, 3))
        return part

    def _is_plain(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether all tensors have the dtypes in which they travel, on the device that sends them."""
        return all(
            tensors[spec.name].dtype == TORCH_DTYPES[spec.dtype]
            and tensors[spec.name].device.type == self._world.device.type
            for spec in self._model.tensors
            if spec.name in tensors
        )

    def _open_peers(self, wave: Wave, *, must_open: bool) -> dict[int, dict[str, Tensor]]:
        """Open the flat source tensors of this node's other ranks of which this rank needs a part, by rank and name.

        Both ends of a pair come to the same: each has reached the other, or their copies become messages.
        """
        mesh, me = self._holdings[0].mesh, self._world.rank
        node = mesh.node(me)
        names = [spec.name for spec in self._model.tensors]
        readers = sorted({copy.destination for copy in wave.sends if mesh.node(copy.destination) == node})
        offered = {names[copy.tensor] for copy in wave.sends if copy.destination in readers}
        wanted: dict[int, set[str]] = {}
        for copy in wave.receives:
            if mesh.node(copy.source) == node:
                wanted.setdefault(copy.source, set()).add(names[copy.tensor])
        tensors = {name: self._tensors[0][name] for name in sorted(offered)}

        facts = self._gather([bool(readers or wanted), bytes_to_move(tensors.values()), room_to_share()])
        if not any(has_peers for has_peers, _, _ in facts.values()):
            return {}
        needed, rooms = zip(*(fact[1:] for rank, fact in facts.items() if mesh.node(rank) == node), strict=True)
        opened, problem = None, None
        try:
            if sum(needed) > min(rooms):
                raise ReshardError(f"{sum(needed)} bytes are to be shared in the node, and /dev/shm has {min(rooms)}")
            opened = NodePeers(self._world, tensors, self._name)
        except _NOT_SHARED as error:
            problem = str(error)
        cards = self._gather(None if opened is None else opened.card)
        found: dict[int, dict[str, Tensor]] = {}
        for peer in sorted({*readers, *wanted}):
            if opened is not None and cards[peer] is not None:
                sizes = local_sizes(self._model, self._holdings[0], peer)
                try:
                    found[peer] = opened.open(peer, cards[peer], {name: sizes[name] for name in wanted.get(peer, ())})
                except _NOT_SHARED as error:
                    problem = f"rank {peer}: {error}"
        results = self._gather([sorted(found), problem])
        failed = {rank: problem for rank, (_, problem) in results.items() if problem is not None}
        if must_open and failed:
            raise ReshardError(
                f"{self._name}: ranks {list(failed)} cannot share memory in their node: {next(iter(failed.values()))}; "
                "give the node a larger /dev/shm and its ranks one user and one container, or use transport 'auto'"
            )
        mutual = [peer for peer in found if me in results[peer][0]]
        self._node = opened
        self._readers = tuple(rank for rank in readers if rank in mutual)
        return {peer: found[peer] for peer in mutual if peer in wanted}

    def _divide(self, part: RankPlan, readable: Mapping[int, Any]) -> list[_Traffic]:
        """Return each wave's messages to and from each rank; none for what is read within the node."""
        waves = []
        for index, wave in enumerate(part.waves):
            by_pair: dict[Pair, list[Copy]] = {}
            for copy in (*wave.sends, *wave.receives):
                if index > 0 or (copy.destination not in self._readers and copy.source not in readable):
                    by_pair.setdefault((copy.source, copy.destination), []).append(copy)
            waves.append(
                {
                    (source, destination): divide(
                        self._model,
                        copies,
                        self._holdings[index],
                        self._holdings[1],
                        self._bucket_bytes,
                        is_plain=source in self._plain[index] and destination in self._plain[1],
                    )
                    for (source, destination), copies in by_pair.items()
                }
            )
        return waves

    def _schedule(self, waves: list[_Traffic]) -> list[list[_Turn]]:
        """Return each wave's messages in the order in which this rank sends and receives them."""
        me = self._world.rank
        mine = [[[to, len(messages)] for (out_of, to), messages in wave.items() if out_of == me] for wave in waves]
        counts = self._gather(mine)
        found = []
        for index, wave in enumerate(waves):
            table = {(rank, to): count for rank, each in counts.items() for to, count in each[index]}
            turns: dict[int, list[tuple[int, Message] | None]] = {}
            for pair, places in slots(table).items():
                if me in pair:
                    assert len(places) == len(wave[pair]), f"ranks {pair} divide their copies differently"
                    is_send, peer = pair[0] == me, pair[pair[0] == me]
                    for place, message in zip(places, wave[pair], strict=True):
                        turns.setdefault(place, [None, None])[not is_send] = peer, message
            found.append([_Turn(*turns[place]) for place in sorted(turns)])
        self._has_messages = any(each for per_wave in counts.values() for each in per_wave)
        return found

    def _carrier(self, transport: TransportName) -> Transport | None:
        """Return the carrier of messages; None where no rank has any."""
        if not self._has_messages:
            return None
        if transport == "mpi" or (transport != "torch" and self._world.uses_mpi and self._world.device.type == "cpu"):
            return MpiTransport(self._world, self._ranks, self._name)
        return TorchTransport(self._world, self._ranks, self._name)

    def _bind_memory(self, part: RankPlan, readable: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Prepare what this rank copies itself: within its memory, and out of its peers'."""
        source, target = self._holdings
        aliased = self._find_aliased()
        self._local_copies = [copy for copy in part.local if self._model.tensors[copy.tensor].name not in aliased]
        self._local = self._moves(self._local_copies, self._shards[0])
        self._padding = [
            padding
            for spec in self._model.tensors
            if spec.name in self._tensors[1] and spec.name not in aliased
            for padding in self._shards[1].padding(spec)
        ]
        self._reads = {}
        for peer in _ring(self._ranks, self._world.rank):
            if peer in readable:
                copies = [copy for copy in part.waves[0].receives if copy.source == peer]
                self._reads[peer] = self._moves(copies, Shards(self._model, source, peer, readable[peer]))

    def _find_aliased(self) -> frozenset[str]:
        """Return the target tensors that are a source tensor, both holding the same of it.

        Raises:
            ReshardError: Tensors overlap otherwise.
        """
        sources, targets = self._tensors
        may = aliases(self._model, *self._holdings, self._world.rank)
        found = frozenset(
            name
            for name in may
            if sources[name].data_ptr() == targets[name].data_ptr() and sources[name].dtype == targets[name].dtype
        )
        taken = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name) for name, tensor in sources.items())
        # Of those that begin no later, the one that reaches furthest.
        furthest = list(itertools.accumulate(taken, _further))
        for name, tensor in targets.items():
            start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
            place = bisect.bisect_left(taken, (stop,))
            if name not in found and place > 0 and furthest[place - 1][1] > start:
                raise ReshardError(
                    f"{self._name}: target {name} overlaps source {furthest[place - 1][2]} in memory, and is not the "
                    "same part of the same tensor; give it memory of its own"
                )
        return found

    def _moves(self, copies: Iterable[Copy], source: Shards) -> Moves:
        """Return copies into the target through the traveling dtype, so that replicas are equal whoever sends them."""
        moves = Moves()
        for copy in copies:
            dtype = self._model.tensors[copy.tensor].dtype
            out_of, to = source.view(copy.tensor, copy.box), self._shards[1].view(copy.tensor, copy.box)
            if TORCH_DTYPES[dtype] in (out_of.dtype, to.dtype):
                moves.out_of.append(out_of)
                moves.to.append(to)
                continue
            count, at_once = num_elements(copy.box), SCRATCH_BYTES // ITEM_BYTES[dtype]
            scratch = self._buffer("scratch", SCRATCH_BYTES, self._world.device).view(TORCH_DTYPES[dtype])
            for start in range(0, count, at_once):
                for box in flat_boxes(copy.box, start, min(count, start + at_once)):
                    to = self._shards[1].view(copy.tensor, box)
                    between = scratch[: num_elements(box)].view(to.shape)
                    moves.converted.append((to, between, source.view(copy.tensor, box)))
        return moves

    def _bind_wave(self, index: int, turns: list[_Turn], carrier: Transport | None) -> list[_Step]:
        """Return the steps of a wave, each as early as the buckets have room for it.

        However far a rank begins ahead, the lowest slot of all that are unfinished has nothing before it at either end.
        """
        steps: list[_Step] = []
        rings = {kind: _Ring(BUCKETS_EACH_WAY * self._bucket_bytes) for kind in ("send", "receive")}
        for number, turn in enumerate(turns):
            assert carrier is not None, "messages without a transport"
            after = max(0, number + 1 - MAX_STEPS_AHEAD)
            ends = []
            for kind, end, shards in (
                ("send", turn.send, self._shards[index]),
                ("receive", turn.receive, self._shards[1]),
            ):
                leg, out_of_bucket, free_after = self._bind_end(end, shards, kind, rings[kind], number, carrier)
                ends.append((leg, out_of_bucket))
                after = max(after, free_after)
            (send, sent), (receive, unpack) = ends
            steps.append(_Step(carrier.prepare(send, receive), Moves(to=sent.out_of, out_of=sent.to), unpack, after))
        return steps

    def _bind_end(
        self,
        end: tuple[int, Message] | None,
        shards: Shards,
        kind: str,
        ring: _Ring,
        number: int,
        carrier: Transport,
    ) -> tuple[Leg | None, Moves, int]:
        """Return one end of the message of step ``number``.

        Returns:
            The end; the copies out of buckets, none where it lies in one run in the tensors; and how many steps must be
            finished before the room in the buckets is free.
        """
        if end is None:
            return None, Moves(), 0
        peer, message = end
        dtypes = [TORCH_DTYPES[self._model.tensors[tensor].dtype] for tensor, _ in message.pieces]
        views = [shards.view(tensor, box) for tensor, box in message.pieces]
        is_there = views[0].device.type == carrier.device.type == self._world.device.type
        run = as_one_run(views, dtypes) if is_there else None
        if run is not None:
            return Leg(peer, run, is_fixed=False), Moves(), 0
        start, free_after = ring.reserve(message.num_bytes, number)
        buffer = self._buffer(kind, ring.num_bytes, carrier.device)[start : start + message.num_bytes]
        sizes = [view.numel() * dtype.itemsize for view, dtype in zip(views, dtypes, strict=True)]
        packed = [
            part.view(dtype).view(view.shape)
            for part, dtype, view in zip(buffer.split(sizes), dtypes, views, strict=True)
        ]
        return Leg(peer, buffer, is_fixed=True), Moves(to=views, out_of=packed), free_after

    def _buffer(self, name: str, num_bytes: int, device: torch.device) -> Tensor:
        """Return a buffer of this rank's own, allocated at the first call, ``[bytes]`` uint8."""
        if name not in self._buckets:
            is_staged = device != self._world.device
            with room_for(num_bytes, device, f"rank {self._world.rank}: {self._name}: a buffer"):
                self._buckets[name] = torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=is_staged)
        return self._buckets[name]

    def _count(self, part: RankPlan, waves: list[list[_Turn]]) -> ReshardStats:
        """Count what each run moves."""
        sends = [turn.send[1] for wave in waves for turn in wave if turn.send is not None]
        receives = [turn.receive[1] for wave in waves for turn in wave if turn.receive is not None]
        read = [copy for copy in part.waves[0].receives if copy.source in self._reads]
        offered = [copy for copy in part.waves[0].sends if copy.destination in self._readers]
        return ReshardStats(
            time_s=0.0,
            received_bytes=sum(message.num_bytes for message in receives) + self._bytes(read),
            sent_bytes=sum(message.num_bytes for message in sends) + self._bytes(offered),
            local_bytes=self._bytes(self._local_copies),
            limit_bytes=received_limit(self._model, *self._holdings, self._world.rank),
            extra_bytes=sum(buffer.nbytes for buffer in self._buckets.values()),
            messages=len(sends),
        )

    def _bytes(self, copies: Iterable[Copy]) -> int:
        return sum(num_elements(copy.box) * ITEM_BYTES[self._model.tensors[copy.tensor].dtype] for copy in copies)


def _carry(steps: list[_Step]) -> Iterator[None]:
    """Pack, send and unpack, with later steps on the wire; yields when it would wait for another rank."""
    done = 0
    for step in steps:
        if step.after > done:
            yield
            for before in steps[done : step.after]:
                before.finish()
            done = step.after
        step.pack.carry_out()
        step.exchange.start()
    yield
    for before in steps[done:]:
        before.finish()


def _further(one: tuple[int, int, str], other: tuple[int, int, str]) -> tuple[int, int, str]:
    return max(one, other, key=lambda each: each[1])


def _ring(ranks: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return the ranks after one and then those before it, so that not all ranks read the same peer first."""
    place = ranks.index(rank)
    return ranks[place + 1 :] + ranks[:place]
