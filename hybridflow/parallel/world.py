"""All ranks of the job: joining them, and their process groups."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from signal import Signals
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from hybridflow.errors import DeadlineError, LayoutError, StopError
from hybridflow.parallel.coordinator import Coordinator, GlooMessenger, Messenger
from hybridflow.parallel.handshake import StrangerError, key_for, listen
from hybridflow.parallel.secret import VARIABLE, find_secret
from hybridflow.parallel.start import Start
from hybridflow.parallel.store import KeeperStore, NamedStore, begin_keeper
from hybridflow.parallel.trust import check_connections, refuse_objects

if TYPE_CHECKING:
    from hybridflow.parallel.mpi import MpiLink
    from hybridflow.parallel.signals import CaughtSignals
    from hybridflow.parallel.watch import Watch

_FOUND = "hybridflow/found"
"""Key of what rank 0 found when the ranks met."""

_AFTER_RANK_0_S = 10.0
"""So much longer than its own deadline a rank waits for what rank 0 says about the ranks that did not come."""

_PORT = "port"
"""Key of the port of rank 0's keeper, in torchrun's own store."""

_ASKED = "hybridflow/asked"
"""Key of who was asked to stop while the ranks were meeting."""

_LOOK_S = 1.0
"""So often a rank that waits for others looks whether the job is to stop."""

_TELL_S = 3.0
"""So much longer a rank that is to stop looks for rank 0, to tell the others of it."""

_CHECK_S = 60.0
"""So long the ranks of a new process group, which all have just connected, have to prove who they are."""

_INTERFACES = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the interface where nodes have several"

_SHARE_GPU = "HYBRIDFLOW_SHARE_GPU"
"""Environment variable, for tests: at 1, ranks may share a GPU, and gloo carries what NCCL else would."""

_IN_ORDER = {
    "alone": "start them with one launcher",
    "slurm": "start with `srun --distribution=block`",
    "mpi": "start with `srun --distribution=block`, or with `mpirun --map-by slot` (Open MPI) or `-ppn` (MPICH)",
    "env": "start one torchrun on each node; where variables are set by hand, LOCAL_WORLD_SIZE is the number of "
    "ranks on a node",
}
"""Launcher -> how its ranks are made to fill one node after the other."""


@dataclass(kw_only=True, eq=False)
class World:
    """The ranks of the job as this one sees them.

    Attributes:
        rank: This process's global rank.
        size: Ranks of the job.
        ranks_per_node: Consecutive ranks that share a node.
        device: Where this rank's models live.
        deadline_s: Longest wait for another rank, in seconds.
        store: Where the ranks meet.
        secret: The job's secret; empty: these ranks were joined by somebody else, who answers for them.
        uses_mpi: MPI started the job.
        watch: The watch over all ranks; None: nobody watches.
        before_exit: As of ``Watch``, where nobody watches: called with the cause of a failure, in a line.
    """

    rank: int
    size: int
    ranks_per_node: int
    device: torch.device
    deadline_s: float
    store: dist.Store
    secret: bytes = field(default=b"", repr=False)
    uses_mpi: bool = False
    watch: Watch | None = None
    before_exit: Callable[[str], None] | None = None
    _groups: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    _coordinators: dict[tuple[int, ...], Coordinator] = field(default_factory=dict)
    _mpi_links: dict[tuple[int, ...], MpiLink] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if dist.is_initialized():  # by the user's program
            return
        timeout = timedelta(seconds=self.deadline_s)
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        if shares_gpu():
            from hybridflow.parallel.shared_gpu import register

            backend = register()
        store = dist.PrefixStore("torch", self.store)
        try:
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout)
        except RuntimeError as error:
            raise DeadlineError(
                f"all {self.size} ranks have met, but rank {self.rank} on {_host()} has no connection with some of "
                f"them after {self.deadline_s:g} s: {_first_line(error)}; {_INTERFACES}"
            ) from error
        if self.secret:
            refuse_objects()
            everyone = dist.group.WORLD
            assert everyone is not None, "it was just made"
            self._check(everyone, tuple(range(self.size)))

    def make_groups(self, rank_sets: Iterable[tuple[int, ...]]) -> None:
        """Create the process groups over these sets of ranks, once each.

        Collective: all ranks of the job, with the same sets in the same order, also those that hold none of them.
        """
        for ranks in dict.fromkeys(rank_sets):
            if ranks not in self._groups:
                self._groups[ranks] = self._new_group(ranks)

    def _new_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        if ranks == tuple(range(self.size)):
            everyone = dist.group.WORLD
            assert everyone is not None, "the constructor has joined the job"
            return everyone
        # Ranks within a group are in mesh order, so that group ranks are coordinates.
        unsorted: dict[str, Any] = {"sort_ranks": False} if list(ranks) != sorted(ranks) else {}
        group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=timedelta(seconds=self.deadline_s), **unsorted)
        if self.secret and self.rank in ranks:
            self._check(group, ranks)
        return group

    def _check(self, group: dist.ProcessGroup, ranks: tuple[int, ...]) -> None:
        if len(ranks) > 1:
            check_connections(group, ranks, self.rank, self.secret, min(self.deadline_s, _CHECK_S))

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Return the process group over these ranks, made before by ``make_groups``."""
        assert ranks in self._groups, f"no process group was made for ranks {ranks}"
        return self._groups[ranks]

    def coordinator(self, ranks: tuple[int, ...]) -> Coordinator:
        """Return the coordinator over these ranks; its first use is collective over them."""
        if ranks not in self._coordinators:
            messenger: Messenger | None = None
            if len(ranks) > 1 and self.uses_mpi:
                from hybridflow.parallel.mpi import MpiMessenger

                messenger = MpiMessenger(ranks, self.deadline_s)
            elif len(ranks) > 1:
                messenger = GlooMessenger(self.group(ranks), ranks, self.deadline_s)
            self._coordinators[ranks] = Coordinator(self.rank, ranks, messenger)
        return self._coordinators[ranks]

    def everyone(self) -> Coordinator:
        """Return the coordinator over all ranks; its first use is collective over them."""
        ranks = tuple(range(self.size))
        self.make_groups([ranks])
        return self.coordinator(ranks)

    def gpu_bytes(self) -> int | None:
        """Return the memory of the job's smallest GPU; None on CPUs. Collective: all ranks.

        Raises:
            LayoutError: Some ranks see no GPU; names their nodes. On all ranks.
        """
        own = torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else None
        sizes, hosts = zip(*self.everyone().gather([own, _host()], "memory"), strict=True)
        without = [rank for rank, size in enumerate(sizes) if size is None]
        if len(without) == len(sizes):
            return None
        if without:
            raise LayoutError(
                f"{Start(launcher='env', hosts=hosts).where(without)} see no GPU, and the others do; look there with "
                "nvidia-smi, leave the node out (sbatch --exclude), or ask for GPUs on every node"
            )
        return int(min(sizes))

    def device_text(self) -> str:
        """Return what the job computes with, as this rank sees it: ``4 x NVIDIA H100 80GB HBM3``, ``CPU, 2 cores``."""
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
            return f"{name}, shared by {self.size} ranks" if shares_gpu() else f"{self.size} x {name}"
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        text = "1 core" if num_cores == 1 else f"{num_cores} cores"
        return f"CPU, {text}" if self.size <= self.ranks_per_node else f"CPU, {text} of each node"

    def mpi_link(self, ranks: tuple[int, ...]) -> MpiLink:
        """Return messages over MPI among these ranks, if MPI started the job; the first use is collective over them."""
        if ranks not in self._mpi_links:
            from hybridflow.parallel.mpi import MpiLink

            self._mpi_links[ranks] = MpiLink(ranks, self.deadline_s)
        return self._mpi_links[ranks]

    def new_store(self, name: str) -> NamedStore:
        """Open a thread's own connection to the ranks' store: on a shared one, a wait blocks the others.

        Args:
            name: Equal names see equal keys.
        """
        return NamedStore(f"hybridflow/{name}", self.store.clone())  # type: ignore[attr-defined]

    def begin_watch(self, start: Start, dead_after_s: float, signals: CaughtSignals | None) -> Watch:
        """Begin the watch over all ranks, see ``watch.Watch``. Collective: all ranks."""
        from hybridflow.parallel.watch import Watch

        self.watch = Watch(
            self.new_store("watch"),
            rank=self.rank,
            size=self.size,
            address=start.meets_at,
            key=key_for(self.secret, f"watch {start.name}"),
            dead_after_s=dead_after_s,
            signals=signals,
        )
        return self.watch

    def close(self) -> None:
        """Leave the job in order."""
        for holder in _holders:
            holder.let_go()
        dist.destroy_process_group()


