"""Calls of other people's code in threads, each within a deadline: what never returns is left behind. No torch."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

_Result = TypeVar("_Result")

MAX_THREADS = 64
"""Calls that run together, unless said otherwise."""
MAX_LEFT_BEHIND = 256
"""Threads whose call has not returned within its deadline; with more of them, no call is begun."""


class CallFailed(Exception):
    """A call raised, or did not return in time."""


def take_all(results: queue.SimpleQueue[_Result], wait_s: float) -> list[_Result]:
    """Return what is in a queue, after a wait of at most ``wait_s`` seconds for the first entry."""
    found: list[_Result] = []
    with contextlib.suppress(queue.Empty):
        found.append(results.get(timeout=wait_s) if wait_s > 0 else results.get_nowait())
        while True:
            found.append(results.get_nowait())
    return found


@dataclass(eq=False)
class _Worker:
    """A thread, the calls that are given to it, and since when it has had the present one."""

    inbox: queue.SimpleQueue[Callable[[], Any]] = field(default_factory=queue.SimpleQueue)
    since: float = 0.0


class Calls:
    """Runs calls in threads. For one thread, which submits them and takes what they give.

    A process can end while calls run, since nothing waits for these threads.

    Args:
        deadline_s: Longest time of a call, from its beginning, in seconds; infinite for calls that end by themselves.
        most_together: Calls that run together; None: ``MAX_THREADS``.
    """

    def __init__(self, deadline_s: float, most_together: int | None = None) -> None:
        self._deadline_s = deadline_s
        self._most_together = MAX_THREADS if most_together is None else most_together
        self._todo: deque[tuple[int, Callable[[], Any]]] = deque()
        self._busy: dict[_Worker, int] = {}
        self._idle: list[_Worker] = []
        self._left_behind: set[_Worker] = set()
        self._done: queue.SimpleQueue[tuple[_Worker, Any]] = queue.SimpleQueue()

    def submit(self, number: int, call: Callable[[], Any]) -> None:
        """Start a call whose result ``ended`` returns under this number."""
        self._todo.append((number, call))
        self._assign()

    def ended(self, wait_s: float) -> list[tuple[int, Any]]:
        """Return numbers and results of calls that have ended since; ``CallFailed`` for a failed one.

        Args:
            wait_s: Longest wait for one, in seconds.
        """
        found: list[tuple[int, Any]] = []
        for worker, result in take_all(self._done, wait_s):
            # Of one that was left behind nobody wants the result any more, but it can be of use again.
            if worker in self._busy:
                found.append((self._busy.pop(worker), result))
            self._left_behind.discard(worker)
            self._idle.append(worker)
        now = time.monotonic()
        for worker in [worker for worker in self._busy if now - worker.since > self._deadline_s]:
            found.append((self._busy.pop(worker), CallFailed(f"no answer within {self._deadline_s:g} s")))
            self._left_behind.add(worker)
        if len(self._left_behind) > MAX_LEFT_BEHIND:
            message = f"not called: {len(self._left_behind)} calls before have never returned"
            found += [(number, CallFailed(message)) for number, _ in self._todo]
            self._todo.clear()
        self._assign()
        return found

    def drop(self) -> None:
        """Forget all calls that have not ended."""
        self._todo.clear()
        self._left_behind.update(self._busy)
        self._busy.clear()

    def _assign(self) -> None:
        while self._todo and len(self._busy) < self._most_together and len(self._left_behind) <= MAX_LEFT_BEHIND:
            worker = self._idle.pop() if self._idle else self._start()
            number, call = self._todo.popleft()
            worker.since = time.monotonic()
            self._busy[worker] = number
            worker.inbox.put(call)

    def _start(self) -> _Worker:
        worker = _Worker()
        threading.Thread(target=_work, args=(worker, self._done), name="call", daemon=True).start()
        return worker


def _work(worker: _Worker, done: queue.SimpleQueue[tuple[_Worker, Any]]) -> None:
    while True:
        call = worker.inbox.get()
        try:
            result = call()
        # It may raise anything, or call sys.exit.
        except BaseException as error:
            result = CallFailed(f"{type(error).__name__}: {error}"[:500])
        done.put((worker, result))
