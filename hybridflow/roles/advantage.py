"""From scores to advantages, over the global batch whatever the layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import gae, group_normalize, token_rewards, whiten
from hybridflow.algorithms.kl import adapt_kl_coef, kl_penalty
from hybridflow.config import Recipe
from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.models.training import sum_over
from hybridflow.roles.job import Job
from hybridflow.roles.placed import padded


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


class Advantage:
    """Computes advantages on the actor's update mesh, where every rank of a replica has the replica's samples.

    Attributes:
        metrics: What the last call measured, over the global batch; emptied by the trainer each step.
    """

    def __init__(self, job: Job, kl_coef: KLCoefficient) -> None:
        self.metrics: dict[str, float] = {}
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
        scores = batch.columns["scores"].double()
        num_tokens = padded(batch, "response_mask").double().sum()
        counts = torch.tensor([len(batch), batch.columns["tokens"].lengths.sum()]).double()
        sums = self._sum()(torch.stack([scores.sum(), num_tokens, *counts]))
        score_sum, num_response_tokens, num_samples, num_all_tokens = sums.tolist()
        self.metrics |= {
            "reward/mean": score_sum / num_samples,
            "response/length_mean": num_response_tokens / num_samples,
            "batch/num_tokens": num_all_tokens,
        }

    def _sum(self) -> Any:
        return sum_over(self._job.world.group(self._peers))