class Holder(Protocol):
    """Holds on to messages of process groups, as a captured graph does."""

    def let_go(self) -> None:
        """Let go of them."""


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def let_go_at_close(holder: Holder) -> None:
    """Have ``World.close`` call ``holder.let_go()`` first, if the holder is still there."""
    _holders.add(holder)


def find_device(local_rank: int) -> torch.device:
    """Return this rank's GPU if it sees any, else the CPU.

    Where the launcher shows each rank a GPU of its own (``srun --gpus-per-task``), it is that one; where each sees all
    of its node, that of its place on the node. Ranks that come to the same one are refused by ``check_gpus``.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def shares_gpu() -> bool:
    """Return whether ranks may share a GPU, which NCCL refuses: gloo takes its place then. For tests."""
    return os.environ.get(_SHARE_GPU) == "1"


def open_store(start: Start, *, start_deadline_s: float, signals: CaughtSignals | None = None) -> dist.Store:
    """Open the store where the ranks meet; a process of rank 0 keeps it, for those who know the job's secret.

    Args:
        start: Which rank this is, from ``find_start``.
        start_deadline_s: Longest wait for it, in seconds.
        signals: The signals that this process catches; a stop signal ends the wait.

    Raises:
        DeadlineError: It cannot be reached, or another program has its port.
        LayoutError: The job's secret cannot be read.
        StopError: A stop signal came.
    """
    if start.launcher == "alone":
        return dist.HashStore()
    try:
        return _open_keeper_store(start, start_deadline_s, signals)
    except StrangerError as error:
        raise DeadlineError(
            f"what listens at {error} is not rank 0 of this job for rank {start.rank} on {_host()}: it "
            f"is another program, or rank 0 has another secret; if so, export {VARIABLE} with the same random value "
            f"for all ranks. {start.where([0])} must run there"
        ) from error
    except (OSError, RuntimeError) as error:
        if start.rank == 0 and isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise DeadlineError(
                f"port {start.port}, where the ranks are to meet, is in use by another program on {_host()}; export "
                "MASTER_PORT with a free port, the same for all ranks, before they are started"
            ) from error
        raise DeadlineError(
            f"no rendezvous at {start.address}:{start.port} within {start_deadline_s:g} s, as seen from {_host()}: "
            f"{_first_line(error)}; {start.where([0])} must run there. If it is only slow, raise "
            "cluster.start_deadline_s; if it came, export MASTER_ADDR with its address on a network that all nodes "
            f"share, or MASTER_PORT with a port that is open between them; {_INTERFACES}"
        ) from error


def _open_keeper_store(start: Start, start_deadline_s: float, signals: CaughtSignals | None) -> KeeperStore:
    """Start the keeper of the store, on rank 0, and connect with it."""
    key = key_for(find_secret(start.secret), f"store {start.name}")
    port, end_s = start.port, time.monotonic() + start_deadline_s
    keeper: subprocess.Popen[bytes] | None = None
    asked: list[tuple[float, str]] = []

    def look() -> None:
        if signals is not None and (came := signals.wait(0)):
            asked.append((time.monotonic(), f"rank {start.rank} on {_host()} received {came[0].name}"))
        if asked and time.monotonic() > asked[0][0] + _TELL_S:
            raise StopError(f"{asked[0][1]} before it met the others")
        if keeper is not None and keeper.poll() is not None:
            raise RuntimeError(f"the process that keeps the store ended with status {keeper.returncode}")

    agent = _open_agent_store(start, start_deadline_s) if start.agent_store else None
    if start.rank == 0:
        listener = listen(start.meets_at, 0 if agent is not None else start.port)
        port = listener.getsockname()[1]
        keeper = begin_keeper(listener, key, start.size)
        if agent is not None:
            agent.set(_PORT, str(port))
    elif agent is not None:
        if _missing(agent, [_PORT], start_deadline_s, look):
            raise RuntimeError("rank 0 has not come")
        port = _port(agent.get(_PORT))
    store = KeeperStore(
        start.meets_at,
        port,
        key,
        timeout_s=start_deadline_s,
        connect_s=max(0.0, end_s - time.monotonic()),
        look=look,
        keeper=keeper,
    )
    if asked:
        store.set(_ASKED, asked[0][1])
    return store


def _open_agent_store(start: Start, deadline_s: float) -> dist.Store:
    """Open torchrun's own store. Everyone who reaches it can write to it, so it is asked for a port alone."""
    store = dist.TCPStore(
        start.address, start.port, start.size, timeout=timedelta(seconds=deadline_s), wait_for_workers=False
    )
    return dist.PrefixStore(f"hybridflow/{start.name}", store)


