"""The policy's loss on one micro-batch, and what is told of it: shares of sums over the global batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hybridflow.algorithms.correction import Weights, correction_weights, kept_tokens
from hybridflow.algorithms.kl import kl_penalty, rounding_at, sequence_means, unrounded
from hybridflow.algorithms.losses import ClipStats, Totals, aggregate, cispo_loss, gspo_loss, policy_loss
from hybridflow.config.recipe import Recipe
from hybridflow.errors import ConfigError
from hybridflow.roles.advantage import KLCoefficient

LOSS_MASK = "loss_mask"
"""The column that is 1 on tokens that are learned from, where the sampler of some was too far from the trainer."""

LOSS_SUMS = ("policy_loss", "loss", "num_clipped", "num_clipped_low", "num_dual_clipped", "entropy", "kl_to_old")
"""Shares of one mini-batch's loss, and of sums over its tokens."""

SAMPLER_SUMS = (
    *("tokens", "sequences", "abs_diff", "sampler_kl", "reference_kl"),
    *("bounded", "weight", "square_weight"),
)
"""Of the global batch, each mini-batch once: how far the trainer is from sampler and reference, and the corrections."""


UserLoss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``(log_probs, old_log_probs, advantages, mask) -> loss of each token``, all ``[samples, tokens]``."""


class PolicyLoss:
    """How the recipe's algorithm learns from advantages.

    Args:
        recipe: The recipe.
        kl_coef: The weight of the KL, where it is a term of the loss.
        user_loss: A program's own, in the place of the recipe's.
    """

    def __init__(self, recipe: Recipe, kl_coef: KLCoefficient, user_loss: UserLoss | None = None) -> None:
        self._recipe = recipe
        self._settings = recipe.loss
        self._kl_coef = kl_coef
        self._user_loss = user_loss

    def __call__(
        self, log_probs: Tensor, entropy: Tensor, columns: Mapping[str, Tensor], totals: Totals
    ) -> tuple[Tensor, Tensor]:
        """Return the micro-batch's share of the loss.

        Args:
            log_probs: Of the weights in training, ``[samples, tokens]``.
            entropy: Of each token's distribution, the same shape.
            columns: ``response_mask`` and ``advantages``; :data:`LOSS_MASK`, where tokens are rejected;
                ``old_log_probs``, unless they are these; ``ref_log_probs``, where there is a reference. The same shape.
            totals: Counts of the global mini-batch.

        Returns:
            The share, to be summed over micro-batches and data-parallel ranks; and :data:`LOSS_SUMS`, no gradient.
        """
        settings, mask = self._settings, columns.get(LOSS_MASK, columns["response_mask"])
        old = columns.get("old_log_probs", log_probs.detach())
        per_token, stats = self._per_token(log_probs, old, columns["advantages"], mask)
        if self._recipe.correction_kind != "none":
            per_token = per_token * self._corrections(old, columns).weights
        loss = aggregate(per_token, mask, settings.aggregation, totals)
        policy_share = loss.detach()
        if self._kl_coef.is_in_loss:
            reference, current = columns["ref_log_probs"], log_probs
            if self._recipe.kl.estimator == "abs":
                # Its gradient is a sign, which of a policy that is its reference rounding would choose.
                current = unrounded(log_probs, reference, rounding_at(self._recipe.rollout.temperature))
            kl = kl_penalty(current, reference, self._recipe.kl.estimator)
            loss = loss + self._kl_coef.value * aggregate(kl, mask, settings.aggregation, totals)
        if settings.entropy_coef:
            loss = loss - settings.entropy_coef * aggregate(entropy, mask, settings.aggregation, totals)
        is_low = stats.is_clipped & (stats.ratio < 1)
        clipped = [each.float() for each in (stats.is_clipped, is_low, stats.is_dual_clipped)]
        on_average = torch.stack([*clipped, entropy.detach(), (old - log_probs).detach()])
        return loss, torch.stack(
            [policy_share, loss.detach(), *((mask > 0) * on_average).sum(dim=(1, 2)) / totals.num_tokens]
        )

    def compare(self, log_probs: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Compare the log-probabilities before the update with those of the sampler and the reference.

        Args:
            log_probs: As for the loss, no gradient.
            columns: As for the loss, and ``rollout_log_probs``.

        Returns:
            :data:`SAMPLER_SUMS` in fp64; and the largest difference to the sampler's.
        """
        mask = columns["response_mask"] > 0
        old, sampled = columns.get("old_log_probs", log_probs), columns["rollout_log_probs"]
        difference = torch.where(mask, (old - sampled).abs(), 0)
        # Of the sampler to the trainer, over what the sampler drew.
        sampler_kl = torch.where(mask, kl_penalty(sampled, old, "k3"), 0)
        lengths = mask.sum(dim=1)
        reference_kl = mask.new_zeros(len(mask), dtype=torch.float64)
        if "ref_log_probs" in columns:
            reference_kl = sequence_means(kl_penalty(old, columns["ref_log_probs"], "k1"), columns["response_mask"])
        sums = [lengths.sum(), (lengths > 0).sum(), difference.sum(), sampler_kl.sum(), reference_kl.sum()]
        corrected = [difference.new_zeros(())] * 3
        if self._recipe.correction_kind != "none":
            found = self._corrections(old, columns)
            weights = torch.where(mask, found.weights, 0).double()
            corrected = [found.is_bounded.sum(), weights.sum(), weights.square().sum()]
        largest = difference.max() if difference.numel() else difference.new_zeros(())
        return torch.stack([each.double() for each in (*sums, *corrected)]), largest

    def keep(self, old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
        """Return which tokens count, ``[samples, tokens]`` as all arguments; see ``correction.kept_tokens``."""
        settings = self._recipe.correction
        assert settings.reject is not None, "the recipe rejects nothing"
        return kept_tokens(
            old_log_probs,
            rollout_log_probs,
            mask,
            estimator=settings.reject,
            level=settings.reject_level,
            low=settings.reject_low,
            high=settings.reject_high,
        )

    def _per_token(self, log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, ClipStats]:
        """Return the loss of each token, of the kind that the recipe names."""
        settings = self._settings
        if self._user_loss is not None:
            per_token = user_loss_of(self._user_loss, log_probs, old, advantages, mask)
            nowhere = torch.zeros_like(mask, dtype=torch.bool)
            return per_token, ClipStats(
                ratio=(log_probs - old).detach().exp(), is_clipped=nowhere, is_dual_clipped=nowhere
            )
        low, high = settings.clip_low, settings.clip_high
        if settings.kind == "gspo":
            return gspo_loss(log_probs, old, advantages, mask, clip_low=low, clip_high=high)
        if settings.kind == "cispo":
            return cispo_loss(log_probs, old, advantages, clip_low=low, clip_high=high)
        return policy_loss(log_probs, old, advantages, clip_low=low, clip_high=high, dual_clip=settings.dual_clip)

    def _corrections(self, old: Tensor, columns: Mapping[str, Tensor]) -> Weights:
        """Return the factors of the loss of each token."""
        settings = self._recipe.correction
        return correction_weights(
            old,
            columns["rollout_log_probs"],
            columns["response_mask"],
            kind=self._recipe.correction_kind,
            level=settings.level,
            low=settings.low,
            high=settings.high,
        )


def user_loss_of(loss: UserLoss, log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return the loss of each token by a program's own function, ``[samples, tokens]`` as all arguments.

    Raises:
        ConfigError: It gave something else, or what cannot be learned from.
    """
    found = loss(log_probs, old, advantages, mask)
    where = f"{type(getattr(loss, '__self__', loss)).__name__}.loss"
    if not isinstance(found, Tensor) or found.shape != mask.shape:
        told = f"shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ConfigError(
            f"{where}: found {told}, expected a tensor of shape {list(mask.shape)}; return the loss of each token, "
            "which is averaged as loss.aggregation says"
        )
    if log_probs.requires_grad and not found.requires_grad:
        raise ConfigError(f"{where}: found no gradient, expected one to log_probs; do not detach() them")
    return found
