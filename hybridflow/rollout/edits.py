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

_ORDER_BITS = 0x7FFFFFFF
_ORDER_ZERO = 1 << 31


class Entries:
    """Any number of rows of numbers for each slot, read for many slots at a time."""

    def __init__(self) -> None:
        self._rows: dict[int, np.ndarray] = {}
        self._table: tuple[np.ndarray, np.ndarray] | None = None

    def put(self, slot: int, rows: Sequence[Sequence[float]]) -> None:
        """A slot's rows from now on; the shorter ones are filled up with -1."""
        if self._rows.pop(slot, None) is not None or len(rows):
            self._table = None
        if len(rows):
            filled = np.full((len(rows), max(map(len, rows))), -1.0)
            for place, row in enumerate(rows):
                filled[place, : len(row)] = row
            self._rows[slot] = filled

    def of(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows of some slots: places among ``slots``, ``[rows]`` int64, and ``[rows, widest]`` fp64."""
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
        slots: Whose they are, ``[rows]``.
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
        """Some of the rows."""
        return replace(self, slots=self.slots[chosen], positions=self.positions[chosen], values=self.values[chosen])

    def tensor(self, name: str) -> Tensor:
        """A parameter of each row, ``[rows]``."""
        return torch.from_numpy(self.values[name].copy()).to(self.device)


def penalized(logits: Tensor, rows: Rows, columns: Columns) -> Tensor:
    """Logits with the penalties of tokens that are there already, ``[rows, columns]``."""
    assert rows.known is not None, "penalties need to know the tokens so far"
    longest = int(rows.positions.max())
    places = np.arange(longest)
    is_known = places < rows.positions[:, None]
    local = rows.known[rows.slots, :longest].astype(np.int64) - columns.first
    is_mine = is_known & (local >= 0) & (local < columns.num_real)
    is_response = places >= rows.values["num_prompt"][:, None]
    # One column more, for what is another rank's.
    at = torch.from_numpy(np.where(is_mine, local, logits.shape[1])).to(rows.device)
    wider = logits.new_zeros(len(logits), logits.shape[1] + 1)
    num_known = wider.scatter(1, at, 1.0)[:, :-1]
    num_sampled = wider.scatter_add_(1, at, torch.from_numpy(is_response).to(rows.device, logits.dtype))[:, :-1]
    repetition, presence, frequency = (rows.tensor(name)[:, None] for name in ("repetition", "presence", "frequency"))
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    changed = torch.where(num_known > 0, repeated, logits)
    return changed - presence * (num_sampled > 0) - frequency * num_sampled


def forbidden(
    rows: Rows, stop_ids: Entries, bad_ids: Entries, never: Sequence[tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """What may not be sampled now: rows, and tokens, ``[forbidden]`` int64 each.

    Args:
        rows: Whose.
        stop_ids: Of slots, ``[token]`` each: forbidden as long as the response may not stop.
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


def edited(
    logits: Tensor, rows: Rows, biases: Entries, never: tuple[np.ndarray, np.ndarray], columns: Columns
) -> Tensor:
    """Logits with biases, and minus infinity where a token is forbidden, ``[rows, columns]``."""
    bias_rows, pairs = biases.of(rows.slots)
    changes = [(bias_rows, pairs[:, 0].astype(np.int64), pairs[:, -1]), (*never, np.full(len(never[0]), -np.inf))]
    for places, tokens, amounts in changes:
        if not len(places):
            continue
        local = tokens - columns.first
        is_mine = (local >= 0) & (local < columns.num_real)
        at = tuple(torch.from_numpy(each[is_mine]).to(rows.device) for each in (places, local))
        logits = logits.clone()
        logits[at] += torch.from_numpy(amounts[is_mine].astype(np.float32)).to(rows.device)
    return logits


def floors(scaled: Tensor, rows: Rows, columns: Columns) -> Tensor:
    """The least scaled logit that may be sampled, ``[rows]``: of the top k, then of top p of these, and of min p.

    Collective: tp.
    """
    top_k, top_p, min_p = (rows.values[name] for name in ("top_k", "top_p", "min_p"))
    floor = scaled.new_full((len(scaled),), -torch.inf)
    if not (top_k.any() or (top_p < 1).any() or min_p.any()):
        return floor
    largest = columns.max(scaled.amax(-1))
    # Rows without a cut are spared.
    if top_k.any():
        where = torch.from_numpy(np.flatnonzero(top_k)).to(rows.device)
        floor[where] = _top_k_edge(scaled[where], rows.tensor("top_k")[where], columns)
    if (top_p < 1).any():
        where = torch.from_numpy(np.flatnonzero(top_p < 1)).to(rows.device)
        some = scaled[where]
        weights = (some - largest[where, None]).exp().double().masked_fill(some < floor[where, None], 0)
        edge = _nucleus_edge(some, weights, rows.tensor("top_p")[where].double(), columns)
        floor[where] = torch.maximum(floor[where], edge)
    # The logarithm of 0 is minus infinity, which keeps all.
    return torch.maximum(floor, largest + rows.tensor("min_p").log())


def _top_k_edge(scaled: Tensor, top_k: Tensor, columns: Columns) -> Tensor:
    """The k-th largest logit, ``[rows]``; the least where there are fewer."""
    most = int(top_k.max())
    local = scaled.topk(min(most, scaled.shape[1]), dim=-1).values
    every = torch.cat(list(gather_over(columns.group, local)), dim=-1)
    ordered = every.topk(min(most, every.shape[1]), dim=-1).values
    return ordered.gather(1, (top_k - 1).clamp(max=ordered.shape[1] - 1)[:, None])[:, 0]


def _nucleus_edge(scaled: Tensor, weights: Tensor, top_p: Tensor, columns: Columns) -> Tensor:
    """The largest logit ``t`` with ``sum(weights of logits ≥ t) ≥ top_p · sum(weights)``, ``[rows]``.

    Found digit by digit in the bits of fp32 numbers, with a histogram of the weights over 256 digits each time: exact
    after four small sums over the group, with no sorting and no gathered logits.
    """
    wanted = top_p * columns.sum(weights.sum(-1))
    order = _to_order(scaled)
    prefix, above = torch.zeros_like(order[:, 0]), torch.zeros_like(wanted)
    for shift in (24, 16, 8, 0):
        in_prefix = (order >> (shift + 8)) == prefix[:, None]
        histogram = weights.new_zeros(len(weights), 256)
        histogram.scatter_add_(1, (order >> shift) & 255, weights * in_prefix)
        histogram = columns.sum(histogram)
        at_or_above = above[:, None] + histogram.flip(1).cumsum(1).flip(1)
        # In another order the same sum may come out a little smaller.
        wanted = torch.minimum(wanted, at_or_above[:, 0])
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
