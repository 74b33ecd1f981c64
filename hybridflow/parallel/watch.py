"""What the ranks of a job tell each other beside their collectives, by a thread of each: that the job is to stop.

A collective cannot carry it, since a rank may be waiting in one, or be busy for minutes outside any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch.distributed as dist

from hybridflow.parallel.signals import CaughtSignals

_POLL_S = 0.5
_STOP = "stop"


class Watch:
    """This rank's ear for the others.

    Args:
        store: Where the ranks meet; a connection that this watch has for itself, with names of its own.
        signals: Those that this process catches; None: it catches none.

    Attributes:
        stop_reason: Why the job is to save and stop, in words; None: it is to go on. Once it has been set, it stays.
        clock: Says why the time is up, once it is; None, or its None: it is not. Called by the thread.
    """

    def __init__(self, store: dist.Store, signals: CaughtSignals | None = None) -> None:
        self.stop_reason: str | None = None
        self.clock: Callable[[], str | None] | None = None
        self._store = store
        self._signals = signals
        self._asked: str | None = None
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def ask_stop(self, reason: str) -> None:
        """Let all ranks know, within a second or so, that the job is to save and stop."""
        self._asked = self._asked or reason

    def close(self) -> None:
        """End the thread."""
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closed.is_set():
            if self._signals is None:
                self._is_closed.wait(_POLL_S)
            else:
                for each in self._signals.wait(_POLL_S):
                    self.ask_stop(f"received {each.name}")
            if self.stop_reason is None:
                time_up = self.clock() if self.clock is not None else None
                if time_up is not None:
                    self.ask_stop(time_up)
                self._share_stop()

    def _share_stop(self) -> None:
        if self._asked is not None and not self._store.check([_STOP]):
            self._store.set(_STOP, self._asked)
        if self._store.check([_STOP]):
            self.stop_reason = self._store.get(_STOP).decode()
