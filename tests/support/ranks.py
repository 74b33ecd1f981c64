"""The one helper that makes ranks for a test: forked processes, gloo, a file as rendezvous, one thread each.

Forking from a parent that has imported torch and megatron-core starts eight ranks in about a second; so a test file
does its imports at the top, and covers many cases in one call.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.api.world import use_world
from hybridflow.parallel.world import World
from tests.support.forked import begin_rank

torch.set_num_threads(1)


def run_ranks(
    case: Callable[..., Any],
    size: int,
    *args: Any,
    deadline_s: float = 1800.0,
    wait_s: float = 60.0,
    ranks_per_node: int = 0,
    dying: frozenset[int] = frozenset(),
) -> list[Any]:
    """Call ``case(world, *args)`` on every rank and return what each returned, in rank order.

    Args:
        case: Runs in a forked child; what it returns must survive pickling.
        size: Number of ranks.
        args: Passed on.
        deadline_s: For the whole call; a hang is a failure, never a stuck test run.
        wait_s: The world's own deadline for a single wait.
        ranks_per_node: Pretended node size; 0 puts all ranks on one node.
        dying: Ranks that the case kills; they return None.

    Raises:
        AssertionError: A rank raised (with its traceback), died or did not end in time.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, children = [], []
        for rank in range(size):
            receiver, sender = context.Pipe(duplex=False)
            child = context.Process(
                target=_child,
                args=(case, rank, size, ranks_per_node or size, wait_s, folder, sender, args),
                daemon=True,
            )
            child.start()
            sender.close()
            pipes.append(receiver)
            children.append(child)
        try:
            return _collect(pipes, children, deadline_s, dying)
        finally:
            for child in children:
                child.kill()
                child.join()


def _collect(pipes: list[Any], children: list[Any], deadline_s: float, dying: frozenset[int]) -> list[Any]:
    end = time.monotonic() + deadline_s
    values: dict[int, Any] = {}
    while len(values) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in values}
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
        assert ready, f"ranks {sorted(waiting.values())} did not end within {deadline_s:g} s"
        for pipe in ready:
            rank = waiting[pipe]
            try:
                error, value = pipe.recv()
            except EOFError:
                children[rank].join()
                if rank in dying and children[rank].exitcode == -signal.SIGKILL:
                    values[rank] = None
                    continue
                raise AssertionError(f"rank {rank} died with exit code {children[rank].exitcode}") from None
            assert error is None, f"rank {rank} raised:\n{error}"
            values[rank] = value
    return [values[rank] for rank in range(len(pipes))]


def _child(
    case: Callable[..., Any],
    rank: int,
    size: int,
    per_node: int,
    wait_s: float,
    folder: str,
    sender: Any,
    args: tuple[Any, ...],
) -> None:
    try:
        begin_rank()
        store = dist.FileStore(os.path.join(folder, "store"), size)
        world = World(
            rank=rank, size=size, ranks_per_node=per_node, device=torch.device("cpu"), deadline_s=wait_s, store=store
        )
        # Programs of the Python API find it by themselves.
        use_world(world)
        sender.send((None, case(world, *args)))
        code = 0
    except BaseException:
        sender.send((traceback.format_exc(), None))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # No interpreter shutdown: gloo's threads and the parent's inherited state have nothing to clean up here.
    os._exit(code)
