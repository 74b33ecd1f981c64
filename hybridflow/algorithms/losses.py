"""Losses per token, and how tokens of many micro-batches and ranks become one number."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from hybridflow.algorithms.inputs import alike

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What a loss is divided by: counts of the global mini-batch, over all micro-batches and data-parallel ranks.

    Attributes:
        num_tokens: Tokens with mask 1.
        num_sequences: Sequences with at least one such token.
        max_response_tokens: What ``seq-mean-token-sum-norm`` divides by: the configured maximum response length or
            another constant, never the padded width.

    Raises:
        ValueError: A count is below 1: such a mini-batch has no loss.
    """

    num_tokens: int
    num_sequences: int
    max_response_tokens: int

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(
                    f"{field.name}={getattr(self, field.name)} in a global mini-batch: must be at least 1; "
                    "leave out a mini-batch in which no token counts"
                )


@dataclass(frozen=True, kw_only=True)
class ClipStats:
    """What clipping did to each token; no gradient. All of the shape of ``log_probs``.

    Attributes:
        ratio: Probability under the current policy over that under the old one.
        is_clipped: The clipped ratio gave the loss (bool).
        is_dual_clipped: The dual clip gave the loss (bool).
    """

    ratio: Tensor
    is_clipped: Tensor
    is_dual_clipped: Tensor


