"""From scores to advantages, over the global batch whatever the layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import gae, group_normalize, token_rewards, whiten
from hybridflow.algorithms.kl import adapt_kl_coef, kl_penalty
from hybridflow.algorithms.lagrange import adapt_multiplier, lagrangian_advantages
from hybridflow.config import Recipe
from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.models.training import sum_over
from hybridflow.roles.job import Job
from hybridflow.roles.placed import length_metrics, padded


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
        self._target = settings.target
        self._horizon = settings.horizon
        self._num_samples = recipe.trainer.global_batch_size

    def advance(self, measured: float) -> None:
        """Take into account the KL that the step measured, nats per token, the same on every rank of the job.

        The coefficient before this is the one that the step applied.
        """
        if self._target is not None:
            self.value = adapt_kl_coef(
                self.value, measured, target=self._target, num_samples=self._num_samples, horizon=self._horizon
            )


class LagrangeMultiplier:
    """The price of cost (arXiv 2310.12773); part of a checkpoint.

    Attributes:
        value: The multiplier that the current step applies.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.value = recipe.lagrange.init
        self._settings = recipe.lagrange

    def advance(self, mean_cost: float) -> None:
        """Take into account the mean cost that the step measured, the same on every rank of the job."""
        settings = self._settings
        self.value = adapt_multiplier(self.value, mean_cost, limit=settings.limit, lr=settings.lr, largest=settings.max)


class Advantage:
    """Computes advantages on the actor's update mesh, where every rank of a replica has the replica's samples.

    Attributes:
        metrics: What the last call measured, over the global batch; emptied by the trainer each step.
        multiplier: The price of cost.
    """

    def __init__(self, job: Job, kl_coef: KLCoefficient) -> None:
        self.metrics: dict[str, float] = {}
        self.multiplier = LagrangeMultiplier(job.recipe)
        self._job = job
        self._kl_coef = kl_coef
        mesh = job.meshes["actor.update"]
        self._peers = mesh.group_of(job.world.rank, "dp", "cp") if job.world.rank in mesh else ()

    def ppo(self, batch: Batch, decided: Mapping[str, Any]) -> Batch:
        """``advantages`` and ``returns``: GAE over token rewards, whitened. Collective: dp."""
        settings = self._job.recipe.advantage
        self._measure(batch)
        mask = padded(batch, "response_mask")
        advantages, returns = gae(
            self._token_rewards(batch),
            padded(batch, "values"),
            mask,
            gamma=settings.gamma,
            gae_lambda=settings.gae_lambda,
        )
        advantages = whiten(advantages, mask, sum_over_ranks=self._sum())
        return self._columns(batch, advantages=advantages, returns=returns)

    def safe(self, batch: Batch, decided: Mapping[str, Any]) -> Batch:
        """``advantages``, ``returns`` and ``cost_returns``, of rewards and costs. Collective: dp.

        GAE of token rewards and of costs, each with its own critic; then ``(A_r - λ A_c) / (1 + λ)``; then whitened,
        as for PPO. The KL penalty is in the rewards alone.

        Paper: arXiv 2310.12773. Whitening is ours; it comes after the combination, so that it does not change what a
        unit of cost is worth in units of reward.
        """
        settings, costs = self._job.recipe.advantage, batch.columns["costs"]
        assert isinstance(costs, Tensor), "costs are a dense column"
        self._measure(batch)
        self.metrics |= {"cost/mean": self._mean(batch, "costs"), "cost/multiplier": self.multiplier.value}
        mask = padded(batch, "response_mask")
        (advantages, returns), (cost_advantages, cost_returns) = (
            gae(rewards, padded(batch, values), mask, gamma=settings.gamma, gae_lambda=settings.gae_lambda)
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

    def grpo(self, batch: Batch, decided: Mapping[str, Any]) -> Batch:
        """``advantages``: each score against those of its group, spread over the response. Collective: dp."""
        return self._of_groups(batch, group_normalize)

    def _of_groups(self, batch: Batch, judge: Callable[[Tensor, Tensor], Tensor]) -> Batch:
        """``advantages`` that are one for each sample, made of all scores and groups: ``judge(scores, groups)``."""
        self._measure(batch)
        mask = padded(batch, "response_mask")
        # A response that nothing of was sampled keeps its score all the same.
        scores = batch.columns["scores"] - self._kl_coef.value * (self._penalty(batch) * mask).sum(dim=1)
        # A group may lie on several ranks: its statistics need all of its scores.
        coordinator = self._job.world.coordinator(self._peers)
        draws = batch.columns["draws"]
        shares = coordinator.gather([batch.ids.tolist(), draws.tolist(), scores.double().tolist()], "scores")
        rows = sorted(row for ids, groups, values in shares for row in zip(ids, groups, values, strict=True))
        judged = judge(torch.tensor([row[2] for row in rows]), torch.tensor([row[1] for row in rows])).tolist()
        by_id = {row[0]: advantage for row, advantage in zip(rows, judged, strict=True)}
        advantages = torch.tensor([by_id[sample] for sample in batch.ids.tolist()])
        return self._columns(batch, advantages=advantages[:, None] * mask)

    def _token_rewards(self, batch: Batch) -> Tensor:
        """Reward of each token, ``[samples, tokens]``: the score at the end, less the KL penalty if it is paid here."""
        mask = padded(batch, "response_mask")
        return token_rewards(batch.columns["scores"], self._penalty(batch), mask, kl_coef=self._kl_coef.value)

    def _penalty(self, batch: Batch) -> Tensor:
        """The KL of each token, ``[samples, tokens]``; zeros where it is no part of the reward."""
        if not self._kl_coef.is_in_reward:
            return torch.zeros_like(padded(batch, "response_mask"))
        old, reference = padded(batch, "old_log_probs"), padded(batch, "ref_log_probs")
        return kl_penalty(old, reference, self._job.recipe.kl.estimator)

    def _columns(self, batch: Batch, **padded_columns: Tensor) -> Batch:
        lengths = batch.columns["response_mask"].lengths
        return Batch(batch.ids, {name: Ragged.from_padded(column, lengths) for name, column in padded_columns.items()})

    def _measure(self, batch: Batch) -> None:
        """Report scores and lengths."""
        self.metrics |= {"reward/mean": self._mean(batch, "scores"), **length_metrics(batch, self._sum())}

    def _mean(self, batch: Batch, name: str) -> float:
        """Mean of a column that has a number for each sample, over the global batch. Collective: dp."""
        values = batch.columns[name]
        assert isinstance(values, Tensor), f"column {name} is ragged"
        total, count = self._sum()(torch.stack([values.double().sum(), torch.tensor(len(batch)).double()])).tolist()
        return float(total / count)

    def _sum(self) -> Any:
        return sum_over(self._job.world.group(self._peers))
