"""Packed, padded and paged attention are one."""

from types import SimpleNamespace

import pytest
import torch

from hybridflow.models.attention import PackedAttention
from hybridflow.models.microbatch import first_of_prompt, pack, split_by_tokens
from hybridflow.models.scoring import Scoring
from hybridflow.rollout.paged import PagedAttention, PagedCache

HEAD = 6


def by_hand(query, key, value, scoring):
    """Causal attention of one sequence, head by head: ``[tokens, heads, head]``."""
    per_group = query.shape[1] // key.shape[1]
    out = torch.zeros_like(query)
    for head in range(query.shape[1]):
        for place in range(len(query)):
            seen = slice(0 if scoring.window is None else max(0, place + 1 - scoring.window), place + 1)
            keys, values = key[seen, head // per_group], value[seen, head // per_group]
            scores = keys @ query[place, head] * scoring.scale
            if scoring.softcap is not None:
                scores = scoring.softcap * (scores / scoring.softcap).tanh()
            out[place, head] = scores.softmax(0) @ values
    return out


SCORINGS = [
    Scoring(scale=HEAD**-0.5),
    Scoring(scale=0.4, window=3),
    Scoring(scale=0.4, window=1),
    Scoring(scale=0.7, softcap=1.2),
    Scoring(scale=0.7, softcap=1.2, window=2),
]


def random_packed(lengths, heads, groups):
    generator = torch.Generator().manual_seed(1)
    shapes = [(sum(lengths), count, HEAD) for count in (heads, groups, groups)]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("lengths", [[5], [3, 3], [1, 7, 4], [2, 1]])
@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_packed_equals_padded_and_the_formula(lengths, heads, groups, scoring):
    packed = random_packed(lengths, heads, groups)
    device = torch.device("cpu")
    context = PackedAttention(lengths, device).attend(0, *packed, scoring)

    width = max(lengths)
    kept = torch.cat([torch.arange(length) + row * width for row, length in enumerate(lengths)])
    # What stands in the padding must not matter.
    padded = [torch.full((len(lengths) * width, *each.shape[1:]), 9.0).index_copy(0, kept, each) for each in packed]
    other = PackedAttention([width] * len(lengths), device).attend(0, *padded, scoring)[kept]
    torch.testing.assert_close(other, context, atol=1e-6, rtol=0)

    parts = zip(*(each.split(lengths) for each in packed), strict=True)
    torch.testing.assert_close(torch.cat([by_hand(*part, scoring) for part in parts]), context, atol=1e-6, rtol=0)

    weight = torch.randn(context.shape, generator=torch.Generator().manual_seed(2))
    gradients = torch.autograd.grad((context * weight).sum(), packed)
    for one, another in zip(gradients, torch.autograd.grad((other * weight).sum(), packed), strict=True):
        torch.testing.assert_close(one, another, atol=1e-6, rtol=0)


def test_positions_begin_anew_in_each_sequence():
    assert PackedAttention([2, 1, 3], torch.device("cpu")).positions.tolist() == [0, 1, 0, 0, 1, 2]


@pytest.mark.parametrize("scoring", SCORINGS)
def test_what_sequences_share_counts_for_all_of_them(scoring):
    # Two beginnings of 3 and 2 tokens: of three sequences the one, of two the other; a sixth shares nothing.
    places = [[0, 1, 2, 3, 4], [0, 1, 2, *range(5, 100)], [0, 1, 2], [100, 101, 102], [100, 101], [103]]
    packed = random_packed([104], 4, 2)
    lengths, device = [len(each) for each in places], torch.device("cpu")
    attention = PackedAttention(lengths, device, torch.tensor([place for each in places for place in each]))
    context = attention.attend(0, *packed, scoring)
    expected = [by_hand(*(part[each] for part in packed), scoring) for each in map(torch.tensor, places)]
    for each, alone in zip(places, expected, strict=True):
        torch.testing.assert_close(context[each], alone, atol=1e-6, rtol=0)
    assert attention.positions[[*range(8), 99, 100, 101, 102, 103]].tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 97, 0, 1, 2, 0]
    # Each token's output counts once, though it may be found in several sequences.
    weight = torch.randn(context.shape, generator=torch.Generator().manual_seed(2))
    own = [[*range(5)], [*range(5, 100)], [], [100, 101, 102], [], [103]]
    total = sum(
        (alone[[each.index(place) for place in mine]] * weight[mine]).sum()
        for each, mine, alone in zip(places, own, expected, strict=True)
    )
    gradients = torch.autograd.grad((context * weight).sum(), packed)
    for one, another in zip(gradients, torch.autograd.grad(total, packed), strict=True):
        torch.testing.assert_close(one, another, atol=2e-6, rtol=0)


