"""Read a recipe: find the file, put overrides over it, read the models it names, check the whole. No torch."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.model_info import read_model_info
from hybridflow.config.algorithm import AlgorithmTraits
from hybridflow.config.cluster import FallbackConfig
from hybridflow.config.recipe import CRITICS, FROZEN, MODEL_SECTIONS, Recipe
from hybridflow.errors import ConfigError, HybridflowError, LayoutError, MissingFileError, did_you_mean
from hybridflow.families.hub_cache import download_hint
from hybridflow.families.model_info import ModelInfo
from hybridflow.flows.registry import ALGORITHMS
from hybridflow.recipe.checks import check_recipe, check_settings
from hybridflow.recipe.defaults import brings_its_own, check_needed, fill_in, in_full, num_gpus
from hybridflow.recipe.inputs import places, with_model_directories, with_paths_beside
from hybridflow.recipe.nested import inner
from hybridflow.recipe.other_names import algorithm_hint, refuse_other_names
from hybridflow.recipe.stages import with_layers
from hybridflow.sections import put_over, read_section, read_yaml, shorten, text_keys, to_dict
from hybridflow.shipped import shipped

_MOST_FALLBACKS = 64
"""Each is checked as a recipe of its own."""

_EXAMPLES = {"ppo": "quickstart"}
"""Algorithms whose shipped recipe has another name."""


_WHOLE = ("actor", "critic", "data", "reward", "cost", "tokenizer", "rollout.engine", *MODEL_SECTIONS.values())
_LAYOUTS = (".update", ".rollout", ".layout")
"""Sections that a person replaces and does not change: another source, scorer, model or layout."""


def find_recipe(name: str | Path) -> Path:
    """Return the file of a recipe: an existing path, or the name of a recipe that comes with the package.

    Raises:
        MissingFileError: There is neither such a file nor such a shipped recipe.
    """
    if os.path.isfile(name):
        return Path(name)
    found = {path.stem: path for path in shipped("launch/recipes").glob("*.yaml")}
    stem = _EXAMPLES.get(str(name), str(name))
    if stem in found:
        return found[stem]
    shown = ", ".join(sorted(found))
    here = [str(path) for path in Path(name).parent.glob("*.yaml")]
    hint = did_you_mean(str(name), here) or did_you_mean(Path(name).stem, found)
    if os.path.isdir(name):
        raise MissingFileError(f"recipe {name}: is a directory; {hint}give a YAML file or a shipped recipe: {shown}")
    raise MissingFileError(f"recipe {name}: no such file; {hint}give a YAML file or a shipped recipe: {shown}")


def load_recipe(name: str | Path, overrides: Sequence[str] = (), *, num_ranks: int | None = None) -> Recipe:
    """Read a recipe, put overrides over it, and check the whole.

    Args:
        name: A YAML file, or the name of a shipped recipe. With a model directory and data among the overrides, the
            name of an algorithm stands for the algorithm's defaults, without anything of the shipped recipe.
        overrides: ``"dotted.key=value"`` each, the value in YAML; later ones win.
        num_ranks: Ranks of a recipe that leaves their number open. None means one for each GPU of this machine, or 1.

    Raises:
        ConfigError: A file that cannot be read, a key that is unknown, missing, ill-typed or at odds with another.
        LayoutError: A layout does not fit its ranks or its model.
    """
    path = find_recipe(name)
    num_ranks = max(1, num_gpus()) if num_ranks is None else num_ranks
    if str(name) in ALGORITHMS and not os.path.isfile(name) and brings_its_own(overrides):
        return recipe_from_dict(
            {"algorithm": str(name)}, source=f"recipe {name}", overrides=overrides, num_ranks=num_ranks
        )
    values = read_yaml(path)
    return recipe_from_dict(values, source=str(path), overrides=overrides, num_ranks=num_ranks, folder=path.parent)


def recipe_for_ranks(
    recipe: Recipe, name: str | Path, overrides: Sequence[str], num_ranks: int, *, told: str | None = None
) -> Recipe:
    """Return the recipe for ``num_ranks`` ranks: itself, or the fallback that uses the most of them.

    Args:
        recipe: From ``load_recipe`` with this name and these overrides.
        name: A YAML file, or the name of a shipped recipe; read once more where a fallback is taken.
        overrides: As for ``load_recipe``; those of the fallback come after them.
        num_ranks: Those that are there; where ``cluster.ranks`` of the result is less, the others have nothing to do. A
            recipe that leaves their number open has all of them.
        told: Where they come from, for messages: ``2 nodes × 4 = 8 ranks``.

    Raises:
        ConfigError: As for ``load_recipe``.
        LayoutError: As for ``load_recipe``; or too few ranks have come.
    """
    if "cluster.ranks" in recipe.defaults and num_ranks != recipe.cluster.ranks:
        recipe = load_recipe(name, overrides, num_ranks=num_ranks)
    fitting = [fallback for fallback in recipe.fallbacks if fallback.ranks <= num_ranks]
    best = max(fitting, key=lambda fallback: fallback.ranks, default=None)
    if num_ranks == recipe.cluster.ranks or (
        # More ranks than the recipe's are idle only where it says that their number may vary.
        recipe.fallbacks and recipe.cluster.ranks <= num_ranks and (best is None or best.ranks < recipe.cluster.ranks)
    ):
        return recipe
    if best is None:
        least = min((fallback.ranks for fallback in recipe.fallbacks), default=None)
        remedy = f"or add a fallback for {num_ranks} ranks" if least is None else f"its smallest fallback needs {least}"
        needed = f"{recipe.name}'s layouts need {recipe.cluster.ranks}"
        fitting_text = _scaled(recipe, name, overrides, num_ranks)
        raise LayoutError(
            f"{f'{num_ranks} ranks' if told is None else told}, but {needed}; "
            + (f"these fit: {fitting_text}" if fitting_text else f"set cluster.ranks={num_ranks} with layouts that fit")
            + f", {remedy}"
        )
    return load_recipe(name, [*overrides, *_overrides_of(best)])


def _scaled(recipe: Recipe, name: str | Path, overrides: Sequence[str], num_ranks: int) -> str | None:
    """Return overrides that put the recipe on other ranks by more or fewer replicas; None where this does not do."""
    sections = {"actor.update": recipe.actor.update, "actor.rollout": recipe.actor.rollout}
    sections |= {f"{role}.layout": getattr(getattr(recipe, role), "layout", None) for role in (*CRITICS, *FROZEN)}
    found = [f"cluster.ranks={num_ranks}"]
    for key, layout in sections.items():
        if layout is None:
            continue
        dp, rest = divmod(layout.dp * num_ranks, recipe.cluster.ranks)
        if rest:
            return None
        found.append(f"{key}.dp={dp}")
    try:
        load_recipe(name, [*overrides, *found])
    except HybridflowError:
        return None
    return " ".join(found)


def _overrides_of(fallback: FallbackConfig) -> tuple[str, ...]:
    return (*fallback.overrides, f"cluster.ranks={fallback.ranks}")


def recipe_from_dict(
    values: object,
    *,
    source: str = "recipe",
    overrides: Sequence[str] = (),
    in_memory: Mapping[str, ModelInfo] | None = None,
    num_ranks: int = 1,
    folder: Path | None = None,
) -> Recipe:
    """Build and check a recipe from nested mappings, as YAML or JSON give them; the inverse of ``to_dict``.

    Args:
        values: The mapping.
        source: What messages call it.
        overrides: As for ``load_recipe``.
        in_memory: Section, such as ``model`` or ``critic.model`` -> what a model says of itself that a program has in
            memory; see ``checkpoint.formats.in_memory.in_memory_info``. It counts as the section's directory.
        num_ranks: Ranks of a recipe that leaves their number open.
        folder: Directory of the recipe, in which files are looked for that are not in the working directory.

    Raises:
        ConfigError: As for ``load_recipe``.
        LayoutError: As for ``load_recipe``.
    """
    origins: Mapping[str, str] = {}
    dropped: tuple[str, ...] = ()
    in_memory = {} if in_memory is None else in_memory
    if isinstance(values, Mapping):
        refuse_other_names(values, overrides, source)
        file_values = values
        values, origins = put_over(*in_full(values, overrides), texts=text_keys(Recipe))
        dropped = _dropped(file_values, values, overrides)
        check_needed(values, source, has_model="model" in in_memory)
        values = _with_defaults(values)
    if folder is not None:
        values = with_paths_beside(values, folder)
    values = with_model_directories(values)
    given = copy.deepcopy(values)
    try:
        found = _settings_of_paths(values, in_memory, folder)
    except HybridflowError as error:
        raise type(error)(f"{source}: {error}") from None
    has_context = inner(values, "model.max_context") is not None
    # From here on the values have what only the directories say.
    values = _with_settings(values, found)
    whole, defaults = _filled_in(values, source, num_ranks, has_context=has_context or "model" not in found)
    recipe = read_section(Recipe, _with_inherited_models(whole, found), source=source, origins=origins)
    if recipe.algorithm not in ALGORITHMS:
        where = origins.get("algorithm", source)
        raise ConfigError(
            f"{where}: algorithm: {algorithm_hint(recipe.algorithm)}expected one of {', '.join(ALGORITHMS)}, "
            f"found {recipe.algorithm!r} (text)"
        )
    recipe = with_layers(
        replace(recipe, traits=ALGORITHMS[recipe.algorithm].traits, defaults=defaults, dropped=dropped)
    )
    try:
        check_settings(recipe, found)
        check_recipe(recipe, in_memory)
    except (ConfigError, LayoutError) as error:
        raise type(error)(f"{source}: {error}") from None
    if len(recipe.fallbacks) > _MOST_FALLBACKS:
        raise ConfigError(
            f"{source}: fallbacks: found {len(recipe.fallbacks)}, expected at most {_MOST_FALLBACKS}; remove some"
        )
    if isinstance(given, Mapping):
        for index, fallback in enumerate(recipe.fallbacks):
            # One that does not fit is found out now, and not when a node has died.
            alone = {key: value for key, value in given.items() if key != "fallbacks"}
            try:
                recipe_from_dict(alone, overrides=_overrides_of(fallback), in_memory=in_memory, folder=folder)
            except (ConfigError, LayoutError) as error:
                raise type(error)(f"{source}: fallbacks[{index}]: {error}") from None
    return recipe


def _dropped(before: Mapping[str, Any], after: Mapping[str, Any], overrides: Sequence[str]) -> tuple[str, ...]:
    """Describe in words the keys that overrides drop, since they give a section of the file as a whole."""
    found = []
    for override in overrides:
        key = override.partition("=")[0]
        old, new = inner(before, key), inner(after, key)
        if key in _WHOLE or key.endswith(_LAYOUTS) or not isinstance(old, Mapping) or not isinstance(new, Mapping):
            continue
        names = [str(name) for name in old if name not in new]
        if names:
            found.append(
                f"override {shorten(override)} drops {', '.join(names)} of the file: it replaces the whole section; to "
                f"keep them, give its keys one by one, as in {key}.{next(iter(new), names[0])}=…"
            )
    return tuple(found)


def _with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values on top of the algorithm's own defaults."""
    algorithm = ALGORITHMS.get(str(values.get("algorithm")))
    found = dict(values)
    for key, section in ({} if algorithm is None else algorithm.traits.defaults).items():
        given = values.get(key, {})
        if isinstance(given, Mapping):
            found[key] = {**section, **given}
    return found


