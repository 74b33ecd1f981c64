"""What computes attention on a GPU, and what it is told of sequences with shared beginnings."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hybridflow.models import cuda_attention
from hybridflow.models.attention import PackedAttention
from hybridflow.models.cuda_attention import Sequences
from hybridflow.models.scoring import Scoring

CPU = torch.device("cpu")
PLAIN, WINDOW, CAP = {}, {"has_window": True}, {"has_cap": True}
HOPPER, ADA, TURING = (9, 0), (8, 9), (7, 5)


@pytest.mark.parametrize(
    ("dtype", "head", "scoring", "capability", "expected"),
    [
        pytest.param(torch.bfloat16, 128, PLAIN, HOPPER, "varlen", id="bf16"),
        pytest.param(torch.float16, 96, WINDOW, ADA, "varlen", id="fp16 with a window"),
        pytest.param(torch.bfloat16, 256, PLAIN, HOPPER, "varlen", id="wide heads"),
        pytest.param(torch.bfloat16, 256, PLAIN, ADA, "rectangles", id="wide heads, little shared memory"),
        pytest.param(torch.bfloat16, 256, CAP, HOPPER, "triton", id="cap"),
        pytest.param(torch.float32, 64, CAP, TURING, "triton", id="cap in fp32"),
        pytest.param(torch.float32, 128, PLAIN, HOPPER, "rectangles", id="fp32"),
        pytest.param(torch.float32, 128, WINDOW, HOPPER, "triton", id="window in fp32"),
        pytest.param(torch.bfloat16, 12, PLAIN, HOPPER, "rectangles", id="head size that is no multiple of 8"),
        pytest.param(torch.bfloat16, 320, PLAIN, HOPPER, "rectangles", id="head size above 256"),
        pytest.param(torch.float16, 128, PLAIN, TURING, "rectangles", id="older GPU"),
    ],
)
def test_what_computes_it(dtype, head, scoring, capability, expected):
    assert cuda_attention.backend(dtype, head, capability, **scoring) == expected


def test_a_window_that_all_sequences_fit_into_is_none(monkeypatch):
    monkeypatch.setattr(cuda_attention, "_capability", lambda device: HOPPER)
    sequences, query = Sequences([5, 3], torch.arange(8), CPU), torch.zeros(8, 2, 16)
    assert [sequences.backend(query, Scoring(scale=1.0, window=each)) for each in (4, 5)] == ["triton", "rectangles"]


def varlen_attn(
    query, key, value, query_starts, key_starts, most_queries, most_keys, *, scale, window_size, enable_gqa
):
    """Attend as flash attention documents it: a sequence's last query sees its last key."""
    found = []
    for index in range(len(query_starts) - 1):
        part, seen = (slice(*starts[index : index + 2].tolist()) for starts in (query_starts, key_starts))
        queries, keys, values = (each.transpose(0, 1)[None] for each in (query[part], key[seen], value[seen]))
        assert queries.shape[2] <= most_queries and keys.shape[2] <= most_keys
        gap = torch.arange(keys.shape[2]) - torch.arange(queries.shape[2])[:, None] - keys.shape[2] + queries.shape[2]
        mask = (gap <= window_size[1]) if window_size[1] >= 0 else torch.ones_like(gap, dtype=torch.bool)
        if window_size[0] >= 0:
            mask &= gap >= -window_size[0]
        context = scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        found.append(context[0].transpose(0, 1))
    return torch.cat(found)


def varlen_attn_of_torch_2_11(query, key, *rest, scale, window_size):
    """Attend likewise, without being told of query groups."""
    is_grouped = query.shape[1] != key.shape[1]
    return varlen_attn(query, key, *rest, scale=scale, window_size=window_size, enable_gqa=is_grouped)


SHARED = [[0, 1, 2, 3, 4], [0, 1, 2, *range(5, 30)], [0, 1, 2], [30, 31, 32], [30, 31], [33]]
APART = [[0, 1, 2, 3], [4], [*range(5, 12)]]


@pytest.mark.parametrize("window", [None, 1, 3, 20, 100])
@pytest.mark.parametrize("places", [SHARED, APART])
@pytest.mark.parametrize("attention", [varlen_attn, varlen_attn_of_torch_2_11])
def test_packed_kernels_are_told_of_own_queries_and_all_keys(monkeypatch, attention, places, window):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attention)
    generator, tokens = torch.Generator().manual_seed(1), max(map(max, places)) + 1
    packed = [torch.randn(tokens, heads, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2)]
    lengths, flat = [len(each) for each in places], torch.tensor([place for each in places for place in each])
    scoring = Scoring(scale=0.4, window=window)
    sequences = Sequences(lengths, flat, CPU)
    expected = PackedAttention(lengths, CPU, flat).attend(0, *packed, scoring)
    context = sequences.attend(*packed, scoring, "varlen")
    torch.testing.assert_close(context, expected, atol=1e-6, rtol=0)
    weight = torch.randn(context.shape, generator=generator)
    pairs = (torch.autograd.grad((each * weight).sum(), packed) for each in (context, expected))
    for one, another in zip(*pairs, strict=True):
        torch.testing.assert_close(one, another, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    "places", [pytest.param([[0, 1], [2, 0]], id="not at the beginning"), pytest.param([[1], [0]], id="out of order")]
)
def test_places_that_cannot_be_told_so_are_refused(places):
    flat = torch.tensor([place for each in places for place in each])
    with pytest.raises(AssertionError):
        Sequences([len(each) for each in places], flat, CPU)


@pytest.mark.parametrize(("heads", "head"), [(4, 16), (2, 12)])
def test_query_groups_and_odd_heads_are_laid_out_for_torch_s_kernels(monkeypatch, heads, head):
    asked = []

    def note(query, key, value, **given):
        asked.append((query.shape, key.shape, value.shape, torch.backends.cuda.math_sdp_enabled()))
        return scaled_dot_product_attention(query, key, value, **given)

    monkeypatch.setattr(cuda_attention, "scaled_dot_product_attention", note)
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(3, count, 9, head, generator=generator, requires_grad=True) for count in (heads, 2, 2)]
    expected = scaled_dot_product_attention(*given, is_causal=True, scale=0.3, enable_gqa=True)
    weight = torch.randn(expected.shape, generator=generator)
    for capability in (HOPPER, TURING):
        monkeypatch.setattr(cuda_attention, "_capability", lambda device, which=capability: which)
        found = cuda_attention.plain_attention(*given, None, 0.3)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        pairs = (torch.autograd.grad((each * weight).sum(), given, retain_graph=True) for each in (found, expected))
        for one, another in zip(*pairs, strict=True):
            torch.testing.assert_close(one, another, atol=2e-6, rtol=0)
    # Scores of all pairs may only be made where torch may have no kernel that does without.
    assert [is_allowed for *_, is_allowed in asked] == [False, True]
    assert {shape for *shapes, _ in asked for shape in shapes} == {(3, heads, 9, 16)}
