"""One rank's part of a job from its start to its exit status, whatever the job is. Light until it runs."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from hybridflow.config.cluster import ClusterConfig
from hybridflow.errors import ContractError
from hybridflow.observe.activity import current_activity
from hybridflow.observe.rank_log import note, tell
from hybridflow.parallel.cause import cause_of, own_place, tell_cause
from hybridflow.parallel.signals import CaughtSignals
from hybridflow.parallel.start import Start

if TYPE_CHECKING:
    from hybridflow.parallel.world import World


MEETING_VARIABLE = "HYBRIDFLOW_MEETING"
"""Number of a file that hybridflow's own launcher leaves open in a rank. It closes it once all watch each other."""

_LEAVE_S = 30.0
"""How long a rank that has done its work waits for what the user's code has left: threads, functions of atexit."""

_FLUSH_S = 5.0


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

    What went wrong is told by one rank alone. After the work the process is to end: it is ended 30 s later if it has
    not by itself.

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
    from hybridflow.parallel.imports import import_megatron, importing

    with importing():
        from hybridflow.parallel.failure import lost_contact, tell_once
        from hybridflow.parallel.process import allow_many_files
        from hybridflow.parallel.rendezvous import open_store
        from hybridflow.parallel.world import join_world

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
                _end_later(status, start.rank)
    except (Exception, SystemExit) as ended:
        error = _as_error(ended)
        if watch is not None:
            watch.fail(error)
        cause = cause_of(error, start.rank, socket.gethostname())
        tell_once(error, lambda: tell(tell_cause(cause)), store, start.rank)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        # No interpreter shutdown: it could wait for ranks that are gone.
        os._exit(cause.status)
    return status


def _as_error(ended: Exception | SystemExit) -> Exception:
    """Return the error for a call of sys.exit too: without the work, status 0 would say that it is done."""
    if isinstance(ended, Exception):
        return ended
    error = ContractError(
        f"code that the job calls called sys.exit({'' if ended.code is None else repr(ended.code)}); have it raise an "
        "exception instead"
    )
    error.__cause__ = ended
    return error


def _end_later(status: int, rank: int) -> None:
    """End this process with its exit status after ``_LEAVE_S``, if it is still there.

    Python waits at its end for each thread that is no daemon, such as the workers of a ThreadPoolExecutor. A worker
    that hangs would keep the process, and with it the job's nodes.
    """

    def end() -> None:
        stuck = [each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
        host = socket.gethostname()
        what = f"threads {', '.join(stuck)}" if stuck else f"a function of atexit, at {own_place(host).line}"
        (tell if rank == 0 else note)(
            f"hybridflow: rank {rank} on {host}: its work is done, and {what} kept the process for {_LEAVE_S:g} s; it "
            f"ends now with exit status {status}; end them in the code that began them, or make threads daemons"
        )
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(status)

    # The second is for a flush that never returns.
    for after_s, act in ((_LEAVE_S, end), (_LEAVE_S + _FLUSH_S, lambda: os._exit(status))):
        timer = threading.Timer(after_s, act)
        timer.daemon = True
        timer.start()


def _tell_launcher() -> None:
    """Let hybridflow's own launcher know that the ranks notice by themselves from now on when one of them ends."""
    number = os.environ.pop(MEETING_VARIABLE, None)
    if number is not None:
        os.close(int(number))
