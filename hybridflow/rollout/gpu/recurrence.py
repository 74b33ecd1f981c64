"""Linear attention on a GPU: one kernel for all sequences with one row, and spans of sequences of like length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridflow.models import delta_rule
from hybridflow.models.attention import of_like_length
from hybridflow.models.delta_rule import Recurrence, State
from hybridflow.models.gated_delta_net import GatedDeltaNet
from hybridflow.parallel.copies import to_device
from hybridflow.rollout.gpu import ops


class Span(NamedTuple):
    """Sequences side by side, as wide as the longest.

    Attributes:
        taken: Their rows, the last row of a shorter one again and again, ``[sequences * width]`` int64.
        rows: Rows that they have, ``[rows]`` int64.
        cells: Which of those taken each of these is, ``[rows]`` int64.
        lengths: Rows of each sequence, ``[sequences]`` int64; None: all have as many.
        slots: Their slots, ``[sequences]`` int64.
        is_first: Whether they begin here; else they all go on.
    """

    taken: Tensor
    rows: Tensor
    cells: Tensor
    lengths: Tensor | None
    slots: Tensor
    is_first: bool

    def recur_from(self, state: State) -> Callable[[Tensor, Tensor, Tensor, Recurrence], Tensor]:
        """Return what ``GatedDeltaNet.context`` takes: from and to the states of a layer, ``[slots, …]`` each."""

        def recur(mixed: Tensor, decay: Tensor, beta: Tensor, recurrence: Recurrence) -> Tensor:
            shape = len(self.slots), -1
            mixed, decay, beta = (each.unflatten(0, shape) for each in (mixed, decay, beta))  # type: ignore[no-untyped-call]
            before = None if self.is_first else State(*(each[self.slots] for each in state))
            found, after = delta_rule.recur(mixed, decay, beta, recurrence, before, self.lengths)
            for kept, new in zip(state, after, strict=True):
                kept[self.slots] = new
            return found.flatten(0, 1)

        return recur


class GpuRecurrence:
    """Rows of several sequences, each of which goes on from the state in its slot, or begins anew at position 0.

    Args:
        addresses: ``GpuCache.addresses``.
        slots: Slot of each row, ``[rows]`` int64.
        positions: Position of each row in its sequence, ``[rows]`` int64; -1: padding, or a row of a span. None: all
            rows are of spans.
        spans: Sequences with more than one row.
        states: ``GpuCache.states``, for the spans.
    """

    def __init__(
        self,
        addresses: Tensor,
        slots: Tensor,
        positions: Tensor | None,
        spans: Sequence[Span] = (),
        states: Mapping[int, State] | None = None,
    ) -> None:
        self._addresses, self._slots, self._positions = addresses, slots, positions
        self._spans, self._states = spans, {} if states is None else states

    def context(self, layer: int, mixed: Tensor, delta: GatedDeltaNet) -> Tensor:
        """Compute as ``GatedDeltaNet.context``: 1 launch, and those of the spans."""
        key_heads, sharers, key_size, value_size = delta.local_sizes
        context = mixed.new_empty(len(mixed), key_heads, sharers, value_size)
        if self._positions is not None:
            weights = delta.conv1d.weight, delta.dt_bias, delta.A_log, delta.out_norm.weight
            where = self._addresses, self._slots, self._positions
            ops.delta_step(context, mixed, *weights, *where, layer, key_size, delta.config.layernorm_epsilon)
        context = context.flatten(1)
        for span in self._spans:
            found = delta.context(mixed[span.taken], span.recur_from(self._states[layer]))
            context[span.rows] = found if span.lengths is None else found[span.cells]
        return context


def plan_recurrence(
    addresses: Tensor, states: Mapping[int, State], slots: np.ndarray, positions: np.ndarray, device: torch.device
) -> GpuRecurrence:
    """Return the plan for some rows, those of a slot side by side, in host memory; nothing is asked of the device."""
    starts = np.flatnonzero(np.diff(slots, prepend=-1))
    counts = np.diff(starts, append=len(slots))
    alone = np.where(np.repeat(counts, counts) == 1, positions, -1)
    spans = []
    for is_first in (False, True):
        # Those that begin take no state from their slot.
        of = np.flatnonzero((counts > 1) & ((positions[starts] == 0) == is_first))
        for chosen in of_like_length(counts[of].tolist()):
            begins, lengths = starts[of[chosen]], counts[of[chosen]]
            spans.append(_span(begins, lengths, slots[begins], is_first, device))
    to, left = (to_device(torch.from_numpy(each), device) for each in (slots, alone))
    return GpuRecurrence(addresses, to, left if (counts == 1).any() else None, spans, states)


def _span(begins: np.ndarray, lengths: np.ndarray, slots: np.ndarray, is_first: bool, device: torch.device) -> Span:
    """Return the span of sequences that begin at some rows, and have so many each."""
    within = np.arange(lengths.max())
    taken = begins[:, None] + np.minimum(within, lengths[:, None] - 1)
    cells = np.flatnonzero(within < lengths[:, None])
    parts = taken.ravel(), taken.ravel()[cells], cells, lengths, slots
    rows, own, at, counts, of = (to_device(torch.from_numpy(each), device) for each in parts)
    return Span(rows, own, at, None if len(cells) == taken.size else counts, of, is_first)