def _port(said: bytes) -> int:
    if not re.fullmatch(rb"\d{1,5}", said):
        raise RuntimeError(f"torchrun's store has {said[:40]!r} in the place of rank 0's port")
    return int(said)


def stand_by(start: Start, *, start_deadline_s: float, signals: CaughtSignals | None = None) -> None:
    """Return when the job is over, on a rank that it does not use.

    A launcher may end all ranks some time after the first has left, as ``srun --wait`` does.

    Args:
        start: Which rank this is, from ``find_start``.
        start_deadline_s: Longest wait for where the others meet, in seconds.
        signals: The signals that this process catches; a stop signal ends the wait for where the others meet.

    Raises:
        DeadlineError: It cannot be reached.
        StopError: A stop signal came.
    """
    if start.agent_store:  # torchrun waits for all
        return
    store = open_store(start, start_deadline_s=start_deadline_s, signals=signals)
    with contextlib.suppress(dist.DistNetworkError):  # rank 0 has left
        while True:
            with contextlib.suppress(dist.DistStoreError):
                store.wait(["hybridflow/nobody sets this"], timedelta(hours=1))


def _host() -> str:
    """Return this node's name in Slurm."""
    return os.environ.get("SLURMD_NODENAME", socket.gethostname())


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".")


def join_world(
    start: Start,
    store: dist.Store,
    *,
    deadline_s: float,
    start_deadline_s: float,
    signals: CaughtSignals | None = None,
) -> World:
    """Meet the other ranks.

    Args:
        start: Which rank this is, from ``find_start``.
        store: Where they meet, from ``open_store``.
        deadline_s: Longest later wait for another rank, in seconds.
        start_deadline_s: Longest wait for the ranks to come, in seconds.
        signals: The signals that this process catches; a stop signal ends the wait on all ranks.

    Raises:
        DeadlineError: Not all ranks came; names those that did not, and their nodes.
        LayoutError: The ranks do not fill one node after the other, or two have the same GPU.
        StopError: A stop signal came.
    """
    device = find_device(start.local_rank)
    signatures = wait_for_all(store, start, start_deadline_s, device, signals)
    # NCCL's groups find one another by it at their first message, for which a rank may come late.
    store.set_timeout(timedelta(seconds=deadline_s))
    check_nodes(start, [each.host for each in signatures])
    check_gpus(signatures)
    if start.is_local and sys.platform.startswith("linux"):
        # Who is on one machine needs no network, and nobody outside needs to reach it.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return World(
        rank=start.rank,
        size=start.size,
        ranks_per_node=start.ranks_per_node,
        device=device,
        deadline_s=deadline_s,
        store=store,
        secret=b"" if start.launcher == "alone" else find_secret(start.secret),
        uses_mpi=start.launcher == "mpi",
    )


