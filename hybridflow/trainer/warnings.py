"""Settings and measurements that are seldom meant: nothing fails, and a person is told once. No torch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from hybridflow.checkpoint.model_info import read_model_info
from hybridflow.config.recipe import MODEL_SECTIONS, Recipe
from hybridflow.mapping.hardware import hardware
from hybridflow.recipe.defaults import num_gpus

_MANY_EPOCHS = 100
_LONG_S = 30 * 86400.0
_MEASURED_STEPS = 3
"""After so many steps their times say how long the others take; the first is slower."""


def recipe_warnings(recipe: Recipe) -> tuple[str, ...]:
    """Describe in words what a recipe asks for that works and is seldom meant."""
    found = [*recipe.dropped]
    for role, key in MODEL_SECTIONS.items():
        model = recipe.model_of(role)
        # The critic's may be the actor's.
        if model.path is None or (role != "actor" and model == recipe.model):
            continue
        limit = read_model_info(Path(model.path)).model.max_context
        if model.max_context > limit:
            found.append(
                f"{key}.max_context={model.max_context}: the model of {key}.path={model.path!r} was made for {limit} "
                f"tokens, and what it says beyond them may be worth nothing; set {key}.max_context={limit}"
            )
    every = recipe.actor.reshard_every
    if every > 1:
        found.append(
            f"actor.reshard_every={every}: rollouts come from weights that are up to {every - 1} update(s) old; "
            f"rollout/staleness_max tells, and correction.kind={recipe.correction_kind} applies"
        )
    steps = recipe.trainer.known_steps
    late = [str(step) for step in recipe.profile.steps if steps and step > steps]
    if late:
        found.append(
            f"profile.steps: {', '.join(late)} is after the last step, and writes no trace; lower it, or raise "
            f"trainer.steps={steps}"
        )
    if recipe.data.held_out is None:
        found.append("data.held_out is missing: there is no validation; name a file of held-out rows to have it")
    return tuple(found)


def cpu_warning(recipe: Recipe) -> str | None:
    """Describe in words that a run on the CPU was meant for GPUs; None: nothing says so.

    Who hides the GPUs has decided.
    """
    hide = "or set CUDA_VISIBLE_DEVICES= (empty), which means the CPU"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    if num_gpus() > 0:
        return (
            f"the run is on the CPU: torch cannot use the {num_gpus()} GPU(s) of this machine, often since it is built "
            f"without CUDA; mend what `hybridflow doctor` names, {hide}"
        )
    named = recipe.cluster.hardware
    if named is not None and not hardware(named).is_cpu:
        asked = f"cluster.hardware={named}"
    elif recipe.model.dtype != "fp32":
        asked = f"model.dtype={recipe.model.dtype}"
    else:
        return None
    return f"the run is on the CPU, though {asked} is for GPUs: torch finds none here; use a machine with GPUs, {hide}"


def epochs_warning(recipe: Recipe, num_rows: int | None, num_prompts: int) -> str | None:
    """Describe in words that training would go through its data very often; None: it would not, or nobody knows.

    Args:
        recipe: The recipe.
        num_rows: Rows of the training data; None: more may come.
        num_prompts: Rows of a step.
    """
    steps = recipe.trainer.steps
    if not num_rows or steps * num_prompts <= _MANY_EPOCHS * num_rows:
        return None
    epoch = max(1, math.ceil(num_rows / num_prompts))
    return (
        f"trainer.steps={steps}: the run goes through the {num_rows:,} rows of {recipe.data.title} "
        f"{steps * num_prompts / num_rows:,.0f} times; an epoch is {epoch:,} step(s) of {num_prompts}: lower "
        "trainer.steps, or set trainer.patience, which ends the run once validations no longer improve"
    )


def duration_warning(recipe: Recipe, steps_here: int, step: int, step_s: float) -> str | None:
    """Describe in words that no end of the run is in sight; None: one is, or it was told.

    Args:
        recipe: The recipe.
        steps_here: Steps since the start of this job.
        step: Number of the step that was done.
        step_s: Its seconds.
    """
    left = recipe.trainer.steps - step
    if steps_here != _MEASURED_STEPS or left * step_s <= _LONG_S:
        return None
    return (
        f"trainer.steps={recipe.trainer.steps}: at {step_s:.2g} s a step, {left:,} more take "
        f"{left * step_s / 86400:,.0f} days; if that is not meant, lower trainer.steps (also with --resume)"
    )


def reward_warning(metrics: Mapping[str, float], step: int, run_dir: str) -> str | None:
    """Describe in words that the scores of a step teach nothing; None: they do, or there are none.

    Args:
        metrics: Of the step.
        step: Its number.
        run_dir: Directory of the run.
    """
    low, high = metrics.get("reward/min"), metrics.get("reward/max")
    if low is None or low != high:
        return None
    return (
        f"step {step}: every sample scored {low:g}, so that the reward teaches nothing; look at samples "
        f"(`hybridflow rollouts {run_dir}`), at what the reward expects, and at "
        "rollout.max_new_tokens, which may cut the answer off"
    )
