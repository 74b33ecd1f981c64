"""Linear attention on a GPU: one kernel for the sequences with one token each, operators of torch for the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridflow.models import delta_rule
from hybridflow.models.delta_rule import Recurrence, State
from hybridflow.models.gated_delta_net import GatedDeltaNet
from hybridflow.parallel.copies import to_device
from hybridflow.rollout.gpu import ops


class Span(NamedTuple):
    """Sequences with as many tokens each.

    Attributes:
        rows: Their rows, ``[sequences * tokens]`` int64.
        slots: Their slots, ``[sequences]`` int64.
        is_first: Whether they begin here; else they all go on.
    """

    rows: Tensor
    slots: Tensor
    is_first: bool

    def recur_from(self, state: State) -> Callable[[Tensor, Tensor, Tensor, Recurrence], Tensor]:
        """Return what ``GatedDeltaNet.context`` takes: from and to the states of a layer, ``[slots, …]`` each."""

        def recur(mixed: Tensor, decay: Tensor, beta: Tensor, recurrence: Recurrence) -> Tensor:
            shape = len(self.slots), -1
            mixed, decay, beta = (each.unflatten(0, shape) for each in (mixed, decay, beta))  # type: ignore[no-untyped-call]
            before = None if self.is_first else State(*(each[self.slots] for each in state))
            found, after = delta_rule.recur(mixed, decay, beta, recurrence, before)
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
        spans: Sequences with more than one token.
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
            context[span.rows] = delta.context(mixed[span.rows], span.recur_from(self._states[layer]))
        return context


def plan_recurrence(
    addresses: Tensor, states: Mapping[int, State], slots: np.ndarray, positions: np.ndarray, device: torch.device
) -> GpuRecurrence:
    """Return the plan for some rows, those of a slot side by side, in host memory; nothing is asked of the device."""
    starts = np.flatnonzero(np.diff(slots, prepend=-1))
    counts = np.diff(starts, append=len(slots))
    alone = np.where(np.repeat(counts, counts) == 1, positions, -1)
    spans = []
    # Those that begin take no state from their slot.
    for count, is_first in sorted({*zip(counts.tolist(), (positions[starts] == 0).tolist(), strict=True)}):
        if count > 1:
            begins = starts[(counts == count) & ((positions[starts] == 0) == is_first)]
            rows = (begins[:, None] + np.arange(count)).ravel()
            of, at = (to_device(torch.from_numpy(each), device) for each in (slots[begins], rows))
            spans.append(Span(at, of, is_first))
    of, left = (to_device(torch.from_numpy(each), device) for each in (slots, alone))
    return GpuRecurrence(addresses, of, left if (counts == 1).any() else None, spans, states)
