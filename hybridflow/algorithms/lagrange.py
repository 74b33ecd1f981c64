"""Learning under a constraint on costs: the multiplier that prices them, and advantages that take them into account."""

from __future__ import annotations

import math

from torch import Tensor

from hybridflow.algorithms.inputs import alike


def lagrangian_advantages(advantages: Tensor, cost_advantages: Tensor, multiplier: float) -> Tensor:
    """Compute ``(A_r - λ A_c) / (1 + λ)``: the reward's advantage less the cost's, at the current price.

    Args:
        advantages: Advantages of rewards, any shape, usually ``[samples, tokens]``; not yet whitened.
        cost_advantages: Advantages of costs, the same shape.
        multiplier: The λ of the paper, at least 0.

    Returns:
        The shape of both.

    Raises:
        ValueError: Shapes differ.

    Paper: arXiv 2310.12773.
    """
    advantages, cost_advantages = alike(advantages=advantages, cost_advantages=cost_advantages)
    return (advantages - multiplier * cost_advantages) / (1.0 + multiplier)


def adapt_multiplier(multiplier: float, mean_cost: float, *, limit: float, lr: float, largest: float) -> float:
    """Raise the price while the mean cost is above its limit, lower it below.

    ``log λ += lr * λ * (mean cost - limit)``, and ``λ <= largest``: a step of gradient ascent in the logarithm. The
    multiplier before this update is the one that the step applies.

    Args:
        multiplier: The one that this step applied, at least 0; from 0 it does not come back.
        mean_cost: Mean cost of the global batch.
        limit: Mean cost that is allowed.
        lr: Step size.
        largest: Upper bound, above 0.

    Returns:
        The next step's multiplier.

    Paper: arXiv 2310.12773. The bound is ours.
    """
    if multiplier == 0:
        return 0.0
    return math.exp(min(math.log(multiplier) + lr * multiplier * (mean_cost - limit), math.log(largest)))
