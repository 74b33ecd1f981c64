"""What the steps of a run were estimated to take, beside what they took. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hybridflow.config.recipe import Recipe
from hybridflow.dataflow.graph import Flow
from hybridflow.errors import HybridflowError
from hybridflow.mapping.fit import in_nodes_of, observed_run, recipe_of
from hybridflow.mapping.hardware import hardware
from hybridflow.mapping.rl_step import phase_seconds, step_calls, steps_ahead, total_seconds
from hybridflow.recipe.meshes import role_meshes


@dataclass(frozen=True, kw_only=True)
class Planned:
    """An estimate for a run, with the lengths that its texts have had.

    Attributes:
        hardware: Name of the hardware.
        step_s: Seconds of a step.
        phases_s: Seconds of each phase, of the rank that takes longest.
    """

    hardware: str
    step_s: float
    phases_s: dict[str, float]


def planned_run(run_dir: Path, flow_of: Callable[[Recipe], Flow]) -> Planned | None:
    """Return the estimate; None: no hardware is named, or the run cannot be estimated or has made too few steps.

    ``flow_of`` returns the flow of a recipe's step.
    """
    try:
        recipe = recipe_of(run_dir)
        name = recipe.cluster.hardware
        if name is None:
            # Before the metrics are read, which are many in a long run.
            return None
        one = observed_run(run_dir, recipe)
        machine, meshes = in_nodes_of(one.recipe, hardware(name)), role_meshes(one.recipe)
        calls = step_calls(one.recipe, flow_of(one.recipe), meshes, machine, one.texts)
    except HybridflowError:
        return None
    phases = phase_seconds(calls, {name: mesh.ranks for name, mesh in meshes.items()})
    ahead = steps_ahead(one.recipe.trainer.max_staleness, machine)
    return Planned(
        hardware=name,
        step_s=total_seconds(calls, max_staleness=ahead),
        phases_s={phase: seconds for phase, seconds in phases.items() if seconds > 0},
    )
