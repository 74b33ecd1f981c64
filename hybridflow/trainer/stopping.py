"""When a job saves and stops before its end: when a signal asks for it, or in time before Slurm's time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping

from hybridflow.observe.starts import StartRecord
from hybridflow.parallel.coordinator import Coordinator
from hybridflow.parallel.scontrol import find_job_end
from hybridflow.parallel.world import World

_LEAVING_S = 10.0
"""For processes to end, and for the batch script to ask for another turn."""

_SAVE_FACTOR = 1.5
"""A file system is not always as quick as it was."""

_FIRST_SAVE_SHARE, _FIRST_SAVE_S = 0.1, (20.0, 600.0)
"""As long as no save has been measured: so much of the job's time, within these bounds."""

_ASK_AGAIN_S = 60.0

_LOOK_S = 1.0

_NUM_SAVES = 3


class Stopping:
    """Whether the job is to stop, as this rank knows it; the ranks agree on it before they do.

    Args:
        world: This rank and the others.
        earlier: The run's starts before this one, which may have measured how long saving takes.
        works_ahead: Whether a rollout goes on beside the update, and is no part of what comes before it.

    Attributes:
        reason: Why the job stops, once ranks have agreed that it does: all of them, or those of a rollout's replica.
        asked: Why this rank wants to stop, where it has no watch that says so; None: it does not.
        job_end_s: Unix time of the job's end, in seconds; known to the lowest rank alone, and there None without one.
        rest_s: How long a step took after its rollout, in seconds; of the last one that was measured, else 0.
    """

    def __init__(self, world: World, earlier: Iterable[StartRecord] = (), *, works_ahead: bool = False) -> None:
        self.reason: str | None = None
        self.asked: str | None = None
        self.job_end_s = find_job_end() if world.rank == 0 else None
        self._watch = world.watch
        self._works_ahead = works_ahead
        self.rest_s = 0.0
        # What the environment says may be old: a start within an allocation comes after it was prolonged.
        self._began_s, self._asked_s = time.time(), float("-inf")
        self._saves_s = [record.save_s for record in earlier if record.save_s is not None][-_NUM_SAVES:]
        self._blocked_s = 0.0
        if self._watch is not None and self.job_end_s is not None:
            threading.Thread(target=self._keep_time, name="time", daemon=True).start()

    @property
    def save_s(self) -> float | None:
        """Return how long the slowest of the last saves took, in seconds, or None if none was measured."""
        return max(self._saves_s, default=None)

    def learn(self, metrics: Mapping[str, float]) -> None:
        """Take up what a step measured: how long saving took, and what comes after the rollout."""
        self._blocked_s = metrics.get("checkpoint/blocked_s", self._blocked_s)
        if "checkpoint/write_s" in metrics:
            self._saves_s = [*self._saves_s, self._blocked_s + metrics["checkpoint/write_s"]][-_NUM_SAVES:]
        if "time/step_s" in metrics:
            before_s = 0.0 if self._works_ahead else metrics.get("time/rollout_s", 0.0)
            self.rest_s = metrics["time/step_s"] - before_s

    def local_reason(self, *, before_update: bool = False) -> str | None:
        """Return why the job should stop, as far as this rank knows.

        Args:
            before_update: What comes now cannot be stopped half-way: there must be time for it, too.
        """
        known = self.reason or (self.asked if self._watch is None else self._watch.stop_reason)
        if known is not None:
            return known
        return self.find_time_up(self.rest_s if before_update else 0.0)

    def settle(self, reasons: Iterable[str | None]) -> bool:
        """Return whether the job stops, from the reasons of all ranks, which are the same on every rank."""
        self.reason = self.reason or next((reason for reason in reasons if reason is not None), None)
        return self.reason is not None

    def agree(self, coordinator: Coordinator, *, before_update: bool = False) -> bool:
        """Return whether the job stops here, as ``local_reason``; the same on every rank.

        Collective: all ranks of the coordinator.
        """
        return self.settle(coordinator.gather(self.local_reason(before_update=before_update), "whether to stop"))

    def find_time_up(self, work_s: float = 0.0) -> str | None:
        """Return why the time is up, or None.

        It is up if ``work_s`` more seconds of work would leave no time to save.
        """
        if self._is_short(work_s) and time.time() - self._asked_s > _ASK_AGAIN_S:
            # It may have been prolonged.
            self._asked_s, fresh_s = time.time(), find_job_end(is_fresh=True)
            # A controller that does not answer has not taken the limit away.
            self.job_end_s = self.job_end_s if fresh_s is None else fresh_s
        if not self._is_short(work_s):
            return None
        assert self.job_end_s is not None, "a job without an end is never short of time"
        return f"{max(0.0, self.job_end_s - time.time()):.0f} s are left of the job's time, saving needs them"

    def _keep_time(self) -> None:
        """Ask all ranks to stop in time, also while they are inside a long rollout. A thread, since Slurm is asked."""
        while (reason := self.find_time_up()) is None:
            time.sleep(_LOOK_S)
        assert self._watch is not None, "the time is kept only of jobs with a watch"
        self._watch.ask_stop(reason)

    def _is_short(self, work_s: float) -> bool:
        end_s = self.job_end_s
        if end_s is None:
            return False
        low, high = _FIRST_SAVE_S
        guess_s = min(high, max(low, _FIRST_SAVE_SHARE * (end_s - self._began_s)))
        save_s = guess_s if self.save_s is None else _SAVE_FACTOR * self.save_s
        return time.time() + work_s + save_s + _LEAVING_S > end_s
