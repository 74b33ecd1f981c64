"""What a checkpoint of a training job holds, and going on from it in the same layout, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridflow import __version__
from hybridflow.checkpoint.store import begin_step, complete_step, load_latest, read_shard, write_shard
from hybridflow.errors import CheckpointError
from hybridflow.roles.job import Job
from hybridflow.sections import to_dict

if TYPE_CHECKING:
    from hybridflow.trainer.trainer import Trainer

KEEP_LAST = 2
_MUST_MATCH = ("algorithm", "seed", "model", "data", "actor", "critic", "reference", "rollout", "ppo", "grpo")
"""Sections of the recipe that a run is resumed with unchanged."""


def save(trainer: Trainer) -> None:
    """Write every role's tensors, each rank its own, and the job's state. Collective: all ranks."""
    job, step = trainer.job, trainer.step
    run_dir, everyone = Path(job.recipe.run_dir), job.world.coordinator(job.meshes["job"].ranks)
    if everyone.is_lead:
        begin_step(run_dir, step)
    everyone.barrier("start of the checkpoint")
    files = [
        write_shard(run_dir, step, name, job.world.rank, tensors) for name, tensors in _tensors(trainer.roles).items()
    ]
    shares = everyone.gather(files, "files of the checkpoint")
    if everyone.is_lead:
        state = {
            "version": __version__,
            "recipe": to_dict(job.recipe),
            "kl_coef": trainer.kl_coef.value,
            "summary": trainer.summary,
        }
        complete_step(run_dir, step, state, [file for share in shares for file in share], KEEP_LAST)
    everyone.barrier("end of the checkpoint")


def load(trainer: Trainer) -> bool:
    """Take up the latest checkpoint of the run; False if there is none yet. Collective: all ranks.

    Raises:
        CheckpointError: It is damaged, or belongs to another recipe; names what differs.
    """
    job = trainer.job
    checkpoint = load_latest(Path(job.recipe.run_dir))
    if checkpoint is None:
        return False
    _check_recipe(job, checkpoint.state["recipe"])
    for name, tensors in _tensors(trainer.roles).items():
        saved = read_shard(checkpoint, name, job.world.rank)
        if saved.keys() != tensors.keys():
            raise CheckpointError(
                f"{checkpoint.path}: {name} on rank {job.world.rank} has other tensors than this run "
                f"({', '.join(sorted(saved.keys() ^ tensors.keys()))[:200]}); resume with the recipe that wrote it"
            )
        with torch.no_grad():
            for key, tensor in tensors.items():
                tensor.copy_(saved[key].view(tensor.shape))
    trainer.step = checkpoint.step
    trainer.kl_coef.value = checkpoint.state["kl_coef"]
    trainer.summary = checkpoint.state["summary"]
    trainer.roles["actor"].mark_changed()
    if job.world.rank == 0:
        print(f"resumed from {checkpoint.path}", flush=True)
    return True


def _tensors(roles: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
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
    for section in _MUST_MATCH:
        if now[section] != saved[section]:
            raise CheckpointError(
                f"{job.recipe.run_dir}: the checkpoint was written with {section}={saved[section]}, the recipe now has "
                f"{now[section]}; resume with the same, or start another run_dir"
            )
    if now["cluster"]["ranks"] != saved["cluster"]["ranks"]:
        raise CheckpointError(
            f"{job.recipe.run_dir}: the checkpoint was written by {saved['cluster']['ranks']} ranks, this run has "
            f"{now['cluster']['ranks']}; resume with as many (resuming in another layout is not there yet)"
        )
