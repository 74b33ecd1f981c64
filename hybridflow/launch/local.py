"""Ranks as processes of this machine: started together, ended together."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Protocol

from hybridflow.exit_status import FAILURE, REQUEST, REQUEUE, SOURCE, TARGET, Ended
from hybridflow.observe.console import complain, signals_raise
from hybridflow.parallel.imports import has_accelerator, import_megatron, importing
from hybridflow.parallel.rank import MEETING_VARIABLE, silence_libraries
from hybridflow.parallel.secret import VARIABLE, new_secret
from hybridflow.parallel.signals import AT_INTERRUPT, STOP_SIGNALS

_TOLD = (FAILURE, REQUEST, SOURCE, TARGET, REQUEUE)
"""Exit statuses of ranks that have told a person why."""

_POLL_S = 0.05
_SAVE_S = 60.0
_BEFORE_MEETING_S = 1.5
"""So long the others have to end once a rank has failed before all had met: they do not notice it themselves."""

_PR_SET_PDEATHSIG = 1

_HYBRIDFLOW = (sys.executable, "-m", "hybridflow")


def run_local(
    argv: Sequence[str],
    *,
    num_ranks: int,
    threads_per_rank: int = 1,
    end_s: float = 15.0,
    save_s: float | None = None,
    program: Sequence[str] = _HYBRIDFLOW,
    ahead: str | None = None,
) -> int:
    """Run a command as ``num_ranks`` processes of this machine, and wait for all of them.

    The ranks write to this process's output. When one exits non-zero or is killed, the others see it themselves and
    end, and what is left after ``end_s`` is killed, or sooner before they have met. One line on standard error says
    which rank it was, unless its exit status is one of those with which ranks tell their own errors. SIGTERM, SIGUSR1
    and SIGUSR2 of this process ask the ranks to save and end, for which they have ``save_s``. So does SIGINT, for which
    they have as long as they need. A second SIGTERM or SIGINT ends them at once. SIGUSR1 and SIGUSR2 may come again and
    again, as from a batch script that cannot know whether the first arrived. The ranks die with this process however it
    ends. There is no deadline for the whole: a rank's own waits have theirs.

    Args:
        argv: Arguments of the program.
        num_ranks: Processes to start; each finds its place in RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
            MASTER_ADDR and MASTER_PORT.
        threads_per_rank: CPU threads of each (OMP_NUM_THREADS).
        end_s: Seconds that the others have to end once a rank has failed.
        save_s: Seconds that the ranks have to save and end once they are asked to. None: 60, and in a job of Slurm,
            which ends what takes too long, as long as they need.
        program: What to start.
        ahead: Module that ranks of hybridflow will import. This process imports it once, and the ranks are forked from
            it: on two cores four ranks start in half the time. None starts each anew, as does a machine with a GPU,
            whose driver does not survive a fork.

    Returns:
        0 if every rank exited with 0; 75 if a signal came before they were started; else the exit status of the rank
        that failed first; 128 + the signal where a signal ended that rank, or this process before the ranks could end
        by themselves.
    """
    if save_s is None:
        save_s = float("inf") if "SLURM_JOB_ID" in os.environ else _SAVE_S
    with _caught_signals() as received:
        try:
            # It takes seconds, and nothing is there yet that would have to save.
            with signals_raise(signal.SIGINT, *STOP_SIGNALS):
                can_fork = ahead is not None and _import(ahead, threads_per_rank)
        except Ended as ended:
            complain(f"received {signal.Signals(ended.signal).name} before the ranks were started; nothing was begun")
            return REQUEUE
        run = functools.partial(_fork, argv) if can_fork else functools.partial(_spawn, [*program, *argv])
        with _held_back() if tuple(program) == _HYBRIDFLOW else nullcontext():
            ranks, meeting = _start(run, num_ranks, threads_per_rank)
        try:
            return _watch(ranks, meeting, received, end_s, save_s)
        finally:
            _kill(ranks)
            os.close(meeting)


def local_environment(rank: int, num_ranks: int, threads_per_rank: int, port: int) -> dict[str, str]:
    """Return the variables that tell a rank of this machine its place."""
    return {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads_per_rank),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }


class _Rank(Protocol):
    """The process of a rank, as ``subprocess.Popen`` is one."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Return the exit status, or minus the signal that ended it; None: it runs."""

    def wait(self) -> int:
        """Return the same at its end."""

    def send_signal(self, number: int) -> None:
        """Send a signal, if it runs."""


