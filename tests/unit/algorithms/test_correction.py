"""Corrections of another sampler, against constants worked out by hand and against autograd."""

import math

import pytest
import torch

from hybridflow.algorithms.correction import correction_weights, kept_tokens

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
    with pytest.raises(ValueError, match="correction 'icepop' of 'mean'"):
        correction_weights(row, row, row, kind="icepop", level="mean", low=0, high=2)
    with pytest.raises(ValueError, match="shapes differ"):
        correction_weights(row, row[:, :1], row, kind="truncate", level="token", low=0, high=2)


def kept(d, mask, **settings):
    """Of samplers that were ``d`` less sure than the trainer."""
    old = torch.full((len(d), len(d[0])), -1.5, requires_grad=True)
    found = kept_tokens(old, old.detach() - torch.tensor(d), torch.tensor(mask), **settings)
    assert not found.requires_grad
    return found.tolist()


@pytest.mark.parametrize(
    ("estimator", "level", "low", "high", "expected"),
    [
        # Ratios of the trainer to the sampler: 3, 2, 1, 1/2, 1/3.
        ("k1", "token", 0.4, 2.5, [0, 1, 1, 1, 0, 0]),
        ("k1", "token", 0.0, 2.5, [0, 1, 1, 1, 1, 0]),
        # d^2 / 2: 0.603, 0.240, 0, 0.240, 0.603.
        ("k2", "token", 0.5, 0.3, [0, 1, 1, 1, 0, 0]),
        # e^d - d - 1, of the sampler to the trainer: 0.901, 0.307, 0, 0.193, 0.432.
        ("k3", "token", 0.5, 0.31, [0, 1, 1, 1, 0, 0]),
        ("k3", "token", 0.5, 0.2, [0, 0, 1, 1, 0, 0]),
    ],
)
def test_tokens_are_rejected_one_by_one(estimator, level, low, high, expected):
    assert kept(D, MASK, estimator=estimator, level=level, low=low, high=high) == [expected]


# Two sequences, of three tokens and of one: products 4 and 2, geometric means 4^(1/3) = 1.587 and 2.
SEQUENCES = [[LN2, LN2, 0.0, 50.0], [LN2, -50.0, 50.0, 50.0]]
SEQUENCE_MASK = [[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("estimator", "level", "high", "expected"),
    [
        ("k1", "sum", 3.0, [False, True]),
        ("k1", "mean", 1.9, [True, False]),
        # Each LN2 gives 0.2402: sums 0.480 and 0.240, means 0.160 and 0.240, largest 0.240.
        ("k2", "sum", 0.3, [False, True]),
        ("k2", "mean", 0.2, [True, False]),
        ("k2", "max", 0.25, [True, True]),
        ("k2", "max", 0.23, [False, False]),
        # Each gives 2 - ln 2 - 1 = 0.3069.
        ("k3", "sum", 0.4, [False, True]),
        ("k3", "mean", 0.25, [True, False]),
        ("k3", "max", 0.3, [False, False]),
    ],
)
def test_sequences_are_rejected_as_a_whole(estimator, level, high, expected):
    found = kept(SEQUENCES, SEQUENCE_MASK, estimator=estimator, level=level, low=0.0, high=high)
    assert found == [
        [flag if is_kept else 0.0 for flag in row] for row, is_kept in zip(SEQUENCE_MASK, expected, strict=True)
    ]


def test_a_bound_of_k3_above_that_of_a_penalty_rejects():
    # e^16 - 17 and e - 2.
    assert kept([[16.0, 1.0]], [[1.0, 1.0]], estimator="k3", level="token", low=0.0, high=12.0) == [[0.0, 1.0]]


def test_rejection_has_no_maximum_of_k1():
    with pytest.raises(ValueError, match="max of k2 and k3 alone"):
        kept(D, MASK, estimator="k1", level="max", low=0.0, high=1.0)
    with pytest.raises(ValueError, match="'k4'"):
        kept(D, MASK, estimator="k4", level="token", low=0.0, high=1.0)
    assert kept([[]], [[]], estimator="k3", level="max", low=0.0, high=1.0) == [[]]
