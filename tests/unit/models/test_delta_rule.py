"""The gated delta rule in chunks is that of ``transformers``, however sequences are cut and packed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad, silu
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from hybridflow.models.attention import PackedAttention
from hybridflow.models.delta_rule import Recurrence, empty_state, recur, step
from hybridflow.models.gated_delta_net import GatedDeltaNet
from hybridflow.rollout.paged import PagedAttention, PagedCache, block_bytes, state_bytes
from tests.cuda.fake.machine import Launches

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


def test_memory_grows_with_the_tokens_and_not_with_their_square():
    made = []
    for tokens in (1024, 2048):
        recurrence, *given = inputs(1, tokens)
        with Launches() as launches:
            recur(*given, recurrence)
        made.append(launches.made_bytes)
    assert made[1] <= 2.01 * made[0]


def test_gradients_take_work_that_grows_with_the_tokens():
    made = []
    for tokens in (1024, 2048):
        recurrence, *given = inputs(1, tokens)
        leaves = [each.requires_grad_() for each in (recurrence.conv, *given)]
        output = recur(*leaves[1:], recurrence)[0]
        with Launches() as launches:
            torch.autograd.grad(output.sum(), leaves)
        made.append(launches.made_bytes)
    assert made[1] <= 2.01 * made[0]


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


def test_filling_behind_a_sequence_changes_neither_output_nor_state():
    recurrence, *given = inputs(4, 70)
    before = recur(*inputs(4, 9, seed=5)[1:], recurrence)[1]
    lengths = [70, 1, 2, 33]
    found, after = recur(*given, recurrence, before, torch.tensor(lengths))
    for index, length in enumerate(lengths):
        own = (each[index : index + 1, :length] for each in given)
        output, state = recur(*own, recurrence, type(before)(*(each[index : index + 1] for each in before)))
        torch.testing.assert_close(found[index, :length], output[0], atol=2e-6, rtol=1e-5)
        for ours, expected in zip(after, state, strict=True):
            torch.testing.assert_close(ours[index], expected[0], atol=2e-6, rtol=1e-5)


def test_a_token_is_taken_into_states_where_they_are():
    sizes = dict(key_heads=2, value_heads=6, key_size=64, value_size=64)
    recurrence = Recurrence(
        torch.randn(2 * 2 * 64 + 6 * 64, KERNEL, generator=torch.Generator().manual_seed(3)), **sizes
    )
    state, slots = empty_state(9, recurrence), torch.tensor([7, 0, 3, 8])
    mixed, decay, beta = torch.randn(4, len(recurrence.conv)), -torch.rand(4, 6), torch.rand(4, 6)
    with Launches() as launches:
        step(mixed, decay, beta, recurrence, state, slots)
    assert launches.made_bytes < state.matrix[slots].nbytes
    assert not state.matrix[[1, 2, 4, 5, 6]].any() and state.matrix[slots].flatten(1).any(1).all()


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


@pytest.mark.parametrize("lengths", [[0, 1, 70, 0, 1], [70, 0]])
def test_sequences_of_one_token_and_of_none_lie_beside_long_ones(lengths):
    recurrence, *given = inputs(sum(lengths))
    found = PackedAttention(lengths, torch.device("cpu")).recur(0, *given, recurrence)
    for part in torch.arange(sum(lengths)).split([each for each in lengths if each]):
        expected = by_transformers(recurrence, *(each[part][None] for each in given))[0]
        torch.testing.assert_close(found[part], expected, atol=2e-6, rtol=1e-5)


class Linear(GatedDeltaNet):
    """Has nothing but what the cache asks for."""

    def __init__(self, recurrence: Recurrence) -> None:
        nn.Module.__init__(self)
        self.recurrence = lambda: recurrence


def linear_cache(recurrence: Recurrence, num_slots: int) -> PagedCache:
    """A cache of two layers, the second with linear attention, whose memory held NaN before."""
    full = SimpleNamespace(num_query_groups_per_partition=1, hidden_size_per_attention_head=4)
    layers = [SimpleNamespace(self_attention=each) for each in (full, Linear(recurrence))]
    config = SimpleNamespace(params_dtype=torch.float32)
    model = SimpleNamespace(config=config, decoder=SimpleNamespace(layers=layers))
    cache = PagedCache(model, 3, torch.device("cpu"), num_slots=num_slots)
    # A block has 16 keys and as many values, of one layer. A state has 3 inputs and a matrix for each head.
    state = 4 * (3 * CHANNELS + 6 * 5 * 7)
    assert (block_bytes(model), state_bytes(model)) == (4 * 2 * 16 * 4, state)
    assert cache.num_bytes == 3 * block_bytes(model) + num_slots * state
    for each in cache.states[1]:
        each.fill_(torch.nan)
    return cache


def test_states_by_slot_go_on_where_they_stand():
    lengths, prompt, num_slots = [70, 3, 131, 1, 20], 9, 3
    recurrence, *given = inputs(sum(lengths))
    parts = list(zip(*(each.split(lengths) for each in given), strict=True))
    # The last has the first one's prompt, which it computes itself.
    parts[4] = tuple(torch.cat([first[:prompt], own[prompt:]]) for first, own in zip(parts[0], parts[4], strict=True))
    expected = [by_transformers(recurrence, *(each[None] for each in part))[0] for part in parts]
    cache = linear_cache(recurrence, 2 * num_slots)
    # Of each lane in turn, by slot: which sequence, from where to where. Slots are taken over from those that ended;
    # the third sequence loses its slot in the middle, and begins anew in another.
    steps = [
        (0, {0: (0, 0, 68), 2: (1, 0, 2)}),
        (1, {0: (2, 0, 64), 1: (3, 0, 1)}),
        (0, {0: (0, 68, 69), 2: (1, 2, 3)}),
        (1, {1: (4, 0, 17)}),
        (0, {0: (0, 69, 70), 2: (2, 0, 1)}),
        (1, {1: (4, 17, 18)}),
        (0, {2: (2, 1, 130)}),
        (1, {1: (4, 18, 20)}),
        (0, {2: (2, 130, 131)}),
    ]
    for lane, slots in steps:
        sequences = torch.tensor([slot for slot, (_, start, stop) in slots.items() for _ in range(start, stop)])
        positions = torch.cat([torch.arange(start, stop) for _, start, stop in slots.values()])
        plan = PagedAttention(cache, torch.zeros(num_slots, 9).int(), sequences, positions, lane * num_slots)
        mixed, decay, beta = (
            torch.cat([parts[index][place][start:stop] for index, start, stop in slots.values()]) for place in range(3)
        )
        wanted = torch.cat([expected[index][start:stop] for index, start, stop in slots.values()])
        torch.testing.assert_close(plan.recur(1, mixed, decay, beta, recurrence), wanted, atol=2e-6, rtol=1e-5)
