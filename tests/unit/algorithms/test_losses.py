"""Losses against constants worked out by hand, and the sum over micro-batches against the whole."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridflow.algorithms.losses import (
    AGGREGATIONS,
    Totals,
    aggregate,
    cispo_loss,
    gspo_loss,
    policy_loss,
    value_loss,
)

# Two sequences with sums 3 and 9 over 2 and 3 tokens, and one without a token.
LOSS = torch.tensor([[1.0, 2, math.nan], [2, 3, 4], [5, 5, 5]])
MASK = torch.tensor([[1.0, 1, 0], [1, 1, 1], [0, 0, 0]])
TOTALS = Totals(num_tokens=5, num_sequences=2, max_response_tokens=10)


def close(actual: Tensor, expected: Tensor | list | float, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 12 / 5),
        ("seq-mean-token-sum", (3 + 9) / 2),
        ("seq-mean-token-mean", (3 / 2 + 9 / 3) / 2),
        ("seq-mean-token-sum-norm", (3 / 10 + 9 / 10) / 2),
    ],
)
def test_aggregate_by_hand(mode: str, expected: float):
    close(aggregate(LOSS, MASK, mode, TOTALS), expected)
    padded = torch.cat((LOSS, torch.full((3, 4), math.nan)), 1), torch.cat((MASK, torch.zeros(3, 4)), 1)
    close(aggregate(*padded, mode, TOTALS), expected)


def test_the_modes_tested_are_all():
    assert set(AGGREGATIONS) == {"token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31 - 1), st.sampled_from(AGGREGATIONS), st.permutations(range(6)), st.integers(0, 6))
def test_micro_batches_add_up_to_the_whole(seed: int, mode: str, order: list[int], cut: int):
    generator = torch.Generator().manual_seed(seed)
    log_probs = (-torch.rand(6, 5, generator=generator)).requires_grad_()
    old_log_probs = -torch.rand(6, 5, generator=generator)
    advantages = torch.randn(6, 5, generator=generator)
    mask = (torch.rand(6, 5, generator=generator) < 0.6).float()
    mask[0, 0] = 1
    totals = Totals(num_tokens=int(mask.sum()), num_sequences=int((mask.sum(1) > 0).sum()), max_response_tokens=8)

    def share(rows: list[int]) -> Tensor:
        loss, _ = policy_loss(log_probs[rows], old_log_probs[rows], advantages[rows], clip_low=0.2, clip_high=0.3)
        return aggregate(loss, mask[rows], mode, totals)

    whole = share(list(range(6)))
    parts = share(order[:cut]) + share(order[cut:])
    close(parts, whole.detach())
    (expected,) = torch.autograd.grad(whole, log_probs)
    close(torch.autograd.grad(parts, log_probs)[0], expected)
    assert not expected[mask == 0].any()


def test_a_micro_batch_without_tokens_has_a_gradient_of_zero():
    loss = torch.ones(2, 3, requires_grad=True)
    for mode in AGGREGATIONS:
        share = aggregate(loss, torch.zeros(2, 3), mode, TOTALS)
        assert share == 0 and not torch.autograd.grad(share, loss)[0].any()


def test_bad_modes_counts_and_shapes_are_refused():
    with pytest.raises(ValueError, match="allowed are token-mean, seq-mean-token-sum,"):
        aggregate(LOSS, MASK, "mean", TOTALS)
    with pytest.raises(ValueError, match="num_sequences=0 .* at least 1"):
        Totals(num_tokens=1, num_sequences=0, max_response_tokens=1)
    with pytest.raises(ValueError, match=r"loss \[3, 3\], mask \[3, 1\]"):
        aggregate(LOSS, MASK[:, :1], "token-mean", TOTALS)
    with pytest.raises(ValueError, match=r"advantages \[3, 1\]"):
        gspo_loss(LOSS, LOSS, LOSS[:, :1], MASK, clip_low=0.2, clip_high=0.2)
    with pytest.raises(ValueError, match=r"advantages \[3, 1\]"):
        cispo_loss(LOSS, LOSS, LOSS[:, :1], clip_low=0.2, clip_high=0.2)


# clip_low 0.2, clip_high 0.3, dual_clip 3. A = +2 for the first four, -2 for the last four.
# ratio  A   -A*ratio  -A*clip          loss  gradient = -A*ratio where the ratio counts
# 1.0   +2   -2        -2               -2    -2
# 1.25  +2   -2.5      -2.5             -2.5  -2.5   (inside clip_high, beyond clip_low)
# 1.5   +2   -3        -2.6 (1.3)       -2.6   0     clipped
# 0.5   +2   -1        -1.6 (0.8)       -1    -1
# 1.0   -2    2         2                2     2
# 0.5   -2    1         1.6 (0.8)        1.6   0     clipped
# 2.0   -2    4         2.6 (1.3)        4     4
# 5.0   -2    10        2.6              6     0     dual clip: min(10, 3*2); without it 10, gradient 10
RATIOS = [1.0, 1.25, 1.5, 0.5, 1.0, 0.5, 2.0, 5.0]
ADVANTAGES = torch.tensor([[2.0, 2, 2, 2, -2, -2, -2, -2]])


@pytest.mark.parametrize(("dual_clip", "last_loss", "last_gradient"), [(None, 10, 10), (3.0, 6, 0)])
def test_policy_loss_by_hand(dual_clip: float | None, last_loss: float, last_gradient: float):
    old_log_probs = torch.full((1, 8), -1.5)
    log_probs = (old_log_probs + torch.tensor([RATIOS]).log()).requires_grad_()
    loss, stats = policy_loss(log_probs, old_log_probs, ADVANTAGES, clip_low=0.2, clip_high=0.3, dual_clip=dual_clip)
    loss.sum().backward()
    close(loss.detach(), [[-2, -2.5, -2.6, -1, 2, 1.6, 4, last_loss]])
    close(log_probs.grad, [[-2, -2.5, 0, -1, 2, 0, 4, last_gradient]], 2e-6)
    close(stats.ratio, [RATIOS])
    assert stats.is_clipped.tolist() == [[False, False, True, False, False, True, False, False]]
    assert stats.is_dual_clipped.tolist() == [[False] * 7 + [dual_clip is not None]]
    assert not stats.ratio.requires_grad


def test_on_policy_gradient_is_minus_the_advantage():
    log_probs = torch.tensor([[-0.5, -1.5, -3.0]], requires_grad=True)
    advantages = torch.tensor([[1.0, -2, 0.5]])
    loss, stats = policy_loss(log_probs, log_probs.detach(), advantages, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    loss.sum().backward()
    assert torch.equal(log_probs.grad, -advantages) and not stats.is_clipped.any()


def test_ratio_is_clamped_at_exp_20():
    old_log_probs = torch.tensor([[-500.0, 0]])
    log_probs = torch.tensor([[0.0, -500]])
    loss, stats = policy_loss(log_probs, old_log_probs, torch.tensor([[-1.0, 1]]), clip_low=0.2, clip_high=0.2)
    close(stats.ratio, [[math.exp(20), math.exp(-20)]])
    close(loss, [[math.exp(20), -math.exp(-20)]])


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-3, 3, width=32), st.floats(-3, 3, width=32)), min_size=1, max_size=9),
    st.floats(0, 0.9),
    st.floats(0, 2),
    st.one_of(st.none(), st.floats(1.01, 5)),
)
def test_policy_loss_is_the_plain_loop(rows: list, low: float, high: float, dual_clip: float | None):
    expected = []
    for d, a in rows:
        ratio = math.exp(d)
        loss = max(-a * ratio, -a * min(max(ratio, 1 - low), 1 + high))
        expected.append(min(loss, -a * dual_clip) if dual_clip is not None and a < 0 else loss)
    d, a = (torch.tensor(column) for column in zip(*rows, strict=True))
    loss, _ = policy_loss(d, torch.zeros_like(d), a, clip_low=low, clip_high=high, dual_clip=dual_clip)
    close(loss, expected, 1e-5)


@pytest.mark.parametrize("dual_clip", [1.0, 0.5, -3.0])
def test_dual_clip_of_one_or_less_is_refused(dual_clip: float):
    with pytest.raises(ValueError, match="must be above 1"):
        policy_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), clip_low=0.2, clip_high=0.2, dual_clip=dual_clip)


def gspo_of(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, rows: list[int]) -> Tensor:
    """The share of some sequences in the loss of all."""
    loss, _ = gspo_loss(log_probs[rows], old_log_probs[rows], advantages[rows], mask[rows], clip_low=0.2, clip_high=0.3)
    totals = Totals(num_tokens=int(mask.sum()), num_sequences=int((mask.sum(1) > 0).sum()), max_response_tokens=8)
    return aggregate(loss, mask[rows], "seq-mean-token-mean", totals)


def test_gspo_by_hand():
    # Mean log-ratios log 2, log 1/2 and, without a token, 0: ratios 2 (clipped to 1.3 where A > 0) and 0.5.
    log_probs = torch.tensor([[math.log(4), 0.0, 9], [-math.log(2), -math.log(2), 0], [1, 1, 1]], requires_grad=True)
    advantages = torch.tensor([[1.0, -1, 5], [2, -2, 5], [5, 5, 5]])
    mask = torch.tensor([[1.0, 1, 0], [1, 1, 0], [0, 0, 0]])
    loss, stats = gspo_loss(log_probs, torch.zeros(3, 3), advantages, mask, clip_low=0.2, clip_high=0.3)
    close(loss[:2, :2].detach(), [[-1.3, 2], [-1, 1.6]])
    close(stats.ratio[:2, :2], [[2, 2], [0.5, 0.5]])
    assert stats.is_clipped[:2, :2].tolist() == [[True, False], [False, True]]
    (gradient,) = torch.autograd.grad((loss * mask).sum(), log_probs)
    # -A · ratio of the sequence on the token itself, where the clip did not give the loss.
    close(gradient, [[0, 2, 0], [-1, 0, 0], [0, 0, 0]])


def test_gspo_bounds_the_exponent_at_10():
    log_probs = torch.tensor([[30.0]], requires_grad=True)
    loss, stats = gspo_loss(
        log_probs, torch.zeros(1, 1), -torch.ones(1, 1), torch.ones(1, 1), clip_low=0.2, clip_high=0.2
    )
    close(stats.ratio, [[math.exp(10)]])
    loss.sum().backward()
    assert log_probs.grad is not None and not log_probs.grad.any()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31 - 1), st.permutations(range(5)), st.integers(0, 5))
def test_gspo_is_the_plain_loop_over_sequences_however_they_are_cut(seed: int, order: list[int], cut: int):
    generator = torch.Generator().manual_seed(seed)
    log_probs, old = 0.4 * torch.randn(2, 5, 4, generator=generator)
    per_sequence = torch.randn(5, generator=generator)
    mask = (torch.rand(5, 4, generator=generator) < 0.7).float()
    mask[0, 0] = 1
    whole, parts = log_probs.clone().requires_grad_(), log_probs.clone().requires_grad_()
    total = torch.zeros(())
    for row in range(5):
        on = mask[row] > 0
        if on.any():
            # With one advantage for the sequence the token form is that of sequences: (1/n) of its gradient on each.
            ratio = (whole[row][on] - old[row][on]).mean().exp()
            a = per_sequence[row]
            total = total + torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.3)) / (mask.sum(1) > 0).sum()
    advantages = per_sequence[:, None].expand(5, 4)
    found = gspo_of(parts, old, advantages, mask, order[:cut]) + gspo_of(parts, old, advantages, mask, order[cut:])
    close(found.detach(), total.detach())
    close(torch.autograd.grad(found, parts)[0], torch.autograd.grad(total, whole)[0])


def test_cispo_by_hand():
    # Ratios 2, 1.1 and 1/2 bounded to 0.8 to 1.3; the gradient is weight times -A, also where it is bounded.
    log_probs = torch.tensor([math.log(2), math.log(1.1), -math.log(2)], requires_grad=True)
    advantages = torch.tensor([1.0, -2, 3])
    loss, stats = cispo_loss(log_probs, torch.zeros(3), advantages, clip_low=0.2, clip_high=0.3)
    close(loss.detach(), [-1.3 * math.log(2), 2.2 * math.log(1.1), 2.4 * math.log(2)])
    assert stats.is_clipped.tolist() == [True, False, True]
    close(torch.autograd.grad(loss.sum(), log_probs)[0], [-1.3, 2.2, -2.4])
    unbounded, _ = cispo_loss(torch.tensor([-9.0]), torch.zeros(1), torch.ones(1), clip_low=1.0, clip_high=0.3)
    close(unbounded, [9 * math.exp(-9)])
    # The ratio is that to the old policy: exp(-1 + 1.1), times 1 for the log-probability of -1.
    close(cispo_loss(-torch.ones(1), torch.tensor([-1.1]), torch.ones(1), clip_low=0.2, clip_high=0.3)[0], [1.1051709])
    # The exponent stops at 20.
    _, stats = cispo_loss(torch.tensor([0.0]), torch.tensor([-30.0]), torch.ones(1), clip_low=0.2, clip_high=0.3)
    close(stats.ratio, [math.exp(20)])


def test_value_loss_by_hand():
    # V_old 1, clip 0.5, so V is clipped to 0.5 .. 1.5.
    # V     R   (V-R)^2  (clip-R)^2      loss  gradient
    # 1.25  2   0.5625   0.5625          0.28125  V-R = -0.75
    # 3     4   1        (1.5-4)^2=6.25  3.125    0     beyond the clip: no reward for moving on
    # 3     1   4        0.25            2        2     moving back is paid for
    values = torch.tensor([[1.25, 3, 3]], requires_grad=True)
    loss = value_loss(values, torch.ones(1, 3), torch.tensor([[2.0, 4, 1]]), value_clip=0.5)
    loss.sum().backward()
    close(loss.detach(), [[0.28125, 3.125, 2]])
    close(values.grad, [[-0.75, 0, 2]])


def test_value_loss_clips_below_too():
    # V 0 is clipped to 0.5; R -1: (0+1)^2 = 1 against (0.5+1)^2 = 2.25.
    close(value_loss(torch.zeros(1), torch.ones(1), -torch.ones(1), value_clip=0.5), [1.125])


def test_gradients_agree_with_finite_differences():
    generator = torch.Generator().manual_seed(5)
    x, old, target = torch.randn(3, 2, 4, generator=generator, dtype=torch.float64)
    x.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda y: policy_loss(y, old, target, clip_low=0.2, clip_high=0.3, dual_clip=2.0)[0], x
    )
    assert torch.autograd.gradcheck(lambda y: value_loss(y, old, target, value_clip=0.5), x)


def test_half_precision_is_left_at_the_door():
    half = torch.full((1, 2), -1.0, dtype=torch.bfloat16)
    assert policy_loss(half, half, half, clip_low=0.2, clip_high=0.2)[0].dtype == torch.float32
    assert gspo_loss(half, half, half, half.abs(), clip_low=0.2, clip_high=0.2)[0].dtype == torch.float32
    assert cispo_loss(half, half, half, clip_low=0.2, clip_high=0.2)[0].dtype == torch.float32
    assert value_loss(half, half, half, value_clip=0.5).dtype == torch.float32
    assert aggregate(half, half.abs(), "token-mean", TOTALS).dtype == torch.float32
