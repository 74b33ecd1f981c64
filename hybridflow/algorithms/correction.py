"""Weights of tokens whose sampler was not quite the policy that is trained: another engine, or older weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.algorithms.inputs import alike

KINDS = ("truncate", "icepop")
LEVELS = ("token", "sequence")


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
    """Bounded importance weights of the trainer's policy over the sampler's.

    With ``d = old_log_prob - rollout_log_prob``, of each token or, at the level of sequences, its sum over the mask::

        w = exp(clamp(d, -20, 20))
        truncate: min(w, high)
        icepop:   w where low <= w <= high, else 0

    Args:
        old_log_probs: Of the weights at the start of the update, ``[samples, tokens]``.
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
