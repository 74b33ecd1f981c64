"""Tokens whose sampler was not quite the policy that is trained, but another engine or older weights.

They are weighed, or rejected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.algorithms.inputs import alike
from hybridflow.algorithms.kl import kl_penalty, unbounded_k3

KINDS = ("truncate", "icepop")
LEVELS = ("token", "sequence")
REJECT_LEVELS = ("token", "sum", "mean", "max")


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What a token's loss is multiplied by; no gradient. Both ``[samples, tokens]``.

    Attributes:
        weights: After the bounds; 1 at mask 0.
        is_bounded: Where a bound changed the weight (bool); False at mask 0.
    """

    weights: Tensor
    is_bounded: Tensor


def correction_weights(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, *, kind: str, level: str, low: float, high: float
) -> Weights:
    """Compute bounded importance weights of the trainer's policy over the sampler's.

    With ``d = old_log_prob - rollout_log_prob``, of each token or, at the level of sequences, its sum over the mask::

        w = exp(clamp(d, -20, 20))
        truncate: min(w, high)
        icepop:   w where low <= w <= high, else 0

    Args:
        old_log_probs: Log-probabilities of the weights at the start of the update, ``[samples, tokens]``.
        rollout_log_probs: The sampler's own, the same shape; finite where the mask is 1.
        mask: 1 on tokens that were sampled, the same shape; a row holds the whole of a sequence.
        kind: One of :data:`KINDS`.
        level: One of :data:`LEVELS`.
        low: Lower bound, of icepop alone.
        high: Upper bound.

    Raises:
        ValueError: Shapes differ, or kind or level is unknown.

    Paper: truncation arXiv 1802.01561; icepop arXiv 2510.18855. The clamp of the exponent is ours.
    """
    if kind not in KINDS or level not in LEVELS:
        raise ValueError(f"correction {kind!r} of {level!r}: allowed are {', '.join(KINDS)} of {', '.join(LEVELS)}")
    old, sampled, mask = alike(old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs, mask=mask)
    on = mask > 0
    d = torch.where(on, old.detach() - sampled.detach(), 0)
    if level == "sequence":
        d = d.sum(dim=1, keepdim=True).expand_as(d)
    raw = torch.exp(d.clamp(-20, 20))
    bounded = raw.clamp(max=high) if kind == "truncate" else torch.where((raw >= low) & (raw <= high), raw, 0)
    return Weights(weights=torch.where(on, bounded, 1), is_bounded=on & (bounded != raw))


def kept_tokens(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    estimator: str,
    level: str,
    low: float,
    high: float,
) -> Tensor:
    """Return which tokens count in the loss: those where the sampler was close enough to the trainer.

    An estimate of the KL of the sampler to the trainer, from ``rollout_log_prob - old_log_prob``, decides: of each
    token, or the sum, mean or maximum of them over the sequence's mask, on all of whose tokens it then decides. ``k1``
    is the logarithm of a ratio, ``exp(-k1) = exp(old_log_prob - rollout_log_prob)``, which must lie between ``low`` and
    ``high``; ``k2`` and ``k3`` are never negative, and must be at most ``high``.

    Args:
        old_log_probs: Log-probabilities of the weights at the start of the update, ``[samples, tokens]``.
        rollout_log_probs: The sampler's own, the same shape; finite where the mask is 1.
        mask: 1 on tokens that were sampled, the same shape; a row holds the whole of a sequence.
        estimator: k1, k2 or k3, see ``kl.kl_penalty``; k3 without its bounds of ±10.
        level: One of :data:`REJECT_LEVELS`; max is of k2 and k3 alone.
        low: Lower bound of the ratio, of k1 alone; 0: none.
        high: Upper bound, of k1 of the ratio.

    Returns:
        ``mask`` where a token is kept, else 0; ``[samples, tokens]``.

    Raises:
        ValueError: Shapes differ, or estimator or level is unknown, or does not go with the other.
    """
    if estimator not in ("k1", "k2", "k3") or level not in REJECT_LEVELS or (estimator, level) == ("k1", "max"):
        raise ValueError(
            f"rejection by {estimator!r} of {level!r}: allowed are k1, k2, k3 of {', '.join(REJECT_LEVELS)}, but max "
            "of k2 and k3 alone"
        )
    old, sampled, mask = alike(
        old_log_probs=old_log_probs.detach(), rollout_log_probs=rollout_log_probs.detach(), mask=mask
    )
    on = mask > 0
    # Clamped as in a penalty, k3 would never be above a bound of 10.
    estimates = unbounded_k3(sampled - old) if estimator == "k3" else kl_penalty(sampled, old, estimator)
    found = torch.where(on, estimates, 0)
    if level in ("sum", "mean"):
        lengths = on.sum(dim=1, keepdim=True).clamp(min=1)
        found = found.sum(dim=1, keepdim=True) / (lengths if level == "mean" else 1)
    elif level == "max" and found.shape[1]:
        found = found.amax(dim=1, keepdim=True)
    if estimator == "k1":
        is_kept = (-found >= (math.log(low) if low > 0 else -math.inf)) & (-found <= math.log(high))
    else:
        is_kept = found <= high
    return torch.where(is_kept, mask, 0)
