"""Linear layers by oneDNN against fp64."""

from __future__ import annotations

import pytest
import torch

from hybridflow.models.cpu_linear import _Linear


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tokens", [0, 1, 7, 1023, 1024, 1100])
@pytest.mark.parametrize(("inputs", "outputs"), [(5, 3), (64, 160), (33, 1)])
def test_products_and_gradients_are_those_of_fp64(tokens, inputs, outputs):
    given = [drawn(tokens, 1, inputs, seed=1), drawn(outputs, inputs, seed=2)]
    # As it comes backward out of a sum, or cut out of something wider.
    weights = drawn(tokens, 1, 2 * outputs, seed=3)[..., ::2]
    ours = [each.clone().requires_grad_() for each in given]
    exact = [each.double().requires_grad_() for each in given]
    found, expected = _Linear.apply(*ours, None, False), exact[0] @ exact[1].t()
    assert found.shape == (tokens, 1, outputs) and found.dtype is torch.float32
    (found * weights).sum().backward()
    (expected * weights.double()).sum().backward()
    tolerance = 1e-6 * max(tokens, inputs, outputs)
    # 1,100 rows are filled up to 9 times 128.
    assert found.untyped_storage().nbytes() == 4 * outputs * (1152 if tokens == 1100 else tokens)
    for one, other in zip(
        (found, *(each.grad for each in ours)), (expected, *(each.grad for each in exact)), strict=True
    ):
        assert one.shape == other.shape
        assert torch.allclose(one.double(), other, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_needs_no_gradient_gets_none(frozen):
    given = [drawn(4, 1, 6, seed=1), drawn(3, 6, seed=2)]
    given[1 - frozen].requires_grad_()
    _Linear.apply(*given, None, False).sum().backward()
    assert given[frozen].grad is None and given[1 - frozen].grad is not None
