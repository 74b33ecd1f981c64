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
from hybridflow.rollout.kernels import load_kernels
from hybridflow.rollout.request import PURPOSES, SamplingParams

_GOLDEN = 0x9E3779B97F4A7C15
_ORDER_BITS = 0x7FFFFFFF
_ORDER_ZERO = 1 << 31
_BELOW_ONE = 1.0 - 2.0**-24


def sequence_key(seed: int, purpose: str, draw: int, index: int) -> int:
    """The 64-bit key of a sequence's noise.

    Args:
        seed: The run's seed.
        purpose: What the sample is for, a key of ``PURPOSES``.
        draw: Serial number of the prompt in the data order.
        index: Number of the sample among those of its prompt.
    """
    key = torch.tensor(_signed(seed * _GOLDEN + PURPOSES[purpose]))
    for part in (draw, index):
        key = _mix(_mix(key) + part)
    return int(key)


def row_keys(keys: Tensor, positions: Tensor) -> Tensor:
    """The keys of tokens at given positions of sequences with given keys, ``[rows]`` int64 each."""
    return _mix(_mix(keys) + positions)


def gumbel_noise(keys: Tensor, first: int, width: int) -> Tensor:
    """Standard Gumbel noise for vocabulary ids ``first`` to ``first + width``, ``[rows, width]`` fp32."""
    ids = torch.arange(first + 1, first + width + 1, dtype=torch.int64, device=keys.device)
    bits = _mix(keys[:, None] + ids * _signed(_GOLDEN))
    # 32 bits, finest near 0, where the largest noise comes from, and never 0 or 1, where the logarithms end.
    uniform = _shift(bits, 32).float().add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()


@dataclass(frozen=True)
class Sampled:
    """The next token of some rows, the same on every rank of the group.

    Attributes:
        tokens: ``[rows]`` int64; -1 where the logits are not finite.
        log_probs: ``[rows]`` fp32 under ``softmax(logits / temperature)``: the quantity that the trainer computes.
        sampled_log_probs: ``[rows]`` fp32 under the distribution that was sampled from.
    """

    tokens: Tensor
    log_probs: Tensor
    sampled_log_probs: Tensor


