"""From scores to advantages, over the global batch whatever the layout."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import GROUP_ESTIMATORS, discounted_returns, gae, remax, token_rewards, whiten
from hybridflow.algorithms.kl import adapt_kl_coef, kl_penalty, rounding_at, unrounded
from hybridflow.algorithms.lagrange import adapt_multiplier, lagrangian_advantages
from hybridflow.config.recipe import Recipe
from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.dataflow.role import NodeCall, Role
from hybridflow.errors import ConfigError, RewardError
from hybridflow.models.training import sum_over
from hybridflow.placement.job import Job
from hybridflow.placement.loss_mask import loss_mask, spread
from hybridflow.rollout.learned import Learned, write_learned
from hybridflow.sampling.equal_samples import keys_of
from hybridflow.sampling.shaping import shaped


class KLCoefficient:
    """The weight of the KL to the reference, fixed or adaptive (arXiv 1909.08593); part of a checkpoint.

    Attributes:
        value: The coefficient that the current step applies.
        is_in_reward: Whether it is a penalty in the reward.
        is_in_loss: Whether it is a term of the actor's loss.
    """

    def __init__(self, recipe: Recipe) -> None:
        settings = recipe.kl
        self.value = settings.coef
        self.is_in_reward = settings.coef > 0 and settings.place == "reward"
        self.is_in_loss = settings.coef > 0 and settings.place == "loss"
        self._settings = settings

    def advance(self, measured: float, num_samples: int) -> None:
        """Take into account the KL that the step measured, the same on every rank of the job.

        The coefficient before this is the one that the step applied.

        Args:
            measured: Nats per token.
            num_samples: Samples of the step.
        """
        target, horizon = self._settings.target, self._settings.horizon
        if target is not None:
            self.value = adapt_kl_coef(self.value, measured, target=target, num_samples=num_samples, horizon=horizon)


class LagrangeMultiplier:
    """The price of cost (arXiv 2310.12773); part of a checkpoint.

    Attributes:
        value: The multiplier that the current step applies.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._settings = recipe.lagrange
        self.value = self._settings.init

    def advance(self, mean_cost: float) -> None:
        """Take into account the mean cost that the step measured, the same on every rank of the job."""
        settings = self._settings
        self.value = adapt_multiplier(self.value, mean_cost, limit=settings.limit, lr=settings.lr, largest=settings.max)


def user_advantages(algorithm: Any, scores: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """Return each sample's advantage by a program's own algorithm, ``[samples]`` as all arguments.

    Raises:
        ConfigError: It gave something else.
    """
    found = algorithm.advantages(scores, groups, lengths)
    where = f"{type(algorithm).__name__}.advantages"
    if not isinstance(found, Tensor) or found.shape != scores.shape:
        told = f"shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ConfigError(
            f"{where}: found {told}, expected a tensor of shape {list(scores.shape)}; return one number for each sample"
        )
    wrong = (~found.isfinite()).nonzero()[:, 0].tolist()
    if wrong:
        raise ConfigError(
            f"{where}: found {float(found[wrong[0]])} at sample {wrong[0]}, of score {float(scores[wrong[0]]):g}, "
            f"expected finite numbers ({len(wrong)} of {len(found)} are not); look for a division by zero, as by the "
            "deviation of a group whose scores are equal"
        )
    return found


