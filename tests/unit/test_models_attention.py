"""Packed, padded and cached attention are one."""

import pytest
import torch

from hybridflow.models.attention import CachedAttention, KeyValueCache, PackedAttention, Scoring

HEAD = 6


def by_hand(query, key, value, scale):
    """Causal attention of one sequence, head by head: ``[tokens, heads, head]``."""
    per_group = query.shape[1] // key.shape[1]
    out = torch.zeros_like(query)
    for head in range(query.shape[1]):
        for place in range(len(query)):
            keys, values = key[: place + 1, head // per_group], value[: place + 1, head // per_group]
            out[place, head] = (keys @ query[place, head] * scale).softmax(0) @ values
    return out


def random_packed(lengths, heads, groups):
    generator = torch.Generator().manual_seed(1)
    shapes = [(sum(lengths), count, HEAD) for count in (heads, groups, groups)]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("lengths", [[5], [3, 3], [1, 7, 4], [2, 1]])
@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2), (3, 1)])
def test_packed_equals_padded_and_the_formula(lengths, heads, groups):
    packed = random_packed(lengths, heads, groups)
    device = torch.device("cpu")
    scale = HEAD**-0.5
    context = PackedAttention(lengths, device).attend(0, *packed, Scoring(scale=scale))

    width = max(lengths)
    kept = torch.cat([torch.arange(length) + row * width for row, length in enumerate(lengths)])
    # What stands in the padding must not matter.
    padded = [torch.full((len(lengths) * width, *each.shape[1:]), 9.0).index_copy(0, kept, each) for each in packed]
    other = PackedAttention([width] * len(lengths), device).attend(0, *padded, Scoring(scale=scale))[kept]
    torch.testing.assert_close(other, context, atol=1e-6, rtol=0)

    parts = zip(*(each.split(lengths) for each in packed), strict=True)
    torch.testing.assert_close(torch.cat([by_hand(*part, scale) for part in parts]), context, atol=1e-6, rtol=0)

    weight = torch.randn(context.shape, generator=torch.Generator().manual_seed(2))
    gradients = torch.autograd.grad((context * weight).sum(), packed)
    for one, another in zip(gradients, torch.autograd.grad((other * weight).sum(), packed), strict=True):
        torch.testing.assert_close(one, another, atol=1e-6, rtol=0)


def test_positions_begin_anew_in_each_sequence():
    assert PackedAttention([2, 1, 3], torch.device("cpu")).positions.tolist() == [0, 1, 0, 0, 1, 2]


def test_cached_continues_packed():
    lengths, device, scale = [3, 6, 1], torch.device("cpu"), 0.4
    with torch.no_grad():
        query, key, value = random_packed([length + 1 for length in lengths], 4, 2)
        expected = PackedAttention([length + 1 for length in lengths], device).attend(
            0, query, key, value, Scoring(scale=scale)
        )
        cache = KeyValueCache(
            num_layers=1, num_slots=3, num_tokens=8, num_groups=2, head_size=HEAD, dtype=torch.float32, device=device
        )
        is_last = torch.zeros(sum(lengths) + 3, dtype=torch.bool)
        is_last[(torch.tensor(lengths) + 1).cumsum(0) - 1] = True
        prompts = PackedAttention(lengths, device, cache).attend(
            0, query[~is_last], key[~is_last], value[~is_last], Scoring(scale=scale)
        )
        torch.testing.assert_close(prompts, expected[~is_last], atol=1e-6, rtol=0)
        following = CachedAttention(cache, torch.tensor(lengths))
        context = following.attend(0, query[is_last], key[is_last], value[is_last], Scoring(scale=scale))
        torch.testing.assert_close(context, expected[is_last], atol=1e-6, rtol=0)
