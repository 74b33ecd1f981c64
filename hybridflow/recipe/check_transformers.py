"""Checks of models that run in ``transformers``. No torch."""

from __future__ import annotations

from collections.abc import Collection

from hybridflow.config.recipe import MODEL_SECTIONS, REWARDS, Recipe
from hybridflow.errors import ConfigError
from hybridflow.recipe.meshes import meshes_in_recipe_order


def transformers_meshes(recipe: Recipe) -> tuple[str, ...]:
    """Return the names of the meshes whose models run in ``transformers``."""
    scorers = [name for name in REWARDS if getattr(getattr(recipe, name), "model", None) is None]
    return tuple(
        name
        for name in meshes_in_recipe_order(recipe)
        if name not in scorers and recipe.model_of(name).implementation == "transformers"
    )


def check_transformers(recipe: Recipe, in_memory: Collection[str] = ()) -> None:
    """Refuse what a model that runs in ``transformers`` cannot do.

    A program has given the models of the sections ``in_memory``.

    Raises:
        ConfigError: A key asks for it.
    """
    for role, key in MODEL_SECTIONS.items():
        model = recipe.model_of(role)
        is_given = key in in_memory or (model is recipe.model and "model" in in_memory)
        if model.implementation == "transformers" and model.path is None and not is_given:
            raise ConfigError(
                f"{key}.path: missing; {key}.implementation=transformers reads a directory of Hugging Face: name it"
            )
        if model.implementation == "megatron" and model.trust_remote_code:
            raise ConfigError(
                f"{key}.trust_remote_code=true: no code of a directory runs in {key}.implementation=megatron; remove it"
            )
    if recipe.model.implementation == "transformers":
        _check_actor(recipe)


def _check_actor(recipe: Recipe) -> None:
    rollout = recipe.rollout
    refused = {
        "actor.lora.path": recipe.actor.lora is not None and recipe.actor.lora.path is not None,
        "actor.lora.dropout": recipe.actor.lora is not None and recipe.actor.lora.dropout > 0,
        "actor.reshard_every": recipe.actor.reshard_every > 1,
        "actor.rollout_ranks": recipe.actor.rollout_ranks is not None,
        "rollout.environment": rollout.environment is not None,
        "rollout.partial_rollouts": rollout.partial_rollouts,
    }
    for key, is_there in refused.items():
        if is_there:
            raise ConfigError(
                f"{key}: cannot be had with an actor that runs in transformers; remove it, or choose a model of "
                "docs/families.md"
            )
