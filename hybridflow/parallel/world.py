"""All ranks of the job, as one of them sees the others, and their process groups."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from hybridflow.errors import DeadlineError, LayoutError
from hybridflow.parallel.coordinator import Coordinator, GlooMessenger, Messenger
from hybridflow.parallel.handshake import key_for
from hybridflow.parallel.rendezvous import (
    INTERFACES,
    check_gpus,
    check_nodes,
    find_device,
    first_line,
    shares_gpu,
    wait_for_all,
)
from hybridflow.parallel.rendezvous import open_store as open_store  # programs know it from here, as docs/pretrained.md
from hybridflow.parallel.secret import find_secret
from hybridflow.parallel.start import Start, node_name
from hybridflow.parallel.store import NamedStore
from hybridflow.parallel.trust import check_connections, refuse_objects

if TYPE_CHECKING:
    from hybridflow.parallel.mpi import MpiLink
    from hybridflow.parallel.signals import CaughtSignals
    from hybridflow.parallel.watch import Watch

_CHECK_S = 60.0
"""So long the ranks of a new process group, which all have just connected, have to prove who they are."""


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
        hosts: Name of each rank's node, in rank order; empty where only ``ranks_per_node`` is known.
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
    hosts: tuple[str, ...] = ()
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
                f"all {self.size} ranks have met, but rank {self.rank} on {node_name()} has no connection with some of "
                f"them after {self.deadline_s:g} s: {first_line(error)}; {INTERFACES}"
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
        sizes, hosts = zip(*self.everyone().gather([own, node_name()], "memory"), strict=True)
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
            deadline_s=self.deadline_s,
            signals=signals,
        )
        return self.watch

    def close(self) -> None:
        """Leave the job in order."""
        for holder in _holders:
            holder.let_go()
        dist.destroy_process_group()


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
    hosts = tuple(each.host for each in signatures)
    check_nodes(start, hosts)
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
        hosts=hosts,
    )


class Holder(Protocol):
    """Holds on to messages of process groups, as a captured graph does."""

    def let_go(self) -> None:
        """Let go of them."""


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def let_go_at_close(holder: Holder) -> None:
    """Have ``World.close`` call ``holder.let_go()`` first, if the holder is still there."""
    _holders.add(holder)
