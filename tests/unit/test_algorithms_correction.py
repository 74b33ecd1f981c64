"""Corrections of another sampler, against constants worked out by hand and against autograd."""

import math

import pytest
import torch

from hybridflow.algorithms.correction import correction_weights

LN2, LN3 = math.log(2), math.log(3)


def weights(d, mask, **settings):
    """Of samplers that were ``d`` less sure than the trainer."""
    old = torch.full((len(d), len(d[0])), -1.5)
    return correction_weights(old, old - torch.tensor(d), torch.tensor(mask), **settings)


# The trainer finds the tokens 3, 2, 1, 1/2, 1/3 times as likely; the last is not of the response.
D = [[LN3, LN2, 0.0, -LN2, -LN3, 9.0]]
MASK = [[1.0, 1.0, 1.0, 1.0, 1.0, 0.0]]


@pytest.mark.parametrize(
    ("kind", "expected", "bounded"),
    [
        ("truncate", [2, 2, 1, 1 / 2, 1 / 3, 1], [True, False, False, False, False, False]),
        # Kept is what lies between 0.4 and 2.
        ("icepop", [0, 2, 1, 1 / 2, 0, 1], [True, False, False, False, True, False]),
    ],
)
def test_weights_of_tokens(kind, expected, bounded):
    found = weights(D, MASK, kind=kind, level="token", low=0.4, high=2.0 + 1e-6)
    torch.testing.assert_close(found.weights, torch.tensor([expected], dtype=torch.float32), atol=2e-6, rtol=0)
    assert found.is_bounded.tolist() == [bounded]


def test_weights_of_sequences_are_the_product_over_the_mask():
    # 3 · 2 · 1/2 = 3 in the first row, whose second-last token does not count; 1/3 · 1/2 = 1/6 in the second.
    d = [[LN3, LN2, 7.0, -LN2], [-LN3, -LN2, 0.0, 0.0]]
    mask = [[1.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0]]
    found = weights(d, mask, kind="truncate", level="sequence", low=0.0, high=2.5)
    torch.testing.assert_close(
        found.weights, torch.tensor([[2.5, 2.5, 1.0, 2.5], [1 / 6, 1 / 6, 1 / 6, 1.0]]), atol=1e-6, rtol=0
    )
    assert found.is_bounded.sum() == 3
    kept = weights(d, mask, kind="icepop", level="sequence", low=0.5, high=5.0).weights
    torch.testing.assert_close(kept, torch.tensor([[3.0, 3.0, 1.0, 3.0], [0.0, 0.0, 0.0, 1.0]]))


def test_the_exponent_is_clamped_and_unknown_tokens_outside_the_mask_do_no_harm():
    found = weights([[100.0, -100.0, math.nan]], [[1.0, 1.0, 0.0]], kind="icepop", level="token", low=0.0, high=1e9)
    torch.testing.assert_close(found.weights, torch.tensor([[math.exp(20), math.exp(-20), 1.0]]))


def test_a_corrected_loss_has_the_plain_one_times_the_weight_as_gradient():
    old = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    sampled = torch.tensor([[-1.2, -1.0, -3.0]], requires_grad=True)
    found = correction_weights(old, sampled, torch.ones(1, 3), kind="truncate", level="token", low=0.0, high=1.1)
    assert not found.weights.requires_grad
    log_probs = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    (log_probs.exp() * found.weights).sum().backward()
    # exp(0.2) = 1.22 is cut to 1.1; exp(-1); exp(0).
    expected = [math.exp(-1) * 1.1, math.exp(-2) * math.exp(-1), math.exp(-3)]
    torch.testing.assert_close(log_probs.grad, torch.tensor([expected]))


def test_what_is_unknown_is_refused():
    row = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="allowed are truncate, icepop of token, sequence"):
        correction_weights(row, row, row, kind="clip", level="token", low=0, high=2)
    with pytest.raises(ValueError, match="shapes differ"):
        correction_weights(row, row[:, :1], row, kind="truncate", level="token", low=0, high=2)
