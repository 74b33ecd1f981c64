"""Figures of hardware that make estimates of measured steps right. No torch."""

from __future__ import annotations

import argparse
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow.config.recipe import Recipe
from hybridflow.dataflow.graph import Flow
from hybridflow.errors import ConfigError
from hybridflow.mapping.hardware import DEFAULT_HARDWARE, Hardware, hardware
from hybridflow.mapping.rl_step import Texts, check_estimated, phase_seconds, spread_lengths, step_calls
from hybridflow.observe.metrics import iterate_metrics
from hybridflow.observe.starts import kept_recipe
from hybridflow.recipe.load import load_recipe
from hybridflow.recipe.meshes import role_meshes

if TYPE_CHECKING:
    import numpy as np

FITTED = (
    *("product_share", "elementwise_share", "memory_share", "node_share"),
    *("launch", "pass_launch", "update_launch", "node_latency"),
)
"""What is fitted. A figure of 0 stays 0."""

FITTED_ON_GPUS = (*FITTED, "cache_share", "engine_launch", "pass_host")

_PASS_HOST_S = 2e-3
"""What a fit begins with where hardware has no ``pass_host``: what it was on an H100, see docs/gpu.md."""

PHASES = ("update", "log_probs", "values", "rollout")
"""Phases whose time is compared."""

_PULL = 0.001
"""Weight of a figure's own value beside one measured time, both as squared logarithms of a ratio."""

_ROUNDS = 30
_LATEST = 20


@dataclass(frozen=True, kw_only=True)
class Observed:
    """A step that was measured.

    Attributes:
        recipe: Of the run.
        texts: Of the step.
        step_s: Of the whole.
        seconds: Of each phase, of the rank that took longest.
    """

    recipe: Recipe
    texts: Texts
    step_s: float
    seconds: Mapping[str, float]


def fitted(hardware: Hardware, observed: Sequence[Observed], flow_of: Callable[[Recipe], Flow]) -> Hardware:
    """Return the hardware with figures that bring estimates near measured times.

    It minimizes the squared logarithms of estimate over measurement, and of each figure over the one it begins with, by
    Gauss-Newton steps in the logarithms of the figures. Figures that the times do not depend on keep their values.

    Args:
        hardware: To begin with.
        observed: Steps that were measured.
        flow_of: Returns the flow of a recipe's step.
    """
    # Begins a thread for each core, with which a launcher cannot fork its ranks.
    import numpy as np

    names = [name for name in (FITTED if hardware.is_cpu else FITTED_ON_GPUS) if getattr(hardware, name) > 0]
    # Beyond it a share stays 1, and has no slope.
    most = [-math.log(getattr(hardware, name)) if name.endswith("_share") else math.inf for name in names]
    flows = [flow_of(one.recipe) for one in observed]

    def differences(moved: np.ndarray) -> np.ndarray:
        machine = _with(hardware, names, moved)
        found: list[float] = []
        for one, flow in zip(observed, flows, strict=True):
            estimated = estimated_phases(one, flow, machine)
            found += [math.log(estimated[name] / one.seconds[name]) for name in PHASES if name in estimated]
        return np.array(found)

    moved, damping = np.zeros(len(names)), 0.01
    left = differences(moved)
    for _ in range(_ROUNDS):
        # Downwards: a share that is 1 cannot grow.
        slopes = np.stack([left - differences(moved - step) for step in 0.01 * np.eye(len(names))], axis=1) / 0.01
        pulled = slopes.T @ left + _PULL * moved
        step = -np.linalg.solve(slopes.T @ slopes + (_PULL + damping) * np.eye(len(names)), pulled)
        tried = np.minimum(moved + step, most)
        further = differences(tried)
        if _loss(further, tried) < _loss(left, moved):
            moved, left, damping = tried, further, damping / 4
        else:
            damping *= 8
    return _with(hardware, names, moved)


