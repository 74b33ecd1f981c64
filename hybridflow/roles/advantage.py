"""From scores to advantages: PPO's and GRPO's, over the global batch whatever the layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hybridflow.algorithms.advantages import gae, group_normalize, token_rewards, whiten
from hybridflow.algorithms.kl import adapt_kl_coef, kl_penalty, sequence_mean_kl
from hybridflow.config import Recipe
from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.models.training import sum_over
from hybridflow.roles.job import Job
from hybridflow.roles.placed import column_rows, padded


class KLCoefficient:
    """The weight of the KL to the reference, fixed or adaptive (arXiv 1909.08593); part of a checkpoint.

    Attributes:
        value: The coefficient that the current step applies.
        is_in_reward: Whether it is a penalty in the reward.
        is_in_loss: Whether it is a term of the actor's loss.
    """

    def __init__(self, recipe: Recipe) -> None:
        is_ppo = recipe.algorithm == "ppo"
        settings = recipe.ppo if is_ppo else recipe.grpo
        self.value = settings.kl_coef
        self.is_in_reward = is_ppo and recipe.ppo.kl_place == "reward" and recipe.ppo.kl_coef > 0
        self.is_in_loss = not self.is_in_reward and settings.kl_coef > 0
        self._target = recipe.ppo.kl_target if is_ppo else None
        self._horizon = recipe.ppo.kl_horizon
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
        """``advantages`` and ``returns``: KL penalty in the reward, GAE, whitening. Collective: dp."""
        settings = self._job.recipe.ppo
        self._measure(batch)
        mask = padded(batch, "response_mask")
        kl = kl_penalty(padded(batch, "old_log_probs"), padded(batch, "ref_log_probs"), settings.kl_estimator)
        rewards = token_rewards(
            batch.columns["scores"], kl, mask, kl_coef=self._kl_coef.value if self._kl_coef.is_in_reward else 0.0
        )
        advantages, returns = gae(
            rewards, padded(batch, "values"), mask, gamma=settings.gamma, gae_lambda=settings.gae_lambda
        )
        advantages = whiten(advantages, mask, sum_over_ranks=self._sum())
        lengths = batch.columns["response_mask"].lengths
        return Batch(
            batch.ids,
            {"advantages": Ragged.from_padded(advantages, lengths), "returns": Ragged.from_padded(returns, lengths)},
        )

    def grpo(self, batch: Batch, decided: Mapping[str, Any]) -> Batch:
        """``advantages``: each score against those of its group, spread over the response. Collective: dp."""
        self._measure(batch)
        scores, draws = batch.columns["scores"], batch.columns["draws"]
        # A group may lie on several ranks: its statistics need all of its scores.
        coordinator = self._job.world.coordinator(self._peers)
        shares = coordinator.gather([batch.ids.tolist(), draws.tolist(), scores.double().tolist()], "scores")
        rows = sorted(row for ids, groups, values in shares for row in zip(ids, groups, values, strict=True))
        by_id = dict(
            zip(
                (row[0] for row in rows),
                group_normalize(
                    torch.tensor([row[2] for row in rows], dtype=torch.float32),
                    torch.tensor([row[1] for row in rows], dtype=torch.int64),
                ).tolist(),
                strict=True,
            )
        )
        mask = column_rows(batch, "response_mask")
        rows_of = [row * by_id[sample] for row, sample in zip(mask, batch.ids.tolist(), strict=True)]
        return Batch(batch.ids, {"advantages": Ragged.from_list(rows_of, torch.float32)})

    def _measure(self, batch: Batch) -> None:
        """Report scores, lengths, the KL to the reference, and how far sampler and trainer differ."""
        mask = padded(batch, "response_mask")
        old, sampled = padded(batch, "old_log_probs"), padded(batch, "rollout_log_probs")
        difference = (old - sampled).abs() * mask
        scores = batch.columns["scores"].double()
        sums = self._sum()(
            torch.stack(
                [
                    scores.sum(),
                    torch.tensor(len(batch)).double(),
                    mask.sum().double(),
                    batch.columns["tokens"].lengths.sum().double(),
                    difference.sum().double(),
                ]
            )
        )
        score_sum, num_samples, num_tokens, num_all_tokens, difference_sum = sums.tolist()
        kl = kl_penalty(old, padded(batch, "ref_log_probs"), "k1")
        self.metrics |= {
            "reward/mean": score_sum / num_samples,
            "response/length_mean": num_tokens / num_samples,
            "batch/num_tokens": num_all_tokens,
            "kl/ref": sequence_mean_kl(kl, mask, sum_over_ranks=self._sum()),
            "kl/coef": self._kl_coef.value,
            "rollout/logprob_abs_diff": difference_sum / num_tokens,
        }

    def _sum(self) -> Any:
        return sum_over(self._job.world.group(self._peers))
