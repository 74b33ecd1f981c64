"""Where a step's time went."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter, time
from typing import NamedTuple, Protocol

from hybridflow.observe.activity import current_activity


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


class Cost(NamedTuple):
    """Cost beside time of pieces of work of one kind and name, on one rank.

    Attributes:
        kind: As of a span.
        name: As of a span.
        flops: See ``work.Work``.
        tokens: See ``work.Work``.
        peak_bytes: Most memory of the device, on a CPU of the process, at one time; 0 where it is not known.
    """

    kind: str
    name: str
    flops: float
    tokens: float
    peak_bytes: int


class Meter(Protocol):
    """Measures the pieces of work that compute, one after the other."""

    def begin(self) -> None:
        """Note that a span begins."""

    def end(self) -> tuple[float, float, int]:
        """Note that a span has ended: ``flops``, ``tokens`` and ``peak_bytes`` of its ``Cost``."""


METERED = ("call", "phase")
"""Kinds of work whose cost is measured: others wait, or move a few numbers."""


class Timeline:
    """The spans of one step on one rank, in the order in which they ended.

    A span costs a few microseconds and does not wait for a GPU: on one, synchronize where the time matters.

    Attributes:
        spans: What was measured since the last :meth:`reset`.
        mark: What surrounds each span, given its name: a range for a profiler. None: nothing does.
        meter: Measures what spans cost beside time; None: nothing does.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.mark: Callable[[str], AbstractContextManager[object]] | None = None
        self.meter: Meter | None = None
        self._costs: dict[tuple[str, str], Cost] = {}
        self._clocks = time(), perf_counter()

    @contextmanager
    def span(self, kind: str, name: str) -> Iterator[None]:
        """Measure the body of a ``with``, also when it raises, and say that it is what this rank does.

        Args:
            kind: What :meth:`totals` adds up by, such as ``rollout``, ``update``, ``move``.
            name: The piece of work, such as ``actor.sample``.
        """
        mark = nullcontext() if self.mark is None else self.mark(name)
        meter = self.meter if kind in METERED else None
        start = perf_counter()
        if meter is not None:
            meter.begin()
        try:
            with mark, current_activity(name):
                yield
        finally:
            if meter is not None:
                self._add_cost(Cost(kind, name, *meter.end()))
            unix, then = self._clocks
            # To the microsecond, since they go to the lowest rank as text.
            self.spans.append(Span(kind, name, round(perf_counter() - start, 6), round(unix + (start - then), 6)))

    @property
    def costs(self) -> list[Cost]:
        """Return what was measured since the last :meth:`reset`, one entry for each kind and name."""
        return list(self._costs.values())

    def _add_cost(self, cost: Cost) -> None:
        key = cost.kind, cost.name
        before = self._costs.get(key, Cost(*key, 0.0, 0.0, 0))
        most = max(before.peak_bytes, cost.peak_bytes)
        self._costs[key] = Cost(*key, before.flops + cost.flops, before.tokens + cost.tokens, most)

    def totals(self) -> dict[str, float]:
        """Add up seconds by kind, first ended first. A span inside another counts for both."""
        totals: dict[str, float] = {}
        for span in self.spans:
            totals[span.kind] = totals.get(span.kind, 0.0) + span.seconds
        return totals

    def reset(self) -> None:
        """Forget the spans and what they cost, at the start of a step."""
        self.spans.clear()
        self._costs.clear()
        # The two clocks drift apart, within a step by nothing that matters.
        self._clocks = time(), perf_counter()
