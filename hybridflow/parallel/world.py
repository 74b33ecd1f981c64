"""All ranks of the job: joining them, and their process groups."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from hybridflow.errors import DeadlineError, LayoutError
from hybridflow.parallel.coordinator import Coordinator, GlooMessenger, Messenger
from hybridflow.parallel.start import Start

if TYPE_CHECKING:
    from hybridflow.parallel.mpi import MpiLink
    from hybridflow.parallel.signals import CaughtSignals
    from hybridflow.parallel.watch import Watch

_FOUND = "hybridflow/found"
"""Key of what rank 0 found when the ranks met."""

_AFTER_RANK_0_S = 10.0
"""So much longer than its own deadline a rank waits for what rank 0 says about the ranks that did not come."""

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
        uses_mpi: MPI started the job.
        watch: The watch over all ranks; None: nobody watches.
    """

    rank: int
    size: int
    ranks_per_node: int
    device: torch.device
    deadline_s: float
    store: dist.Store
    uses_mpi: bool = False
    watch: Watch | None = None
    _groups: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    _coordinators: dict[tuple[int, ...], Coordinator] = field(default_factory=dict)
    _mpi_links: dict[tuple[int, ...], MpiLink] = field(default_factory=dict)

    def __post_init__(self) -> None:
        timeout = timedelta(seconds=self.deadline_s)
        backend = f"cpu:gloo,cuda:{'gloo' if shares_gpu() else 'nccl'}" if self.device.type == "cuda" else "gloo"
        store = dist.PrefixStore("torch", self.store)
        try:
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout)
        except RuntimeError as error:
            raise DeadlineError(
                f"all {self.size} ranks have met, but rank {self.rank} on {_host()} has no connection with some of "
                f"them after {self.deadline_s:g} s: {_first_line(error)}; {_INTERFACES}"
            ) from error

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
        return group

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

    def mpi_link(self, ranks: tuple[int, ...]) -> MpiLink:
        """Return messages over MPI among these ranks, if MPI started the job; the first use is collective over them."""
        if ranks not in self._mpi_links:
            from hybridflow.parallel.mpi import MpiLink

            self._mpi_links[ranks] = MpiLink(ranks, self.deadline_s)
        return self._mpi_links[ranks]

    def new_store(self, name: str) -> dist.Store:
        """Open a thread's own connection to the ranks' store: on a shared one, a wait blocks the others.

        Args:
            name: Equal names see equal keys.
        """
        return dist.PrefixStore(f"hybridflow/{name}", self.store.clone())  # type: ignore[attr-defined]

    def begin_watch(self, start: Start, dead_after_s: float, signals: CaughtSignals | None) -> Watch:
        """Begin the watch over all ranks, see ``watch.Watch``. Collective: all ranks."""
        from hybridflow.parallel.watch import Watch

        self.watch = Watch(
            self.new_store("watch"),
            rank=self.rank,
            size=self.size,
            address=start.address,
            dead_after_s=dead_after_s,
            signals=signals,
        )
        return self.watch

    def close(self) -> None:
        """Leave the job in order."""
        dist.destroy_process_group()


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


def open_store(start: Start, *, start_deadline_s: float) -> dist.Store:
    """Open the store where the ranks meet; rank 0 or the launcher keeps it.

    Args:
        start: Which rank this is, from ``find_start``.
        start_deadline_s: Longest wait for it, in seconds.

    Raises:
        DeadlineError: It cannot be reached, or another program has its port.
    """
    if start.launcher == "alone":
        return dist.HashStore()
    is_keeper = start.rank == 0 and not start.agent_store
    try:
        store = dist.TCPStore(
            start.address,
            start.port,
            start.size,
            is_master=is_keeper,
            timeout=timedelta(seconds=start_deadline_s),
            wait_for_workers=False,
            # Left to itself the store listens on every interface of the machine.
            master_listen_fd=_listen(start) if is_keeper and start.address == "127.0.0.1" else None,
        )
    except (OSError, RuntimeError) as error:
        if is_keeper and ("EADDRINUSE" in str(error) or isinstance(error, OSError) and error.errno == errno.EADDRINUSE):
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
    return dist.PrefixStore(start.name, store)