class Advantage(Role):
    """Computes advantages on the actor's update mesh, where every rank of a replica has the replica's samples.

    Attributes:
        scores: Prompt index, index and score of each sample that came since they were taken; on one rank of each
            replica, where samples are archived.
        multiplier: The price of cost.
    """

    call_names = ("ppo", "safe", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax")

    def __init__(self, job: Job, kl_coef: KLCoefficient) -> None:
        super().__init__()
        self.scores: list[tuple[int, int, float]] = []
        self.multiplier = LagrangeMultiplier(job.recipe)
        self._drops = job.recipe.drops_samples
        self._job = job
        self._kl_coef = kl_coef
        self._column: str = job.objects.get("scores", "scores")
        mesh = job.meshes["actor.update"]
        # Ranks of cp share a replica, and have the same samples.
        self._peers = mesh.group_of(job.world.rank, "dp") if job.world.rank in mesh else ()

    @property
    def calls(self) -> Mapping[str, NodeCall]:
        """Return name -> call."""
        methods: dict[str, Callable[[Batch], Batch]] = {name: getattr(self, name) for name in self.call_names}
        for name in (*GROUP_ESTIMATORS, "user_algorithm"):
            methods[name] = functools.partial(self._grouped, name)
        return {name: functools.partial(self._compute, method) for name, method in methods.items()}

    def _compute(self, method: Callable[[Batch], Batch], batch: Batch, decided: Mapping[str, Any]) -> Batch:
        """Compute with the samples that count alone, and report these; the others get zeros. Collective: dp."""
        if not self._drops:
            self._measure(batch)
            computed = method(batch)
        else:
            found = loss_mask(batch)
            self._measure_dropped(found)
            kept = batch.select(found.nonzero()[:, 0])
            self._measure(kept)
            computed = spread(method(kept), batch, found)
        self._archive(batch, computed, decided)
        return computed

    def _archive(self, batch: Batch, computed: Batch, decided: Mapping[str, Any]) -> None:
        """Keep what the step learns from each token, on one rank of each replica, where samples are archived."""
        recipe, rank, about = self._job.recipe, self._job.world.rank, decided.get("train_step")
        speaks = self._job.meshes["actor.update"].speaks(rank)
        # A program may compute advantages outside of a step.
        if about is None or not speaks or not recipe.archives_step(about["step"]):
            return
        advantages = computed.ragged("advantages").to_list()
        if "old_log_probs" in batch.columns:
            old_log_probs = batch.ragged("old_log_probs").to_list()
        else:
            old_log_probs = [torch.full_like(each, math.nan) for each in advantages]
        places = [divmod(number, recipe.rollout.group_size) for number in batch.ids.tolist()]
        rows = [
            (*place, Learned(gained.float().cpu().numpy(), told.float().cpu().numpy()))
            for place, gained, told in zip(places, advantages, old_log_probs, strict=True)
            if recipe.archives_prompt(place[0])
        ]
        write_learned(Path(recipe.run_dir) / "rollouts", about["step"], rank, rows)

    def ppo(self, batch: Batch) -> Batch:
        """Compute ``advantages`` and ``returns``: GAE over token rewards, whitened. Collective: dp."""
        settings = self._job.recipe.advantage
        mask = batch.ragged("response_mask").pad(0)
        advantages, returns = gae(
            self._token_rewards(batch),
            batch.ragged("values").pad(0),
            mask,
            gamma=settings.gamma,
            gae_lambda=settings.gae_lambda,
        )
        advantages = whiten(advantages, mask, sum_over_ranks=self._sum())
        return self._columns(batch, advantages=advantages, returns=returns)

    def safe(self, batch: Batch) -> Batch:
        """Compute ``advantages``, ``returns`` and ``cost_returns`` from rewards and costs. Collective: dp.

        The formula is GAE of token rewards and of costs, each with its own critic; then ``(A_r - λ A_c) / (1 + λ)``;
        then whitening, as for PPO. The KL penalty is in the rewards alone.

        Paper: arXiv 2310.12773. Whitening is ours; it comes after the combination, so that it does not change what a
        unit of cost is worth in units of reward.
        """
        settings, costs = self._job.recipe.advantage, batch.dense("costs")
        self.metrics |= {"cost/mean": self._mean(costs), "cost/multiplier": self.multiplier.value}
        mask = batch.ragged("response_mask").pad(0)
        (advantages, returns), (cost_advantages, cost_returns) = (
            gae(rewards, batch.ragged(values).pad(0), mask, gamma=settings.gamma, gae_lambda=settings.gae_lambda)
            for rewards, values in (
                (self._token_rewards(batch), "values"),
                (token_rewards(costs, torch.zeros_like(mask), mask, kl_coef=0.0), "cost_values"),
            )
        )
        combined = lagrangian_advantages(advantages, cost_advantages, self.multiplier.value)
        return self._columns(
            batch,
            advantages=whiten(combined, mask, sum_over_ranks=self._sum()),
            returns=returns,
            cost_returns=cost_returns,
        )

    def reinforce_plus_plus(self, batch: Batch) -> Batch:
        """Compute ``advantages``: discounted returns of token rewards, whitened. Collective: dp."""
        mask = batch.ragged("response_mask").pad(0)
        returns = discounted_returns(self._token_rewards(batch), mask, gamma=self._job.recipe.advantage.gamma)
        return self._columns(batch, advantages=whiten(returns, mask, sum_over_ranks=self._sum()))

    def reinforce_plus_plus_baseline(self, batch: Batch) -> Batch:
        """Compute ``advantages``: each score minus its group's mean, spread over the response and whitened.

        Collective: dp.
        """
        mask = batch.ragged("response_mask").pad(0)
        advantages = whiten(self._of_groups(batch, "dr_grpo"), mask, sum_over_ranks=self._sum())
        return self._columns(batch, advantages=advantages)

    def remax(self, batch: Batch) -> Batch:
        """Compute ``advantages``: reward-to-go minus the greedy response's score in ``baselines``. Collective: dp."""
        baselines = batch.dense("baselines")
        sums = torch.tensor([float(baselines.double().sum()), len(batch)], dtype=torch.float64)
        baseline_sum, count = self._sum()(sums).tolist()
        self.metrics["reward/baseline_mean"] = baseline_sum / count
        advantages = remax(self._token_rewards(batch), baselines, batch.ragged("response_mask").pad(0))
        return self._columns(batch, advantages=advantages)

    def _grouped(self, name: str, batch: Batch) -> Batch:
        """Compute ``advantages``: one of each sample, spread over its response. Collective: dp."""
        return self._columns(batch, advantages=self._of_groups(batch, name))

    def _of_groups(self, batch: Batch, name: str) -> Tensor:
        """Return advantages that are one for each sample, spread over its response, ``[samples, tokens]``.

        Args:
            batch: This rank's share.
            name: Key of ``GROUP_ESTIMATORS``, or ``user_algorithm``.
        """
        mask = batch.ragged("response_mask").pad(0)
        # A response that nothing of was sampled keeps its score all the same.
        penalties = self._kl_coef.value * (self._penalty(batch) * mask).sum(dim=1).double()
        # Equal responses have equal penalties, which no layout may round apart: the spread of a group may be a divisor.
        keys = keys_of(batch, "tokens", "response_mask") if self._kl_coef.is_in_reward else [""] * len(batch)
        # A group may lie on several ranks: its statistics need all of its scores.
        coordinator = self._job.world.coordinator(self._peers)
        columns = [batch.ids, batch.dense("prompt_indices"), self._scores(batch).double(), mask.sum(dim=1), penalties]
        shares = coordinator.gather([*(column.tolist() for column in columns), keys], "scores")
        rows = sorted(row for share in shares for row in zip(*share, strict=True))
        ids, groups, all_scores, lengths = (torch.tensor([row[at] for row in rows]) for at in range(4))
        first: dict[str, float] = {}
        all_scores = all_scores - torch.tensor([first.setdefault(key, penalty) for *_, penalty, key in rows])
        if name == "user_algorithm":
            found = user_advantages(self._job.objects["algorithm"], all_scores, groups, lengths)
        else:
            found = GROUP_ESTIMATORS[name](all_scores, groups, lengths)
        return found[torch.searchsorted(ids, batch.ids)][:, None] * mask

    def _token_rewards(self, batch: Batch) -> Tensor:
        """Return each token's reward, ``[samples, tokens]``: the final score, minus a KL penalty in the reward."""
        mask = batch.ragged("response_mask").pad(0)
        return token_rewards(self._scores(batch), self._penalty(batch), mask, kl_coef=self._kl_coef.value)

    def _scores(self, batch: Batch) -> Tensor:
        """Return the scores to learn from, ``[samples]``, shaped if the recipe says so."""
        return shaped(self._job.recipe, batch.dense(self._column), batch.ragged("response_mask").lengths)

    def _penalty(self, batch: Batch) -> Tensor:
        """Return the KL of each token, ``[samples, tokens]``; zeros where it is no part of the reward."""
        if not self._kl_coef.is_in_reward:
            return torch.zeros_like(batch.ragged("response_mask").pad(0))
        old, reference = batch.ragged("old_log_probs").pad(0), batch.ragged("ref_log_probs").pad(0)
        # Else rounding would be all that tells responses of equal scores apart, of a policy that is its reference.
        old = unrounded(old, reference, rounding_at(self._job.recipe.rollout.temperature))
        return kl_penalty(old, reference, self._job.recipe.kl.estimator)

    def _columns(self, batch: Batch, **padded_columns: Tensor) -> Batch:
        lengths = batch.ragged("response_mask").lengths
        return Batch(batch.ids, {name: Ragged.from_padded(column, lengths) for name, column in padded_columns.items()})

    def _measure(self, batch: Batch) -> None:
        """Report scores and lengths."""
        scores = batch.dense(self._column)
        self.metrics |= {"reward/mean": self._mean(scores), **length_metrics(batch, self._sum())}
        if lengths := length_stats(self._job, batch):
            recipe = self._job.recipe
            rows = [
                (*divmod(number, recipe.rollout.group_size), score)
                for number, score in zip(batch.ids.tolist(), scores.tolist(), strict=True)
            ]
            scored = [(prompt_index, score) for prompt_index, _, score in rows if not math.isnan(score)]
            self.sample_stats = {"reward": [score for _, score in scored], **lengths}
            if recipe.rollout.group_size > 1:
                self.sample_stats["prompt"] = [float(prompt_index) for prompt_index, _ in scored]
            self.scores += [row for row in rows if recipe.archives_prompt(row[0])]
        if self._job.recipe.shaping.overlong_buffer:
            self.metrics["reward/shaped_mean"] = self._mean(self._scores(batch))

    def _measure_dropped(self, found: Tensor) -> None:
        """Report how many samples are left out. Collective: dp.

        Args:
            found: Which are not, ``[samples]``.

        Raises:
            RewardError: All are, on all ranks.
        """
        counts = torch.tensor([float(found.sum()), float((~found).sum())], dtype=torch.float64)
        num_kept, num_dropped = self._sum()(counts).tolist()
        if num_kept == 0:
            raise RewardError(
                f"none of the {num_dropped:.0f} samples of this step has all its scores; mend what scores, or set "
                "on_failure=error to see how it fails"
            )
        self.metrics["batch/dropped"] = num_dropped

    def _mean(self, values: Tensor) -> float:
        """Return the mean of one number per sample, ``[samples]``, over the global batch. Collective: dp."""
        total, count = self._sum()(torch.stack([values.double().sum(), torch.tensor(len(values)).double()])).tolist()
        return float(total / count)

    def _sum(self) -> Any:
        return sum_over(self._job.world.group(self._peers))


def length_metrics(batch: Batch, sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Measure the lengths of the global batch's samples, from this replica's. Collective: dp."""
    mask = batch.ragged("response_mask")
    shares = [float(mask.values.double().sum()), len(batch), int(batch.ragged("tokens").lengths.sum())]
    counts = torch.tensor(shares, dtype=torch.float64)
    num_response_tokens, num_samples, num_tokens = sum_over_ranks(counts).tolist()
    return {"response/length_mean": num_response_tokens / num_samples, "batch/num_tokens": num_tokens}


def length_stats(job: Job, batch: Batch) -> dict[str, list[float]]:
    """Return the response tokens of each sample of this rank's replica, on one of its ranks."""
    mesh = job.meshes["actor.update"]
    place = mesh.coordinate(job.world.rank)
    if place.tp or place.cp or place.pp:
        return {}
    return {"length": [float(row.sum()) for row in batch.ragged("response_mask").to_list()]}
