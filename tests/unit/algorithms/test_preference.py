"""Losses of preferences against constants worked out by hand, and gradients against the derivatives on paper."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.preference import bradley_terry_loss, dpo_loss, ipo_loss, kto_loss

CHOSEN = torch.tensor([-1.0, 2.0, 0.5], dtype=torch.float64, requires_grad=True)
REJECTED = torch.tensor([-3.0, 4.0, 0.5], dtype=torch.float64, requires_grad=True)
# h = chosen - rejected is 2, -2 and 0.
SIGMOID_2, SIGMOID_1 = 0.8807970779778823, 0.7310585786300049
LOG_2 = 0.6931471805599453


def check(losses: Tensor, expected: list[float], slopes: list[float]) -> None:
    """Losses, and their derivatives by the chosen's number; those by the rejected's are the opposite."""
    torch.testing.assert_close(losses.detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    gradients = torch.autograd.grad(losses.sum(), (CHOSEN, REJECTED))
    for sign, gradient in zip((1, -1), gradients, strict=True):
        wanted = sign * torch.tensor(slopes, dtype=torch.float64)
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-9)


def test_bradley_terry_by_hand():
    """-log σ(2 - 1), -log σ(-2), -log σ(0 + 1); the slope is -σ of the opposite."""
    margins = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
    losses = bradley_terry_loss(CHOSEN, REJECTED, margins)
    expected = [-math.log(SIGMOID_1), -math.log(1 - SIGMOID_2), -math.log(SIGMOID_1)]
    check(losses, expected, [SIGMOID_1 - 1, -SIGMOID_2, SIGMOID_1 - 1])


def test_dpo_by_hand():
    """With β = 0.5: -log σ(1), -log σ(-1), log 2; slopes -β σ(-βh)."""
    losses = dpo_loss(CHOSEN, REJECTED, beta=0.5)
    expected = [-math.log(SIGMOID_1), -math.log(1 - SIGMOID_1), LOG_2]
    check(losses, expected, [0.5 * (SIGMOID_1 - 1), -0.5 * SIGMOID_1, -0.25])


def test_dpo_with_label_smoothing_by_hand():
    """-(1 - s) log σ(βh) - s log σ(-βh), whose slope is β (σ(βh) - (1 - s))."""
    losses = dpo_loss(CHOSEN, REJECTED, beta=0.5, label_smoothing=0.2)
    right, wrong = -math.log(SIGMOID_1), -math.log(1 - SIGMOID_1)
    expected = [0.8 * right + 0.2 * wrong, 0.8 * wrong + 0.2 * right, LOG_2]
    check(losses, expected, [0.5 * (SIGMOID_1 - 0.8), 0.5 * (1 - SIGMOID_1 - 0.8), 0.5 * (0.5 - 0.8)])


def test_ipo_by_hand():
    """With τ = 0.25 a pair is to be 2 apart: (2 - 2)², (-2 - 2)², (0 - 2)²."""
    check(ipo_loss(CHOSEN, REJECTED, beta=0.25), [0.0, 16.0, 4.0], [0.0, -8.0, -4.0])


def test_kto_by_hand():
    """With β = 0.5 and z = 1: r = 3 gives σ(1) if wanted and σ(-1) if not; the slope of -σ(βu) is -β σ (1 - σ)."""
    log_ratios = torch.tensor([3.0, 3.0, -1.0, 1.0], dtype=torch.float64, requires_grad=True)
    z_ref = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    wanted = torch.tensor([1.0, 0.0, 0.0, 1.0])
    losses = kto_loss(log_ratios, wanted, z_ref, beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)
    expected = [2 * (1 - SIGMOID_1), 3 * SIGMOID_1, 3 * (1 - SIGMOID_1), 2 * 0.5]
    torch.testing.assert_close(losses.detach(), torch.tensor(expected, dtype=torch.float64))
    gradient, through_z = torch.autograd.grad(losses.sum(), (log_ratios, z_ref), allow_unused=True)
    bump = SIGMOID_1 * (1 - SIGMOID_1)
    slopes = [-2 * 0.5 * bump, 3 * 0.5 * bump, 3 * 0.5 * bump, -2 * 0.5 * 0.25]
    torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=torch.float64))
    assert through_z is None, "a gradient goes through z_ref"


def test_losses_stay_finite_where_a_pair_is_far_apart():
    far, near = torch.tensor([1e4, -1e4]), torch.zeros(2)
    assert bradley_terry_loss(far, near, near).tolist() == [0.0, 1e4]
    assert dpo_loss(far, near, beta=1.0).tolist() == [0.0, 1e4]


@pytest.mark.parametrize(
    "compute",
    [
        lambda a, b: bradley_terry_loss(a, b, a),
        lambda a, b: dpo_loss(a, b, beta=1.0),
        lambda a, b: ipo_loss(a, b, beta=1.0),
        lambda a, b: kto_loss(a, b, a.sum(), beta=1.0, desirable_weight=1.0, undesirable_weight=1.0),
    ],
)
def test_shapes_that_would_be_broadcast_are_refused(compute):
    with pytest.raises(ValueError, match="shapes differ"):
        compute(torch.zeros(3), torch.zeros(1))


def test_half_precision_is_left():
    losses = dpo_loss(torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16), beta=0.1)
    assert losses.dtype == torch.float32
