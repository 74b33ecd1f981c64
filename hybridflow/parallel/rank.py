"""One rank's part of a job from its start to its exit status, whatever the job is. Light until it runs."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from hybridflow.config.cluster import ClusterConfig
from hybridflow.observe.activity import current_activity
from hybridflow.observe.rank_log import tell
from hybridflow.parallel.cause import cause_of, tell_cause
from hybridflow.parallel.signals import CaughtSignals
from hybridflow.parallel.start import Start

if TYPE_CHECKING:
    from hybridflow.parallel.world import World


MEETING_VARIABLE = "HYBRIDFLOW_MEETING"
"""Number of a file that hybridflow's own launcher leaves open in a rank. It closes it once all watch each other."""


def silence_libraries() -> None:
    """Silence what megatron-core and torch say about themselves; our user cannot act on it."""
    warnings.filterwarnings("ignore", module=r"megatron\b|torch\b")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    # That a machine has nvcc and no GPU, as login nodes do.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def run_rank(
    start: Start,
    signals: CaughtSignals,
    load: Callable[[], Callable[[World], int]],
    cluster: ClusterConfig,
) -> int:
    """Meet the other ranks, work, and leave in order; any failure ends the process at once.

    What went wrong is told by one rank alone.

    Args:
        start: Which rank this is, from ``find_start``.
        signals: The signals that this process catches.
        load: Imports what the work takes, before the ranks meet, and gives the work. That is called with the world of
            all ranks, on each of them, and gives the exit status, the same on all.
        cluster: Deadlines of the job.
    """
    if not signals.asks_at_interrupt:
        # The launcher, which Ctrl-C reaches too, acts for its ranks.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    silence_libraries()
    from hybridflow.parallel.failure import lost_contact, tell_once
    from hybridflow.parallel.imports import import_megatron
    from hybridflow.parallel.process import allow_many_files
    from hybridflow.parallel.world import join_world, open_store

    import_megatron()
    work = load()
    allow_many_files()
    store, watch = None, None
    try:
        with lost_contact("the job", tuple(range(start.size)), cluster.deadline_s):
            come_s = cluster.start_deadline_s
            store = open_store(start, start_deadline_s=come_s, signals=signals)
            world = join_world(start, store, deadline_s=cluster.deadline_s, start_deadline_s=come_s, signals=signals)
            watch = world.begin_watch(start, cluster.dead_after_s, signals)
            _tell_launcher()
            status = work(world)
            with current_activity("the end of the job"):
                world.close()
                watch.close()
                signals.ignore()
    except Exception as error:
        if watch is not None:
            watch.fail(error)
        cause = cause_of(error, start.rank, socket.gethostname())
        tell_once(error, lambda: tell(tell_cause(cause)), store, start.rank)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        # No interpreter shutdown: it could wait for ranks that are gone.
        os._exit(cause.status)
    return status


def _tell_launcher() -> None:
    """Let hybridflow's own launcher know that the ranks notice by themselves from now on when one of them ends."""
    number = os.environ.pop(MEETING_VARIABLE, None)
    if number is not None:
        os.close(int(number))
