"""A role: an object on each rank whose calls the nodes of a flow name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from hybridflow.dataflow.batch import Batch

NodeCall = Callable[[Batch, Mapping[str, Any]], Batch | None]
"""``call(batch, decided)``: the columns that the node reads, and the values of the loops and branches around it.
Returns the columns that the node writes on the output ranks of its mesh."""


class Role(ABC):
    """One participant of a flow, on this rank.

    Attributes:
        metrics: Measurements of the last calls, over the global batch; the trainer empties them at each step.
        sample_stats: Numbers of single samples that this rank reports, see ``step_metrics.DISTRIBUTIONS``; emptied
            alike.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.sample_stats: dict[str, list[float]] = {}

    @property
    @abstractmethod
    def calls(self) -> Mapping[str, NodeCall]:
        """Return name -> call, for every node that may name this role."""

    def enter_phase(self, phase: str) -> None:  # noqa: B027  (most roles have one phase)
        """Prepare for a phase. Collective: all ranks on which the role is called."""
