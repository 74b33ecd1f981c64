"""A role: an object on each rank whose calls the nodes of a flow name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hybridflow.dataflow.batch import Batch

NodeCall = Callable[[Batch, Mapping[str, Any]], Batch | None]
"""``call(batch, decided)``: the columns that the node reads, and the values of the loops and branches around it.
Returns the columns that the node writes on the output ranks of its mesh."""


class Role:
    """One participant of a flow, on this rank.

    Attributes:
        call_names: Methods that nodes may name.
        metrics: Measurements of the last calls, over the global batch; the trainer empties them at each step.
        sample_stats: Numbers of single samples that this rank reports, see ``step_metrics.DISTRIBUTIONS``, and of
            single experts, see ``observe.expert_loads``; emptied alike.
        shown: Samples for a person, of the last validation or of the step, see ``sampling.validation``; emptied alike.
    """

    call_names: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.sample_stats: dict[str, list[float]] = {}
        self.shown: list[dict[str, Any]] = []

    @property
    def calls(self) -> Mapping[str, NodeCall]:
        """Return name -> call, for every node that may name this role."""
        return {name: getattr(self, name) for name in self.call_names}

    def enter_phase(self, phase: str) -> None:
        """Prepare for a phase. Collective: all ranks on which the role is called."""
