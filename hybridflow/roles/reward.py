"""The reward, or the cost, of what is no model here: functions, services, judges; each sample is scored on one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from hybridflow.config.rewards import REWARD_POLICY
from hybridflow.config.rewards import RewardConfig as Settings
from hybridflow.data.prompts import Example
from hybridflow.dataflow.batch import Batch
from hybridflow.dataflow.role import Role
from hybridflow.errors import ConfigError, RewardError
from hybridflow.observe.rank_log import say
from hybridflow.placement.job import Job
from hybridflow.recipe.check_sampling import check_failure_reward
from hybridflow.rewards.kinds import make_kind
from hybridflow.rewards.runners import InPlace
from hybridflow.rewards.sample import Sample
from hybridflow.rewards.scorer import Counts, Scorer
from hybridflow.rollout.environment import text_of
from hybridflow.sampling.validation import measure, shown_samples, shown_training_samples
from hybridflow.sections import changed_keys

SCORES = {"reward": "scores", "cost": "costs"}
"""Role -> the column that it writes."""

CALL_METRICS = ("failed", "retried", "cached", "call_s", "call_longest_s", "idle_stops")
"""What is told of its calls, as ``reward/failed`` or ``cost/failed``."""


class Reward(Role):
    """Scores responses on its mesh, one data-parallel replica a rank, so that each sample is scored once.

    Args:
        job: The job; a function or object that it has for the role comes before what the recipe names.
        role: ``reward``, or ``cost``: which section of the recipe it is, and which mesh.

    Raises:
        ConfigError: What scores cannot be found or made.
    """

    call_names = ("score", "score_validation")

    def __init__(self, job: Job, role: str = "reward") -> None:
        super().__init__()
        self._job = job
        self._role = role
        self._totals = Counts()
        settings: Settings = getattr(job.recipe, role)
        user_reward = job.objects.get(role)
        self._scorer: Scorer | None = None
        if role == "reward" and user_reward is not None:
            check_failure_reward(job.recipe, "the reward of the program")
        if user_reward is None and settings.kind is None and job.recipe.rollout.environment is not None:
            for name in changed_keys(settings, REWARD_POLICY):
                raise ConfigError(f"{role}.{name}: the environment's rewards are sums of its own; remove the key")
        elif job.world.rank in job.meshes[role]:
            mesh = job.meshes[role]
            node = job.world.rank // mesh.ranks_per_node
            sharing = sum(rank // mesh.ranks_per_node == node for rank in mesh.ranks)
            self._scorer = Scorer(make_kind(settings, role, user_reward, sharing=sharing), settings, role)

    def score(self, batch: Batch, decided: Mapping[str, Any]) -> Batch:
        """Compute ``scores``, or ``costs``, of responses to training problems; NaN means leave out.

        Collective: its mesh, but where nothing can fail without ending the run.

        Raises:
            RewardError: A sample has no score, and ``on_failure`` is ``error``, or none of all has one; names one.
        """
        scores = self._scores(batch, self._job.train.example)
        if self._scorer is not None and self._tells:
            self._report(self._scorer.counts)
        if self._role == "reward" and not self.shown:
            self.shown = shown_training_samples(self._job, batch, scores, decided)
        return Batch(batch.ids, {SCORES[self._role]: scores})

    def score_validation(self, batch: Batch, decided: Mapping[str, Any]) -> None:
        """Measure ``validation/score``: the mean score of greedy responses to held-out problems; and pass@k.

        Collective: the reward's mesh.

        Raises:
            RewardError: As for ``score``, but for responses of which none has a score.
        """
        scores = self._scores(batch, lambda row: self._job.held_out[row][0])
        judges = self._job.world.coordinator(self._job.meshes["reward"].ranks)
        self.metrics |= measure(self._job, judges, batch.ids, scores)
        self.shown = shown_samples(self._job, batch, scores)

    @property
    def _tells(self) -> bool:
        """Return whether there are calls to report; the same on all ranks."""
        assert self._scorer is not None, "the environment's rewards are no calls"
        settings = self._scorer.settings
        return bool(changed_keys(settings, REWARD_POLICY)) or not isinstance(self._scorer.kind.runner, InPlace)

    def _scores(self, batch: Batch, example_of: Callable[[int], Example]) -> torch.Tensor:
        if self._scorer is None:
            return batch.dense("environment_rewards")
        prompt_indices = batch.dense("prompt_indices").tolist()
        prompt_lengths = batch.dense("prompt_lengths").tolist()
        sequences = batch.ragged("tokens").to_list()
        responses = [sequence[length:] for sequence, length in zip(sequences, prompt_lengths, strict=True)]
        if "last_turn_lengths" in batch.columns:
            lengths = batch.dense("last_turn_lengths").tolist()
            responses = [tokens[len(tokens) - last :] for tokens, last in zip(responses, lengths, strict=True)]
        samples = [
            self._sample(example_of(prompt_index), response.tolist())
            for response, prompt_index in zip(responses, prompt_indices, strict=True)
        ]
        scores = torch.tensor(self._scorer.scores(samples), dtype=torch.float32)
        counts = self._scorer.counts
        if counts.failed:
            say(f"{self._role}: failed in {counts.failed} of {counts.samples} samples; one: {counts.first_failure}")
        return scores

    def _sample(self, example: Example, tokens: list[int]) -> Sample:
        response = text_of(self._job.tokenizer, tokens)
        return Sample(
            prompt=example.prompt,
            response=response,
            answer=example.answer,
            place=example.place,
            fields=example.row,
        )

    def _report(self, counts: Counts) -> None:
        """Report this step's calls on all ranks. Collective: its mesh."""
        everyone = self._job.world.coordinator(self._job.meshes[self._role].ranks)
        shares = [Counts(**share) for share in everyone.gather(asdict(counts), f"{self._role}s of the samples")]
        failures = [share.first_failure for share in shares if share.first_failure]
        if failures and sum(share.failed for share in shares) == sum(share.samples for share in shares):
            raise RewardError(f"no sample has a score: {failures[0]}; mend what scores, there is nothing to learn from")
        names = [f"{self._role}/{name}" for name in CALL_METRICS]
        # A step may have several rollouts.
        totals = sum(shares, self._totals if names[0] in self.metrics else Counts())
        self._totals = totals
        values = (
            float(totals.failed),
            float(totals.retries),
            totals.cached / max(totals.samples, 1),
            totals.calls_s / max(totals.calls, 1),
            totals.longest_s,
            float(totals.idle_stops),
        )
        self.metrics |= zip(names, values, strict=True)
