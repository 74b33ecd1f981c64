"""Where a step's time went."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple

from hybridflow.observe.doing import doing


class Span(NamedTuple):
    """A stretch of time: what kind of work, which piece of it, and how long in seconds."""

    kind: str
    name: str
    seconds: float


class Timeline:
    """The spans of one step on one rank, in the order in which they ended.

    A span costs about a microsecond and does not wait for a GPU: on one, synchronise where the time matters.

    Attributes:
        spans: What was measured since the last :meth:`reset`.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []

    @contextmanager
    def span(self, kind: str, name: str) -> Iterator[None]:
        """Measure the body of a ``with``, also when it raises, and say that it is what this rank does.

        Args:
            kind: What :meth:`totals` adds up by, such as ``rollout``, ``update``, ``move``.
            name: The piece of work, such as ``actor.sample``.
        """
        start = perf_counter()
        try:
            with doing(name):
                yield
        finally:
            self.spans.append(Span(kind, name, perf_counter() - start))

    def totals(self) -> dict[str, float]:
        """Add up seconds by kind, first ended first. A span inside another counts for both."""
        totals: dict[str, float] = {}
        for kind, _, seconds in self.spans:
            totals[kind] = totals.get(kind, 0.0) + seconds
        return totals

    def reset(self) -> None:
        """Forget the spans, at the start of a step."""
        self.spans.clear()
