"""Checks of prompts with images. No torch."""

from __future__ import annotations

from pathlib import Path

from hybridflow.config.recipe import MODEL_SECTIONS, REWARDS, Recipe
from hybridflow.errors import ConfigError
from hybridflow.families.images import PROCESSOR, ImageSettings, check_turns, image_settings

_KEY = "data.images_field"


def check_images(recipe: Recipe) -> None:
    """Refuse what cannot be had with images in prompts.

    Raises:
        ConfigError: A key asks for it, or a model reads no images.
    """
    if recipe.data.images_field is None:
        if recipe.data.image_max_pixels is not None:
            raise ConfigError(f"data.image_max_pixels: is for images; give {_KEY} too, or remove it")
        return
    kind = recipe.rollout.engine.kind
    if recipe.generates and kind != "megatron":
        raise ConfigError(
            f"rollout.engine.kind={kind}: {_KEY}={recipe.data.images_field} gives images to our own engine alone; set "
            "it to megatron, or leave the images out"
        )
    if recipe.rollout.replay is not None:
        raise ConfigError(f"rollout.replay: cannot be had with {_KEY}; remove one of the two")
    actor: ImageSettings | None = None
    for role, key in MODEL_SECTIONS.items():
        section, model = getattr(recipe, role), recipe.model_of(role)
        if section is None or (role in REWARDS and section.model is None):
            continue
        if model.implementation != "megatron":
            raise ConfigError(
                f"{key}.implementation={model.implementation}: {_KEY} needs a model that megatron-core computes; "
                "docs/images.md lists them"
            )
        if model.path is None:
            raise ConfigError(f"{key}.path: missing; {_KEY} needs the directory of a model that reads images")
        settings = image_settings(Path(model.path), recipe.data.image_max_pixels)
        actor = actor or settings
        _check_cut(settings, key, actor)
        check_turns(settings, model)


def _check_cut(settings: ImageSettings, key: str, actor: ImageSettings) -> None:
    """Refuse a model that cuts images into other tokens than the actor, whose prompts it is to read."""
    for name in ("side", "min_pixels", "max_pixels"):
        found, expected = getattr(settings, name), getattr(actor, name)
        if found != expected:
            raise ConfigError(
                f"{key}.path: {settings.path} has {name}={found} for images, and {actor.path} {name}={expected}; give "
                f"models that cut images alike: {PROCESSOR} says how, and data.image_max_pixels bounds it"
            )
