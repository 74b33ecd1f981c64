"""Files that a recipe names: where they are looked for, and whether they are there. No torch.

A path is relative to the directory in which the command is started. A file that is not there is looked for beside the
recipe. What a run writes is always relative to the directory of the command.
"""

from __future__ import annotations

import copy
import glob
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.model_info import latest_actor
from hybridflow.config.recipe import CRITICS, MODEL_SECTIONS, Recipe
from hybridflow.data.files import is_address
from hybridflow.data.tokenizer import JSON, Tokenizer, check_same_pieces, open_tokenizer, tokenizer_in
from hybridflow.errors import ConfigError, MissingFileError
from hybridflow.families.hub_cache import data_set_hint, find_model
from hybridflow.plugins import split_name
from hybridflow.recipe.nested import inner
from hybridflow.sections import to_dict

_FILES = (
    *("data.train", "data.held_out", "data.chat_template", "data.spool.path"),
    *("tokenizer.path", "actor.lora.path", "rollout.replay"),
)
_MODULES = ("reward.function", "cost.function", "rollout.environment.name")
_MADE = ("data.train", "data.held_out")
"""Files that are made where ``data.arithmetic`` says how, and are then outputs."""


def with_paths_beside(values: Any, folder: Path) -> Any:
    """Return a recipe's values with ``~`` as the home, and with the paths of files that are only beside the recipe.

    A module that is only there gets the names of the directories between, as in ``folder.rewards:score``, where the
    recipe is below the working directory.

    Args:
        values: Nested mappings.
        folder: Directory of the recipe.
    """
    found = copy.deepcopy(values)
    for section, key, _ in _paths(found):
        path = section[key] = os.path.expanduser(section[key])
        if not os.path.isabs(path) and not _is_there(path) and _is_there(str(folder / path)):
            section[key] = str(folder / path)
    for section, key in _modules(found):
        section[key] = _module_beside(section[key], folder)
    return found


def with_model_directories(values: Any) -> Any:
    """Return a recipe's values in which a name of the hub is the copy in the cache, and a run its latest actor.

    Of a run that a critic names, it does not know whether the critic or the actor is meant.

    Args:
        values: Nested mappings.

    Raises:
        CheckpointError: The note of a run's latest checkpoint is damaged.
    """
    found = copy.deepcopy(values)
    for role, key in MODEL_SECTIONS.items():
        section = inner(found, key)
        if isinstance(section, dict) and _is_path(section.get("path")):
            folder = find_model(section["path"])
            section["path"] = str(folder if role in CRITICS else latest_actor(folder))
    return found


def places(path: str, folder: Path | None) -> str:
    """Return in words where a path was looked for; empty: it says so itself."""
    if os.path.isabs(path):
        return ""
    beside = None if folder is None else folder.resolve()
    return f" in {Path.cwd()}" + ("" if beside in (None, Path.cwd()) else f", nor beside the recipe in {beside}")


def check_inputs(recipe: Recipe, folder: Path | None) -> None:
    """Refuse a recipe whose files are not there; messages name its folder, if it has one.

    Raises:
        MissingFileError: A file is neither in the working directory nor beside the recipe.
    """
    for section, key, name in _paths(to_dict(recipe)):
        path = section[key]
        if not _is_there(path):
            hint = data_set_hint(path) if name.startswith("data.") else ""
            raise MissingFileError(f"{name}={path!r}: no such file{places(path, folder)}; name one that is there{hint}")


def tokenizer_path(recipe: Recipe) -> Path | None:
    """Return the tokenizer that the recipe names, or the model's own; None where one is to be trained.

    Raises:
        ConfigError: The model has none.
    """
    if recipe.tokenizer.path is not None:
        return Path(recipe.tokenizer.path)
    if recipe.model.path is None:
        return None
    found = tokenizer_in(recipe.model.path)
    if found is None:
        raise ConfigError(
            f"tokenizer.path: missing; model.path={recipe.model.path!r} has no tokenizer; set tokenizer.path to "
            "the one that the model was trained with"
        )
    return found