def estimated_phases(one: Observed, flow: Flow, hardware: Hardware) -> dict[str, float]:
    """Return the estimated seconds of the phases of a measured step."""
    meshes = role_meshes(one.recipe)
    calls = step_calls(one.recipe, flow, meshes, hardware, one.texts)
    ranks = {name: mesh.ranks for name, mesh in meshes.items()}
    return {name: value for name, value in phase_seconds(calls, ranks).items() if name in one.seconds and value > 0}


def with_host_time(hardware: Hardware) -> Hardware:
    """Return the hardware with a host time. The table's GPUs have none, because none is published."""
    if hardware.is_cpu or hardware.pass_host:
        return hardware
    return replace(hardware, pass_host=_PASS_HOST_S)


def asked_hardware(arguments: argparse.Namespace, flow_of: Callable[[Recipe], Flow]) -> tuple[Hardware, Texts | None]:
    """Return the hardware that ``--hardware`` or the recipe names, fitted to the run of ``--like``, and its texts.

    The name is put into ``arguments``.
    """
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if arguments.hardware is None:
        arguments.hardware = recipe.cluster.hardware or DEFAULT_HARDWARE
    machine = in_nodes_of(recipe, hardware(arguments.hardware))
    if arguments.like is None:
        return machine, None
    one = observed_run(arguments.like, recipe_of(arguments.like))
    check_estimated(one.recipe, machine)
    machine = fitted(with_host_time(machine), [one], flow_of)
    estimated = estimated_phases(one, flow_of(one.recipe), machine)
    worst = max(abs(seconds / one.seconds[name] - 1) for name, seconds in estimated.items())
    return replace(machine, error_percent=round(100 * worst, 1)), one.texts


def in_nodes_of(recipe: Recipe, machine: Hardware) -> Hardware:
    """Return the hardware in nodes of ``cluster.ranks_per_node``, if the recipe has it and ranks share no cores."""
    per_node = recipe.cluster.ranks_per_node
    if per_node is None or machine.crowding > 1:
        return machine
    return replace(machine, ranks_per_node=per_node)


def recipe_of(run_dir: Path) -> Recipe:
    """Return the recipe that a run kept. Raises ConfigError: it kept none, or one that is wrong here."""
    kept = kept_recipe(run_dir)
    if kept is None:
        raise ConfigError(f"{run_dir}: holds no recipe below logs/; give the directory of a run")
    return load_recipe(kept)


def observed_run(run_dir: Path, recipe: Recipe) -> Observed:
    """Return what a step of a run took: the median of its latest steps, and of each phase.

    The recipe is what ``recipe_of`` gives.

    Raises:
        DataError: It has no metrics.
        ConfigError: It has made fewer than three steps.
    """
    # One more, since the first step of a run is not like the others.
    timed = deque((row for row in iterate_metrics(run_dir) if "time/step_s" in row), maxlen=_LATEST + 1)
    rows = list(timed)[1:]
    if len(rows) < 2:
        raise ConfigError(f"{run_dir}: three steps are needed; let the run go on")

    def middle(name: str) -> float:
        return statistics.median(row.get(name, 0.0) for row in rows)

    samples, response = recipe.trainer.global_batch_size, middle("response/length_mean")
    prompt = max(1, round(middle("batch/num_tokens") / samples - response))
    lengths = spread_lengths(samples, max(1.0, response), recipe.rollout.max_new_tokens)
    seconds = {name: middle(f"time/{name}_s") for name in PHASES}
    return Observed(
        recipe=recipe,
        texts=Texts(prompt=prompt, responses=lengths),
        step_s=middle("time/step_s"),
        seconds={name: value for name, value in seconds.items() if value > 0},
    )


def _loss(left: np.ndarray, moved: np.ndarray) -> float:
    return float(left @ left + _PULL * moved @ moved)


def _with(hardware: Hardware, names: Sequence[str], moved: np.ndarray) -> Hardware:
    """Return the hardware with figures multiplied by e to the power of ``moved``; no share exceeds 1."""
    values = {name: getattr(hardware, name) * math.exp(by) for name, by in zip(names, moved, strict=True)}
    return replace(
        hardware, **{name: min(1.0, value) if name.endswith("_share") else value for name, value in values.items()}
    )