class Sampler:
    """Samples for slots, each of which has its own parameters.

    Args:
        num_slots: Slots.
        group: Tensor-parallel ranks, each of which has some columns of the logits.
        vocab_size: True vocabulary.
        device: Where logits are.
    """

    def __init__(self, num_slots: int, group: dist.ProcessGroup, vocab_size: int, device: torch.device) -> None:
        self._group = group
        self._vocab_size = vocab_size
        self._device = device
        self._keys = torch.zeros(num_slots, dtype=torch.int64)
        self._temperatures = torch.ones(num_slots)
        self._top_k = torch.zeros(num_slots, dtype=torch.int64)
        self._top_p = torch.ones(num_slots)
        self._is_greedy = torch.zeros(num_slots, dtype=torch.uint8)

    def seat(self, slot: int, params: SamplingParams, key: int) -> None:
        """A slot has a new owner, whose noise comes from ``key``."""
        self._keys[slot] = key
        self._temperatures[slot] = params.temperature
        self._top_k[slot] = params.top_k
        self._top_p[slot] = params.top_p
        self._is_greedy[slot] = params.greedy

    def sample(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Sampled:
        """Choose one token for each row.

        Collective: tp.

        Args:
            logits: This rank's columns, ``[rows, padded_vocab/tp]``.
            slots: Whose rows they are, ``[rows]`` int64 in host memory.
            positions: Where the tokens to be chosen will stand in their sequences, ``[rows]`` int64 in host memory.
        """
        columns = Columns(logits.shape[-1], self._group, self._vocab_size)
        rows = _Rows(
            keys=row_keys(self._keys[slots], positions).to(self._device),
            temperatures=self._temperatures[slots].to(self._device),
            is_greedy=self._is_greedy[slots].to(self._device),
        )
        top_k, top_p = self._top_k[slots], self._top_p[slots]
        if bool((top_k > 0).any()) or bool((top_p < 1).any()):
            scaled = columns.scaled(logits, rows.temperatures[:, None])
            kept = _cut(scaled, top_k.to(self._device), top_p.to(self._device), columns)
            found = _find_best(scaled, rows, columns, kept)
        else:
            found = _find(logits, rows, columns)
        return _settle(gather_over(columns.group, found))


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Of the rows to be sampled: noise keys, temperatures, and whether they are greedy, ``[rows]`` each."""

    keys: Tensor
    temperatures: Tensor
    is_greedy: Tensor


def _find(logits: Tensor, rows: _Rows, columns: Columns) -> Tensor:
    """This rank's candidates, and what their log-probabilities are made of, ``[6, rows]`` fp64.

    Best score, its id, its scaled logit, the largest scaled logit, the sum of ``exp(scaled - largest)``, and the same
    sum over what may be sampled. fp64 carries token ids, and fp32 numbers, exactly.
    """
    kernels = load_kernels()
    if kernels is None or logits.device.type != "cpu" or logits.dtype is not torch.float32:
        scaled = columns.scaled(logits, rows.temperatures[:, None])
        return _find_best(scaled, rows, columns, None)
    logits = logits.contiguous()
    found = torch.empty(6, len(logits), dtype=torch.float64)
    kernels.hf_sample(
        *(each.data_ptr() for each in (found, logits, rows.keys, rows.temperatures, rows.is_greedy)),
        *logits.shape,
        columns.num_real,
        columns.first,
    )
    return found


def _find_best(scaled: Tensor, rows: _Rows, columns: Columns, kept: Tensor | None) -> Tensor:
    """As ``_find``, of scaled logits; those that are not ``kept`` (``[rows, columns]`` bool) are not chosen."""
    largest = scaled.amax(-1)
    weights = (scaled - largest[:, None]).exp()
    total = weights.sum(-1)
    scores = scaled + gumbel_noise(rows.keys, columns.first, scaled.shape[1]) * (1 - rows.is_greedy[:, None])
    kept_total = total
    if kept is not None:
        kept_total = (weights * kept).sum(-1)
        scores = scores.masked_fill(~kept, -torch.inf)
    best, place = scores.max(-1)
    chosen = scaled.gather(1, place[:, None])[:, 0]
    return torch.stack([each.double() for each in (best, place + columns.first, chosen, largest, total, kept_total)])


def _settle(candidates: Tensor) -> Sampled:
    """The winners of all ranks' candidates, ``[tp, 6, rows]``."""
    best, ids, chosen, largest, totals, kept = candidates.unbind(1)
    winner = best.argmax(0, keepdim=True)
    top = largest.amax(0)
    shares = (largest - top).exp()
    shares = torch.where(totals > 0, shares, torch.zeros_like(shares))
    normalizer = top + (totals * shares).sum(0).log()
    kept_normalizer = top + (kept * shares).sum(0).log()
    tokens, logit = ids.gather(0, winner)[0].long(), chosen.gather(0, winner)[0]
    tokens[~normalizer.isfinite()] = -1
    return Sampled(tokens, (logit - normalizer).float(), (logit - kept_normalizer).float())


def _cut(scaled: Tensor, top_k: Tensor, top_p: Tensor, columns: Columns) -> Tensor:
    """Which columns may be sampled, ``[rows, columns]`` bool."""
    largest = columns.max(scaled.amax(-1))
    normalizer = largest + columns.sum((scaled - largest[:, None]).exp().sum(-1)).log()
    floor = torch.full_like(normalizer, -torch.inf)
    most = int(top_k.max())
    if most:
        local = scaled.topk(min(most, scaled.shape[1]), dim=-1).values
        every = torch.cat(list(gather_over(columns.group, local)), dim=-1)
        ordered = every.topk(min(most, every.shape[1]), dim=-1).values
        place = (top_k - 1).clamp(0, ordered.shape[1] - 1)
        floor = torch.where(top_k > 0, ordered.gather(1, place[:, None])[:, 0], floor)
    if bool((top_p < 1).any()):
        probabilities = (scaled - normalizer[:, None]).exp()
        edge = _nucleus_edge(scaled, probabilities, floor, columns, top_p)
        floor = torch.where(top_p < 1, torch.maximum(floor, edge), floor)
    return scaled >= floor[:, None]


def _nucleus_edge(scaled: Tensor, probabilities: Tensor, floor: Tensor, columns: Columns, top_p: Tensor) -> Tensor:
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
