"""Advantages: from rewards to how much better than expected each token was.

Every statistic is over the global batch, so it does not depend on how samples are spread over ranks or micro-batches.
Sums are taken in fp64, so that it does not depend on the order of addition either (to fp32 precision).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybridflow.algorithms.inputs import alike

SumOverRanks = Callable[[Tensor], Tensor]
"""Sums a small fp64 tensor over the data-parallel ranks; every rank gets the sum."""


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> Tensor:
    """Compute the reward of each token: the sample's score on its last response token, minus every token's KL penalty.

    ``r_t = score * [t is the last token with mask 1] - kl_coef * kl_t * mask_t``

    Args:
        scores: One score per sample, ``[samples]``.
        kl: KL penalty of each token, ``[samples, tokens]``; any value at mask 0.
        mask: 1 on tokens that the policy produced, ``[samples, tokens]``.
        kl_coef: Weight of the penalty, the β of the papers.

    Returns:
        Rewards ``[samples, tokens]``, 0 at mask 0. A sample without a response token loses its score.

    Raises:
        ValueError: The shapes do not fit each other.

    Paper: arXiv 1909.08593.
    """
    kl, mask = alike(kl=kl, mask=mask)
    if scores.shape != kl.shape[:1]:
        raise ValueError(f"scores {list(scores.shape)} for kl {list(kl.shape)}: must be one per sample, [samples]")
    on = mask > 0
    is_last = on & (on.cumsum(dim=1) == on.sum(dim=1, keepdim=True))
    return scores.to(kl.dtype)[:, None] * is_last - kl_coef * torch.where(on, kl, 0)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Compute generalized advantage estimates over the tokens that the policy produced.

    Backwards from the last token, with ``V`` and ``A`` 0 after it::

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * gae_lambda * A_{t+1}
        returns = A + V

    At mask 0 (padding, tool and observation tokens) the running ``V_{t+1}`` and ``A_{t+1}`` pass through unchanged:
    ``t + 1`` is the policy's next own token, and what is given at mask 0 is never read.

    Args:
        rewards: ``[samples, tokens]``.
        values: The critic's values when the samples were made, ``[samples, tokens]``.
        mask: 1 on tokens that the policy produced, ``[samples, tokens]``.
        gamma: Discount per token.
        gae_lambda: 1 is reward-to-go minus value, 0 is the one-step error.

    Returns:
        Advantages (not yet whitened) and returns, both ``[samples, tokens]`` and 0 at mask 0.

    Raises:
        ValueError: Shapes differ.

    Paper: arXiv 1506.02438. It has no mask; the pass-through is ours.
    """
    rewards, values, mask = alike(rewards=rewards, values=values, mask=mask)
    on = mask > 0
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    next_value, next_advantage = values.new_zeros(len(values)), values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(on[:, t], delta + gamma * gae_lambda * next_advantage, next_advantage)
        next_value = torch.where(on[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(on[:, t], next_advantage, 0)
        returns[:, t] = torch.where(on[:, t], next_advantage + next_value, 0)
    return advantages, returns


def whiten(x: Tensor, mask: Tensor, *, sum_over_ranks: SumOverRanks | None = None) -> Tensor:
    """Shift and scale to mean 0 and variance 1 over all mask-1 tokens of the global batch.

    ``(x - mean) * rsqrt(var + 1e-8)`` with Bessel's correction, ``var = sum((x - mean)^2) / (n - 1)``. Two passes,
    mean first: the difference of two large squares would lose the variance of a batch far from 0.

    Args:
        x: This rank's share, ``[samples, tokens]``; any value at mask 0.
        mask: 1 on tokens that count, ``[samples, tokens]``.
        sum_over_ranks: Sums over the data-parallel ranks; None if this rank holds the whole batch.

    Returns:
        ``[samples, tokens]``, 0 at mask 0.

    Collective: dp, twice, when ``sum_over_ranks`` is given. Every rank raises if one does for too few tokens.

    Raises:
        ValueError: Shapes differ, or the global batch has fewer than two tokens.
    """
    x, mask = alike(x=x, mask=mask)
    on = mask > 0
    wide = torch.where(on, x, 0).double()
    counts = torch.stack((on.sum().double(), wide.sum()))
    num_tokens, x_sum = (counts if sum_over_ranks is None else sum_over_ranks(counts)).unbind()
    if num_tokens < 2:
        raise ValueError(
            f"whitening over {int(num_tokens)} response token(s) of the global batch: a variance needs at least 2; "
            "check the response masks, or make the batch larger"
        )
    centred = torch.where(on, wide - x_sum / num_tokens, 0)
    square_sum = centred.square().sum().reshape(1)
    square_sum = square_sum if sum_over_ranks is None else sum_over_ranks(square_sum)
    return (centred * torch.rsqrt(square_sum / (num_tokens - 1) + 1e-8)).to(x.dtype)


def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Compute the reward-to-go ``R_t = r_t + gamma * R_{t+1}`` of each token; ``t + 1`` is the policy's next own token.

    At mask 0 the running return passes through unchanged.

    Args:
        rewards: ``[samples, tokens]``; what is given at mask 0 is never read.
        mask: 1 on tokens that the policy produced, ``[samples, tokens]``.
        gamma: Discount per token.

    Returns:
        ``[samples, tokens]``, 0 at mask 0; not whitened.

    Raises:
        ValueError: Shapes differ.

    Paper: REINFORCE++, arXiv 2501.03262.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, gae_lambda=1.0)[0]


def remax(rewards: Tensor, baselines: Tensor, mask: Tensor) -> Tensor:
    """Compute the undiscounted reward-to-go of each token, minus the score of the greedy response to the same prompt.

    Args:
        rewards: ``[samples, tokens]``; what is given at mask 0 is never read.
        baselines: Score of the greedy response to each sample's prompt, ``[samples]``.
        mask: 1 on tokens that the policy produced, ``[samples, tokens]``.

    Returns:
        ``[samples, tokens]``, 0 at mask 0.

    Raises:
        ValueError: The shapes do not fit each other.

    Paper: arXiv 2310.10505.
    """
    if baselines.shape != rewards.shape[:1]:
        raise ValueError(
            f"baselines {list(baselines.shape)} for rewards {list(rewards.shape)}: must be one per sample, [samples]"
        )
    returns = discounted_returns(rewards, mask, gamma=1.0)
    return torch.where(mask > 0, returns - baselines.to(returns.dtype)[:, None], 0)


def group_normalize(scores: Tensor, groups: Tensor) -> Tensor:
    """Compute GRPO's advantage of each sample: its score relative to the other responses to the same prompt.

    ``(score - mean) / (std + 1e-6)`` within the group, with the unbiased standard deviation (n - 1); 0 for a group of
    one, which has nothing to be compared with. The caller spreads the result over the sample's response mask.

    Args:
        scores: Scores of the whole global batch, ``[samples]``: a group may lie on several ranks, so gather first.
        groups: Which group each sample belongs to, int64 ``[samples]``; any distinct numbers, in any order.

    Returns:
        ``[samples]``.

    Raises:
        ValueError: Shapes differ, or are not one-dimensional.

    Paper: arXiv 2402.03300.
    """
    # fp64: in fp32 the mean of three scores of 0.9 misses them by 6e-8, which a divisor of 1e-6 makes 0.06.
    within = _Groups(scores, groups)
    centred = within.centred(torch.ones_like(within.scores))
    variances = within.sums(centred.square()) / (within.sizes - 1).clamp(min=1)
    return _narrow(centred / (variances.sqrt() + 1e-6), scores)


def group_center(scores: Tensor, groups: Tensor) -> Tensor:
    """Subtract the mean of its group from each score; 0 for a group of one.

    The advantage of Dr. GRPO, and before whitening that of REINFORCE++ with a baseline. Shapes and errors as in
    :func:`group_normalize`.

    Paper: arXiv 2503.20783, arXiv 2501.03262.
    """
    within = _Groups(scores, groups)
    return _narrow(within.centred(torch.ones_like(within.scores)), scores)


def leave_one_out(scores: Tensor, groups: Tensor) -> Tensor:
    """Compute RLOO's advantage: each score minus the mean of the others in its group.

    ``score * n / (n - 1) - mean * n / (n - 1)``; 0 for a group of one. Shapes and errors as in
    :func:`group_normalize`.

    Paper: arXiv 2402.14740.
    """
    within = _Groups(scores, groups)
    factors = within.sizes / (within.sizes - 1).clamp(min=1)
    return _narrow(within.centred(torch.ones_like(within.scores)) * factors, scores)


def length_weighted_center(scores: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """Compute OPO's advantage: score minus the group's mean weighted by lengths, ``sum(n * score) / sum(n)``.

    0 for a group of one. A group without a token keeps its scores.

    Args:
        scores: As in :func:`group_normalize`.
        groups: As in :func:`group_normalize`.
        lengths: Response tokens of each sample, ``[samples]``.

    Returns:
        ``[samples]``.

    Raises:
        ValueError: As in :func:`group_normalize`.

    Paper: arXiv 2505.23585.
    """
    within = _Groups(scores, groups)
    if lengths.shape != scores.shape:
        raise ValueError(f"lengths {list(lengths.shape)} for scores {list(scores.shape)}: must be one per sample")
    return _narrow(within.centred(lengths.double()), scores)


class _Groups:
    """Statistics within groups, in fp64: every attribute and result is ``[samples]``, that of each sample's group.

    Attributes:
        scores: The samples' own.
        sizes: Samples of the group.
    """

    def __init__(self, scores: Tensor, groups: Tensor) -> None:
        if scores.shape != groups.shape or scores.dim() != 1:
            raise ValueError(
                f"scores {list(scores.shape)} and groups {list(groups.shape)}: both must be [samples], one entry per "
                "sample"
            )
        _, self._index, counts = torch.unique(groups, return_inverse=True, return_counts=True)
        self._num_groups = len(counts)
        self.scores = scores.double()
        self.sizes = counts[self._index]

    def sums(self, values: Tensor) -> Tensor:
        return values.new_zeros(self._num_groups).index_add(0, self._index, values)[self._index]

    def centred(self, weights: Tensor) -> Tensor:
        """Subtract the weighted mean of their group from scores."""
        totals = self.sums(weights)
        return self.scores - self.sums(weights * self.scores) / torch.where(totals > 0, totals, 1)


def _narrow(values: Tensor, like: Tensor) -> Tensor:
    return values.to(torch.promote_types(like.dtype, torch.float32))


GroupEstimator = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(scores, groups, lengths) -> advantages``, each ``[samples]`` over the global batch."""

GROUP_ESTIMATORS: dict[str, GroupEstimator] = {
    "grpo": lambda scores, groups, lengths: group_normalize(scores, groups),
    "dr_grpo": lambda scores, groups, lengths: group_center(scores, groups),
    "rloo": lambda scores, groups, lengths: leave_one_out(scores, groups),
    "opo": length_weighted_center,
}
"""Calls of ``roles.advantage`` that give each sample one advantage."""
