"""A role: an object on each rank whose calls the nodes of a flow name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hybridflow.dataflow.batch import Batch

NodeCall = Callable[[Batch, Mapping[str, Any]], Batch | None]
"""``call(batch, decided)``: the columns that the node reads, and the values of the loops and branches around it.
Returns the columns that the node writes on the output ranks of its mesh."""


class Metrics(dict[str, float]):
    """Measurements of a step by name; a metric of the updates is the mean over the step's mini-batches so far."""

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[str, tuple[float, float]] = {}

    def add_update(self, role: str, grad_norm: float, told: Mapping[str, float]) -> None:
        """Take what an optimizer step tells of its mini-batch, in which each metric is a mean or a share already.

        Args:
            role: Whose step; ``<role>/grad_norm`` is the mean of its norms, ``<role>/grad_norm_max`` the largest.
            grad_norm: Norm of the gradient before clipping.
            told: Metric -> value.
        """
        norm, largest = f"{role}/grad_norm", f"{role}/grad_norm_max"
        self.average({**told, norm: grad_norm})
        self[largest] = max(grad_norm, self.get(largest, grad_norm))

    def average(self, told: Mapping[str, float]) -> None:
        """Take what a mini-batch tells: each metric becomes the mean over the mini-batches that told it."""
        for name, value in told.items():
            self.add_share(name, value, 1)

    def add_share(self, name: str, part: float, whole: float) -> None:
        """Add to both sides of a share, or of a mean: a step may have several rollouts."""
        parts, wholes = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = parts, wholes = parts + part, wholes + whole
        self[name] = parts / wholes if wholes else 0.0

    def add_count(self, name: str, count: float) -> None:
        """Add to a count."""
        self[name] = self.get(name, 0.0) + count

    def clear(self) -> None:
        """Forget a step."""
        super().clear()
        self._sums.clear()


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
        self.metrics = Metrics()
        self.sample_stats: dict[str, list[float]] = {}
        self.shown: list[dict[str, Any]] = []

    @property
    def calls(self) -> Mapping[str, NodeCall]:
        """Return name -> call, for every node that may name this role."""
        return {name: getattr(self, name) for name in self.call_names}

    def enter_phase(self, phase: str) -> None:
        """Prepare for a phase. Collective: all ranks on which the role is called."""
