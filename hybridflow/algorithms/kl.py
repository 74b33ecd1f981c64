"""Distance to the reference policy: per-token estimators, and the controller of their weight."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybridflow.algorithms.inputs import alike

_ROUNDING = 1e-5


def rounding_at(temperature: float) -> float:
    """Return by how much a log-probability of fp32 may differ between two layouts, in nats."""
    return _ROUNDING / min(temperature, 1.0)


def unrounded(log_probs: Tensor, ref_log_probs: Tensor, rounding: float) -> Tensor:
    """Return the log-probabilities, but the reference's where they differ by rounding at most; no gradient there.

    Of a policy that is its reference, rounding would choose the sign of a gradient, or tell responses apart.

    Args:
        log_probs: Of the policy, any shape.
        ref_log_probs: Of the reference, the same shape.
        rounding: How much rounding makes at most.
    """
    return torch.where((log_probs - ref_log_probs).abs() > rounding, log_probs, ref_log_probs)


def _k2(d: Tensor) -> Tensor:
    return d.square() / 2


def unbounded_k3(d: Tensor) -> Tensor:
    """Return k3 of a difference of log-probabilities, ``exp(-d) + d - 1``, with the exponent clamped to ±20."""
    return torch.exp((-d).clamp(-20, 20)) + d - 1


def _k3(d: Tensor) -> Tensor:
    return unbounded_k3(d).clamp(-10, 10)


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


def adapt_kl_coef(kl_coef: float, kl: float, *, target: float, num_samples: int, horizon: int) -> float:
    """Move the KL coefficient towards the one that holds the KL at its target.

    ``kl_coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon)``. The coefficient before this update is
    the one that the step applies.

    Args:
        kl_coef: The coefficient that this step applied.
        kl: KL of this step: the mean over its sequences of :func:`sequence_means`, one without tokens left out.
        target: The KL to hold, in the same unit (nats per token).
        num_samples: Samples of the global batch.
        horizon: Samples over which a steady miss of 20 % or more moves the coefficient by about 20 %.

    Returns:
        The next step's coefficient.

    Paper: arXiv 1909.08593.
    """
    miss = min(max(kl / target - 1.0, -0.2), 0.2)
    return kl_coef * (1.0 + miss * num_samples / horizon)
