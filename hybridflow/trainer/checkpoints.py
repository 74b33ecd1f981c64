"""What a checkpoint of a training job holds, and going on from it in the same layout, bit for bit."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow import __version__
from hybridflow.checkpoint.store import (
    Checkpoint,
    begin_step,
    complete_step,
    latest_step,
    load_latest,
    read_shard,
    write_shard,
)
from hybridflow.errors import CheckpointError
from hybridflow.roles.job import Job
from hybridflow.sections import to_dict

KEEP_LAST = 2
_MUST_MATCH = (
    *("algorithm", "seed", "model", "data", "tokenizer", "actor", "critic", "reference", "reward", "rollout"),
    *("ppo", "grpo"),
    *("trainer.global_batch_size", "trainer.mini_batch_size"),
)
"""Keys of the recipe that a run is resumed with unchanged; its place in the data is counted in global batches."""


def check_new(run_dir: Path) -> None:
    """Refuse to begin a run anew where an earlier one has checkpoints.

    Its own first save would be refused too, when the training is done.

    Raises:
        CheckpointError: There is a checkpoint.
    """
    step = latest_step(run_dir)
    if step is not None:
        raise CheckpointError(
            f"{run_dir}: holds a run with a checkpoint of step {step}; add --resume to go on from it, set run_dir to "
            f"another directory, or remove {run_dir / 'checkpoints'} to begin anew"
        )


def save(job: Job, roles: Mapping[str, Any], step: int, state: Mapping[str, Any]) -> None:
    """Write every role's tensors, each rank its own, and the job's state.

    Collective: all ranks.

    Args:
        job: The job.
        roles: Name -> role; those with a model are saved.
        step: Training steps done.
        state: What else the run needs to go on; JSON.
    """
    run_dir, everyone = Path(job.recipe.run_dir), job.world.coordinator(job.meshes["job"].ranks)
    if everyone.is_lead:
        begin_step(run_dir, step)
    everyone.barrier("start of the checkpoint")
    files = [write_shard(run_dir, step, name, job.world.rank, tensors) for name, tensors in _tensors(roles).items()]
    shares = everyone.gather([files, _optimizer_steps(roles)], "files of the checkpoint")
    if everyone.is_lead:
        whole = {
            "version": __version__,
            "recipe": to_dict(job.recipe),
            "optimizer_steps": [steps for _, steps in shares],
            **state,
        }
        complete_step(run_dir, step, whole, [file for written, _ in shares for file in written], KEEP_LAST)
    everyone.barrier("end of the checkpoint")


def load(job: Job, roles: Mapping[str, Any]) -> Checkpoint | None:
    """Fill the roles from the latest checkpoint of the run, and return it; None if there is none yet.

    Raises:
        CheckpointError: It is damaged, or belongs to another recipe; names what differs.
    """
    checkpoint = load_latest(Path(job.recipe.run_dir))
    if checkpoint is None:
        return None
    _check_recipe(job, checkpoint.state["recipe"])
    for name, tensors in _tensors(roles).items():
        saved = read_shard(checkpoint, name, job.world.rank)
        if saved.keys() != tensors.keys():
            raise CheckpointError(
                f"{checkpoint.path}: {name} on rank {job.world.rank} has other tensors than this run "
                f"({', '.join(sorted(saved.keys() ^ tensors.keys()))[:200]}); resume with the recipe that wrote it"
            )
        with torch.no_grad():
            for key, tensor in tensors.items():
                tensor.copy_(saved[key].view(tensor.shape))
    for name, steps in checkpoint.state["optimizer_steps"][job.world.rank].items():
        roles[name].trainable.set_optimizer_steps(steps)
    return checkpoint


def _optimizer_steps(roles: Mapping[str, Any]) -> dict[str, list[int]]:
    return {
        name: role.trainable.optimizer_steps()
        for name, role in roles.items()
        if getattr(role, "trainable", None) is not None
    }


def _tensors(roles: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """File name -> live tensors: copying into them loads a checkpoint."""
    found: dict[str, dict[str, Tensor]] = {}
    for name in ("actor", "critic", "reference"):
        role = roles.get(name)
        if role is None or role.model is None:
            continue
        found[name] = role.model.tensors()
        if getattr(role, "trainable", None) is not None:
            found[f"{name}-optimizer"] = role.trainable.optimizer_state()
    return found


def _check_recipe(job: Job, saved: dict[str, Any]) -> None:
    now = to_dict(job.recipe)
    for key in _MUST_MATCH:
        wanted, found = (functools.reduce(operator.getitem, key.split("."), recipe) for recipe in (saved, now))
        if found != wanted:
            raise CheckpointError(
                f"{job.recipe.run_dir}: the checkpoint was written with {key}={wanted}, the recipe now has {found}; "
                "resume with the same, or start another run_dir"
            )
    if now["cluster"]["ranks"] != saved["cluster"]["ranks"]:
        raise CheckpointError(
            f"{job.recipe.run_dir}: the checkpoint was written by {saved['cluster']['ranks']} ranks, this run has "
            f"{now['cluster']['ranks']}; resume with as many (resuming in another layout is not there yet)"
        )
