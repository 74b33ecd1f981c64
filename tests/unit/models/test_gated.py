"""The gate between the two products of a feed-forward block: against autograd, and what it keeps."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu, silu

from hybridflow.models import gpt
from hybridflow.models.gated import gated, gelu_tanh

REFERENCES = {
    "silu": silu,
    "gelu_tanh": lambda gate: gelu(gate, approximate="tanh"),
    "quick_gelu": lambda gate: gate * torch.sigmoid(1.702 * gate),
}


@pytest.mark.parametrize(("clamp", "offset"), [(None, 0.0), (0.5, 1.0)])
@pytest.mark.parametrize("name", REFERENCES)
def test_the_product_and_its_gradient_are_those_of_autograd(name, clamp, offset):
    mixed = torch.randn(3, 1, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight = torch.arange(15.0, dtype=torch.float64).view(3, 1, 5)
    gate, other = mixed.chunk(2, dim=-1)
    if clamp is not None:
        assert (mixed.abs() > clamp).any()
        gate, other = gate.clamp(max=clamp), other.clamp(-clamp, clamp)
    expected = REFERENCES[name](gate) * (other + offset)
    found = gated(mixed, gpt._ACTIVATIONS[name], clamp, offset)
    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad((each * weight).sum(), mixed)[0] for each in (found, expected))
    torch.testing.assert_close(ours, theirs)


def test_it_keeps_its_input_alone():
    kept = []
    mixed = torch.randn(4, 6).requires_grad_()

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        gated(mixed, gelu_tanh)
    assert len(kept) == 1 and kept[0].data_ptr() == mixed.data_ptr()
