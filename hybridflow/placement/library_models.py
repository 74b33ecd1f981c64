"""Modules of ``transformers`` for the roles whose models run there, of directories or of models that were given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hybridflow.checkpoint.formats.registry import open_model
from hybridflow.checkpoint.manifest import NAME
from hybridflow.checkpoint.model_info import read_model_info
from hybridflow.config.recipe import FROZEN, MODEL_SECTIONS
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.families.family import VALUE_HEAD
from hybridflow.families.model import ModelConfig
from hybridflow.models.hf_adapters import add_adapters
from hybridflow.models.hf_model import (
    Filling,
    TransformersActor,
    TransformersCritic,
    copy_model,
    is_scorer,
    make_actor,
    make_critic,
    wrap_actor,
    wrap_critic,
)
from hybridflow.models.initial import initial_matrix
from hybridflow.models.user_model import Uncut
from hybridflow.placement.job import Job
from hybridflow.placement.user_objects import object_of


def with_library_models(job: Job) -> Job:
    """Return the job with the modules of its models that run in ``transformers``; one that has none as it is.

    The first rank of a mesh reads the weights, and the others get them when the model is placed. A rank without a part
    of a model has its module without memory, which tells names and shapes. Of a model that a program gave a copy is
    trained.

    Raises:
        ConfigError: ``transformers`` is not there, or has no such model.
        CheckpointError: A directory is damaged, or its tensors are not the model's.
    """
    recipe, modules = job.recipe, dict[str, nn.Module]()
    for role in MODEL_SECTIONS:
        section = getattr(recipe, role)
        if section is None or (role in FROZEN and section.model is None):
            continue
        if recipe.model_of(role).implementation == "transformers":
            given, filling = object_of(job, role), _filling(job, role)
            how: dict[str, Any] = {"has_value_head": recipe.has_value_head(role), "seed": recipe.seed}
            if given is None:
                module = _make(job.model_of(role), filling, **how)
            else:
                module = _wrap(given, job.model_of(role), filling, **how)
            modules[role] = module
            if role == "actor" and recipe.actor.lora is not None:
                assert isinstance(module, TransformersActor), "of a scorer refused by the recipe"
                add_adapters(module, recipe.actor.lora, seed=recipe.seed)
    return replace(job, modules=modules) if modules else job


def _filling(job: Job, role: str) -> Filling:
    """Return what fills a role's module on this rank."""
    names = ("actor.update", "actor.rollout", "reference") if role == "actor" else (role,)
    meshes, rank = [job.meshes[name] for name in names if name in job.meshes], job.world.rank
    if not any(rank in mesh for mesh in meshes):
        return "never"
    if job.is_resumed:
        return "read" if role in FROZEN else "later"
    return "read" if rank == meshes[0].ranks[0] else "later"


def _make(model: ModelConfig, filling: Filling, *, has_value_head: bool, seed: int) -> nn.Module:
    assert model.path is not None, "refused by the recipe"
    path = Path(model.path)
    info = read_model_info(path)
    assert info.assets is not None, "of a directory"
    # A model directory of ours holds the tensors, and beside them what a directory of Hugging Face has.
    is_ours = (path / NAME).is_file()
    if is_ours and info.model.implementation != "transformers":
        raise ConfigError(
            f"{path}: was trained with implementation=megatron, whose tensors transformers does not know; leave "
            "implementation out, or convert it: hybridflow convert SOURCE OUT --to hf"
        )
    made: Filling = "later" if is_ours and filling == "read" else filling
    module: nn.Module
    if has_value_head:
        critic = module = make_critic(info.assets, model, is_scorer=info.has_value_head and not is_ours, filling=made)
        if filling == "read" and not info.has_value_head:
            _set_head(critic, model, seed)
    else:
        module = make_actor(info.assets, model, filling=made)
    if is_ours and filling == "read":
        _fill(module, path)
    return module


def _wrap(given: nn.Module, model: ModelConfig, filling: Filling, *, has_value_head: bool, seed: int) -> nn.Module:
    """Make a role's module of a model that a program gave."""
    inner = copy_model(given, model, filling=filling)
    if not has_value_head:
        return wrap_actor(inner, model)
    module = wrap_critic(inner, model, is_scorer=is_scorer(given), where="model in memory")
    if filling == "read" and not is_scorer(given):
        _set_head(module, model, seed)
    return module


def _set_head(critic: TransformersCritic, model: ModelConfig, seed: int) -> None:
    """Set the initial values of a new value head."""
    head = critic.value_head.weight
    head.data.copy_(initial_matrix(VALUE_HEAD, head.shape, seed=seed, std=model.init_std))


@torch.no_grad()
def _fill(module: nn.Module, path: Path) -> None:
    """Read a module's tensors from a model directory of ours; a new value head stays as it is.

    Raises:
        CheckpointError: A tensor is missing or has another shape, or the module has no place for one.
    """
    source, held = open_model(path), dict(Uncut(module).tensors())
    strangers = [name for name in source.tensors if name not in held]
    if strangers and isinstance(module, TransformersActor):
        raise CheckpointError(
            f"{path}: {strangers[0]}: the {type(module.inner).__name__} of its config.json has no such tensor; is "
            "tie_word_embeddings what it was in training?"
        )
    for name, tensor in held.items():
        entry = source.tensors.get(name)
        if entry is None and name == VALUE_HEAD:
            continue
        if entry is None or entry.shape != (tuple(tensor.shape) or (1,)):
            found = "no such tensor" if entry is None else list(entry.shape)
            raise CheckpointError(
                f"{path}: {name}: found {found}, expected {list(tensor.shape)}; is it of another model?"
            )
        tensor.copy_(source.read(name).view(tensor.shape))
        source.release()
