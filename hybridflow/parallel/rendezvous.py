"""Where the ranks of a job meet: the store of rank 0, the wait for all, and which of them are not where they should be.

Each rank signs in with its node and its GPU. Rank 0 reads what the others signed and tells all what it found. From
there on they are a ``parallel.world.World``.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import groupby
from signal import Signals
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from hybridflow.errors import DeadlineError, LayoutError, StopError
from hybridflow.parallel.handshake import StrangerError, key_for, listen
from hybridflow.parallel.secret import VARIABLE, find_secret
from hybridflow.parallel.start import Start, node_name
from hybridflow.parallel.store import KeeperStore, begin_keeper

if TYPE_CHECKING:
    from hybridflow.parallel.signals import CaughtSignals

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

INTERFACES = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the interface where nodes have several"

SHARE_GPU = "HYBRIDFLOW_SHARE_GPU"
"""Environment variable, for tests: at 1, ranks may share a GPU, and gloo carries what NCCL else would."""


_IN_ORDER = {
    "alone": "start them with one launcher",
    "slurm": "start with `srun --distribution=block`",
    "mpi": "start with `srun --distribution=block`, or with `mpirun --map-by slot` (Open MPI) or `-ppn` (MPICH)",
    "env": "start one torchrun on each node; where variables are set by hand, LOCAL_WORLD_SIZE is the number of "
    "ranks on a node",
}
"""Launcher -> how its ranks are made to fill one node after the other."""


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
    return os.environ.get(SHARE_GPU) == "1"


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
            f"what listens at {error} is not rank 0 of this job for rank {start.rank} on {node_name()}: it "
            f"is another program, or rank 0 has another secret; if so, export {VARIABLE} with the same random value "
            f"for all ranks. {start.where([0])} must run there"
        ) from error
    except (OSError, RuntimeError) as error:
        if start.rank == 0 and isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise DeadlineError(
                f"port {start.port}, where the ranks are to meet, is in use by another program on {node_name()}; "
                "export MASTER_PORT with a free port, the same for all ranks, before they are started"
            ) from error
        raise DeadlineError(
            f"no rendezvous at {start.address}:{start.port} within {start_deadline_s:g} s, as seen from {node_name()}: "
            f"{first_line(error)}; {start.where([0])} must run there. If it is only slow, raise "
            "cluster.start_deadline_s; if it came, export MASTER_ADDR with its address on a network that all nodes "
            f"share, or MASTER_PORT with a port that is open between them; {INTERFACES}"
        ) from error


def _open_keeper_store(start: Start, start_deadline_s: float, signals: CaughtSignals | None) -> KeeperStore:
    """Start the keeper of the store, on rank 0, and connect with it."""
    key = key_for(find_secret(start.secret), f"store {start.name}")
    port, end_s = start.port, time.monotonic() + start_deadline_s
    keeper: subprocess.Popen[bytes] | None = None
    asked: list[tuple[float, str]] = []

    def look() -> None:
        if signals is not None and (came := signals.wait(0)):
            asked.append((time.monotonic(), f"rank {start.rank} on {node_name()} received {came[0].name}"))
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
        return Signature(node_name())
    return Signature(node_name(), str(torch.cuda.get_device_properties(device).uuid), torch.cuda.device_count())


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
        store.set(_ASKED, f"rank {start.rank} on {node_name()} received {came[0].name}")
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
                f"{SHARE_GPU}=1 lets ranks share a GPU, slowly"
            )


def first_line(error: Exception) -> str:
    """Return what torch says of an error before the place in its source."""
    return str(error).splitlines()[0].rstrip(".")
