"""The gated delta rule in chunks is that of ``transformers``, however sequences are cut and packed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad, silu
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from hybridflow.models.attention import PackedAttention
from hybridflow.models.delta_rule import Recurrence, recur

SIZES = dict(key_heads=2, value_heads=6, key_size=5, value_size=7)
CHANNELS, KERNEL = 2 * 2 * 5 + 6 * 7, 4


def inputs(*shape: int, seed: int = 3) -> tuple[Recurrence, Tensor, Tensor, Tensor]:
    """Weights, and what tokens of this shape have, random."""
    generator = torch.Generator().manual_seed(seed)
    recurrence = Recurrence(0.5 * torch.randn(CHANNELS, KERNEL, generator=generator), **SIZES)
    mixed = torch.randn(*shape, CHANNELS, generator=generator)
    decay = -torch.rand(*shape, 6, generator=generator)
    return recurrence, mixed, decay, torch.rand(*shape, 6, generator=generator)


def by_transformers(recurrence: Recurrence, mixed: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Token by token, of whole sequences ``[samples, tokens, …]``."""
    padded = pad(mixed.transpose(1, 2), (KERNEL - 1, 0))
    channels = silu(conv1d(padded, recurrence.conv[:, None], groups=CHANNELS)).transpose(1, 2)
    query, key, value = channels.split([10, 10, 42], dim=-1)
    query, key, value = (each.unflatten(-1, (-1, size)) for each, size in ((query, 5), (key, 5), (value, 7)))
    found, _ = torch_recurrent_gated_delta_rule(query, key, value, decay, beta, use_qk_l2norm_in_kernel=True)
    return found


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_chunks_compute_what_transformers_computes_token_by_token(tokens):
    given = inputs(3, tokens)
    torch.testing.assert_close(recur(given[1], *given[2:], given[0])[0], by_transformers(*given), atol=2e-6, rtol=1e-5)


def test_gradients_are_those_of_the_token_by_token_rule():
    given = inputs(2, 90)
    weight = torch.randn(2, 90, 6, 7, generator=torch.Generator().manual_seed(4))
    gradients = []
    for compute in (lambda r, *rest: recur(*rest, r)[0], by_transformers):
        leaves = [each.clone().requires_grad_() for each in (given[0].conv, *given[1:])]
        (compute(given[0]._replace(conv=leaves[0]), *leaves[1:]) * weight).sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_a_state_goes_on_where_it_was_left():
    recurrence, *given = inputs(2, 150)
    whole, end = recur(*given, recurrence)
    state, found = None, []
    for start, stop in ((0, 1), (1, 70), (70, 71), (71, 72), (72, 150)):
        part, state = recur(*(each[:, start:stop] for each in given), recurrence, state)
        found.append(part)
    torch.testing.assert_close(torch.cat(found, 1), whole, atol=2e-6, rtol=1e-5)
    for ours, expected in zip(state, end, strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-6, rtol=1e-5)


def test_packed_sequences_share_the_tokens_of_a_prompt():
    lengths, prompt = [150, 20, 3, 151], 9
    recurrence, *given = inputs(sum(lengths) - prompt)
    # The last goes on from the first tokens of the first.
    shared = torch.cat([torch.arange(173), torch.arange(prompt), torch.arange(173, 173 + 151 - prompt)])
    packed = PackedAttention(lengths, torch.device("cpu"), shared)
    found = packed.recur(0, *given, recurrence)
    for places in shared.split(lengths):
        expected = by_transformers(recurrence, *(each[places][None] for each in given))[0]
        torch.testing.assert_close(found[places], expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_a_micro_batch_without_tokens_has_no_output(lengths):
    recurrence, *given = inputs(0)
    assert PackedAttention(lengths, torch.device("cpu")).recur(0, *given, recurrence).shape == (0, 6, 7)


def test_sequences_of_one_token_and_of_none_lie_beside_long_ones():
    lengths = [0, 1, 70, 0, 1]
    recurrence, *given = inputs(sum(lengths))
    found = PackedAttention(lengths, torch.device("cpu")).recur(0, *given, recurrence)
    for part in torch.arange(72).split([1, 70, 1]):
        expected = by_transformers(recurrence, *(each[part][None] for each in given))[0]
        torch.testing.assert_close(found[part], expected, atol=2e-6, rtol=1e-5)
