"""What a person reads before the first step of a job and after its last one. No torch."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.config.recipe import MODEL_MESHES, REWARDS, Recipe
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.observe.console import duration
from hybridflow.observe.metrics import RESULTS
from hybridflow.observe.summary import REPORT_FILE
from hybridflow.reshard.spec import ModelSpec


def first_line(recipe: Recipe) -> str:
    """Return the line for the time in which a job imports its libraries."""
    ranks = "1 rank" if recipe.cluster.ranks == 1 else f"{recipe.cluster.ranks} ranks"
    return f"{recipe.name}: {recipe.algorithm} on {ranks}, run directory {recipe.run_dir}"


def banner(
    recipe: Recipe,
    meshes: Mapping[str, DeviceMesh],
    spec: ModelSpec,
    *,
    device: str,
    num_rows: int | None,
    num_held_out: int,
    prompts: str | None = None,
) -> str:
    """Return what is about to be trained, on what, and where.

    Args:
        recipe: The recipe.
        meshes: Name -> mesh.
        spec: Tensors of the actor.
        device: What the ranks compute with.
        num_rows: Rows to train on; None: it is not known, as of a live queue.
        num_held_out: Held-out rows.
        prompts: What is to be said of the prompts; None: nothing.
    """
    trainer, rollout = recipe.trainer, recipe.rollout
    size = sum(math.prod(tensor.shape) for tensor in spec.tensors)
    model = "new" if recipe.model.path is None else recipe.model.path
    rows = "rows as they come" if num_rows is None else f"{num_rows:,} rows"
    samples = f"{trainer.global_batch_size} samples"
    if rollout.group_size > 1:
        samples += f" ({trainer.global_batch_size // rollout.group_size} prompts × {rollout.group_size})"
    if trainer.save_every is None:
        saves = "a checkpoint every 15 minutes"
    else:
        saves = f"a checkpoint every {trainer.save_every} steps" if trainer.save_every else "a checkpoint at the end"
    steps = "as many as the program takes," if trainer.known_steps is None else f"{trainer.steps:,}"
    lines = {
        "device": device,
        "model": f"{model}, {_count(size)} parameters, {recipe.model.dtype}",
        "data": f"{recipe.data.title}, {rows}; {num_held_out:,} held out",
        **({} if prompts is None else {"prompts": prompts}),
        "layouts": ", ".join(_layouts(recipe, meshes)),
        "steps": f"{steps} of {samples}, {saves}",
    }
    return "\n".join(f"  {name:<8} {text}" for name, text in lines.items())


def farewell(recipe: Recipe, summary: Mapping[str, Any], *, saved_step: int | None, seconds: float) -> str:
    """Return what a finished job leaves: its result, its checkpoint, how to export it, and where to look.

    With ``trainer.keep_best`` the best checkpoint is named too, and is the one to export.

    Args:
        recipe: The recipe.
        summary: Summary of the run.
        saved_step: Step of the newest checkpoint; None: there is none.
        seconds: Length of its steps together.
    """
    run_dir = Path(recipe.run_dir)
    steps = summary["steps"]
    parts = [f"done: {steps:,} step{'' if steps == 1 else 's'} in {duration(seconds)}"]
    best = ""
    for name, text in RESULTS.items():
        if f"{name}_after_rl" in summary:
            before, after = summary.get(f"{name}_before_rl"), text.format(summary[f"{name}_after_rl"])
            parts.append(f"held-out {name} {after if before is None else f'{text.format(before)} → {after}'}")
            if recipe.trainer.keep_best and "best_step" in summary:
                best = f"; best {text.format(summary['best_score'])} after step {summary['best_step']:,}"
            break
    lines = ["; ".join(parts) + best]
    if saved_step is not None:
        exported = checkpoint = run_dir / "checkpoints" / f"step_{saved_step:06d}"
        lines.append(f"  checkpoint  {checkpoint}")
        if best:
            exported = checkpoint.with_name(f"step_{summary['best_step']:06d}")
            lines.append(f"  best        {exported}")
        out = Path("out") / run_dir.name
        if out.absolute() == run_dir.absolute():
            out = out.with_name(f"{out.name}-hf")
        words = ["hybridflow", "convert", str(exported / "actor"), str(out), "--to", "hf"]
        lines.append(f"  export      {shlex.join(words)}")
    if summary["steps"]:
        lines.append(f"  look        {run_dir / REPORT_FILE}")
    return "\n".join(lines)


def _layouts(recipe: Recipe, meshes: Mapping[str, DeviceMesh]) -> list[str]:
    """Return each model's role with its layout; the actor's two as one where they are the same."""
    found = {name: str(meshes[name].layout) for name in MODEL_MESHES if name in meshes}
    for role in REWARDS:
        scorer = getattr(recipe, role)
        if scorer is None or scorer.model is None:
            found.pop(role, None)
    if "actor.rollout" in found and found["actor.rollout"] == found["actor.update"]:
        found = {"actor": found.pop("actor.update"), **{k: v for k, v in found.items() if k != "actor.rollout"}}
    return [f"{name} {_short(layout)}" for name, layout in found.items()]


def _short(layout: str) -> str:
    """Return a layout without its axes of size 1: ``tp2.dp2``."""
    return ".".join(axis for axis in layout.split(".") if not re.fullmatch("[a-z]+1", axis)) or "dp1"


def _count(number: int) -> str:
    """Return a number of parameters with three digits: ``1.24 M``."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
