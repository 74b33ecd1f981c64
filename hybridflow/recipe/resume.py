"""Hold a recipe against the one that a checkpoint was written with. No torch.

Each key says on its field whether a resumed run may change it, see ``sections.MAY_CHANGE``; the default is that it must
match.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridflow.config.recipe import Recipe
from hybridflow.errors import CheckpointError
from hybridflow.plugins import split_name
from hybridflow.sections import resume_rules, to_dict


def check_resume(recipe: Recipe, saved: Mapping[str, Any], checkpoint: Path) -> None:
    """Refuse to go on from a checkpoint with another value of a key that must match.

    A key that one of the two versions of hybridflow does not know is not compared.

    Args:
        recipe: The recipe of this start.
        saved: The recipe that the checkpoint was written with, as ``to_dict`` gave it.
        checkpoint: The directory of the checkpoint.

    Raises:
        CheckpointError: A key that must match differs; names it and both values. Or no step is asked for, so that a
            model is evaluated, and the checkpoint is of another one.
    """
    before, now = fixed_settings(saved), fixed_settings(to_dict(recipe))
    path = path_before(saved)
    if recipe.trainer.steps == 0 and recipe.model.path not in (None, path):
        raise CheckpointError(
            f"{recipe.run_dir}: evaluates model.path={path}, and a resumed run reads no other weights than those of "
            f"{checkpoint}; set another run_dir to evaluate {recipe.model.path}"
        )
    for key in now:
        if key in before and before[key] != now[key]:
            # As a recipe writes them: null, true.
            saved_value, value = (
                each if isinstance(each, str) else json.dumps(each) for each in (before[key], now[key])
            )
            raise CheckpointError(
                f"{recipe.run_dir}: the checkpoint was written with {key}={saved_value}, the recipe now has "
                f"{value}; resume with the same, or set another run_dir, and model={checkpoint / 'actor'} to begin "
                "there with the trained weights"
            )


def path_before(saved: Mapping[str, Any]) -> str | None:
    """Return ``model.path`` of the recipe that a checkpoint was written with, as ``to_dict`` gave it."""
    path: str | None = saved["model"].get("path")
    return path


def fixed_settings(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a resumed run may not change of a recipe: dotted key -> value.

    Args:
        recipe: From ``to_dict``, of this version of hybridflow or of another one.

    Returns:
        JSON values. A section is ``"a section"``, so that it differs from null; its keys follow it. Of the two ways to
        write a function, ``package.module:name`` stands for both.
    """
    return {key: value for key, value in _settings("", recipe) if not _rules().get(key, True)}


@functools.cache
def _rules() -> Mapping[str, bool]:
    return resume_rules(Recipe)


@functools.cache
def _sections() -> frozenset[str]:
    return frozenset(key.rpartition(".")[0] for key in _rules())


def _settings(prefix: str, section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of a section, including those of its inner sections."""
    for name, value in section.items():
        key = f"{prefix}{name}"
        # A mapping of names that others have chosen is one value.
        if isinstance(value, Mapping) and key in _sections():
            yield key, "a section"
            yield from _settings(f"{key}.", value)
        elif isinstance(value, str) and ".py:" in value:
            yield key, ":".join(split_name(value))
        else:
            yield key, value
