"""What requests ask to be changed about logits before sampling: penalties, biases, what is forbidden, and the cuts.

Each rank of a tensor-parallel group edits its own columns; for the cuts a few numbers of each row cross the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.models.log_probs import Columns
from hybridflow.parallel.copies import to_device
from hybridflow.rollout.cpu.kernels import load_kernels

_ORDER_BITS = 0x7FFFFFFF
_ORDER_ZERO = 1 << 31


class Entries:
    """Any number of rows of numbers for each slot, read for many slots at a time."""

    def __init__(self) -> None:
        self._rows: dict[int, np.ndarray] = {}
        self._table: tuple[np.ndarray, np.ndarray] | None = None

    def put(self, slot: int, rows: Sequence[Sequence[float]]) -> None:
        """Set a slot's rows; shorter rows are padded with -1."""
        if self._rows.pop(slot, None) is not None or len(rows):
            self._table = None
        if len(rows):
            filled = np.full((len(rows), max(map(len, rows))), -1.0)
            for place, row in enumerate(rows):
                filled[place, : len(row)] = row
            self._rows[slot] = filled

    def of(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of some slots: places among ``slots``, ``[rows]`` int64, and ``[rows, widest]`` fp64."""
        if not self._rows:
            return np.zeros(0, np.int64), np.zeros((0, 1))
        if self._table is None:
            widest = max(rows.shape[1] for rows in self._rows.values())
            fill = [
                np.pad(each, ((0, 0), (0, widest - each.shape[1])), constant_values=-1) for each in self._rows.values()
            ]
            self._table = (
                np.repeat(np.array(list(self._rows)), [len(rows) for rows in self._rows.values()]),
                np.concatenate(fill),
            )
        owners, rows = self._table
        places = np.full(max(int(owners.max()), int(slots.max(initial=0))) + 1, -1)
        places[slots] = np.arange(len(slots))
        is_asked = places[owners] >= 0
        return places[owners[is_asked]], rows[is_asked]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of logits, and what their owners ask for.

    Attributes:
        slots: Slot of each row, ``[rows]``.
        positions: Where the tokens to be chosen will stand, ``[rows]``.
        values: Parameters, ``[rows]`` with named fields.
        known: Tokens before that, ``[slots, capacity]``; None where nothing depends on them.
        device: Where the logits are.
    """

    slots: np.ndarray
    positions: np.ndarray
    values: np.ndarray
    known: np.ndarray | None
    device: torch.device

    def take(self, chosen: np.ndarray) -> Rows:
        """Return some of the rows."""
        return replace(self, slots=self.slots[chosen], positions=self.positions[chosen], values=self.values[chosen])

    def tensor(self, name: str) -> Tensor:
        """Return a parameter of each row, ``[rows]``."""
        return to_device(torch.from_numpy(self.values[name].copy()), self.device)


def penalized(logits: Tensor, rows: Rows, columns: Columns) -> Tensor:
    """Return logits with the penalties of tokens that are there already, ``[rows, columns]``."""
    assert rows.known is not None, "penalties need to know the tokens so far"
    places = np.arange(int(rows.positions.max()))
    local = rows.known[rows.slots, : len(places)].astype(np.int64) - columns.first
    is_mine = (places < rows.positions[:, None]) & (local >= 0) & (local < columns.num_real)
    owner, place = is_mine.nonzero()
    is_sampled = place >= rows.values["num_prompt"][owner]
    at = tuple(to_device(torch.from_numpy(each), rows.device) for each in (owner, local[is_mine]))
    counts = torch.zeros_like(logits).index_put_(
        at, torch.from_numpy(is_sampled).to(rows.device, logits.dtype), accumulate=True
    )[at]
    repetition, presence, frequency = (rows.tensor(name)[at[0]] for name in ("repetition", "presence", "frequency"))
    values = logits[at]
    values = torch.where(values > 0, values / repetition, values * repetition)
    # What stands there twice is written twice, the same.
    return logits.index_put(at, values - presence * (counts > 0) - frequency * counts)


def forbidden(
    rows: Rows, stop_ids: Entries, bad_ids: Entries, never: Sequence[tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return which tokens may not be sampled now: rows, and tokens, ``[forbidden]`` int64 each.

    Args:
        rows: Rows to look at.
        stop_ids: Stop tokens of slots, ``[token]`` each: forbidden as long as the response may not stop.
        bad_ids: Of slots, sequences, the last token first: it is forbidden where the others stand before it.
        never: Slots and tokens.
    """
    # The token to come counts: a response as long as ``min_new_tokens`` may have it.
    stop_rows, stops = stop_ids.of(rows.slots)
    is_early = rows.positions[stop_rows] + 1 < rows.values["no_stop_before"][stop_rows]
    bad_rows, sequences = bad_ids.of(rows.slots)
    is_there = np.ones(len(bad_rows), bool)
    if sequences.shape[1] > 1:
        assert rows.known is not None, "sequences of forbidden tokens need to know the tokens so far"
        before = rows.positions[bad_rows, None] - np.arange(1, sequences.shape[1])
        tokens = np.where(before >= 0, rows.known[rows.slots[bad_rows, None], np.maximum(before, 0)], -2)
        is_there = ((tokens == sequences[:, 1:]) | (sequences[:, 1:] < 0)).all(1)
    places = {slot: place for place, slot in enumerate(rows.slots.tolist())}
    more = np.array([(places[slot], token) for slot, token in never if slot in places], np.int64).reshape(-1, 2)
    return (
        np.concatenate([stop_rows[is_early], bad_rows[is_there], more[:, 0]]),
        np.concatenate([stops[is_early, 0], sequences[is_there, 0], more[:, 1]]).astype(np.int64),
    )


def rules_of(slots: np.ndarray, biases: Entries, bad_ids: Entries) -> tuple[np.ndarray, np.ndarray]:
    """Return biases and forbidden sequences of some slots as rules of one shape, which kernels read.

    Returns:
        Tokens, ``[slots, rules, widest]`` int32, filled with -1: the first gets the amount if the others stand before
        it, the last first. Amounts, ``[slots, rules]`` fp32: a bias, or minus infinity.
    """
    bias_rows, pairs = biases.of(slots)
    bad_rows, sequences = bad_ids.of(slots)
    owners = np.concatenate([bias_rows, bad_rows])
    tokens = np.full((len(owners), sequences.shape[1]), -1.0)
    tokens[: len(bias_rows), 0] = pairs[:, 0]
    tokens[len(bias_rows) :] = sequences
    counts = np.bincount(owners, minlength=len(slots))
    order = owners.argsort(kind="stable")
    at = owners[order], np.arange(len(owners)) - np.repeat(counts.cumsum() - counts, counts)
    found = np.full((len(slots), counts.max(), tokens.shape[1]), -1, np.int32)
    amounts = np.zeros(found.shape[:2], np.float32)
    found[at] = tokens[order]
    amounts[at] = np.concatenate([pairs[:, -1], np.full(len(bad_rows), -np.inf)])[order]
    return found, amounts


def edited(
    logits: Tensor, rows: Rows, biases: Entries, never: tuple[np.ndarray, np.ndarray], columns: Columns
) -> Tensor:
    """Return logits with biases, and minus infinity where a token is forbidden, ``[rows, columns]``."""
    bias_rows, pairs = biases.of(rows.slots)
    changes = [(bias_rows, pairs[:, 0].astype(np.int64), pairs[:, -1]), (*never, np.full(len(never[0]), -np.inf))]
    for places, tokens, amounts in changes:
        if not len(places):
            continue
        local = tokens - columns.first
        is_mine = (local >= 0) & (local < columns.num_real)
        at = tuple(to_device(torch.from_numpy(each[is_mine]), rows.device) for each in (places, local))
        logits = logits.clone()
        logits[at] += torch.from_numpy(amounts[is_mine].astype(np.float32)).to(rows.device)
    return logits


def floors(scaled: Tensor, rows: Rows, columns: Columns) -> Tensor:
    """Return the least scaled logit that may be sampled, ``[rows]``.

    Top k applies first, then top p of these, then min p.

    Collective: tp.
    """
    top_k, top_p, min_p = (rows.values[name] for name in ("top_k", "top_p", "min_p"))
    floor = scaled.new_full((len(scaled),), -torch.inf)
    if not (top_k.any() or (top_p < 1).any() or min_p.any()):
        return floor
    largest = columns.max(scaled.amax(-1))
    # Rows without a cut are spared.
    if top_k.any():
        where = to_device(torch.from_numpy(np.flatnonzero(top_k)), rows.device)
        floor[where] = _top_k_edge(scaled[where], rows.tensor("top_k")[where], columns)
    if (top_p < 1).any():
        where = to_device(torch.from_numpy(np.flatnonzero(top_p < 1)), rows.device)
        top_shares = rows.tensor("top_p")[where].double()
        edge = _nucleus_edge(scaled[where], floor[where], largest[where], top_shares, columns)
        floor[where] = torch.maximum(floor[where], edge)
    # The logarithm of 0 is minus infinity, which keeps all.
    return torch.maximum(floor, largest + rows.tensor("min_p").log())


def _top_k_edge(scaled: Tensor, top_k: Tensor, columns: Columns) -> Tensor:
    """Return the k-th largest logit, ``[rows]``; the smallest if there are fewer."""
    most = int(top_k.max())
    local = scaled.topk(min(most, scaled.shape[1]), dim=-1).values
    every = columns.gather(local)
    ordered = every.topk(min(most, every.shape[1]), dim=-1).values
    return ordered.gather(1, (top_k - 1).clamp(max=ordered.shape[1] - 1)[:, None])[:, 0]


def _nucleus_edge(scaled: Tensor, floor: Tensor, largest: Tensor, top_p: Tensor, columns: Columns) -> Tensor:
    """Return the largest logit that with all above it has ``top_p`` of the weight, ``[rows]``.

    The weight is that of the logits not below ``floor``.

    The search goes digit by digit through the bits of fp32 numbers, with a histogram of the weights over 256 values
    each time. It is exact after four small sums over the group, without sorting or gathered logits.
    """
    prefix = torch.zeros(len(scaled), dtype=torch.int64, device=scaled.device)
    above, wanted = top_p.new_zeros(len(scaled)), None
    for shift in (24, 16, 8, 0):
        histogram = columns.sum(_sums_by_digit(scaled, floor, largest, prefix, shift))
        at_or_above = above[:, None] + histogram.flip(1).cumsum(1).flip(1)
        # The same sum in another order may come out a little smaller.
        wanted = top_p * at_or_above[:, 0] if wanted is None else torch.minimum(wanted, at_or_above[:, 0])
        digit = ((at_or_above >= wanted[:, None]).sum(1) - 1).clamp(min=0)[:, None]
        above = (at_or_above - histogram).gather(1, digit)[:, 0]
        prefix = prefix * 256 + digit[:, 0]
    return _from_order(prefix)


def _sums_by_digit(scaled: Tensor, floor: Tensor, largest: Tensor, prefix: Tensor, shift: int) -> Tensor:
    """Sum the weights of this rank's columns by the eight bits above ``shift``, ``[rows, 256]`` fp64.

    It counts only columns whose higher bits are ``prefix`` (``[rows]``), and that are not below ``floor``.
    """
    sums = torch.zeros(len(scaled), 256, dtype=torch.float64, device=scaled.device)
    kernels = load_kernels()
    if kernels is not None and scaled.device.type == "cpu":
        given = [each.contiguous() for each in (sums, scaled, floor, largest, prefix)]
        kernels.hf_sum_by_digit(*(each.data_ptr() for each in given), *scaled.shape, shift)
        return sums
    order = _to_order(scaled)
    is_wanted = ((order >> (shift + 8)) == prefix[:, None]) & (scaled >= floor[:, None])
    weights = (scaled - largest[:, None]).exp().double() * is_wanted
    return sums.scatter_add_(1, (order >> shift) & 255, weights)


def gather_over(group: dist.ProcessGroup, value: Tensor) -> Tensor:
    """Gather every rank's tensor, stacked in group order, ``[tp, …]``. Collective: tp."""
    size = dist.get_world_size(group)
    if size == 1:
        return value[None]
    parts = [torch.empty_like(value) for _ in range(size)]
    dist.all_gather(parts, value.contiguous(), group=group)
    return torch.stack(parts)


def joined_columns(group: dist.ProcessGroup, part: Tensor) -> Tensor:
    """Gather every rank's columns, side by side in group order: ``[rows, columns]`` each. Collective: tp."""
    parts = part.new_empty(group.size() * len(part), part.shape[1])
    dist.all_gather_into_tensor(parts, part.contiguous(), group=group)
    return parts.view(-1, *part.shape).transpose(0, 1).flatten(1)


def _to_order(value: Tensor) -> Tensor:
    """Map fp32 to int64 integers from 0 to 2³² in the same order."""
    bits = value.contiguous().view(torch.int32)
    return (bits ^ ((bits >> 31) & _ORDER_BITS)).long() + _ORDER_ZERO


def _from_order(order: Tensor) -> Tensor:
    bits = (order - _ORDER_ZERO).int()
    return (bits ^ ((bits >> 31) & _ORDER_BITS)).view(torch.float32)
