"""The ranks of a Python program: this process alone, or one of those that a launcher has started.

The same script runs as ``python script.py``, ``torchrun --nproc-per-node 4 script.py`` and ``srun python script.py``:
every rank runs all of it, with the same arguments.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
from functools import partial
from types import TracebackType

import torch
import torch.distributed as dist

from hybridflow.errors import ConfigError
from hybridflow.observe.console import accept_all_letters
from hybridflow.parallel.cause import cause_of, in_a_line
from hybridflow.parallel.process import allow_many_files
from hybridflow.parallel.rank import silence_libraries
from hybridflow.parallel.rendezvous import check_gpus, find_device, open_store, wait_for_all
from hybridflow.parallel.signals import CaughtSignals
from hybridflow.parallel.start import Start, find_start
from hybridflow.parallel.world import World, join_world

DEADLINE_S = 1800.0
"""Longest wait for another rank; as ``cluster.deadline_s``."""

START_DEADLINE_S = 120.0
DEAD_AFTER_S = 20.0

_worlds: list[World] = []


def find_world() -> World:
    """Return the ranks of this program, which meet at the first call. Collective: all ranks.

    Where the program has called ``torch.distributed.init_process_group`` itself, these are its ranks. Without
    ``LOCAL_RANK``, each keeps the GPU that the program chose by ``torch.cuda.set_device``.

    Raises:
        DeadlineError: A rank did not come.
        ConfigError: The program's own process group cannot carry messages of the CPU.
        LayoutError: Two ranks have the same GPU.
    """
    if not _worlds:
        silence_libraries()
        accept_all_letters()
        allow_many_files()
        _worlds.append(_adopt() if dist.is_initialized() else _join(find_start()))
        if _worlds[0].watch is None:
            _note_failures(_worlds[0])
    return _worlds[0]


def use_world(world: World | None) -> None:
    """Take ranks that have met already.

    Args:
        world: World of these ranks; None: forget them.
    """
    _worlds[:] = [] if world is None else [world]


def _join(start: Start) -> World:
    # A signal is one thing to a process alone, and another to a job of many.
    signals = CaughtSignals() if start.size > 1 else None
    store = open_store(start, start_deadline_s=START_DEADLINE_S, signals=signals)
    world = join_world(start, store, deadline_s=DEADLINE_S, start_deadline_s=START_DEADLINE_S, signals=signals)
    if signals is not None:
        world.begin_watch(start, DEAD_AFTER_S, signals)
        sys.excepthook = partial(_fail, os.getpid())
    atexit.register(_leave, world, signals)
    return world


def _adopt() -> World:
    backends = dist.get_backend_config()
    if "gloo" not in backends:
        raise ConfigError(
            f"torch.distributed was initialised with {backends}; hybridflow also exchanges messages in host memory: "
            "call init_process_group('cpu:gloo,cuda:nccl'), or leave it to hybridflow"
        )
    store = dist.distributed_c10d._get_default_store()
    start = Start(launcher="env", rank=dist.get_rank(), size=dist.get_world_size())
    device = find_device(own_place())
    check_gpus(wait_for_all(store, start, START_DEADLINE_S, device))
    return World(
        rank=start.rank,
        size=start.size,
        ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", start.size)),
        device=device,
        deadline_s=DEADLINE_S,
        store=store,
    )


def own_place() -> int:
    """Return this rank's place on its node: that of the launcher, else that of the GPU that the program chose."""
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def _note_failures(world: World) -> None:
    """Note in the run's files what ends a program that nobody watches; it ends as any program."""
    told, pid = sys.excepthook, os.getpid()

    def fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        told(kind, error, trace)
        if isinstance(error, Exception) and world.before_exit is not None and os.getpid() == pid:
            world.before_exit(in_a_line(cause_of(error, world.rank, socket.gethostname())))

    sys.excepthook = fail


def _fail(pid: int, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End all ranks at once after an error on one, the process ``pid``; one that it has forked ends alone."""
    sys.__excepthook__(kind, error, trace)
    (world,) = _worlds
    if isinstance(error, Exception) and os.getpid() == pid:
        assert world.watch is not None, "a process alone ends as any program"
        world.watch.fail(error)
    sys.stdout.flush()
    os._exit(1)


def _leave(world: World, signals: CaughtSignals | None) -> None:
    if dist.is_initialized() and world in _worlds:
        world.close()
    if world.watch is not None and signals is not None:
        world.watch.close()
        signals.ignore()
