"""Signals that ask a job to save and stop: USR1 and USR2, which sites send ahead of a time limit, and TERM. No torch.

Python runs handlers between two steps of its own, so not while a rank waits for others in a collective. These signals
are therefore taken note of by way of a pipe, which a thread reads.
"""

from __future__ import annotations

import os
import select
import signal

from hybridflow.observe.console import complain

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)

AT_INTERRUPT = "Ctrl-C: the job saves and stops; press Ctrl-C again to end it at once"


class CaughtSignals:
    """From its making on, the stop signals no longer end this process; for the main thread to make, as early as it can.

    They are kept until ``wait`` tells of them.

    Args:
        asks_at_interrupt: Whether a first Ctrl-C is a stop signal, too; a second one ends the process.

    Attributes:
        asks_at_interrupt: Likewise.
    """

    def __init__(self, *, asks_at_interrupt: bool = False) -> None:
        self.asks_at_interrupt = asks_at_interrupt
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for each in STOP_SIGNALS:
            signal.signal(each, lambda number, frame: None)
            # Libraries in the middle of a call need not know.
            signal.siginterrupt(each, False)
        if asks_at_interrupt:
            signal.signal(signal.SIGINT, self._interrupt)

    def fileno(self) -> int:
        """Return the file number for a selector, which finds it ready when ``wait`` has something to tell."""
        return self._reader

    def wait(self, timeout_s: float) -> tuple[signal.Signals, ...]:
        """Return the stop signals that have come, at once if any, after ``timeout_s`` if none comes. Any thread."""
        ready, _, _ = select.select([self._reader], [], [], timeout_s)
        numbers = os.read(self._reader, 4096) if ready else b""
        asked = (*STOP_SIGNALS, signal.SIGINT) if self.asks_at_interrupt else STOP_SIGNALS
        return tuple(signal.Signals(number) for number in numbers if number in asked)

    def ignore(self) -> None:
        """Make the stop signals do nothing from now on.

        Python gives them back their deadly meaning while it ends, and a second one then would change a job's status.
        """
        for each in (*STOP_SIGNALS, signal.SIGINT) if self.asks_at_interrupt else STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)

    def _interrupt(self, number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        complain(AT_INTERRUPT)
