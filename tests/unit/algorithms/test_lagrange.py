"""The price of cost, worked out by hand."""

import pytest
import torch

from hybridflow.algorithms.lagrange import adapt_multiplier, lagrangian_advantages


def adapted(multiplier, mean_cost):
    return adapt_multiplier(multiplier, mean_cost, limit=2.0, lr=0.5, largest=4.0)


def test_the_price_rises_above_the_limit_and_falls_below():
    # log 2 + 0.5 · 2 · (2.25 − 2) = log 2 + 0.25; log 0.5 + 0.5 · 0.5 · (1 − 2) = log 0.5 − 0.25.
    assert adapted(2.0, 2.25) == pytest.approx(2.0 * 1.2840254166877414, rel=1e-12)
    assert adapted(0.5, 1.0) == pytest.approx(0.5 * 0.7788007830714049, rel=1e-12)
    assert adapted(3.0, 2.0) == pytest.approx(3.0, rel=1e-12)


def test_the_price_keeps_to_its_bounds():
    assert adapted(2.0, 1e30) == pytest.approx(4.0, rel=1e-12)
    assert adapted(2.0, -1e30) == 0.0 and adapted(0.0, 1e30) == 0.0


def test_advantages_are_weighed_with_the_price():
    reward, cost = torch.tensor([[1.0, -2.0]]), torch.tensor([[0.5, 3.0]])
    # (1 − 3 · 0.5) / 4 and (−2 − 3 · 3) / 4.
    assert torch.allclose(lagrangian_advantages(reward, cost, 3.0), torch.tensor([[-0.125, -2.75]]))
    assert torch.equal(lagrangian_advantages(reward, cost, 0.0), reward)
    with pytest.raises(ValueError, match=r"advantages \[1, 2\], cost_advantages \[1\]"):
        lagrangian_advantages(reward, cost[:, 0], 1.0)