def test_sums_so_far_go_over_a_token_s_own_sequence():
    places = torch.tensor([0, 1, 2, 0, 1, 3, 4, 5])
    attention = PackedAttention([3, 4, 1], torch.device("cpu"), places)
    assert attention.sums_so_far(torch.tensor([1, 10, 100, 1000, 5, 7])).tolist() == [1, 11, 111, 1011, 1016, 7]


def test_a_prompt_that_samples_share_is_packed_once():
    sequences = [torch.tensor(each) for each in ([5, 6, 7], [1, 2, 3], [5, 6, 8, 9], [5, 6])]
    prompts = [2, 1, 2, 1]
    assert first_of_prompt(sequences, prompts) == [0, 1, 0, 3]
    batch = pack([2, 3, 0], sequences, prompts, torch.device("cpu"))
    assert batch.tokens.tolist() == [5, 6, 8, 9, 5, 6, 7]
    assert [each.tolist() for each in batch.places] == [[0, 1, 2, 3], [4, 5], [0, 1, 6]]
    assert (batch.lengths, batch.response_lengths) == ([4, 2, 3], [2, 1, 1])
    assert batch.rows.tolist() == [1, 2, 4, 1] and batch.targets.tolist() == [8, 9, 6, 7]
    assert batch.attention.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]


def test_samples_of_one_prompt_come_together():
    lengths, prompts = [9, 3, 4, 8, 3], [0, 1, 0, 1, 4]
    assert split_by_tokens(lengths, 20) == [[1, 4, 2, 3], [0]]
    # Those of the shortest longest sample first; all tokens count, shared or not.
    assert split_by_tokens(lengths, 20, prompts=prompts) == [[4, 1, 3, 2], [0]]
    assert split_by_tokens(lengths, 5, prompts=prompts) == [[4], [1], [3], [2], [0]]


def empty_cache(groups: int, num_blocks: int) -> PagedCache:
    """A cache of one layer whose memory held NaN before."""
    attention = SimpleNamespace(num_query_groups_per_partition=groups, hidden_size_per_attention_head=HEAD)
    model = SimpleNamespace(
        config=SimpleNamespace(params_dtype=torch.float32),
        decoder=SimpleNamespace(layers=[SimpleNamespace(self_attention=attention)]),
    )
    cache = PagedCache(model, num_blocks, torch.device("cpu"))
    for each in (*cache.keys, *cache.values):
        each.fill_(torch.nan)
    return cache


@pytest.mark.parametrize("heads, groups", [(4, 2), (3, 1)])
@pytest.mark.parametrize(
    "scoring", [*SCORINGS, Scoring(scale=0.4, window=17), Scoring(scale=0.7, softcap=1.2, window=20)]
)
def test_paged_continues_packed(scoring, heads, groups):
    lengths = [3, 40, 1, 17]
    # Tokens of each sequence in each step: prompts in pieces, single tokens beside them, some not there at all.
    steps = [[2, 15, 0, 16], [1, 1, 0, 1], [0, 23, 1, 0], [0, 1, 0, 0]]
    assert [sum(counts) for counts in zip(*steps, strict=True)] == lengths
    with torch.no_grad():
        packed = random_packed(lengths, heads, groups)
        expected = PackedAttention(lengths, torch.device("cpu")).attend(0, *packed, scoring).split(lengths)
        parts = [each.split(lengths) for each in packed]
        cache = empty_cache(groups, 13)
        tables = torch.randperm(13, generator=torch.Generator().manual_seed(3))[:12].int().view(4, 3)
        done = [0] * len(lengths)
        for counts in steps:
            where = [(index, slice(done[index], done[index] + count)) for index, count in enumerate(counts)]
            sequences = torch.tensor([index for index, count in enumerate(counts) for _ in range(count)])
            positions = torch.cat([torch.arange(part.start, part.stop) for _, part in where])
            query, key, value = (torch.cat([each[index][part] for index, part in where]) for each in parts)
            context = PagedAttention(cache, tables, sequences, positions).attend(0, query, key, value, scoring)
            wanted = torch.cat([expected[index][part] for index, part in where])
            torch.testing.assert_close(context, wanted, atol=1e-6, rtol=0)
            done = [part.stop for _, part in where]
