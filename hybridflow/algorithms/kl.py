"""Distance to the reference policy: per-token estimators, and the controller of their weight."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import SumOverRanks
from hybridflow.algorithms.inputs import alike


def _k2(d: Tensor) -> Tensor:
    return d.square() / 2


def _k3(d: Tensor) -> Tensor:
    return (torch.exp((-d).clamp(-20, 20)) + d - 1).clamp(-10, 10)


_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": lambda d: d, "abs": torch.abs, "k2": _k2, "k3": _k3}


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, estimator: str) -> Tensor:
    """Estimate each token's KL divergence of the policy from the reference, from the sampled token alone.

    With ``d = log_prob - ref_log_prob``:

    - ``k1``: ``d``
    - ``abs``: ``|d|``
    - ``k2``: ``d^2 / 2``
    - ``k3``: ``exp(-d) + d - 1``, the exponent clamped to ±20 and the whole to ±10

    A ``+`` after a name (``k3+``) keeps the value and takes the gradient of k2, whose expectation is that of the KL
    itself.

    Args:
        log_probs: Log-probabilities of the policy, any shape, usually ``[samples, tokens]``; finite at mask 0 too.
        ref_log_probs: Log-probabilities of the reference, the same shape; a constant.
        estimator: One of the names above.

    Returns:
        The estimates, in the shape of ``log_probs``.

    Raises:
        ValueError: Shapes differ, or the estimator is unknown.

    Paper: k3 as in GRPO, arXiv 2402.03300. The clamps are ours: one token of a stray policy must not drown a batch.
    """
    if estimator.removesuffix("+") not in _ESTIMATORS:
        raise ValueError(f"KL estimator {estimator!r}: allowed are {', '.join(_ESTIMATORS)}, each also with a '+'")
    log_probs, ref_log_probs = alike(log_probs=log_probs, ref_log_probs=ref_log_probs)
    d = log_probs - ref_log_probs
    kl = _ESTIMATORS[estimator.removesuffix("+")](d)
    if not estimator.endswith("+"):
        return kl
    k2 = _k2(d)
    return kl.detach() + (k2 - k2.detach())


def sequence_means(kl: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each sequence over the tokens that count, ``[samples]`` fp64; 0 for a sequence without any.

    Args:
        kl: ``[samples, tokens]``; any value at mask 0.
        mask: 1 on tokens that count, ``[samples, tokens]``.

    Raises:
        ValueError: Shapes differ.
    """
    kl, mask = alike(kl=kl, mask=mask)
    on = mask > 0
    return torch.where(on, kl, 0).double().sum(dim=1) / on.sum(dim=1).clamp(min=1)


def sequence_mean_kl(kl: Tensor, mask: Tensor, *, sum_over_ranks: SumOverRanks | None = None) -> float:
    """Return the KL for the adaptive controller: the mean over sequences of each one's masked mean.

    Args:
        kl: This rank's share, ``[samples, tokens]``; any value at mask 0.
        mask: 1 on tokens that count, ``[samples, tokens]``. A sequence without any is left out.
        sum_over_ranks: Sums over the data-parallel ranks; None if this rank holds the whole batch.

    Returns:
        The mean over the global batch.

    Collective: dp when ``sum_over_ranks`` is given.

    Raises:
        ValueError: Shapes differ, or no sequence of the global batch has a token.
    """
    means = sequence_means(kl, mask)
    counts = torch.stack((means.sum(), (mask > 0).any(dim=1).sum().double()))
    mean_sum, num_sequences = (counts if sum_over_ranks is None else sum_over_ranks(counts)).tolist()
    if num_sequences == 0:
        raise ValueError("mean KL over 0 sequences with response tokens: at least 1 is needed; check the masks")
    return float(mean_sum / num_sequences)


def adapt_kl_coef(kl_coef: float, kl: float, *, target: float, num_samples: int, horizon: int) -> float:
    """Move the KL coefficient towards the one that holds the KL at its target.

    ``kl_coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon)``. The coefficient before this update is
    the one that the step applies.

    Args:
        kl_coef: The coefficient that this step applied.
        kl: What :func:`sequence_mean_kl` measured in this step.
        target: The KL to hold, in the same unit (nats per token).
        num_samples: Samples of the global batch.
        horizon: Samples over which a steady miss of 20 % or more moves the coefficient by about 20 %.

    Returns:
        The next step's coefficient.

    Paper: arXiv 1909.08593.
    """
    miss = min(max(kl / target - 1.0, -0.2), 0.2)
    return kl_coef * (1.0 + miss * num_samples / horizon)