class Signature(NamedTuple):
    """What a rank tells the others when it signs in.

    Attributes:
        host: Node on which it runs.
        gpu: Identifier of its GPU, unique in the world; empty on a CPU.
        num_gpus: GPUs that it sees.
    """

    host: str
    gpu: str = ""
    num_gpus: int = 0


def _sign(device: torch.device) -> Signature:
    if device.type == "cpu":
        return Signature(_host())
    return Signature(_host(), str(torch.cuda.get_device_properties(device).uuid), torch.cuda.device_count())


def wait_for_all(
    store: dist.Store,
    start: Start,
    start_deadline_s: float,
    device: torch.device,
    signals: CaughtSignals | None = None,
) -> tuple[Signature, ...]:
    """Return where each rank runs, once every rank has signed in with its device.

    Rank 0 reads what the others sign and tells them what it found, since thousands of ranks that all read the
    signatures of all would keep the store busy.

    Raises:
        DeadlineError: Names the ranks that did not come, alike on all that came.
        StopError: This rank or another that came was sent a stop signal meanwhile.
    """
    names = [f"hybridflow/here/{rank}" for rank in range(start.size)]
    store.set(names[start.rank], json.dumps(_sign(device)))

    came: list[Signals] = []

    def look() -> None:
        _look(store, start, signals, came)

    if start.rank == 0:
        try:
            missing = _missing(store, names, start_deadline_s, look)
        except StopError as error:
            store.set(_FOUND, json.dumps({"stop": str(error)}))
            time.sleep(_LOOK_S)  # rank 0 keeps the store, so it leaves last
            raise
        signatures = [] if missing else [json.loads(each) for each in store.multi_get(names)]
        store.set(_FOUND, json.dumps({"missing": missing, "signatures": signatures}))
    elif _missing(store, [_FOUND], start_deadline_s + _AFTER_RANK_0_S, look):
        missing, signatures = _missing(store, names, 0.0, look) or [0], []
    else:
        found = json.loads(store.get(_FOUND))
        if "stop" in found:
            raise StopError(found["stop"])
        missing, signatures = found["missing"], found["signatures"]
    if missing:
        raise DeadlineError(
            f"{len(missing)} of {start.size} ranks did not come within {start_deadline_s:g} s: {start.where(missing)}; "
            "look for what kept them from starting, or raise cluster.start_deadline_s if they are only slow"
        )
    if signals is not None and came:  # too late to stop here: it is the trainer's matter
        signals.put_back(came)
    return tuple(Signature(*each) for each in signatures)