class _Fork:
    """A forked process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._look(os.WNOHANG)

    def wait(self) -> int:
        found = self._look(0)
        assert found is not None, "it has been waited for"
        return found

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _look(self, how: int) -> int | None:
        if self.returncode is None and (found := os.waitpid(self.pid, how))[0]:
            self.returncode = os.waitstatus_to_exitcode(found[1])
        return self.returncode


_Start = Callable[[Mapping[str, str], int, Callable[[], None]], _Rank]
"""``start(environment, meeting, prepare)``: a rank that keeps the meeting open and first calls ``prepare``."""


def _start(start: _Start, num_ranks: int, threads_per_rank: int) -> tuple[list[_Rank], int]:
    """Start the ranks. Returns them, and the end of a pipe that is closed at the other once all have met."""
    port = free_port()
    meeting, other_end = os.pipe()
    os.set_blocking(meeting, False)
    shared = {VARIABLE: new_secret(), MEETING_VARIABLE: str(other_end)}
    prepare = _die_with_parent()
    ranks: list[_Rank] = []
    try:
        for rank in range(num_ranks):
            environment = {**os.environ, **local_environment(rank, num_ranks, threads_per_rank, port), **shared}
            ranks.append(start(environment, other_end, prepare))
    except OSError:
        _kill(ranks)
        os.close(meeting)
        raise
    finally:
        os.close(other_end)
    return ranks, meeting


def _spawn(
    command: Sequence[str], environment: Mapping[str, str], meeting: int, prepare: Callable[[], None]
) -> subprocess.Popen[bytes]:
    """Start a command as a rank."""
    return subprocess.Popen(
        command,
        env=environment,
        pass_fds=[meeting],
        stdin=subprocess.DEVNULL,
        # A session of its own: Ctrl-C reaches a rank through us, once; what it starts can be killed with it.
        start_new_session=True,
        preexec_fn=prepare,
    )


def _fork(argv: Sequence[str], environment: Mapping[str, str], meeting: int, prepare: Callable[[], None]) -> _Fork:
    """Start hybridflow as a rank, with all that this process has imported."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if pid:
        return _Fork(pid)
    status = FAILURE
    try:
        os.setsid()
        prepare()
        for number in (signal.SIGINT, *STOP_SIGNALS):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["hybridflow", *argv]
        # runpy warns of a module that is there already, as the command's own is.
        sys.modules.pop("hybridflow.__main__", None)
        runpy.run_module("hybridflow", run_name="__main__")
    except SystemExit as done:
        status = done.code if isinstance(done.code, int) else FAILURE
    except BaseException:
        traceback.print_exc()
    finally:
        # Not through the end of this interpreter, which belongs to the launcher.
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(status)


def _import(module: str, threads_per_rank: int) -> bool:
    """Import what the ranks will, and return whether they can be forked from this process."""
    if has_accelerator():
        return False
    silence_libraries()
    # Libraries read it when they are loaded.
    os.environ["OMP_NUM_THREADS"] = str(threads_per_rank)
    try:
        with importing():
            import_megatron()
            importlib.import_module(module)
    except ImportError:
        # The ranks tell of it.
        return False
    # Of a process with threads a child has the locks, and not the threads that would open them.
    return len(os.listdir("/proc/self/task")) == 1 if sys.platform == "linux" else False


def _have_met(meeting: int) -> bool:
    """Return whether no rank has the pipe open any more: all watch each other, or are gone."""
    try:
        return os.read(meeting, 1) == b""
    except BlockingIOError:
        return False


def _watch(ranks: Sequence[_Rank], meeting: int, received: list[int], end_s: float, save_s: float) -> int:
    """Wait for every rank; from the first failure or signal on, not for ever."""
    status = 0
    kill_at_s = float("inf")
    is_asked = False
    while any(rank.poll() is None for rank in ranks):
        if sum(number in (signal.SIGINT, signal.SIGTERM) for number in received) > 1:
            return 128 + received[0]
        if received and not is_asked:
            is_asked = True
            if received[0] == signal.SIGINT:
                complain(AT_INTERRUPT)
            else:
                kill_at_s = min(kill_at_s, time.monotonic() + save_s)
            for rank in ranks:
                rank.send_signal(received[0])
                # A stopped process takes no signal before it goes on.
                rank.send_signal(signal.SIGCONT)
        elif status == 0 and (failed := _first_failure(ranks)) is not None:
            status = _report(failed, ranks[failed].wait(), len(ranks))
            kill_at_s = min(
                kill_at_s, time.monotonic() + (end_s if _have_met(meeting) else min(end_s, _BEFORE_MEETING_S))
            )
        elif time.monotonic() > kill_at_s:
            return status or 128 + received[0]
        time.sleep(_POLL_S)
    if status == 0 and (failed := _first_failure(ranks)) is not None:
        status = _report(failed, ranks[failed].wait(), len(ranks))
    return status


def _first_failure(ranks: Sequence[_Rank]) -> int | None:
    """Return the failed rank that is likeliest the cause.

    A rank ended by a signal comes before one that missed it, then the lowest.
    """
    failed = {index: code for index, rank in enumerate(ranks) if (code := rank.poll())}
    return min(failed, key=lambda index: (failed[index] > 0, index), default=None)


def _report(index: int, returncode: int, num_ranks: int) -> int:
    """Say which rank failed unless it has said so itself; return the exit status of the whole."""
    if returncode in _TOLD:
        return returncode
    if returncode > 0:
        what, status = f"exited with status {returncode}; if it said why, that is above", returncode
    else:
        what, status = f"was killed by {signal.Signals(-returncode).name}", 128 - returncode
        if -returncode == signal.SIGKILL:
            what += "; if nobody did so, memory ran out: use a smaller trainer.micro_batch_tokens, or fewer ranks"
    others = "; the other ranks are ended" if num_ranks > 1 else ""
    print(f"error: rank {index} {what}{others}", file=sys.stderr, flush=True)
    return status


def _kill(ranks: Sequence[_Rank]) -> None:
    """End the rest of every rank that did not end well, with all that it started."""
    for rank in ranks:
        if rank.returncode != 0:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
    for rank in ranks:
        rank.wait()


@contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """Collect SIGINT and what asks a job to stop in a list instead of ending on them."""
    received: list[int] = []
    before = {
        signum: signal.signal(signum, lambda number, _: received.append(number))
        for signum in (signal.SIGINT, *STOP_SIGNALS)
    }
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def _held_back() -> Iterator[None]:
    """Keep signals that come to a rank of hybridflow, started meanwhile, until it catches them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, *STOP_SIGNALS))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def free_port() -> int:
    """Return a port that nothing listens on, below those that the kernel deals to others until a rank listens there."""
    for port in random.SystemRandom().sample(range(10240, 20000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> Callable[[], None]:
    """Return what a child runs before its program, so that it cannot outlive us. Linux alone offers it."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return ask
