"""Choosing the next token from vocabulary-parallel logits, the same in every layout.

Noise is counter-based: a hash of (seed, purpose, draw, sample index, position, vocabulary id), so no generator has a
state to keep, and a tensor-parallel rank makes the noise of its own columns alone. The token is the argmax of logits
plus Gumbel noise, which samples from the softmax (Gumbel-max, see arXiv 1611.00712); only each rank's best candidate
crosses the group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.models.log_probs import Columns

PURPOSES = {"rollout": 1, "validation": 2}
_GOLDEN = 0x9E3779B97F4A7C15
_ORDER_BITS = 0x7FFFFFFF
_ORDER_ZERO = 1 << 31


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a response is sampled.

    Attributes:
        max_new_tokens: Most tokens of a response, the stop token included.
        temperature: Divides the logits.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all.
        greedy: Take the most likely token, without noise.
        stop_ids: Tokens that end a response, and are part of it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    greedy: bool = False
    stop_ids: tuple[int, ...] = ()


def row_keys(seed: int, purpose: str, draws: Tensor, indices: Tensor, positions: Tensor) -> Tensor:
    """One 64-bit key for each row to be sampled.

    Args:
        seed: The run's seed.
        purpose: What the sample is for, a key of ``PURPOSES``.
        draws: Serial number of the prompt in the data order, ``[rows]`` int64.
        indices: Number of the sample among those of its prompt, ``[rows]`` int64.
        positions: Position of the token to be chosen in its sequence, ``[rows]`` int64.

    Returns:
        ``[rows]`` int64.
    """
    key = torch.full_like(draws, _signed(seed * _GOLDEN + PURPOSES[purpose]))
    for part in (draws, indices, positions):
        key = _mix(_mix(key) + part)
    return key


def gumbel_noise(keys: Tensor, first: int, width: int) -> Tensor:
    """Standard Gumbel noise for vocabulary ids ``first`` to ``first + width``, ``[rows, width]`` fp32."""
    ids = torch.arange(first + 1, first + width + 1, dtype=torch.int64, device=keys.device)
    bits = _mix(keys[:, None] + ids * _signed(_GOLDEN))
    # The upper 24 bits, moved to the middle of their interval, so that neither logarithm meets zero.
    uniform = ((bits >> 40) & 0xFFFFFF).float().add_(0.5).mul_(2.0**-24)
    return uniform.log_().neg_().log_().neg_()


def sample_tokens(logits: Tensor, keys: Tensor, columns: Columns, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Choose one token for each row.

    Collective: tp.

    Args:
        logits: This rank's columns, ``[rows, padded_vocab/tp]``.
        keys: From ``row_keys``, ``[rows]``.
        columns: Which columns these are.
        params: How to sample.

    Returns:
        Token ids ``[rows]`` int64, and their log-probabilities ``[rows]`` fp32 under ``softmax(logits / temperature)``
        before any top-k or top-p cut: the quantity that the trainer computes. The same on every rank of the group.
    """
    scaled = columns.scaled(logits, params.temperature)
    largest = columns.max(scaled.amax(-1))
    normalizer = largest + columns.sum((scaled - largest[:, None]).exp().sum(-1)).log()
    if params.greedy:
        scores = scaled
    else:
        scores = scaled + gumbel_noise(keys, columns.first, scaled.shape[1])
        scores[scaled < _threshold(scaled, normalizer, columns, params)[:, None]] = -torch.inf
    best, place = scores.max(-1)
    chosen = scaled.gather(1, place[:, None])[:, 0]
    # fp64 carries a token id, and both fp32 numbers, exactly.
    candidates = gather_over(
        columns.group, torch.stack([best.double(), (place + columns.first).double(), chosen.double()])
    )
    winner = candidates[:, 0].argmax(0)
    token, logit = candidates[winner, 1:, torch.arange(len(winner), device=winner.device)].unbind(-1)
    return token.long(), logit.float() - normalizer


def _threshold(scaled: Tensor, normalizer: Tensor, columns: Columns, params: SamplingParams) -> Tensor:
    """The smallest logit that may still be chosen, ``[rows]``."""
    floor = torch.full_like(normalizer, -torch.inf)
    if params.top_k:
        local = scaled.topk(min(params.top_k, scaled.shape[1]), dim=-1).values
        every = torch.cat(list(gather_over(columns.group, local)), dim=-1)
        floor = every.topk(min(params.top_k, every.shape[1]), dim=-1).values[:, -1]
    if params.top_p < 1.0:
        probabilities = (scaled - normalizer[:, None]).exp()
        floor = torch.maximum(floor, _nucleus_edge(scaled, probabilities, floor, columns, params.top_p))
    return floor


def _nucleus_edge(scaled: Tensor, probabilities: Tensor, floor: Tensor, columns: Columns, top_p: float) -> Tensor:
    """The largest logit ``t`` with ``mass(logits ≥ t) ≥ top_p``, ``[rows]``.

    Found digit by digit in the bits of fp32 numbers, with a histogram of the mass over 256 digits each time: exact
    after four small sums over the group, with no sorting and no gathered logits.
    """
    kept = torch.where(scaled >= floor[:, None], probabilities, torch.zeros_like(probabilities))
    wanted = top_p * columns.sum(kept.sum(-1))
    order = _to_order(scaled)
    prefix, above = torch.zeros_like(order[:, 0]), torch.zeros_like(wanted)
    for shift in (24, 16, 8, 0):
        in_prefix = (order >> (shift + 8)) == prefix[:, None]
        histogram = kept.new_zeros(len(kept), 256)
        histogram.scatter_add_(1, (order >> shift) & 255, torch.where(in_prefix, kept, torch.zeros_like(kept)))
        histogram = columns.sum(histogram)
        at_or_above = above[:, None] + histogram.flip(1).cumsum(1).flip(1)
        digit = ((at_or_above >= wanted[:, None]).sum(1) - 1).clamp(min=0)[:, None]
        above = (at_or_above - histogram).gather(1, digit)[:, 0]
        prefix = prefix * 256 + digit[:, 0]
    return _from_order(prefix)


def gather_over(group: dist.ProcessGroup, value: Tensor) -> Tensor:
    """Every rank's tensor, stacked in group order, ``[tp, …]``. Collective: tp."""
    size = dist.get_world_size(group)
    if size == 1:
        return value[None]
    parts = [torch.empty_like(value) for _ in range(size)]
    dist.all_gather(parts, value.contiguous(), group=group)
    return torch.stack(parts)


def _to_order(value: Tensor) -> Tensor:
    """fp32 to integers from 0 to 2³² in the same order, int64."""
    bits = value.contiguous().view(torch.int32)
    return (bits ^ ((bits >> 31) & _ORDER_BITS)).long() + _ORDER_ZERO


def _from_order(order: Tensor) -> Tensor:
    bits = (order - _ORDER_ZERO).int()
    return (bits ^ ((bits >> 31) & _ORDER_BITS)).view(torch.float32)


def _mix(value: Tensor) -> Tensor:
    """A bijection of 64-bit integers whose output bits all depend on all input bits (the finalizer of SplitMix64)."""
    value = (value ^ _shift(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shift(value, 27)) * _signed(0x94D049BB133111EB)
    return value ^ _shift(value, 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value
