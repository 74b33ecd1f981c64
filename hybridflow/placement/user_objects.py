"""What a Python program gave in the place of what a recipe names: models to begin with, classes of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from hybridflow.checkpoint.formats.in_memory import in_memory_model, is_model, library_assets
from hybridflow.checkpoint.formats.registry import open_model
from hybridflow.checkpoint.formats.source import Source
from hybridflow.config.recipe import CRITICS
from hybridflow.data.tokenizer import split_stop
from hybridflow.errors import ConfigError, LayoutError
from hybridflow.families.model import differing
from hybridflow.models.user_model import FAMILY, is_user_class
from hybridflow.placement.job import Job


def has_weights(job: Job, role: str) -> bool:
    """Return whether a role's weights come from somewhere other than the seed."""
    return role in job.objects or job.model_of(role).path is not None


def weights_of(job: Job, role: str) -> Source | None:
    """Return the weights that a role begins with: of the given model, or of the directory that the recipe names.

    Returns:
        None: they are made from the seed.

    Raises:
        ConfigError: What was given is no model, or another one than the recipe's.
        CheckpointError: The directory is damaged, or the model's tensors are not those of its settings.
    """
    model = job.model_of(role)
    if role not in job.objects:
        return None if model.path is None else open_model(Path(model.path))
    found = in_memory_model(job.objects[role], vocab_size=model.vocab_size)
    for name in differing(found.model, model):
        raise ConfigError(
            f"{role}: the model that was given has {name}={getattr(found.model, name)!r}, the recipe "
            f"{getattr(model, name)!r}; give "
            "hybridflow.recipe.load.recipe_from_dict its settings too (in_memory=), or leave the key out"
        )
    return found


def in_memory_assets(job: Job, role: str) -> tuple[str | None, dict[str, bytes]] | None:
    """Return the family and small files of a model that was given; None: none was."""
    given = object_of(job, role)
    if given is not None and job.model_of(role).implementation == "transformers":
        return library_assets(given)
    if user_class_of(job, role) is not None and not runs_in_transformers(job, role):
        return FAMILY, {}
    if role not in job.objects or not is_model(given):
        return None
    source = in_memory_model(given)
    return source.family, source.assets()


def object_of(job: Job, role: str) -> Any:
    """Return what a program gave for a role, or for the actor whose weights the role begins with; None: nothing."""
    has_model = getattr(getattr(job.recipe, role, None), "model", None) is not None
    return job.objects.get(role if role in job.objects or has_model else "actor")


def user_class_of(job: Job, role: str) -> nn.Module | None:
    """Return the class of a role's model that is whole on each rank: the user's own, or one that runs in transformers.

    A reference has the actor's. None: there is none.
    """
    for name in ("reference", "actor") if role == "reference" else (role,):
        given = job.modules.get(name, job.objects.get(name))
        if given is not None:
            return given if isinstance(given, nn.Module) and is_user_class(given) else None
    return None


def runs_in_transformers(job: Job, role: str) -> bool:
    """Return whether a role's model is a module of ``transformers``, from ``placement.library_models``."""
    module = user_class_of(job, role)
    return any(module is each for each in job.modules.values())


def check_objects(job: Job) -> None:
    """Refuse what was given in the wrong place, or cannot be done with it.

    Raises:
        ConfigError: What was given is no model, or the recipe asks for what it cannot do.
        LayoutError: Its mesh would cut it.
    """
    for role in ("actor", "reference", *CRITICS, "teacher"):
        given = job.objects.get(role)
        if given is not None and not is_model(given) and user_class_of(job, role) is None:
            raise ConfigError(
                f"{role}: found {type(given).__name__}, expected a PreTrainedModel of transformers, a GPTModel of "
                "megatron-core, or a class of your own (docs/extend.md)"
            )
    if "reference" in job.objects and "actor" in job.modules:
        raise ConfigError(
            "reference: was given, and the actor runs in transformers, whose reference is its copy; remove it"
        )
    if "reference" in job.objects and job.recipe.actor.lora is not None:
        raise ConfigError("reference: was given, and actor.lora makes it the actor without adapters; remove one")
    for name, mesh in job.meshes.items():
        if user_class_of(job, mesh.role) is not None and mesh.layout.tp * mesh.layout.pp > 1:
            raise LayoutError(f"{name}: layout {mesh.layout}: a class of your own is not cut; set tp and pp to 1")
    if user_class_of(job, "actor") is not None and not runs_in_transformers(job, "actor"):
        _check_user_actor(job)


def _check_user_actor(job: Job) -> None:
    recipe = job.recipe
    rollout = recipe.rollout
    refused = {
        "actor.lora": recipe.actor.lora is not None,
        # The class that learns is the one that generates: no other weights stay behind.
        "actor.reshard_every": recipe.actor.reshard_every > 1,
        "actor.rollout_ranks": recipe.actor.rollout_ranks is not None,
        "rollout.environment": rollout.environment is not None,
        "rollout.partial_rollouts": rollout.partial_rollouts,
        # It ends at tokens.
        "rollout.stop": bool(split_stop(rollout.stop, job.tokenizer)[0]),
        "rollout.engine.kind=vllm": rollout.engine.kind == "vllm",
    }
    for key, is_there in refused.items():
        if is_there:
            raise ConfigError(f"{key}: cannot be had with an actor of your own class; remove it")
    for name in CRITICS:
        if getattr(recipe, name) is not None and name not in job.objects and getattr(recipe, name).model is None:
            raise ConfigError(
                f"{name}: would begin as a copy of the actor, which is a class of your own; give one for it too, or "
                f"set {name}.model"
            )