def open_known(path: str | Path, recipe: Recipe) -> Tokenizer:
    """Open the tokenizer at ``path`` without the special tokens that a model of the recipe has no rows for.

    Raises:
        DataError: It cannot be read.
    """
    rows = [recipe.model_of(role).vocab_size for role in MODEL_SECTIONS]
    return open_tokenizer(path, min((each for each in rows if each is not None), default=None))


def check_vocabularies(recipe: Recipe, tokenizer: Tokenizer | None) -> None:
    """Refuse models that do not know the tokenizer's tokens.

    Args:
        recipe: What is run.
        tokenizer: Its tokenizer; None: it is yet to be trained, and will have tokens of its own.

    Raises:
        ConfigError: A model's vocabulary is too small, or a model comes with a tokenizer and the run would train one.
        DataError: A model was trained with another tokenizer.
    """
    for role, section in MODEL_SECTIONS.items():
        model = recipe.model_of(role)
        prefix = "model" if model is recipe.model else section
        own = None if model.path is None else tokenizer_in(model.path)
        if tokenizer is None:
            # A sentencepiece model may be the one that equal data gave another run.
            if own is not None and own.name == JSON:
                raise ConfigError(
                    f"tokenizer.path: missing; {prefix}.path={model.path!r} knows the tokens of {own}, and the run "
                    "would train another tokenizer; set tokenizer.path to that file"
                )
            continue
        if model.vocab_size is not None and model.vocab_size < tokenizer.vocab_size:
            raise ConfigError(
                f"{prefix}.vocab_size={model.vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}; raise "
                "it, or leave it out; of a model with a path, name the tokenizer that it was trained with"
            )
        if own is not None and own != tokenizer.path:
            check_same_pieces(tokenizer, open_tokenizer(own), whose=f"{prefix}.path={model.path!r}")


def _paths(values: Any) -> Iterator[tuple[Any, Any, str]]:
    """Yield section, key and dotted name of each path of a file that is read; addresses are none."""
    data = values.get("data") if isinstance(values, dict) else None
    is_made = isinstance(data, dict) and data.get("arithmetic") is not None
    names = [name for name in _FILES if not (is_made and name in _MADE)]
    for name in (*names, *(f"{model}.path" for model in MODEL_SECTIONS.values())):
        *outer, key = name.split(".")
        section = values
        for part in outer:
            section = section.get(part) if isinstance(section, dict) else None
        if isinstance(section, dict) and _is_path(section.get(key)):
            yield section, key, name
    sources = data.get("mixture") if isinstance(data, dict) else None
    for index, source in enumerate(sources if isinstance(sources, list | tuple) else ()):
        if isinstance(source, dict) and _is_path(source.get("path")):
            yield source, "path", f"data.mixture[{index}].path"


def _modules(values: Any) -> Iterator[tuple[Any, Any]]:
    """Yield section and key, or list and index, of each ``package.module:name``."""
    for name in _MODULES:
        outer, _, key = name.rpartition(".")
        section = inner(values, outer)
        if isinstance(section, dict) and isinstance(section.get(key), str):
            yield section, key
    callbacks = inner(values, "metrics.callbacks")
    if isinstance(callbacks, list):
        yield from ((callbacks, index) for index, name in enumerate(callbacks) if isinstance(name, str))


def _module_beside(name: str, folder: Path) -> str:
    module, attribute = split_name(name)
    top = module.partition(".")[0]
    is_beside = attribute and top and (folder / f"{module.replace('.', '/')}.py").is_file()
    if not is_beside or os.path.exists(top) or os.path.exists(f"{top}.py") or _is_installed(top):
        return name
    between = Path(os.path.relpath(folder.resolve(), Path.cwd())).parts
    # Nothing else can be imported from the working directory.
    can_be_imported = all(part.isidentifier() for part in between)
    return f"{'.'.join((*between, module))}:{attribute}" if can_be_imported else name


def _is_installed(top: str) -> bool:
    return top in sys.modules or importlib.util.find_spec(top) is not None


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and value != "" and not is_address(value)


def _is_there(path: str) -> bool:
    return os.path.exists(path) or (glob.has_magic(path) and next(glob.iglob(path, recursive=True), None) is not None)
