"""How calls for scores are made: one by one, or many at a time in an event loop; in threads, see rollout.calls.

All have the same three methods, for one thread that submits calls and takes what they give. No torch.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from hybridflow.rollout.calls import CallFailed, take_all

_GRACE_S = 1.0
"""So long after its deadline a call in the loop must have ended, or the loop is held by one that does not await."""


class Runner(Protocol):
    """Makes calls."""

    def submit(self, number: int, call: Callable[[], Any]) -> None:
        """Start a call whose result ``ended`` returns under this number."""

    def ended(self, wait_s: float) -> list[tuple[int, Any]]:
        """Return numbers and results of calls that have ended since; ``CallFailed`` for one that took too long."""

    def drop(self) -> None:
        """Forget all calls that have not ended."""


class InPlace:
    """Makes each call when its result is asked for, in the thread that asks, however long it takes."""

    def __init__(self) -> None:
        self._todo: deque[tuple[int, Callable[[], Any]]] = deque()

    def submit(self, number: int, call: Callable[[], Any]) -> None:
        """See ``Runner.submit``."""
        self._todo.append((number, call))

    def ended(self, wait_s: float) -> list[tuple[int, Any]]:
        """See ``Runner.ended``; makes one call."""
        number, call = self._todo.popleft()
        return [(number, call())]

    def drop(self) -> None:
        """See ``Runner.drop``."""
        self._todo.clear()


class InLoop:
    """Awaits what calls give, many together, in an event loop that has a thread of its own.

    Args:
        deadline_s: Longest time of a call, from its beginning, in seconds; infinite: none.
        most_together: Calls that are under way together.
    """

    def __init__(self, deadline_s: float, most_together: int) -> None:
        self._deadline_s = deadline_s
        self._most_together = most_together
        self._todo: deque[tuple[int, Callable[[], Any]]] = deque()
        self._since: dict[int, float] = {}
        self._done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, number: int, call: Callable[[], Any]) -> None:
        """See ``Runner.submit``; the call gives an awaitable, which must not raise."""
        self._todo.append((number, call))
        self._assign()

    def ended(self, wait_s: float) -> list[tuple[int, Any]]:
        """See ``Runner.ended``."""
        found = take_all(self._done, wait_s)
        for number, _ in found:
            del self._since[number]
        now = time.monotonic()
        if any(now - since > self._deadline_s + _GRACE_S for since in self._since.values()):
            reason = f"no answer within {self._deadline_s:g} s, and the event loop is held: await, and do not block it"
            found += [(number, CallFailed(reason)) for number in self._since]
            self._leave()
        self._assign()
        return found

    def drop(self) -> None:
        """See ``Runner.drop``."""
        self._todo.clear()
        if self._since:
            self._leave()

    def _leave(self) -> None:
        """Leave the loop running unheard; the next call begins another."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop, self._done = None, queue.SimpleQueue()
        self._since.clear()

    def _assign(self) -> None:
        while self._todo and len(self._since) < self._most_together:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._loop,), name="reward loop", daemon=True).start()
            number, call = self._todo.popleft()
            self._since[number] = time.monotonic()
            asyncio.run_coroutine_threadsafe(self._await(number, call, self._done), self._loop)

    async def _await(self, number: int, call: Callable[[], Any], done: queue.SimpleQueue[tuple[int, Any]]) -> None:
        timeout_s = None if self._deadline_s == float("inf") else self._deadline_s
        try:
            result = await asyncio.wait_for(call(), timeout_s)
        except (asyncio.TimeoutError, asyncio.CancelledError):
            result = CallFailed(f"no answer within {self._deadline_s:g} s")
        done.put((number, result))


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, and end what was under way in it."""
    loop.run_forever()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.close()