def _missing(store: dist.Store, names: Sequence[str], wait_s: float, look: Callable[[], None]) -> list[int]:
    """Return which of these names, by their places, are not in the store after so many seconds."""
    end_s = time.monotonic() + wait_s
    while (left_s := end_s - time.monotonic()) > 0:
        look()
        try:
            store.wait(list(names), timedelta(seconds=min(left_s, _LOOK_S)))
            look()
            return []
        except dist.DistNetworkError:
            break
        except RuntimeError:  # not in time
            continue
    return [place for place, name in enumerate(names) if not store.check([name])]


def _look(store: dist.Store, start: Start, signals: CaughtSignals | None, came: list[Signals]) -> None:
    """Note a stop signal of this rank where rank 0 sees it; on rank 0, raise StopError if any rank noted one."""
    if signals is not None:
        came += signals.wait(0)
    if came:
        store.set(_ASKED, f"rank {start.rank} on {_host()} received {came[0].name}")
    if start.rank == 0 and store.check([_ASKED]):
        raise StopError(f"{store.get(_ASKED).decode()} before all ranks had met; nothing was begun")


def check_nodes(start: Start, hosts: Sequence[str]) -> None:
    """Refuse ranks that are not where the launcher's numbers put them.

    Args:
        start: What the launcher told this rank.
        hosts: The node on which each rank runs, in rank order.

    Raises:
        LayoutError: Ranks of a node are not consecutive, or fewer of them share one than the launcher said.
    """
    runs = [(host, len(list(run))) for host, run in groupby(hosts)]
    remedy = _IN_ORDER[start.launcher]
    if len({host for host, _ in runs}) != len(runs):
        shown = ", ".join(f"{rank} on {host}" for rank, host in enumerate(hosts[:4]))
        raise LayoutError(
            f"ranks must fill one node after the other, but they are spread: {shown}{', …' if start.size > 4 else ''}; "
            f"{remedy}"
        )
    for host, number in runs:
        if number % start.ranks_per_node:
            raise LayoutError(
                f"the launcher said that {start.ranks_per_node} consecutive ranks share a node, but {number} run on "
                f"{host}; {remedy}"
            )


def check_gpus(signatures: Sequence[Signature]) -> None:
    """Refuse two ranks on one GPU, unless they were told to share it.

    Args:
        signatures: What each rank signed in with, in rank order.

    Raises:
        LayoutError: Names both ranks, their node, and the GPUs that they see.
    """
    if shares_gpu():
        return
    first: dict[str, int] = {}
    for rank, (host, gpu, num_gpus) in enumerate(signatures):
        if gpu and first.setdefault(gpu, rank) != rank:
            num_ranks = sum(each.host == host for each in signatures)
            raise LayoutError(
                f"ranks {first[gpu]} and {rank} on {host} have the same GPU: {num_ranks} ranks run there, and rank "
                f"{rank} sees {num_gpus} GPU{'s' if num_gpus != 1 else ''}; start no more ranks on a node than it has "
                "GPUs, and show each rank all of them, or one of its own (`srun --gpus-per-task=1`). For tests, "
                f"{_SHARE_GPU}=1 lets ranks share a GPU, slowly"
            )
