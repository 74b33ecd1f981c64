"""Experts by grouped products: the numbers and gradients of one expert after the other."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import grouped_mm, silu

from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models import experts
from hybridflow.models.gated import gated
from hybridflow.models.gpt import transformer_config
from hybridflow.models.grouped import grouped_experts, is_grouped

torch_stack = torch.stack
GATE = partial(gated, activation=silu)
PLACES = {"apart": None, "rising": 1, "falling": -1}


def lay(weights, direction):
    """Parameters with these values: each by itself, or both of each expert side by side in one buffer with a gap."""
    if direction is None:
        return [[nn.Parameter(each.clone()) for each in kind] for kind in weights]
    experts = list(zip(*weights, strict=True))[::direction]
    buffer = torch.zeros(sum(each.numel() + 5 for pair in experts for each in pair))
    found, at = ([], []), 0
    for pair in experts:
        for kind, each in zip(found, pair, strict=True):
            kind.append(nn.Parameter(buffer[at : at + each.numel()].view(each.shape).copy_(each)))
            at += each.numel() + 5
    return [kind[::direction] for kind in found]


def draw(generator, num_tokens, counts, per_token):
    """Tokens, their pairs by expert, weights of pairs, and matrices."""
    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    chosen = expert[torch.randperm(len(expert), generator=generator)].view(num_tokens, per_token)
    hidden, weights = (torch.randn(num_tokens, width, generator=generator) for width in (16, per_token))
    matrices = [[torch.randn(*shape, generator=generator) for _ in counts] for shape in ((48, 16), (16, 24))]
    return hidden, chosen, weights, matrices


def one_by_one(hidden, chosen, weights, first, second, biases=None, num_sharers=1):
    total = torch.zeros_like(hidden)
    for expert, (one, two) in enumerate(zip(first, second, strict=True)):
        before, behind = (0, 0) if biases is None else (biases[0][expert], biases[1][expert] / num_sharers)
        gate, value = (hidden @ one.T + before).chunk(2, dim=-1)
        output = (silu(gate) * value) @ two.T + behind
        total = total + (weights * (chosen == expert)).sum(1, keepdim=True) * output
    return total


@pytest.mark.parametrize("direction", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize(("counts", "per_token"), [([3, 0, 9, 8], 2), ([0, 0, 0, 20], 4), ([1, 1, 1, 1], 1), ([7], 1)])
@pytest.mark.parametrize("has_sums", [False, True])
def test_grouped_experts_are_what_each_computes(monkeypatch, counts, per_token, direction, has_sums):
    generator = torch.Generator().manual_seed(1)
    hidden, chosen, weights, matrices = draw(generator, sum(counts) // per_token, counts, per_token)
    first, second = lay(matrices, direction)
    given = [hidden.requires_grad_(), weights.requires_grad_(), *first, *second]
    sums = lay([[torch.ones_like(each) for each in kind] for kind in (first, second)], direction)
    for weight, total in zip((*first, *second), (*sums[0], *sums[1]), strict=True):
        weight.main_grad = total.detach()
    copies = []
    monkeypatch.setattr("hybridflow.models.grouped.torch.stack", lambda each: copies.append(each) or torch_stack(each))
    order = chosen.flatten().argsort(stable=True)
    found = grouped_experts(hidden, order, torch.tensor(counts), weights, first, second, GATE, adds_gradients=has_sums)
    expected = one_by_one(hidden, chosen, weights, first, second)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    gradient = torch.randn(expected.shape, generator=generator)
    ours, theirs = (torch.autograd.grad(each, given, gradient) for each in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
    for weight, other in zip((*first, *second), theirs[2:], strict=True):
        torch.testing.assert_close(weight.main_grad, 1 + has_sums * other, rtol=1e-5, atol=1e-4)
        assert getattr(weight, "grad_added_to_main_grad", False) == has_sums
    assert len(copies) == (4 if direction is None and len(counts) > 1 else 0)


@pytest.mark.parametrize("num_sharers", [1, 2])
@pytest.mark.parametrize("direction", PLACES.values(), ids=PLACES)
def test_biases_are_added_and_their_gradients_are_whole(direction, num_sharers):
    generator = torch.Generator().manual_seed(4)
    hidden, chosen, weights, matrices = draw(generator, 10, [3, 0, 9, 8], 2)
    first, second = lay(matrices, direction)
    biases = [[torch.randn(width, generator=generator).requires_grad_() for _ in range(4)] for width in (48, 16)]
    given = [hidden.requires_grad_(), weights.requires_grad_(), *first, *second, *biases[0]]
    order = chosen.flatten().argsort(stable=True)
    known = dict(biases=tuple(biases), num_sharers=num_sharers)
    found = grouped_experts(hidden, order, torch.tensor([3, 0, 9, 8]), weights, first, second, GATE, **known)
    expected = one_by_one(hidden, chosen, weights, first, second, **known)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    gradient = torch.randn(expected.shape, generator=generator)
    ours, theirs = (torch.autograd.grad(each, [*given, *biases[1]], gradient) for each in (found, expected))
    # All sharers have the whole gradient of the second bias, of which each adds its part.
    theirs = (*theirs[:-4], *(each * num_sharers for each in theirs[-4:]))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_no_group_is_without_rows(monkeypatch):
    stops = []

    def keep_stops(rows, weights, *, offs):
        stops.append(offs.tolist())
        return grouped_mm(rows, weights, offs=offs)

    monkeypatch.setattr("hybridflow.models.grouped.grouped_mm", keep_stops)
    hidden, first, second = torch.ones(9, 8), [torch.ones(16, 8)] * 4, [torch.ones(8, 8)] * 4
    grouped_experts(hidden, torch.arange(9), torch.tensor([0, 9, 0, 0]), torch.ones(9, 1), first, second, GATE)
    # The last group has what is left.
    assert stops == [[8, 24, 32, 41]] * 2


def test_what_is_kept_for_the_backward_pass_has_no_second_copy_of_the_inputs():
    generator = torch.Generator().manual_seed(1)
    hidden, chosen, weights, matrices = draw(generator, 64, [256, 256], 8)
    first, second = lay(matrices, 1)
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    order = chosen.flatten().argsort(stable=True)
    hidden.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        grouped_experts(hidden, order, torch.tensor([256, 256]), weights, first, second, GATE)
    rows, matrix_bytes = 512 + 2 * 8, 2 * 4 * (48 * 16 + 16 * 24 + 10)
    # Inputs, gate and other half; the gate's product, and that weighted. In numbers: the weights, and the ends.
    assert sum(kept.values()) <= matrix_bytes + 4 * rows * (16 + 2 * 24 + 2 * 24 + 2)


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
    [({}, True), ({"linear_bias": True, "glu_clamp": 7.0, "glu_offset": 1.0, "activation": "quick_gelu"}, True)]
    + [({"ffn_hidden_size": 12}, False), ({"dtype": "fp32"}, False)],
)
def test_experts_that_the_products_do_not_know_compute_one_after_the_other(changes, expected):
    model = replace(MIXTURE, **changes)
    config = transformer_config(model, ParallelLayout(), torch.device("cuda"))
    assert is_grouped(SimpleNamespace(is_cuda=True, dtype=config.params_dtype), config) == expected


def test_frozen_experts_have_no_gradient():
    hidden = torch.randn(4, 8, requires_grad=True)
    first, second = [torch.randn(16, 8)], [torch.randn(8, 8)]
    counts, weights = torch.tensor([4]), torch.ones(4, 1)
    grouped_experts(hidden, torch.arange(4), counts, weights, first, second, GATE).sum().backward()
    assert hidden.grad is not None and first[0].grad is None


def test_pairs_of_each_expert_are_found_in_their_order():
    expert = torch.randint(0, 6, (50,), generator=torch.Generator().manual_seed(2)).sort().values
    expert = expert[expert != 3]
    assert torch.equal(experts._counts(expert, 7), expert.bincount(minlength=7))