def stand_by(start: Start, *, start_deadline_s: float) -> None:
    """Return when the job is over, on a rank that it does not use.

    A launcher may end all ranks some time after the first has left, as ``srun --wait`` does.

    Args:
        start: Which rank this is, from ``find_start``.
        start_deadline_s: Longest wait for where the others meet, in seconds.

    Raises:
        DeadlineError: It cannot be reached.
    """
    if start.agent_store:  # torchrun waits for all, and keeps its store meanwhile
        return
    store = open_store(start, start_deadline_s=start_deadline_s)
    with contextlib.suppress(dist.DistNetworkError):  # rank 0 has left
        while True:
            with contextlib.suppress(dist.DistStoreError):
                store.wait(["hybridflow/nobody sets this"], timedelta(hours=1))


def _listen(start: Start) -> int:
    """Return a socket that only this machine can reach, for the store to take over."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((start.address, start.port))
        listener.listen(start.size)
        return listener.detach()


def _host() -> str:
    """Return this node's name in Slurm."""
    return os.environ.get("SLURMD_NODENAME", socket.gethostname())


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".")


def join_world(start: Start, store: dist.Store, *, deadline_s: float, start_deadline_s: float) -> World:
    """Meet the other ranks.

    Args:
        start: Which rank this is, from ``find_start``.
        store: Where they meet, from ``open_store``.
        deadline_s: Longest later wait for another rank, in seconds.
        start_deadline_s: Longest wait for the ranks to come, in seconds.

    Raises:
        DeadlineError: Not all ranks came; names those that did not, and their nodes.
        LayoutError: The ranks do not fill one node after the other, or two have the same GPU.
    """
    device = find_device(start.local_rank)
    signatures = wait_for_all(store, start, start_deadline_s, device)
    check_nodes(start, [each.host for each in signatures])
    check_gpus(signatures)
    return World(
        rank=start.rank,
        size=start.size,
        ranks_per_node=start.ranks_per_node,
        device=device,
        deadline_s=deadline_s,
        store=store,
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
    store: dist.Store, start: Start, start_deadline_s: float, device: torch.device
) -> tuple[Signature, ...]:
    """Return where each rank runs, once every rank has signed in with its device.

    Rank 0 reads what the others sign and tells them what it found, since thousands of ranks that all read the
    signatures of all would keep the store busy.

    Raises:
        DeadlineError: Names the ranks that did not come, alike on all that came.
    """
    names = [f"hybridflow/here/{rank}" for rank in range(start.size)]
    store.set(names[start.rank], json.dumps(_sign(device)))
    if start.rank == 0:
        missing = _missing(store, names, start_deadline_s)
        signatures = [] if missing else [json.loads(each) for each in store.multi_get(names)]
        store.set(_FOUND, json.dumps({"missing": missing, "signatures": signatures}))
    elif _missing(store, [_FOUND], start_deadline_s + _AFTER_RANK_0_S):
        missing, signatures = _missing(store, names, 0.0) or [0], []
    else:
        found = json.loads(store.get(_FOUND))
        missing, signatures = found["missing"], found["signatures"]
    if missing:
        raise DeadlineError(
            f"{len(missing)} of {start.size} ranks did not come within {start_deadline_s:g} s: {start.where(missing)}; "
            "look for what kept them from starting, or raise cluster.start_deadline_s if they are only slow"
        )
    return tuple(Signature(*each) for each in signatures)


def _missing(store: dist.Store, names: Sequence[str], wait_s: float) -> list[int]:
    """Return which of these names, by their places, are not in the store after so many seconds."""
    with contextlib.suppress(RuntimeError):
        if wait_s > 0:
            store.wait(list(names), timedelta(seconds=wait_s))
            return []
    return [place for place, name in enumerate(names) if not store.check([name])]


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
