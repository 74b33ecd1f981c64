"""Advantages against constants worked out by hand, plain loops and equivalences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridflow.algorithms.advantages import (
    GROUP_ESTIMATORS,
    discounted_returns,
    gae,
    group_center,
    group_normalize,
    leave_one_out,
    length_weighted_center,
    remax,
    token_rewards,
    whiten,
)


def close(actual: Tensor, expected: Tensor | list, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=tolerance, atol=tolerance)


def random_batch(seed: int, samples: int = 4, tokens: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, samples, tokens, generator=generator)
    mask = (torch.rand(samples, tokens, generator=generator) < 0.7).float()
    mask[0, :2] = 1  # at least two tokens count
    return rewards, values, mask


def plain_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """GAE as a person would do it: drop what the policy did not produce, then recur over Python floats."""
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for sample in range(len(rewards)):
        own = [t for t in range(rewards.shape[1]) if mask[sample, t]]
        value_after, advantage_after = 0.0, 0.0
        for t in reversed(own):
            delta = float(rewards[sample, t]) + gamma * value_after - float(values[sample, t])
            advantage_after = delta + gamma * lam * advantage_after
            value_after = float(values[sample, t])
            advantages[sample, t] = advantage_after
            returns[sample, t] = advantage_after + value_after
    return advantages, returns


seeds = st.integers(0, 2**31 - 1)
fractions = st.floats(0, 1)


def test_gae_by_hand():
    # gamma 0.5, lambda 0.5 (product 0.25), r = 0 0 8, V = 2 4 6.
    # t=2: delta = 8 - 6                = 2    A = 2                        R = 8
    # t=1: delta = 0 + 0.5*6 - 4        = -1   A = -1 + 0.25*2     = -0.5   R = 3.5
    # t=0: delta = 0 + 0.5*4 - 2        = 0    A = 0 + 0.25*(-0.5) = -0.125 R = 1.875
    advantages, returns = gae(
        torch.tensor([[0.0, 0, 8]]), torch.tensor([[2.0, 4, 6]]), torch.ones(1, 3), gamma=0.5, gae_lambda=0.5
    )
    close(advantages, [[-0.125, -0.5, 2]])
    close(returns, [[1.875, 3.5, 8]])


def test_gae_carries_value_and_advantage_through_a_masked_token():
    # The same three tokens, with a tool's token (reward 100, value 50) in their midst and padding at the end.
    rewards = torch.tensor([[0.0, 0, 100, 8, math.nan]])
    values = torch.tensor([[2.0, 4, 50, 6, math.nan]])
    advantages, returns = gae(rewards, values, torch.tensor([[1.0, 1, 0, 1, 0]]), gamma=0.5, gae_lambda=0.5)
    close(advantages, [[-0.125, -0.5, 0, 2, 0]])
    close(returns, [[1.875, 3.5, 0, 8, 0]])


@settings(max_examples=30, deadline=None)
@given(seeds, fractions, fractions)
def test_gae_is_the_plain_loop(seed: int, gamma: float, lam: float):
    batch = random_batch(seed)
    for actual, expected in zip(gae(*batch, gamma=gamma, gae_lambda=lam), plain_gae(*batch, gamma, lam), strict=True):
        close(actual, expected, 1e-5)


def test_returns_are_reward_to_go_without_discount():
    rewards, values, mask = random_batch(3)
    advantages, returns = gae(rewards, values, mask, gamma=1.0, gae_lambda=1.0)
    reward_to_go = (rewards * mask).flip(1).cumsum(1).flip(1) * mask
    close(returns, reward_to_go, 1e-5)
    close(advantages, reward_to_go - values * mask, 1e-5)


def test_lambda_zero_is_the_one_step_error():
    rewards, values, mask = random_batch(4)
    mask[:] = 1
    next_values = torch.cat((values[:, 1:], torch.zeros(4, 1)), dim=1)
    advantages, _ = gae(rewards, values, mask, gamma=0.9, gae_lambda=0.0)
    close(advantages, rewards + 0.9 * next_values - values)


@settings(max_examples=20, deadline=None)
@given(seeds, st.integers(1, 5))
def test_padding_changes_nothing(seed: int, width: int):
    rewards, values, mask = random_batch(seed)
    junk = torch.full((4, width), math.nan)
    padded = [torch.cat((x, junk), dim=1) for x in (rewards, values)] + [torch.cat((mask, torch.zeros(4, width)), 1)]
    narrow, wide = gae(rewards, values, mask, gamma=0.9, gae_lambda=0.8), gae(*padded, gamma=0.9, gae_lambda=0.8)
    for x, y in zip(narrow, wide, strict=True):
        assert torch.equal(x, y[:, :7]) and not y[:, 7:].any()
    assert torch.equal(whiten(values, mask), whiten(padded[1], padded[2])[:, :7])


@settings(max_examples=20, deadline=None)
@given(seeds, st.permutations(range(4)))
def test_permuting_samples_permutes_results(seed: int, order: list[int]):
    rewards, values, mask = random_batch(seed)
    scores, groups = rewards[:, 0], torch.tensor([5, 9, 5, 5])
    permuted = gae(rewards[order], values[order], mask[order], gamma=0.9, gae_lambda=0.8)
    for x, y in zip(gae(rewards, values, mask, gamma=0.9, gae_lambda=0.8), permuted, strict=True):
        assert torch.equal(x[order], y)
    close(whiten(values[order], mask[order]), whiten(values, mask)[order])
    close(group_normalize(scores[order], groups[order]), group_normalize(scores, groups)[order])


def test_whiten_by_hand():
    # Tokens 1 2 3 6: mean 3, squares 4+1+0+9 = 14, Bessel 14/3. Scale sqrt(3/14) = 0.46291005.
    x = torch.tensor([[1.0, 2, math.nan], [3, -7, 6]])
    whitened = whiten(x, torch.tensor([[1.0, 1, 0], [1, 0, 1]]))
    close(whitened, [[-0.92582010, -0.46291005, 0], [0, 0, 1.38873015]])


def test_whiten_equal_tokens_are_zero():
    close(whiten(torch.full((2, 3), 0.1), torch.ones(2, 3)), torch.zeros(2, 3))


def test_whiten_far_from_zero_keeps_its_variance():
    # 10000 ± 0.0625 (exact in fp32): mean of squares less square of mean would be lost. n = 4, var = 4/3 * 0.0625^2.
    x = 10000 + 0.0625 * torch.tensor([[1.0, -1, 1, -1]])
    close(whiten(x, torch.ones(1, 4)), math.sqrt(3 / 4) * torch.tensor([[1.0, -1, 1, -1]]), 2e-6)


class Ranks:
    """``sum_over_ranks`` of one rank that runs alone: its n-th sum is the n-th total of all ranks, recorded before."""

    def __init__(self, totals: list[Tensor]) -> None:
        self.totals = iter(totals)

    def __call__(self, local: Tensor) -> Tensor:
        assert local.dtype == torch.float64 and local.numel() <= 2
        return next(self.totals)


def test_whiten_over_ranks_is_the_whole_batch():
    _, values, mask = random_batch(11, samples=6)
    shares = [(values[:1], mask[:1]), (values[1:1], mask[1:1]), (values[1:], mask[1:])]  # one rank has no sample
    on = values.double() * mask
    n, mean = mask.double().sum(), on.sum() / mask.sum()
    squares = ((on - mean).square() * mask).sum()
    parts = [whiten(*share, sum_over_ranks=Ranks([torch.stack((n, on.sum())), squares[None]])) for share in shares]
    close(torch.cat(parts), whiten(values, mask))
    assert not torch.allclose(torch.cat([whiten(*shares[0]), whiten(*shares[2])]), whiten(values, mask), atol=1e-3)


def test_whiten_sends_its_own_sums():
    sent = []
    whiten(torch.tensor([[1.0, 2, 9]]), torch.tensor([[1.0, 1, 0]]), sum_over_ranks=lambda x: sent.append(x) or x)
    # n = 2, sum 3; then squares about 1.5: 0.25 + 0.25.
    assert [x.tolist() for x in sent] == [[2, 3], [0.5]]


@pytest.mark.parametrize("count", [0, 1])
def test_whiten_refuses_fewer_than_two_tokens(count: int):
    mask = torch.zeros(2, 3)
    mask[0, :count] = 1
    with pytest.raises(ValueError, match=rf"over {count} response token.*at least 2"):
        whiten(torch.ones(2, 3), mask)


def test_whiten_counts_tokens_over_ranks_not_locally():
    # One token here, one elsewhere (value 3): mean 2, var 2, scale sqrt(1/2).
    mask = torch.tensor([[1.0, 0]])
    totals = [torch.tensor([2.0, 4]).double(), torch.tensor([2.0]).double()]
    close(whiten(torch.tensor([[1.0, 9]]), mask, sum_over_ranks=Ranks(totals)), [[-math.sqrt(0.5), 0]])


def test_group_normalize_by_hand():
    # Group 7 = 1 2 3 6: mean 3, unbiased std sqrt(14/3) = 2.16024690. Group 2 = 0 1: mean 0.5, std sqrt(1/2).
    # Group 4 is alone.
    scores = torch.tensor([1.0, 0, 2, 5, 3, 1, 6])
    groups = torch.tensor([7, 2, 7, 4, 7, 2, 7])
    expected = [-0.92582010, -0.70710678, -0.46291005, 0, 0, 0.70710678, 1.38873015]
    close(group_normalize(scores, groups), expected, 3e-6)


def test_group_of_equal_scores_has_no_advantage():
    # A mean taken in fp32 would miss 0.9 by 6e-8, and 6e-8 / 1e-6 is an advantage of 0.06.
    close(group_normalize(torch.full((3,), 0.9), torch.zeros(3, dtype=torch.int64)), torch.zeros(3))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.floats(-5, 5, width=32)), min_size=1, max_size=12))
def test_group_normalize_is_the_plain_loop(rows: list[tuple[int, float]]):
    groups, scores = zip(*rows, strict=True)
    expected = []
    for group, score in rows:
        mates = [s for g, s in rows if g == group]
        mean = math.fsum(mates) / len(mates)
        variance = math.fsum((s - mean) ** 2 for s in mates) / max(len(mates) - 1, 1)
        expected.append((score - mean) / (math.sqrt(variance) + 1e-6))
    close(group_normalize(torch.tensor(scores), torch.tensor(groups)), expected, 1e-5)


# Group 7 = 1 2 3 6 of lengths 4 1 2 1, group 2 = 0 1 of lengths 3 1, group 4 alone.
SCORES = torch.tensor([1.0, 0, 2, 5, 3, 1, 6])
GROUPS = torch.tensor([7, 2, 7, 4, 7, 2, 7])
LENGTHS = torch.tensor([4.0, 3, 1, 9, 2, 1, 1])


def test_group_baselines_by_hand():
    # Means 3 and 0.5; a group of one has nothing to be compared with.
    close(group_center(SCORES, GROUPS), [-2, -0.5, -1, 0, 0, 0.5, 3])
    # The others' means: of 2 3 6, 1, 1 3 6, none, 1 2 6, 0, 1 2 3.
    close(leave_one_out(SCORES, GROUPS), [1 - 11 / 3, -1, 2 - 10 / 3, 0, 0, 1, 4])
    # (4·1 + 1·2 + 2·3 + 1·6) / 8 = 2.25 and (3·0 + 1·1) / 4 = 0.25.
    close(length_weighted_center(SCORES, GROUPS, LENGTHS), [-1.25, -0.25, -0.25, 0, 0.75, 0.75, 3.75])


def test_a_group_without_a_token_keeps_its_scores():
    close(length_weighted_center(torch.tensor([1.0, 3]), torch.tensor([0, 0]), torch.zeros(2)), [1, 3])


rows_of_groups = st.lists(
    st.tuples(st.integers(-3, 3), st.floats(-5, 5, width=32), st.integers(1, 9)), min_size=1, max_size=12
)


@settings(max_examples=40, deadline=None)
@given(rows_of_groups, st.randoms(use_true_random=False))
def test_group_baselines_are_the_plain_loops_in_any_order(rows: list[tuple[int, float, int]], random):
    random.shuffle(rows)
    centred, left_out, weighted = [], [], []
    for index, (group, score, _) in enumerate(rows):
        mates = [(s, n) for g, s, n in rows if g == group]
        others = [s for other, (g, s, _) in enumerate(rows) if g == group and other != index]
        centred.append(score - math.fsum(s for s, _ in mates) / len(mates))
        left_out.append(score - math.fsum(others) / len(others) if others else 0.0)
        weighted.append(score - math.fsum(s * n for s, n in mates) / sum(n for _, n in mates))
    groups, scores, lengths = (torch.tensor(column) for column in zip(*rows, strict=True))
    close(group_center(scores, groups), centred, 1e-5)
    close(leave_one_out(scores, groups), left_out, 1e-5)
    close(length_weighted_center(scores, groups, lengths), weighted, 1e-5)


def test_discounted_returns_by_hand():
    # 3; 2 + 3/2 = 3.5; carried through the masked token: 1 + 3.5/2 = 2.75.
    rewards = torch.tensor([[1.0, math.nan, 2, 3], [4.0, 5, math.nan, math.nan]])
    mask = torch.tensor([[1.0, 0, 1, 1], [1, 1, 0, 0]])
    close(discounted_returns(rewards, mask, gamma=0.5), [[2.75, 0, 3.5, 3], [6.5, 5, 0, 0]])


@settings(max_examples=20, deadline=None)
@given(seeds, fractions)
def test_discounted_returns_are_the_plain_sum(seed: int, gamma: float):
    rewards, _, mask = random_batch(seed)
    expected = torch.zeros_like(rewards)
    for sample in range(len(rewards)):
        own = [t for t in range(rewards.shape[1]) if mask[sample, t]]
        for place, t in enumerate(own):
            later = own[place:]
            expected[sample, t] = math.fsum(gamma**k * float(rewards[sample, each]) for k, each in enumerate(later))
    close(discounted_returns(rewards, mask, gamma=gamma), expected, 1e-5)


def test_remax_by_hand():
    # Rewards to go 6 5 . 3 less a baseline of 2; 1 less one of 4.
    rewards = torch.tensor([[1.0, 2, math.nan, 3], [1, 0, 0, 0]])
    mask = torch.tensor([[1.0, 1, 0, 1], [1, 0, 0, 0]])
    close(remax(rewards, torch.tensor([2.0, 4]), mask), [[4, 3, 0, 1], [-3, 0, 0, 0]])


def test_token_rewards_by_hand():
    # Score on the last own token; kl_coef 0.5 times the KL taken off each own token; nothing where the mask is 0.
    kl = torch.tensor([[0.2, 0.4, math.nan], [0.2, math.nan, 0.6], [1, 1, 1]])
    mask = torch.tensor([[1.0, 1, 0], [1, 0, 1], [0, 0, 0]])
    rewards = token_rewards(torch.tensor([1.0, 2, 3]), kl, mask, kl_coef=0.5)
    close(rewards, [[-0.1, 0.8, 0], [-0.1, 0, 1.7], [0, 0, 0]])


def test_unlike_shapes_are_refused():
    wide, narrow = torch.ones(2, 3), torch.ones(2, 1)
    with pytest.raises(ValueError, match=r"rewards \[2, 3\], values \[2, 1\], mask \[2, 3\]"):
        gae(wide, narrow, wide, gamma=1.0, gae_lambda=1.0)
    with pytest.raises(ValueError, match="shapes differ"):
        whiten(wide, narrow)
    for groups in (torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"scores \[2, 3\].* must be \[samples\]"):
            group_normalize(wide, groups)
    with pytest.raises(ValueError, match=r"lengths \[1\] for scores \[2\]"):
        length_weighted_center(torch.ones(2), torch.ones(2), torch.ones(1))
    with pytest.raises(ValueError, match=r"baselines \[3\] for rewards \[2, 3\]"):
        remax(wide, torch.ones(3), wide)
    with pytest.raises(ValueError, match=r"scores \[3\] for kl \[2, 3\]"):
        token_rewards(torch.ones(3), wide, wide, kl_coef=0.0)


def test_half_precision_is_left_at_the_door():
    values = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.bfloat16)
    assert whiten(values, torch.ones(1, 3)).dtype == torch.float32
    assert gae(values, values, values, gamma=1.0, gae_lambda=1.0)[0].dtype == torch.float32
    for estimate in GROUP_ESTIMATORS.values():
        assert estimate(values[0], torch.zeros(3, dtype=torch.int64), torch.ones(3)).dtype == torch.float32
