"""Decisions of a job's loops and branches: which step comes next, what it samples, when to validate, save and stop.

Each decision is a function of the step alone, or all ranks agree on it, so it is the same on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hybridflow.data.problems import StoredProblems
from hybridflow.dataflow.run import Replicated
from hybridflow.errors import DataError
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.observe.rank_log import say
from hybridflow.parallel.coordinator import Coordinator
from hybridflow.placement.job import Job
from hybridflow.sampling.groups import Scores, Turn
from hybridflow.trainer.ahead import WORKING_AHEAD
from hybridflow.trainer.progress import Progress
from hybridflow.trainer.roles import Roles
from hybridflow.trainer.stopping import Stopping

_PROMPTS_S = 5.0
"""While prompts are waited for, the ranks agree so often on going on, in seconds."""

_WARM_STEPS_TOGETHER = 16
"""After so many steps of the warm start the ranks agree anew on going on."""


class Decisions:
    """Takes the decisions that a schedule names.

    Args:
        job: The job.
        meshes: Name -> mesh, ``job`` among them.
        roles: Its roles.
        progress: The steps done.
        stopping: Whether the job is to stop.

    Attributes:
        is_warm_start_cut: Whether the warm start was cut short on this rank.
        first_prompt_index: Where the rollouts of a program's next step begin; None: behind those of the last step.
        shortage: Why no prompts have come for the next step, or too few of its groups teach something, on every rank;
            None: there were enough so far.
    """

    def __init__(
        self, job: Job, meshes: Mapping[str, DeviceMesh], roles: Roles, progress: Progress, stopping: Stopping
    ) -> None:
        self.is_warm_start_cut = False
        self.first_prompt_index: int | None = None
        self.shortage: str | None = None
        self._job = job
        self._recipe = job.recipe
        self._meshes = meshes
        self._roles = roles
        self._progress = progress
        self._stopping = stopping
        self._everyone = job.world.coordinator(meshes["job"].ranks)

    def table(self) -> dict[str, Replicated]:
        """Return name -> decision, each beginning anew: one table for each run of a program."""
        stopping, everyone, coordinator = self._stopping, self._everyone, self._job.world.coordinator
        table: dict[str, Callable[[], Any]] = {
            "warm_step": self._warm_steps().__next__,
            "train_step": self.next_step,
            "fill": self._rollout_turns().__next__,
            "fill_buffer": self._fill_steps().__next__,
            "sample_ahead": self._sampling_ahead,
            "have_prompts": lambda: self._have_come(
                self._sampling_ahead(), coordinator(self._meshes[WORKING_AHEAD].ranks)
            ),
            "keep_samples": lambda: not stopping.agree(coordinator(self._meshes[WORKING_AHEAD].ranks)),
            "go_on": lambda: not stopping.agree(everyone),
            "go_on_to_update": lambda: self.shortage is None and not stopping.agree(everyone, before_update=True),
            "critic_mini_batch": self._mini_batches().__next__,
            "actor_mini_batch": self._actor_mini_batches().__next__,
            "validate": self._is_validation_due,
            "save": self._is_save_due,
        }
        return {name: Replicated(take) for name, take in table.items()}

    def _warm_steps(self) -> Iterator[dict[str, int] | None]:
        """Yield the turns of the warm start, with progress on the console, then the end of the loop."""
        warm, update = self._recipe.warm_start, self._meshes["actor.update"]
        steps = warm.steps if warm is not None else 0
        ranks = self._job.world.coordinator(tuple(sorted(update.ranks)))
        for step in range(steps):
            if step % _WARM_STEPS_TOGETHER == 0 and self._stopping.agree(ranks):
                self.is_warm_start_cut = True
                break
            # The first rank of the last stage knows the loss.
            if step % max(1, steps // 10) == 0 and self._job.world.rank == update.output_ranks(0)[0]:
                loss = self._roles.actor.metrics.get("warm_start/loss")
                say(f"warm start: step {step}/{steps}" + (f" | loss {loss:.3f}" if loss is not None else ""))
            yield {"step": step}
        yield None

    def next_step(self) -> dict[str, int] | None:
        """Return what the next step samples, once its prompts are there; None: there is no next step."""
        found = self._sampling_of(self._progress.step + 1)
        return found if self._have_come(found, self._everyone) else None

    def _have_come(self, sampled: Mapping[str, int] | None, ranks: Coordinator) -> bool:
        """Wait for the prompts of a step, where they come while the job runs, unless it is to stop. Collective: ranks.

        What is sampled ahead is waited for by some ranks alone. The others learn here of a shortage.
        """
        problems, since_s = self._job.train, time.monotonic()
        if sampled is None or not isinstance(problems, StoredProblems) or problems.num_rows is not None:
            return sampled is not None and self.shortage is None
        shortages = ranks.gather(self.shortage, "whether prompts are short")
        self.shortage = next((each for each in shortages if each is not None), None)
        if self.shortage is not None:
            return False
        # Partial rollouts begin the next step too.
        begins_next = self._recipe.rollout.partial_rollouts and sampled["step"] < self._recipe.trainer.steps
        last = sampled["first_prompt_index"] + sampled["num_prompts"] * (1 + begins_next) - 1
        try:
            while not ranks.on_lead("prompts", lambda: problems.look(last, since_s, _PROMPTS_S)):
                if self._stopping.agree(ranks):
                    return False
        except DataError as error:
            self.shortage = str(error)
            return False
        return True

    def _sampling_of(self, step: int) -> dict[str, int] | None:
        """Return what a step samples; None: the step is not to come."""
        progress = self._progress
        is_over = step > self._recipe.trainer.steps or progress.is_out_of_patience
        if is_over or self._stopping.reason is not None:
            return None
        num_between = (step - progress.step - 1) * progress.num_prompts
        return {
            "step": step,
            "first_prompt_index": progress.next_prompt_index + num_between,
            "num_prompts": progress.num_prompts,
            "version": progress.step,
        }

    def _sampling_ahead(self) -> dict[str, int] | None:
        """Return what is sampled while the next step is learned from."""
        return self._sampling_of(self._progress.step + 1 + self._recipe.trainer.max_staleness)

    def _fill_steps(self) -> Iterator[dict[str, int] | None]:
        """Yield what is sampled before the first step, then the end of the loop."""
        for ahead in range(1, 1 + self._recipe.trainer.max_staleness):
            found = self._sampling_of(self._progress.step + ahead)
            yield found if self._have_come(found, self._everyone) else None
        yield None

    def _rollout_turns(self) -> Iterator[Turn | None]:
        """Yield the rollouts of one training step, of algorithms with several, then the end of the loop, and so on."""
        progress = self._progress
        while True:
            assert self._roles.groups is not None, "only algorithms with groups have this loop"
            first = progress.next_prompt_index if self.first_prompt_index is None else self.first_prompt_index
            try:
                for turn in self._roles.groups.turns(first, progress.num_prompts, self._share_scores):
                    # The first rollout's prompts are there. A refill may need more than have come.
                    if not self._have_come(turn, self._everyone):
                        break
                    yield turn
            except DataError as error:
                # Too few groups, which all ranks find alike: the steps before this one are to be saved.
                self.shortage = str(error)
            yield None

    def _share_scores(self, local_scores: Scores) -> list[Scores] | None:
        """Return the scores of all ranks; None: the step is left. Collective: all ranks."""
        shares = self._everyone.gather([self._stopping.local_reason(), local_scores], "scores of the step's groups")
        if self._stopping.settle(reason for reason, _ in shares):
            return None
        return [[(prompt_index, score) for prompt_index, score in scores] for _, scores in shares]

    def _mini_batches(self) -> Iterator[dict[str, int] | None]:
        """Yield the mini-batches of one training step, then the end of the loop, and so on for ever."""
        num_mini_batches = self._recipe.trainer.global_batch_size // self._recipe.trainer.samples_per_update
        while True:
            for epoch in range(self._recipe.loss.epochs):
                for index in range(num_mini_batches):
                    yield {"epoch": epoch, "index": index}
            yield None

    def _actor_mini_batches(self) -> Iterator[dict[str, int] | None]:
        """Yield the actor's mini-batches of one training step, then the end of the loop, and so on for ever."""
        turns = self._mini_batches()
        while True:
            if not self._progress.is_critic_alone(self._progress.step + 1):
                yield from iter(turns.__next__, None)
            yield None

    def _is_validation_due(self) -> bool:
        """Return whether to validate; asked before the step is counted. A job that is to stop saves first.

        The last step always ends with one, so that the last checkpoint knows whether it is the best.
        """
        trainer, step = self._recipe.trainer, self._progress.step + 1
        if not (step >= trainer.steps or _is_due(step, trainer.validate_every)):
            return False
        if self._stopping.agree(self._everyone):
            return False
        self._roles.actor.begin_validation(step)
        return True

    @property
    def has_missed_validation(self) -> bool:
        """Return whether the last step was to end with a validation, and the job stopped before that."""
        progress = self._progress
        return progress.validations.step != progress.step and _is_due(
            progress.step, self._recipe.trainer.validate_every
        )

    def _is_save_due(self) -> bool:
        trainer, progress = self._recipe.trainer, self._progress
        is_last = progress.step == trainer.steps or self._stopping.reason is not None or progress.is_out_of_patience
        is_best = trainer.keep_best and progress.validations.best_step == progress.step
        if trainer.save_every is None:
            return is_last or is_best or progress.is_save_overdue
        return is_last or is_best or _is_due(progress.step, trainer.save_every)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
