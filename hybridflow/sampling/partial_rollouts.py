"""Responses of the next step that are begun where this step's leave room, and go on when the weights have changed.

Known as partial rollouts: arXiv 2501.12599.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hybridflow.rollout.engine import MegatronEngine
from hybridflow.rollout.request import Progress, Request, Response, RolloutStopped, SampleKey

Pairs = list[tuple[Request, Response]]


class PartialRollouts:
    """What a replica has of the next step's responses; the same on all its ranks."""

    def __init__(self) -> None:
        self._begun: dict[SampleKey, Response] = {}

    def take(self) -> Mapping[SampleKey, Response]:
        """Return, and forget, what there is of the step that begins, by prompt index and index, done or paused."""
        begun, self._begun = self._begun, {}
        return begun

    def drive(
        self,
        engine: MegatronEngine,
        requests: Sequence[Request],
        following: Sequence[Request],
        progress: Progress,
        *,
        num_slots: int,
    ) -> Pairs:
        """Generate responses to all requests; begin the following requests meanwhile, as slots become free.

        When the last of the requests is done, which is noticed a few tokens later, the others are paused and kept.

        Collective: tp, pp.

        Args:
            engine: What generates.
            requests: Requests of this step.
            following: Requests of the next step, in the order in which they are begun.
            progress: What goes on beside, of the requests alone.
            num_slots: So many that are not done are enough: no following one is begun then.

        Raises:
            RolloutStopped: ``progress`` said so; with those of ``requests`` alone.
        """
        until = _UntilDone(progress, requests)
        paused: Pairs = []
        left = list(following)

        def more(num_open: int) -> list[Request]:
            count = max(0, num_slots - num_open)
            begun, left[:count] = left[:count], []
            return begun

        try:
            engine.drive(requests, "rollout", until, more=more, expected=[*requests, *following])
        except RolloutStopped as stopped:
            if not until.is_done:
                raise RolloutStopped([pair for pair in stopped.unfinished if until.wants(pair[0])]) from None
            paused = stopped.unfinished
        others = [pair for pair in until.pairs if not until.wants(pair[0])] + paused
        # One that failed is tried again.
        self._begun = {ask.key: got for ask, got in others if got.finish != "failed" and len(got.tokens)}
        return [pair for pair in until.pairs if until.wants(pair[0])]


class _UntilDone:
    """Ends when certain requests are done, and tells of these alone what goes on beside, see ``request.Progress``."""

    def __init__(self, progress: Progress, requests: Sequence[Request]) -> None:
        self.pairs: Pairs = []
        self._progress = progress
        self._left = self._wanted = frozenset(request.key for request in requests)

    def wants(self, request: Request) -> bool:
        """Return whether this is one of the requests."""
        return request.key in self._wanted

    @property
    def is_done(self) -> bool:
        return not self._left

    def finished(self, pairs: Pairs) -> None:
        self.pairs += pairs
        if wanted := [pair for pair in pairs if self.wants(pair[0])]:
            self._left -= {ask.key for ask, _ in wanted}
            self._progress.finished(wanted)

    def is_stopping(self) -> bool:
        return self.is_done or self._progress.is_stopping()
