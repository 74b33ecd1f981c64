"""Responses that there are before a step samples, of a log, a replay or the step before, and what keeps new ones."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace

from hybridflow.rollout.log_file import LogWriter
from hybridflow.rollout.request import Request, Response, SampleKey
from hybridflow.sampling.partial_rollouts import Pairs
from hybridflow.sampling.rollout_log import to_logged


@dataclass(frozen=True)
class SamplingProgress:
    """What goes on beside generating, see ``request.Progress``."""

    is_stopping: Callable[[], bool]
    log: LogWriter | None = None

    def finished(self, pairs: Pairs) -> None:
        """Keep finished and paused responses, on the rank that has a log. A failed one is tried again."""
        if self.log is not None:
            self.log.add(to_logged(ask, got) for ask, got in pairs if got.finish != "failed" and len(got.tokens))


class KnownResponses:
    """Responses that there are before a step samples: those that are done are not generated again.

    Args:
        found: Of a log, a replay, or the step before, by key.
        carried: Those of the step before.
        progress: Keeps what is done, so that the log of this start has the whole step.

    Attributes:
        again: The done ones that were asked for.
    """

    def __init__(
        self, found: Mapping[SampleKey, Response], carried: Container[SampleKey], progress: SamplingProgress
    ) -> None:
        self.again: Pairs = []
        self._found, self._carried, self._progress = found, carried, progress
        self._num_begun = self._num_done_early = 0

    def missing(self, requests: list[Request]) -> list[Request]:
        """Return the requests that are to be generated, from where they were paused; note the others."""
        pairs = [(ask, self._found.get(ask.key)) for ask in requests]
        done = [(ask, got) for ask, got in pairs if got is not None and got.finish != "paused"]
        if done:
            self._progress.finished(done)
            self.again.extend(done)
        self._num_done_early += sum(ask.key in self._carried for ask, _ in done)
        begun = [replace(ask, begun=got) for ask, got in pairs if got is None or got.finish == "paused"]
        self._num_begun += sum(ask.begun is not None for ask in begun)
        return begun

    def counts(self, num_claimed: int) -> dict[str, int]:
        """Return how many responses were known, begun earlier, or claimed from another replica."""
        return {
            "rollout/reused": len(self.again) - self._num_done_early,
            "rollout/continued": self._num_begun + self._num_done_early,
            "rollout/claimed": num_claimed,
        }
