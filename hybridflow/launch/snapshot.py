"""What a job is launched with, kept in its run directory: the recipe, the site settings, and the code that will run."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import yaml

from hybridflow import __version__
from hybridflow.config.recipe import Recipe
from hybridflow.errors import WriteError
from hybridflow.launch.site import Site
from hybridflow.observe.files import check_own, replace_file, sync_path
from hybridflow.programs import try_program
from hybridflow.recipe.load import recipe_from_dict
from hybridflow.recipe.nested import inner
from hybridflow.sections import to_dict
from hybridflow.shipped import PACKAGE, shipped

# Kernels are compiled for this machine, and used where they fit the source beside them.
_KEPT = (".py", ".yaml", ".sbatch", ".sh", ".typed", ".so", ".c", ".h", ".html", ".css", ".js")

_OPEN = ("actor.update", "actor.rollout", "critic.layout", "cost_critic.layout", "trainer.micro_batch_tokens")
"""What a recipe that leaves it out has by the job's ranks, which a fallback changes, and by its GPUs."""


def next_folder(run_dir: Path) -> Path:
    """Return the folder of the next launch of a run: ``run_dir/launch/0001`` and up."""
    folder = run_dir / "launch"
    numbers = [int(path.name) for path in folder.glob("[0-9]*") if path.name.isdecimal()] if folder.is_dir() else []
    return folder / f"{max(numbers, default=0) + 1:04d}"


def kept_recipe(recipe: Recipe) -> str:
    """Return the text of a recipe with every key but those that only the job can settle: these are as they were given.

    Raises:
        HybridflowError: The text is no recipe, so that the job would fail after it has waited in the queue.
    """
    values = to_dict(recipe)
    for key in recipe.defaults:
        section, _, last = key.rpartition(".")
        if last == "layers":
            inner(values, section)[last] = "auto"
    for key in _OPEN:
        section, _, last = key.rpartition(".")
        if key in recipe.defaults:
            del inner(values, section)[last]
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    recipe_from_dict(values, source="the recipe as the job has it", num_ranks=recipe.cluster.ranks)
    return text


def write_snapshot(
    folder: Path, recipe: Recipe, site: Site, batch: str, *, source: str, overrides: Sequence[str], with_code: bool
) -> None:
    """Keep a launch: in full, or not at all.

    Raises:
        HybridflowError: As for ``kept_recipe``.
        WriteError: The disk refuses, the run's directory is another user's, or another launch of this run took the
            number at the same time.
    """
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    recipe_text = kept_recipe(recipe)
    try:
        for path in (folder.parent.parent, folder.parent):
            check_own(path)
        aside.mkdir(parents=True)
        if with_code:
            copy_package(aside / "code")
        about = {
            "launched": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "recipe": source,
            "overrides": list(overrides),
            "folder": os.getcwd(),
            "hybridflow": __version__,
            "python": sys.version.split()[0],
            "git": git_state(PACKAGE),
            "packages": packages(),
        }
        for name, content in (
            ("recipe.yaml", recipe_text),
            ("site.yaml", yaml.safe_dump(to_dict(site), sort_keys=False, allow_unicode=True)),
            ("about.json", json.dumps(about, indent=2) + "\n"),
            ("batch.sh", batch),
        ):
            replace_file(aside / name, content.encode())
        # Fails where that directory is there by now and has something in it.
        os.rename(aside, folder)
        sync_path(folder.parent)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise WriteError(
            f"{folder}: the launch cannot be kept there: {error.strerror}; free the place, or set run_dir"
        ) from error


def copy_package(target: Path) -> None:
    """Copy the source of hybridflow, with its parts that lie elsewhere in a clone, as one package below ``target``.

    Raises:
        OSError: The disk refuses.
    """
    for source, below in ((PACKAGE, ""), *((shipped(name), name) for name in ("launch/recipes", "slurm"))):
        for path in sorted(source.rglob("*")):
            if path.suffix in _KEPT and path.is_file() and "__pycache__" not in path.parts:
                copy = target / "hybridflow" / below / path.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)


def git_state(folder: Path) -> dict[str, str] | None:
    """Return the commit of a clone and what differs from it.

    None where the package is in no clone, or there is no git.
    """
    found = {}
    for key, command in (("commit", ("rev-parse", "HEAD")), ("changed", ("status", "--porcelain", "--", str(folder)))):
        text, failure = try_program(["git", "-C", str(folder), *command])
        if failure:
            return None
        found[key] = text.rstrip()
    return found


def packages() -> dict[str, str]:
    """Return installed packages and their versions."""
    found = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    return {name: found[name] for name in sorted(found, key=str.lower) if name}
