"""Kernels between the products of a layer, with their gradients: against autograd in fp64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu

from hybridflow.models import layer_kernels, recurrence_kernels

DTYPES = {torch.float32: 2e-6, torch.bfloat16: 2.0**-6}
"""Format -> largest difference over the largest value. The interpreter cuts digits off where a GPU rounds."""


def numbers(*shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def compare(found, inputs, expected, dtype):
    """Compare a result and the gradients of the inputs of a weighted sum of it; expected takes inputs in fp64."""
    exact = [each.detach().double().requires_grad_() for each in inputs]
    wanted = expected(*exact)
    weight = numbers(*found.shape, dtype=dtype)
    ours = torch.autograd.grad(found, inputs, weight)
    theirs = torch.autograd.grad(wanted, exact, weight.double())
    for one, other in zip((found, *ours), (wanted, *theirs), strict=True):
        gap = (one.detach().double() - other.detach()).abs().amax()
        assert float(gap) <= DTYPES[dtype] * float(other.detach().abs().amax())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "kind", "clamp", "offset"),
    [((3, 1, 20), 0, 0.0, 0.0), ((1, 1, 2200), 1, 0.0, 0.0), ((5, 2, 2048), 2, 0.0, 0.0), ((4, 1, 30), 2, 0.7, 1.0)],
)
def test_gates(dtype, shape, kind, clamp, offset):
    mixed = numbers(*shape, dtype=dtype).requires_grad_()

    def expected(mixed):
        gate, other = mixed.chunk(2, dim=-1)
        if clamp:
            gate, other = gate.clamp(max=clamp), other.clamp(-clamp, clamp)
        active = gelu(gate, approximate="tanh") if kind == 1 else gate * torch.sigmoid((1.702 if kind else 1) * gate)
        return active * (other + offset)

    compare(layer_kernels.gated(mixed, kind, clamp, offset), [mixed], expected, dtype)
    assert layer_kernels.gated(mixed[:0], kind, clamp, offset).shape == (0, *shape[1:-1], shape[-1] // 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("heads", "head", "dims"), [(3, 16, 16), (1, 24, 8), (40, 6, 4)])
def test_rotations(dtype, is_interleaved, heads, head, dims):
    tokens = 5
    angles = torch.outer(torch.arange(tokens), 0.3 ** torch.arange(dims // 2)).float()
    # Keys stand between queries and values, so that their rows are apart.
    mixed = numbers(tokens, heads, head + 3, dtype=dtype).requires_grad_()

    def expected(mixed):
        values = mixed[:, :, :head]
        pairs = values[..., :dims].unflatten(-1, (dims // 2, 2) if is_interleaved else (2, dims // 2))
        low, high = pairs.unbind(-1 if is_interleaved else -2)
        cosine, sine = angles.double().cos()[:, None], angles.double().sin()[:, None]
        together = torch.stack(
            [low * cosine - high * sine, high * cosine + low * sine], dim=-1 if is_interleaved else -2
        )
        return torch.cat([together.flatten(-2), values[..., dims:]], dim=-1)

    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    compare(layer_kernels.turned(mixed[:, :, :head], table, 1.0, is_interleaved), [mixed], expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [6, 1030])
def test_rows_that_are_taken_more_than_once(dtype, width):
    packed = numbers(7, width, dtype=dtype).requires_grad_()
    # Nobody takes token 4.
    taken = torch.tensor([0, 1, 2, 0, 1, 3, 5, 0, 6, 6])
    order, starts = layer_kernels.order_of(taken, 7)
    found = layer_kernels.taken_rows(packed, taken, order, starts)
    compare(found, [packed], lambda packed: packed[taken], dtype)
    assert torch.equal(found, packed[taken])


def token_by_token(query, key, value, decay, beta, state):
    """The gated delta rule as its paper states it; queries and keys of each value head."""
    found = []
    query, key = (each.repeat_interleave(value.shape[2] // key.shape[2], dim=2) for each in (query, key))
    for token in range(value.shape[1]):
        q, k, v = (each[:, token] for each in (query, key, value))
        state = state * decay[:, token].exp()[..., None, None]
        written = beta[:, token, :, None] * (v - torch.einsum("shkv,shk->shv", state, k))
        state = state + k[..., None] * written[:, :, None]
        found.append(torch.einsum("shkv,shk->shv", state, q))
    return torch.stack(found, dim=1), state


@pytest.mark.parametrize(
    ("samples", "tokens", "key_heads", "sharers", "keys", "values", "forgetting"),
    [
        pytest.param(2, 4, 2, 2, 5, 7, 0.5, id="odd widths"),
        pytest.param(1, 1, 1, 1, 4, 4, 0.5, id="one token"),
        pytest.param(1, 30, 1, 1, 16, 8, 0.1, id="many tokens"),
        pytest.param(1, 9, 1, 1, 16, 8, 9.0, id="little is left from token to token"),
        pytest.param(1, 2, 1, 1, 24, 130, 0.5, id="three blocks of columns"),
    ],
)
def test_the_gated_delta_rule(samples, tokens, key_heads, sharers, keys, values, forgetting):
    heads = key_heads * sharers
    query, key = (numbers(samples, tokens, key_heads, keys + each, dtype=torch.float32)[..., each:] for each in (0, 1))
    key = torch.nn.functional.normalize(key, dim=-1)
    value, before = (
        numbers(*shape, dtype=torch.float32)
        for shape in ((samples, tokens, heads, values), (samples, heads, keys, values))
    )
    decay = -forgetting * numbers(samples, tokens, heads, dtype=torch.float32).exp()
    beta = numbers(heads, tokens, samples, dtype=torch.float32).sigmoid().permute(2, 1, 0)
    inputs = [each.requires_grad_() for each in (query, key, value, decay, beta, before)]
    exact = [each.detach().double().requires_grad_() for each in inputs]
    found, _, after = recurrence_kernels.recurred(*inputs)
    expected = token_by_token(*exact)
    weights = [numbers(*each.shape, dtype=torch.float32) for each in expected]
    ours = torch.autograd.grad([found, after], inputs, weights)
    theirs = torch.autograd.grad(expected, exact, [each.double() for each in weights])
    for one, other in zip((found, after, *ours), (*expected, *theirs), strict=True):
        assert one.shape == other.shape
        gap = (one.detach().double() - other.detach()).abs().amax()
        assert float(gap) <= 5e-6 * float(other.detach().abs().amax())


def test_without_tokens_the_gated_delta_rule_leaves_states_as_they_are():
    nothing, numbers_of, before = (
        torch.zeros(2, 0, 1, 4),
        torch.zeros(2, 0, 1),
        numbers(2, 1, 4, 4, dtype=torch.float32),
    )
    before.requires_grad_()
    found, _, after = recurrence_kernels.recurred(nothing, nothing, nothing, numbers_of, numbers_of, before)
    assert found.shape == (2, 0, 1, 4) and torch.equal(after, before)
    assert torch.equal(torch.autograd.grad(after.sum(), before)[0], torch.ones_like(before))
