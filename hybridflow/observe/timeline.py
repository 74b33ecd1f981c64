"""Where a step's time went."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter, time
from typing import NamedTuple

from hybridflow.observe.doing import doing


class Span(NamedTuple):
    """A stretch of time.

    Attributes:
        kind: What kind of work.
        name: Which piece of it.
        seconds: How long.
        start_s: When it began, Unix time in seconds. Of two ranks it can be compared as well as the clocks of their
            nodes can.
    """

    kind: str
    name: str
    seconds: float
    start_s: float


class Timeline:
    """The spans of one step on one rank, in the order in which they ended.

    A span costs a few microseconds and does not wait for a GPU: on one, synchronise where the time matters.

    Attributes:
        spans: What was measured since the last :meth:`reset`.
        mark: What surrounds each span, given its name: a range for a profiler. None: nothing does.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.mark: Callable[[str], AbstractContextManager[object]] | None = None
        self._clocks = time(), perf_counter()

    @contextmanager
    def span(self, kind: str, name: str) -> Iterator[None]:
        """Measure the body of a ``with``, also when it raises, and say that it is what this rank does.

        Args:
            kind: What :meth:`totals` adds up by, such as ``rollout``, ``update``, ``move``.
            name: The piece of work, such as ``actor.sample``.
        """
        mark = nullcontext() if self.mark is None else self.mark(name)
        start = perf_counter()
        try:
            with mark, doing(name):
                yield
        finally:
            # To the microsecond, since they go to the lowest rank as text.
            self.spans.append(Span(kind, name, round(perf_counter() - start, 6), round(self._unix(start), 6)))

    def totals(self) -> dict[str, float]:
        """Add up seconds by kind, first ended first. A span inside another counts for both."""
        totals: dict[str, float] = {}
        for span in self.spans:
            totals[span.kind] = totals.get(span.kind, 0.0) + span.seconds
        return totals

    def reset(self) -> None:
        """Forget the spans, at the start of a step."""
        self.spans.clear()
        # The two clocks drift apart, within a step by nothing that matters.
        self._clocks = time(), perf_counter()

    def _unix(self, start: float) -> float:
        unix, then = self._clocks
        return unix + (start - then)
