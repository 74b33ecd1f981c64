"""How ranks share the tokens of sequences, without processes: a group that knows its size, and values put together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hybridflow.models.attention import PackedAttention
from hybridflow.models.context import ContextAttention, ContextShare, Dealt, zigzag
from hybridflow.models.flash import flash_attention, flash_gradient
from hybridflow.models.scoring import Scoring
from tests.unit.models.test_cuda_attention import varlen_attn

CPU = torch.device("cpu")
PLACES = [[0, 1, 2, 3, 4], [0, 1, 2, *range(5, 30)], [0, 1, 2], [30, 31, 32], [30, 31], [33]]
"""Sequences some of which begin alike, one that is the beginning of another, and one of a single token."""
COUNTS = [5, 25, 0, 3, 0, 1]


def test_chunks_by_hand():
    # Eight tokens, then six: chunks of two, and of 1, 2, 1, 2; the second piece begins with the second rank.
    first, second = zigzag([8, 6], 2)
    assert first == [(0, 0, 2), (0, 6, 8), (1, 9, 11), (1, 11, 12)]
    assert second == [(0, 2, 4), (0, 4, 6), (1, 8, 9), (1, 12, 14)]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_each_token_has_one_rank_and_causal_work_is_even(size):
    counts = [4096, 1, 3000, 17, 0, 2]
    dealt = zigzag(counts, size)
    tokens = sorted(token for chunks in dealt for _, start, stop in chunks for token in range(start, stop))
    assert tokens == list(range(sum(counts)))
    starts = [sum(counts[:piece]) for piece in range(len(counts))]
    work = [sum(at - starts[piece] for piece, start, stop in each for at in range(start, stop)) for each in dealt]
    assert max(work) < 1.01 * min(work)
    assert max(sum(stop - start for _, start, stop in each) for each in dealt) <= sum(counts) / size + 2 * len(counts)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 3, 20])
@pytest.mark.parametrize("size", [2, 3])
def test_a_ranks_queries_see_what_they_would_see_in_whole_sequences(monkeypatch, size, window, softcap):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(34, heads, 8, generator=generator) for heads in (4, 2, 2))
    lengths, flat = [len(each) for each in PLACES], torch.tensor([place for each in PLACES for place in each])
    scoring = Scoring(scale=0.4, window=window, softcap=softcap)
    whole = PackedAttention(lengths, CPU, flat)
    expected = whole.attend(0, query, key, value, scoring)
    for rank in range(size):
        share = ContextShare(COUNTS, SimpleNamespace(size=lambda: size, rank=lambda rank=rank: rank), CPU)
        attention = ContextAttention(lengths, CPU, flat, share)
        mine, index = share.tokens.mine, share.tokens.index
        assert torch.equal(attention.positions, whole.positions[mine])
        keys, values = (torch.full((int(index.max()) + 1, 2, 8), torch.nan) for _ in range(2))
        keys[index], values[index] = key, value
        view = attention._view(window)
        found = view.attend(query[mine], keys, values, scoring)
        torch.testing.assert_close(found, expected[mine], atol=1e-6, rtol=0)
        if softcap is None:
            found = view._sequences.attend(query[mine], keys, values, scoring, "varlen")
            torch.testing.assert_close(found, expected[mine], atol=1e-6, rtol=0)


def test_the_gradients_of_sinks_are_those_of_whole_sequences(monkeypatch):
    # Of a group of one, which has nothing to exchange.
    for name in ("exchange", "sum_back"):
        monkeypatch.setattr(Dealt, name, lambda self, values: values)
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(34, heads, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2)]
    inputs.append(torch.tensor([1.0, -2.0, 3.0, 0.5], requires_grad=True))
    lengths, flat = [len(each) for each in PLACES], torch.tensor([place for each in PLACES for place in each])
    share = ContextShare(COUNTS, SimpleNamespace(size=lambda: 1, rank=lambda: 0), CPU)
    assert torch.equal(share.tokens.mine, torch.arange(34)) and torch.equal(share.tokens.index, torch.arange(34))
    found = []
    for attention in (PackedAttention(lengths, CPU, flat), ContextAttention(lengths, CPU, flat, share)):
        context = attention.attend(0, *inputs[:3], Scoring(scale=0.4, window=3, sinks=inputs[3]))
        weight = torch.randn(context.shape, generator=torch.Generator().manual_seed(2))
        found.append([context, *torch.autograd.grad((context * weight).sum(), inputs)])
    for expected, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (5, 12), (40, 900), (600, 800)])
@pytest.mark.parametrize("window", [None, 4])
def test_attention_in_parts_and_its_gradients_are_those_of_the_whole(queries, keys, window):
    generator = torch.Generator().manual_seed(2)
    shapes = ((queries, 4, 16), (keys, 2, 16), (keys, 2, 16))
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    gradient, scoring = torch.randn(queries, 4, 16, generator=generator), Scoring(scale=0.25, window=window)
    at, to = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    seen = (to <= at) if window is None else (to <= at) & (to > at - window)
    by_head = [each.transpose(0, 1)[None] for each in inputs]
    expected = torch.nn.functional.scaled_dot_product_attention(*by_head, attn_mask=seen, scale=0.25, enable_gqa=True)[
        0
    ].transpose(0, 1)
    wanted = torch.autograd.grad(expected, inputs, gradient)
    with torch.no_grad():
        context, normalizers = flash_attention(*inputs, scoring)
        found = flash_gradient(gradient, *inputs, context, normalizers, scoring)
    torch.testing.assert_close(context, expected, atol=1e-6, rtol=0)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=0)
