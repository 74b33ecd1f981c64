"""Losses of responses of which some are preferred, one number for each pair or response."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hybridflow.algorithms.inputs import alike


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margins: Tensor) -> Tensor:
    """Compute ``-log sigmoid(chosen - rejected - margin)`` of each pair.

    Args:
        chosen: Scores of the better responses, ``[pairs]``.
        rejected: Scores of the others, ``[pairs]``.
        margins: By how much the first should be ahead at least, ``[pairs]``; a constant.

    Raises:
        ValueError: Shapes differ.

    Paper: Bradley and Terry, "Rank analysis of incomplete block designs", Biometrika 1952; as the loss of a reward
        model arXiv 1909.08593; margins arXiv 2307.09288.
    """
    chosen, rejected, margins = alike(chosen=chosen, rejected=rejected, margins=margins)
    return -logsigmoid(chosen - rejected - margins)


def dpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Compute ``-(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h)`` of each pair, ``h = chosen - rejected``.

    Args:
        chosen: Log-probability of the better response less that under the reference, ``[pairs]``; without a reference
            the first alone.
        rejected: The same of the other response, ``[pairs]``.
        beta: Weight of the KL to the reference that is implied.
        label_smoothing: ``s``, share of the pairs that are taken to be the wrong way round.

    Raises:
        ValueError: Shapes differ.

    Paper: arXiv 2305.18290; label smoothing: its authors' note on conservative DPO.
    """
    chosen, rejected = alike(chosen=chosen, rejected=rejected)
    ahead = beta * (chosen - rejected)
    return -(1 - label_smoothing) * logsigmoid(ahead) - label_smoothing * logsigmoid(-ahead)


def ipo_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Compute ``(h - 1 / (2 beta))^2`` of each pair, ``h = chosen - rejected``.

    Args:
        chosen: As for ``dpo_loss``: sums over the tokens of a response, not means.
        rejected: As ``chosen``.
        beta: The paper's regularization τ.

    Raises:
        ValueError: Shapes differ.

    Paper: arXiv 2310.12036.
    """
    chosen, rejected = alike(chosen=chosen, rejected=rejected)
    return (chosen - rejected - 1 / (2 * beta)).square()


def kto_loss(
    log_ratios: Tensor,
    is_wanted: Tensor,
    z_ref: Tensor,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """Compute ``w (1 - sigmoid(beta (r - z)))`` of a wanted response, ``w (1 - sigmoid(beta (z - r)))`` of another.

    Args:
        log_ratios: ``r``, log-probability of each response less that under the reference, ``[responses]``.
        is_wanted: Above 0 where the response is wanted, ``[responses]``.
        z_ref: ``z``, the KL to the reference that all are measured against, a scalar; no gradient goes through it.
        beta: How quickly a gain or loss saturates.
        desirable_weight: ``w`` of responses that are wanted.
        undesirable_weight: ``w`` of the others.

    Raises:
        ValueError: Shapes differ.

    Paper: arXiv 2402.01306.
    """
    log_ratios, is_wanted = alike(log_ratios=log_ratios, is_wanted=is_wanted)
    ahead = beta * (log_ratios - z_ref.detach())
    wanted = desirable_weight * (1 - torch.sigmoid(ahead))
    unwanted = undesirable_weight * (1 - torch.sigmoid(-ahead))
    return torch.where(is_wanted > 0, wanted, unwanted)
