"""Signals that ask a job to save and stop: USR1 and USR2, which sites send ahead of a time limit, and TERM. No torch.

Python runs handlers between two steps of its own, so not while a rank waits for others in a collective. These signals
are therefore taken note of by way of a pipe, which a thread reads.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable

from hybridflow.observe.console import complain

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)

COPIES_S = 2.0
"""For so long after a Ctrl-C, a launcher may pass its own on to ranks that have got it from the terminal."""

AT_INTERRUPT = "Ctrl-C: the job saves and stops; press Ctrl-C again to end it at once"

_listeners: list[Callable[[str], None]] = []
_caught: list[CaughtSignals] = []


def listen(tell: Callable[[str], None]) -> None:
    """Have the first stop signal call a function instead of ending this process; the next one ends it.

    For a process without a watch, which may be a program in a notebook: Ctrl-C interrupts as ever, and a signal keeps
    the handler that the program has given it.

    Args:
        tell: Called with what came, on the main thread. ``leave`` takes it back.
    """
    _listeners.append(tell)
    if threading.current_thread() is threading.main_thread():
        for each in STOP_SIGNALS:
            if signal.getsignal(each) is signal.SIG_DFL:
                signal.signal(each, _tell)


def leave(tell: Callable[[str], None]) -> None:
    """Take ``listen`` back; without anybody who listens, the signals end this process again."""
    if tell in _listeners:
        _listeners.remove(tell)
    if not _listeners:
        _give_back()


def _tell(number: int, frame: object) -> None:
    _give_back()
    for tell in _listeners:
        tell(f"received {signal.Signals(number).name}")


def _give_back() -> None:
    if threading.current_thread() is threading.main_thread():
        for each in STOP_SIGNALS:
            if signal.getsignal(each) is _tell:
                signal.signal(each, signal.SIG_DFL)


def _end_forked() -> None:
    """Let the stop signals end a forked process, such as a worker that loads data, for which nobody listens."""
    _listeners.clear()
    _give_back()
    for each in _caught:
        each.leave_to_parent()


os.register_at_fork(after_in_child=_end_forked)


class CaughtSignals:
    """From its making on, the stop signals no longer end this process; for the main thread to make, as early as it can.

    They are kept until ``wait`` tells of them.

    Args:
        asks_at_interrupt: Whether a first Ctrl-C is a stop signal, too; a second one ends the process.
        speaks: Whether this process says so at the first Ctrl-C; of several ranks one does.
        copies_s: Further SIGINTs within so many seconds are the first Ctrl-C again: the terminal sends it to all
            processes, and a launcher passes on its own. Above 0, a SIGTERM after these seconds counts as the second
            Ctrl-C, which torchrun passes on as SIGTERM.

    Attributes:
        asks_at_interrupt: Likewise.
    """

    def __init__(self, *, asks_at_interrupt: bool = False, speaks: bool = True, copies_s: float = 0.0) -> None:
        self.asks_at_interrupt = asks_at_interrupt
        self._speaks, self._copies_s = speaks, copies_s
        # The handler of the main thread may run long after the pipe has told of a signal: each has its own clock.
        self._handled_s: float | None = None
        self._read_s: float | None = None
        self._kept: list[signal.Signals] = []
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for each in STOP_SIGNALS:
            signal.signal(each, self._stop)
            # Libraries in the middle of a call need not know.
            signal.siginterrupt(each, False)
        if asks_at_interrupt:
            signal.signal(signal.SIGINT, self._interrupt)
            signal.siginterrupt(signal.SIGINT, False)
        # Our launcher has held them back.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, *STOP_SIGNALS))
        _caught.append(self)

    def fileno(self) -> int:
        """Return the file number for a selector, which finds it ready when ``wait`` has something to tell."""
        return self._reader

    def wait(self, timeout_s: float) -> tuple[signal.Signals, ...]:
        """Return the stop signals that have come, at once if any, after ``timeout_s`` if none comes. Any thread.

        A second Ctrl-C ends the process here if the main thread is in a collective.
        """
        # Not select, which takes no file number from 1024 on.
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        numbers = os.read(self._reader, 4096) if poll.poll(timeout_s * 1000) else b""
        asked = (*STOP_SIGNALS, signal.SIGINT) if self.asks_at_interrupt else STOP_SIGNALS
        came = [signal.Signals(number) for number in numbers if number in asked]
        if self._copies_s:
            for each in came:
                if self._is_second(each, self._read_s):
                    os._exit(128 + signal.SIGINT)
                if each == signal.SIGINT and self._read_s is None:
                    self._read_s = time.monotonic()
        kept, self._kept = self._kept, []
        return (*kept, *came)

    def put_back(self, came: Iterable[signal.Signals]) -> None:
        """Let the next ``wait`` tell of signals that an earlier one has told of."""
        self._kept += came
        # No signal has this number.
        os.write(self._writer, b"\0")

    def ignore(self) -> None:
        """Make the stop signals do nothing from now on.

        Python gives them back their deadly meaning while it ends, and a second one then would change a job's status.
        """
        for each in (*STOP_SIGNALS, signal.SIGINT) if self.asks_at_interrupt else STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)

    def leave_to_parent(self) -> None:
        """Let the stop signals end this process, which was forked: the pipe is that of its parent.

        A first Ctrl-C, which the terminal sends to both, still leaves it to work while the parent saves.
        """
        signal.set_wakeup_fd(-1)
        self._speaks = False
        for each in STOP_SIGNALS:
            if signal.getsignal(each) == self._stop:
                signal.signal(each, signal.SIG_DFL)

    def _is_second(self, number: int, first_s: float | None) -> bool:
        """Return whether a signal is a second Ctrl-C, and not a copy of the first, which came at ``first_s``."""
        is_end = number in (signal.SIGINT, signal.SIGTERM)
        return is_end and first_s is not None and time.monotonic() - first_s > self._copies_s

    def _stop(self, number: int, frame: object) -> None:
        if self._copies_s and self._is_second(number, self._handled_s):
            _end()

    def _interrupt(self, number: int, frame: object) -> None:
        if self._is_second(number, self._handled_s):
            _end()
        if self._handled_s is not None:
            return
        self._handled_s = time.monotonic()
        if not self._copies_s:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if self._speaks:
            complain(AT_INTERRUPT)


def _end() -> None:
    """End this process as an uncaught Ctrl-C does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