def _filled_in(values: Any, source: str, num_ranks: int, *, has_context: bool) -> tuple[Any, dict[str, Any]]:
    """Return the values with the keys that they leave out, and these keys."""
    if not isinstance(values, Mapping):
        return values, {}
    algorithm = ALGORITHMS.get(str(values.get("algorithm")))
    traits = AlgorithmTraits(reads=frozenset()) if algorithm is None else algorithm.traits
    whole, _ = put_over(values, ())
    name = Path(source.removeprefix("recipe ")).stem
    return whole, fill_in(whole, traits, name=name, num_ranks=num_ranks, has_context=has_context)


def _settings_of_paths(values: Any, in_memory: Mapping[str, ModelInfo], folder: Path | None) -> dict[str, ModelInfo]:
    """Return the settings of directories that a recipe names, or of in-memory models, by key of the section."""
    found = dict(in_memory)
    for key in MODEL_SECTIONS.values():
        path = inner(values, f"{key}.path")
        if key in in_memory:
            if path is not None:
                raise ConfigError(f"{key}.path={path!r}: would not be read, a model was given in memory; give one")
            continue
        if key == "teacher.model" and path is None and inner(values, "teacher") is not None:
            raise ConfigError(
                "teacher.model.path: missing; a model that was not trained teaches nothing, name its directory (of a "
                "run of ours: runs/NAME)"
            )
        if isinstance(path, str):
            try:
                found[key] = read_model_info(Path(path))
            except HybridflowError as error:
                if os.path.exists(path):
                    raise type(error)(f"{key}.path={path!r}: {error}") from None
                looked = places(path, folder)
                where = f": is not{looked}" if looked else ""
                raise MissingFileError(f"{key}.path={path!r}{where}: {error}{download_hint(path)}") from None
            except OSError as error:
                raise ConfigError(f"{key}.path={shorten(path)!r}: {error.strerror}; name a directory") from None
    return found


def _with_settings(values: Any, found: Mapping[str, ModelInfo]) -> Any:
    """Return the values on top of the settings that the directories beside their paths have."""
    for key, settings in found.items():
        section = values
        for name in key.split("."):
            # Of a model that was given the section may be left out.
            section[name] = {} if section.get(name) is None else section[name]
            if not isinstance(section[name], dict):
                raise ConfigError(f"{key}: expected a section with keys; found {section[name]!r}")
            section = section[name]
        given = dict(section)
        section.update(to_dict(settings.model))
        section.update(given)
    return values


def _with_inherited_models(values: Any, found: Mapping[str, ModelInfo]) -> Any:
    """Return the values with the keys of ``model`` beneath each model section that has no directory of its own.

    A section within a model, such as ``rotary_scaling``, is inherited whole or not at all.
    """
    actors = inner(values, "model")
    for key in MODEL_SECTIONS.values():
        role, _, name = key.rpartition(".")
        given = inner(values, key)
        if role and key not in found and isinstance(given, dict) and isinstance(actors, dict):
            # The actor's weights are not inherited, only its shape.
            model = {**actors, "path": None, **given}
            values = {**values, role: {**values[role], name: model}}
    return values
