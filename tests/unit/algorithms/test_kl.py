"""KL estimators and the controller against constants worked out by hand and against the KL itself."""

from __future__ import annotations

import math

import pytest
import torch

from hybridflow.algorithms.kl import adapt_kl_coef, kl_penalty, rounding_at, sequence_means, unbounded_k3, unrounded

NAMES = ("k1", "abs", "k2", "k3")


# d = log 2 = 0.69314718: k2 = 0.24022651, k3 = 1/2 + d - 1 = 0.19314718; k3' = 1 - exp(-d) = 1/2.
# d = -log 2:             k2 the same,     k3 = 2 - d - 1   = 0.30685282; k3' = 1 - 2 = -1.
@pytest.mark.parametrize(
    ("estimator", "values", "gradients"),
    [
        ("k1", [0.69314718, -0.69314718], [1, 1]),
        ("abs", [0.69314718, 0.69314718], [1, -1]),
        ("k2", [0.24022651, 0.24022651], [0.69314718, -0.69314718]),
        ("k3", [0.19314718, 0.30685282], [0.5, -1]),
        ("k1+", [0.69314718, -0.69314718], [0.69314718, -0.69314718]),
        ("abs+", [0.69314718, 0.69314718], [0.69314718, -0.69314718]),
        ("k2+", [0.24022651, 0.24022651], [0.69314718, -0.69314718]),
        ("k3+", [0.19314718, 0.30685282], [0.69314718, -0.69314718]),
    ],
)
def test_estimators_by_hand(estimator: str, values: list[float], gradients: list[float]):
    ref_log_probs = torch.tensor([[-2.0, -2.0]])
    log_probs = (ref_log_probs + torch.tensor([[math.log(2), -math.log(2)]])).requires_grad_()
    kl = kl_penalty(log_probs, ref_log_probs, estimator)
    kl.sum().backward()
    torch.testing.assert_close(kl.detach(), torch.tensor([values]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(log_probs.grad, torch.tensor([gradients], dtype=torch.float32), rtol=1e-5, atol=1e-6)


def test_a_difference_that_rounding_makes_is_none_and_has_no_gradient():
    # A temperature below 1 multiplies logits, and what rounding has made of them; one above 1 leaves log-probabilities.
    assert rounding_at(1.0) == rounding_at(2.0) == pytest.approx(rounding_at(0.1) / 10)
    log_probs = torch.tensor([-2.0, -2.0 + 1e-6, -2.0 - 1e-6, -1.999, -2.001], requires_grad=True)
    reference = torch.full((5,), -2.0)
    kl = kl_penalty(unrounded(log_probs, reference, rounding_at(1.0)), reference, "abs")
    kl.sum().backward()
    torch.testing.assert_close(kl.detach(), torch.tensor([0, 0, 0, 1e-3, 1e-3]), rtol=1e-3, atol=0)
    assert log_probs.grad.tolist() == [0, 0, 0, 1, -1]


def test_k3_clamps():
    # d = -1000: exp(1000) would be infinite; the exponent stops at 20 and the whole at 10. d = 1000: 1000 - 1, so 10.
    log_probs = torch.tensor([-1000.0, 0, -2.0], requires_grad=True)
    ref_log_probs = torch.tensor([0.0, -1000, -2.0])
    kl = kl_penalty(log_probs, ref_log_probs, "k3")
    kl.sum().backward()
    assert kl.tolist() == [10, 10, 0]
    assert log_probs.grad.tolist() == [0, 0, 0]
    found = unbounded_k3(torch.tensor([-25.0, 30], dtype=torch.float64))
    assert found.tolist() == pytest.approx([math.exp(20) - 26, 29 + math.exp(-20)], rel=1e-12)


def test_plus_keeps_the_value_bit_for_bit():
    d = torch.linspace(-30, 30, 601)
    for name in NAMES:
        assert torch.equal(kl_penalty(d, torch.zeros_like(d), name), kl_penalty(d, torch.zeros_like(d), name + "+"))


def test_expectations_are_the_kl():
    # Summed over a whole vocabulary with the policy's weights, k1 and k3 are the KL; k2's gradient is the KL's.
    logits = torch.tensor([0.5, -0.3, 0.1], dtype=torch.float64, requires_grad=True)
    ref_log_probs = torch.log_softmax(torch.tensor([0.0, 0.2, -0.4], dtype=torch.float64), 0)
    log_probs = torch.log_softmax(logits, 0)
    probs = log_probs.detach().exp()
    kl = (log_probs.exp() * (log_probs - ref_log_probs)).sum()
    for name in ("k1", "k3"):
        torch.testing.assert_close((probs * kl_penalty(log_probs, ref_log_probs, name)).sum(), kl)
    (kl_gradient,) = torch.autograd.grad(kl, logits, retain_graph=True)
    for name in ("k2", "k1+", "k3+"):
        loss = (probs * kl_penalty(log_probs, ref_log_probs, name)).sum()
        torch.testing.assert_close(torch.autograd.grad(loss, logits, retain_graph=True)[0], kl_gradient)


def test_unknown_estimators_and_shapes_are_refused():
    for name in ("k4", "k3++", "+", ""):
        with pytest.raises(ValueError, match="allowed are k1, abs, k2, k3"):
            kl_penalty(torch.zeros(1), torch.zeros(1), name)
    with pytest.raises(ValueError, match=r"log_probs \[2, 3\], ref_log_probs \[3\]"):
        kl_penalty(torch.zeros(2, 3), torch.zeros(3), "k1")


def test_means_of_sequences_by_hand():
    # Sequences 1 and (2, 4) have means 1 and 3. The third has no token.
    kl = torch.tensor([[1.0, math.nan], [2, 4], [9, 9]])
    mask = torch.tensor([[1.0, 0], [1, 1], [0, 0]])
    found = sequence_means(kl, mask)
    assert found.tolist() == [1.0, 3.0, 0.0] and found.dtype == torch.float64


def test_adaptive_coefficient_by_hand():
    # 12/6 - 1 = 1, clipped to 0.2; 0.2 * 256/10000 = 0.00512; 0.2 * 1.00512 = 0.201024.
    assert adapt_kl_coef(0.2, 12.0, target=6.0, num_samples=256, horizon=10000) == pytest.approx(0.201024, abs=1e-12)
    # 0.6/6 - 1 = -0.9, clipped to -0.2: 0.2 * 0.99488 = 0.198976.
    assert adapt_kl_coef(0.2, 0.6, target=6.0, num_samples=256, horizon=10000) == pytest.approx(0.198976, abs=1e-12)
    # 6.6/6 - 1 = 0.1 is not clipped: 0.2 * 1.00256 = 0.200512.
    assert adapt_kl_coef(0.2, 6.6, target=6.0, num_samples=256, horizon=10000) == pytest.approx(0.200512, abs=1e-12)
    assert adapt_kl_coef(0.2, 6.0, target=6.0, num_samples=256, horizon=10000) == 0.2
