"""Attention on packed tokens by our kernels: context and gradients are those of the CPU's path."""

from __future__ import annotations

import pytest
import torch

from hybridflow.models.attention import PackedAttention
from hybridflow.models.cuda_attention import Sequences
from hybridflow.models.scoring import Scoring

CPU = torch.device("cpu")
SCORINGS = [
    pytest.param(Scoring(scale=0.3), id="plain"),
    pytest.param(Scoring(scale=0.7, softcap=1.2), marks=pytest.mark.long, id="cap"),
    pytest.param(Scoring(scale=0.4, window=3), marks=pytest.mark.long, id="window 3"),
    pytest.param(Scoring(scale=0.4, window=1), marks=pytest.mark.long, id="window 1"),
    pytest.param(Scoring(scale=0.7, softcap=1.2, window=20), id="cap, window 20"),
]
SHARED = [[*range(40)], [*range(30), *range(40, 75)], [*range(12)], [75, 76, 77], [75, 76, 78], [79]]
"""Beginnings that two, three and two sequences have; one sequence has nothing of its own, one is a single token."""
PLACES = [
    pytest.param([[*range(5)]], id="one"),
    pytest.param([[0], [1]], id="single tokens"),
    pytest.param([[*range(33)], [*range(33, 34)], [*range(34, 114)]], id="longer than a block"),
    pytest.param(SHARED, id="shared beginnings"),
]


def tensors(places, heads, groups, head, dtype):
    generator = torch.Generator().manual_seed(1)
    tokens = max(max(each) for each in places) + 1
    shapes = [(tokens, count, head) for count in (heads, groups, groups)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def both(places, packed, scoring, theirs=None):
    """Return context and gradients of the path for CPUs and of the kernels."""
    lengths, flat = [len(each) for each in places], torch.tensor([place for each in places for place in each])
    sequences = Sequences(lengths, flat, CPU)
    upper = theirs or packed
    weight = torch.randn(packed[0].shape, generator=torch.Generator().manual_seed(2))
    found = []
    for given, context in (
        (upper, PackedAttention(lengths, CPU, flat).attend(0, *upper, scoring)),
        (packed, sequences.attend(*packed, scoring, "triton")),
    ):
        gradients = torch.autograd.grad((context * weight.to(context.dtype)).sum(), given)
        found.append([context.detach().float(), *(each.float() for each in gradients)])
    return found


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("places", PLACES)
def test_kernels_agree_with_the_path_for_cpus(places, scoring):
    for ours, theirs in zip(*both(places, tensors(places, 6, 2, 16, torch.float32), scoring), strict=True):
        torch.testing.assert_close(theirs, ours, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("heads", "groups", "head", "dtype"),
    [
        pytest.param(3, 3, 12, torch.float32, id="12 dims a head, no groups"),
        pytest.param(5, 1, 40, torch.float16, id="fp16, 40 dims, one group"),
        pytest.param(4, 2, 64, torch.bfloat16, id="bf16"),
    ],
)
def test_head_sizes_and_formats(heads, groups, head, dtype):
    packed = tensors(SHARED, heads, groups, head, dtype)
    exact = [each.detach().float().requires_grad_() for each in packed]
    scoring = Scoring(scale=head**-0.5, softcap=2.0, window=30)
    tolerance = 5e-6 if dtype is torch.float32 else 16 * torch.finfo(dtype).eps
    for ours, theirs in zip(*both(SHARED, packed, scoring, exact), strict=True):
        torch.testing.assert_close(theirs, ours, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.long), 3])
def test_sinks_take_their_share_and_have_gradients(window):
    packed = tensors(SHARED, 6, 2, 16, torch.float32)
    sinks = torch.tensor([0.5, -3.0, 2.0, 0.0, 4.0, 1.0], requires_grad=True)
    plain, scoring = Scoring(scale=0.4, window=window), Scoring(scale=0.4, window=window, sinks=sinks)
    lengths, places = [len(each) for each in SHARED], torch.tensor([place for each in SHARED for place in each])
    found = []
    for attend in (
        lambda scoring: PackedAttention(lengths, CPU, places).attend(0, *packed, scoring),
        lambda scoring: Sequences(lengths, places, CPU).attend(*packed, scoring, "triton"),
    ):
        context = attend(scoring)
        assert float((context - attend(plain)).abs().max()) > 0.1, "the sinks have no weight"
        weight = torch.randn(context.shape, generator=torch.Generator().manual_seed(2))
        found.append([context, *torch.autograd.grad((context * weight).sum(), [*packed, sinks])])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(theirs, ours, atol=2e-5, rtol=1e-5)


def test_no_tokens():
    sequences = Sequences([], torch.empty(0, dtype=torch.int64), CPU)
    query = torch.empty(0, 4, 16)
    assert sequences.attend(query, query, query, Scoring(scale=1.0, softcap=1.0), "triton").shape == (0, 4, 16)
