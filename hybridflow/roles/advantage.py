"""From scores to advantages: PPO's and GRPO's, over the global batch whatever the layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import gae, group_normalize, token_rewards, whiten
from hybridflow.algorithms.correction import Weights, correction_weights
from hybridflow.algorithms.kl import adapt_kl_coef, kl_penalty, sequence_mean_kl
from hybridflow.config import Recipe
from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.errors import EngineError
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


def corrections(recipe: Recipe, old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Weights:
    """What the recipe multiplies the loss of each token by; all ``[samples, tokens]``."""
    settings = recipe.correction
    return correction_weights(
        old_log_probs,
        rollout_log_probs,
        mask,
        kind=recipe.correction_kind,
        level=settings.level,
        low=settings.low,
        high=settings.high,
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
        difference = torch.where(mask > 0, (old - sampled).abs(), 0)
        self._check_known(batch, sampled, mask)
        # Of the sampler to the trainer, over what the sampler drew.
        sampler_kl = torch.where(mask > 0, kl_penalty(sampled, old, "k3"), 0)
        scores = batch.columns["scores"].double()
        sums = self._sum()(
            torch.stack(
                [
                    scores.sum(),
                    torch.tensor(len(batch)).double(),
                    mask.sum().double(),
                    batch.columns["tokens"].lengths.sum().double(),
                    difference.sum().double(),
                    sampler_kl.sum().double(),
                ]
            )
        )
        score_sum, num_samples, num_tokens, num_all_tokens, difference_sum, sampler_kl_sum = sums.tolist()
        kl = kl_penalty(old, padded(batch, "ref_log_probs"), "k1")
        self.metrics |= {
            "reward/mean": score_sum / num_samples,
            "response/length_mean": num_tokens / num_samples,
            "batch/num_tokens": num_all_tokens,
            "kl/ref": sequence_mean_kl(kl, mask, sum_over_ranks=self._sum()),
            "kl/coef": self._kl_coef.value,
            "rollout/logprob_abs_diff": difference_sum / num_tokens,
            # Of this rank; of several ranks' the largest counts.
            "rollout/logprob_abs_diff_max": difference.max().item() if difference.numel() else 0.0,
            "rollout/kl": sampler_kl_sum / num_tokens,
        }
        if self._job.recipe.correction_kind != "none":
            self._measure_correction(corrections(self._job.recipe, old, sampled, mask), mask, num_tokens)

    def _check_known(self, batch: Batch, sampled: Tensor, mask: Tensor) -> None:
        """What a sampler did not tell, nothing can be computed with."""
        unknown = (sampled.isnan() & (mask > 0)).any(dim=1)
        if unknown.any():
            raise EngineError(
                f"draw {batch.columns['draws'][unknown][0].item()}: rollout.engine.kind="
                f"{self._job.recipe.rollout.engine.kind} did not tell the log-probability of a token that it sampled; "
                "train with a server that tells them all, such as vLLM's"
            )

    def _measure_correction(self, found: Weights, mask: Tensor, num_tokens: float) -> None:
        """The share of tokens that a bound changed; and of how many equal weights these are worth."""
        weights = torch.where(mask > 0, found.weights, 0).double()
        bounded, total, squares = self._sum()(
            torch.stack([found.is_bounded.double().sum(), weights.sum(), weights.square().sum()])
        ).tolist()
        self.metrics |= {
            "correction/bounded_share": bounded / num_tokens,
            "correction/effective_share": total**2 / (squares * num_tokens) if squares > 0 else 0.0,
        }

    def _sum(self) -> Any:
        return sum_over(self._job.world.group(self._peers))
