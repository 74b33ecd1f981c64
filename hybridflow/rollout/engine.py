"""Continuous batching on the training model's own weights, under tensor, pipeline and data parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hybridflow.rollout.replica import Replica
from hybridflow.rollout.request import LOOK_STEPS, Progress, Request, Response, RolloutStopped, check_requests
from hybridflow.rollout.session import FEW_STEPS, Session


class MegatronEngine(Replica):
    """Generates with one data-parallel replica of a model. Arguments, attributes and calls as ``Replica``."""

    @torch.inference_mode()
    def generate(
        self, requests: list[Request], purpose: str = "rollout", progress: Progress | None = None
    ) -> list[Response]:
        """Return one response for each request, in their order.

        Collective: tp, pp.

        Raises:
            DataError: A request cannot be met: its prompt leaves no room for a response, in the model's context or in
                the cache.
            RolloutStopped: ``progress`` said to stop; on all ranks of the replica, at the same point.
        """
        found = {id(request): response for request, response in self.drive(requests, purpose, progress)}
        return [found[id(request)] for request in requests]

    @torch.inference_mode()
    def drive(
        self,
        requests: Sequence[Request],
        purpose: str = "rollout",
        progress: Progress | None = None,
        *,
        more: Callable[[int], Sequence[Request]] = lambda num_open: (),
        expected: Sequence[Request] | None = None,
    ) -> list[tuple[Request, Response]]:
        """Generate like ``generate``, with further requests that arrive meanwhile; return all pairs in finishing order.

        It asks ``progress`` every ``LOOK_STEPS`` steps whether to stop, and then passes it what has finished.

        Args:
            requests: What there is at once.
            purpose: Of the noise.
            progress: What goes on beside; None: nothing.
            more: Asked before each step, with the number of requests that are not done, for others. Gives the same on
                all ranks of the replica. When none is left and it has no others, that is the end.
            expected: All requests that may come; None: only ``requests``.

        Collective: tp, pp.
        """
        expected = requests if expected is None else expected
        session = self.open(expected, purpose)
        check_requests(expected, self.refusal)
        session.add(requests)
        done: list[tuple[Request, Response]] = []
        num_told = 0
        num_added = len(requests)
        while True:
            others = more(session.num_open)
            session.add(others)
            num_added += len(others)
            if session.is_idle:
                break
            if progress is not None and session.looks_up():
                if len(done) > num_told:
                    progress.finished(done[num_told:])
                    num_told = len(done)
                if progress.is_stopping():
                    left = session.pause()
                    self.finish()
                    self.metrics = session.metrics()
                    if ended := [pair for pair in left if pair[1].finish != "paused"]:
                        progress.finished(ended)
                    raise RolloutStopped([pair for pair in left if pair[1].finish == "paused"])
            done += session.step(LOOK_STEPS if num_added == len(expected) else FEW_STEPS)
        if progress is not None and len(done) > num_told:
            progress.finished(done[num_told:])
        self.finish()
        self.metrics = session.metrics()
        return done

    @torch.inference_mode()
    def open(self, expected: Sequence[Request] | None = None, purpose: str = "rollout") -> Session:
        """Begin to generate: requests are added to the session, those that are expected or, without, any.

        Collective: tp, pp.
        """
        self.prepare()
        self.measure()
        return Session(self, purpose, expected)