def aggregate(loss: Tensor, mask: Tensor, mode: str, totals: Totals) -> Tensor:
    """Return this micro-batch's share of the mini-batch's loss.

    The shares add up, over micro-batches and data-parallel ranks, to the loss of the whole mini-batch, and their
    gradients to its gradient, since every denominator is global. With ``S`` a sequence's masked sum and ``n`` its
    masked tokens:

    - ``token-mean``: ``sum(S) / num_tokens``
    - ``seq-mean-token-sum``: ``sum(S) / num_sequences``
    - ``seq-mean-token-mean``: ``sum(S / (n + 1e-8)) / num_sequences``
    - ``seq-mean-token-sum-norm``: ``sum(S) / max_response_tokens / num_sequences``

    Args:
        loss: Per token, ``[samples, tokens]``; a row holds the whole of a sequence. Finite at mask 0.
        mask: 1 on tokens that count, ``[samples, tokens]``.
        mode: One of :data:`AGGREGATIONS`.
        totals: Counts of the global mini-batch.

    Returns:
        A scalar, to be summed and not averaged. 0, with a graph behind it, when no token counts here.

    Raises:
        ValueError: Shapes differ, or the mode is unknown.

    Paper: token-mean arXiv 2503.14476 (DAPO), seq-mean-token-mean arXiv 2402.03300 (GRPO),
    seq-mean-token-sum-norm arXiv 2503.20783 (Dr. GRPO).
    """
    loss, mask = alike(loss=loss, mask=mask)
    on = mask > 0
    sums = torch.where(on, loss, 0).sum(dim=1)
    match mode:
        case "token-mean":
            return sums.sum() / totals.num_tokens
        case "seq-mean-token-sum":
            return sums.sum() / totals.num_sequences
        case "seq-mean-token-mean":
            return (sums / (on.sum(dim=1) + 1e-8)).sum() / totals.num_sequences
        case "seq-mean-token-sum-norm":
            return sums.sum() / totals.max_response_tokens / totals.num_sequences
    raise ValueError(f"aggregation {mode!r}: allowed are {', '.join(AGGREGATIONS)}")


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, ClipStats]:
    """Compute PPO's clipped loss of each token.

    With ``ratio = exp(clamp(log_prob - old_log_prob, -20, 20))``::

        loss = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))
        loss = min(loss, -A * dual_clip)  where A < 0, if dual_clip is given

    Args:
        log_probs: Log-probabilities of the policy, any shape, usually ``[samples, tokens]``; finite at mask 0 too.
        old_log_probs: Log-probabilities of the weights at rollout; a constant of the same shape.
        advantages: A constant of the same shape.
        clip_low: How far the ratio may fall below 1.
        clip_high: How far it may rise above 1; unlike ``clip_low``, it is DAPO's clip-higher.
        dual_clip: Bound on the ratio for negative advantages, above 1; None is without one.

    Returns:
        The loss per token, in the shape of ``log_probs``, and what clipping did.

    Raises:
        ValueError: Shapes differ, or ``dual_clip`` is not above 1.

    Paper: arXiv 1707.06347; clip-higher arXiv 2503.14476; dual clip arXiv 1912.09729. The clamp of the exponent is
        ours.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip={dual_clip}: must be above 1 (3 is usual), or None for no dual clip")
    log_probs, old_log_probs, advantages = alike(
        log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages
    )
    ratio = torch.exp((log_probs - old_log_probs).clamp(-20, 20))
    loss, stats = _clipped_loss(ratio, advantages, clip_low, clip_high)
    if dual_clip is None:
        return loss, stats
    bound = -advantages * dual_clip
    is_dual_clipped = (advantages < 0) & (loss > bound)
    return torch.where(is_dual_clipped, bound, loss), replace(stats, is_dual_clipped=is_dual_clipped)


def gspo_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, ClipStats]:
    """Compute GSPO's clipped loss of each token, by the ratio of its whole sequence.

    With ``s`` the mean of ``log_prob - old_log_prob`` over the sequence's mask and ``sg`` a stopped gradient::

        ratio = exp(min(log_prob - sg(log_prob) + sg(s), 10))
        loss = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))

    So every token of a sequence has its ratio, and the gradient of its own log-probability. To be aggregated as
    ``seq-mean-token-mean``.

    Args:
        log_probs: Log-probabilities of the policy, ``[samples, tokens]``; a row holds the whole of a sequence. Finite
            at mask 0 too.
        old_log_probs: Log-probabilities of the weights at the start of the update; a constant of the same shape.
        advantages: A constant of the same shape.
        mask: 1 on tokens that count, the same shape.
        clip_low: How far the ratio may fall below 1.
        clip_high: How far it may rise above 1.

    Returns:
        The loss per token, in the shape of ``log_probs``, and what clipping did; there is no dual clip.

    Raises:
        ValueError: Shapes differ.

    Paper: arXiv 2507.18071, GSPO-token. The bound of the exponent is ours.
    """
    log_probs, old_log_probs, advantages, mask = alike(
        log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, mask=mask
    )
    on, constant = mask > 0, log_probs.detach()
    means = torch.where(on, constant - old_log_probs, 0).sum(dim=1, keepdim=True) / on.sum(dim=1, keepdim=True).clamp(
        min=1
    )
    ratio = torch.exp((log_probs - constant + means).clamp(max=10))
    return _clipped_loss(ratio, advantages, clip_low, clip_high)


def cispo_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, ClipStats]:
    """Compute CISPO's loss of each token: the clipped ratio is a weight, and every token keeps its gradient.

    ``-sg(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * log_prob`` with
    ``ratio = exp(clamp(log_prob - old_log_prob, -20, 20))``.

    Args:
        log_probs: Log-probabilities of the policy, any shape, usually ``[samples, tokens]``; finite at mask 0 too.
        old_log_probs: Log-probabilities of the weights at the start of the update; a constant of the same shape.
        advantages: A constant of the same shape.
        clip_low: How far the weight may fall below 1; 1: it has no lower bound.
        clip_high: How far it may rise above 1.

    Returns:
        The loss per token, in the shape of ``log_probs``, and what clipping did.

    Raises:
        ValueError: Shapes differ.

    Paper: arXiv 2506.13585. The clamp of the exponent is ours.
    """
    log_probs, old_log_probs, advantages = alike(
        log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages
    )
    ratio = torch.exp((log_probs.detach() - old_log_probs).clamp(-20, 20))
    weights = ratio.clamp(1 - clip_low, 1 + clip_high)
    is_clipped = weights != ratio
    stats = ClipStats(ratio=ratio, is_clipped=is_clipped, is_dual_clipped=torch.zeros_like(is_clipped))
    return -weights * advantages * log_probs, stats


def _clipped_loss(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, ClipStats]:
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    is_clipped = clipped > unclipped
    stats = ClipStats(ratio=ratio.detach(), is_clipped=is_clipped, is_dual_clipped=torch.zeros_like(is_clipped))
    return torch.maximum(unclipped, clipped), stats


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, value_clip: float) -> Tensor:
    """Compute the critic's clipped squared error of each token.

    ``0.5 * max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2)``

    Args:
        values: Values of the critic in training, any shape, usually ``[samples, tokens]``.
        old_values: Values of the critic when the samples were made; a constant of the same shape.
        returns: Its targets; a constant of the same shape.
        value_clip: How far a value may move from the old one before the error stops rewarding it.

    Returns:
        The loss per token, in the shape of ``values``.

    Raises:
        ValueError: Shapes differ.

    Paper: arXiv 1707.06347 with the clipping of its authors' code, which the paper does not state.
    """
    values, old_values, returns = alike(values=values, old_values=old_values, returns=returns)
    clipped = values.clamp(old_values - value_clip, old_values + value_clip)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())
