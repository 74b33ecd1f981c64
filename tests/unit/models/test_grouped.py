"""Experts by grouped products: the numbers and gradients of one expert after the other."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import grouped_mm, silu

from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models import experts
from hybridflow.models.gpt import transformer_config
from hybridflow.models.grouped import grouped_experts, is_grouped


@pytest.mark.parametrize("counts", [[3, 0, 9, 8], [0, 0, 0, 20], [1, 1, 1, 1]])
def test_grouped_experts_are_what_each_computes(counts):
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).requires_grad_()

    hidden, weights = draw(sum(counts), 16), draw(sum(counts))
    first, second = [draw(48, 16) for _ in counts], [draw(16, 24) for _ in counts]
    given = [hidden, weights, *first, *second]
    found = grouped_experts(hidden, torch.tensor(counts), weights, first, second, silu)
    parts = []
    for rows, scale, one, two in zip(hidden.split(counts), weights.split(counts), first, second, strict=True):
        gate, value = (rows @ one.T).chunk(2, dim=-1)
        parts.append((silu(gate) * value * scale[:, None]) @ two.T)
    expected = torch.cat(parts)
    torch.testing.assert_close(found, expected)
    gradient = torch.randn(expected.shape, generator=generator)
    for one, other in zip(
        torch.autograd.grad(found, given, gradient), torch.autograd.grad(expected, given, gradient), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_no_group_is_without_rows(monkeypatch):
    stops = []

    def keep_stops(rows, weights, *, offs):
        stops.append(offs.tolist())
        return grouped_mm(rows, weights, offs=offs)

    monkeypatch.setattr("hybridflow.models.grouped.grouped_mm", keep_stops)
    hidden, first, second = torch.ones(9, 8), [torch.ones(16, 8)] * 4, [torch.ones(8, 8)] * 4
    grouped_experts(hidden, torch.tensor([0, 9, 0, 0]), torch.ones(9), first, second, silu)
    assert stops == [[8, 24, 32, 40]] * 2


MIXTURE = ModelConfig(
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=16,
    num_attention_heads=2,
    max_context=8,
    num_experts=4,
    dtype="bf16",
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, True), ({"glu_clamp": 7.0}, False), ({"glu_offset": 1.0}, False), ({"linear_bias": True}, False)]
    + [({"activation": "quick_gelu"}, True), ({"ffn_hidden_size": 12}, False), ({"dtype": "fp32"}, False)],
)
def test_experts_whose_gate_the_products_do_not_know_compute_one_after_the_other(changes, expected):
    model = replace(MIXTURE, **changes)
    config = transformer_config(model, ParallelLayout(), torch.device("cuda"))
    assert is_grouped(SimpleNamespace(is_cuda=True, dtype=config.params_dtype), config) == expected


def test_frozen_experts_have_no_gradient():
    hidden = torch.randn(4, 8, requires_grad=True)
    first, second = [torch.randn(16, 8)], [torch.randn(8, 8)]
    grouped_experts(hidden, torch.tensor([4]), torch.ones(4), first, second, silu).sum().backward()
    assert hidden.grad is not None and first[0].grad is None


def test_pairs_of_each_expert_are_found_in_their_order():
    expert = torch.randint(0, 6, (50,), generator=torch.Generator().manual_seed(2)).sort().values
    expert = expert[expert != 3]
    assert torch.equal(experts._counts(expert, 7), expert.bincount(minlength=7))
