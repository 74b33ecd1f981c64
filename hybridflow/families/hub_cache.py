"""Models of Hugging Face's hub by their names: the copies that were downloaded to its cache. Nothing is downloaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hybridflow.families.assets import CONFIG
from hybridflow.shipped import shipped

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_REVISION = re.compile(r"[0-9a-f]{40}")
_LOCAL = ("checkpoints", "models", "out", "runs")
"""Directories of models: what stands below them is a path, not a name of the hub."""

_FETCHES = re.compile(r"^#   (hf download \S+ .*--local-dir (\S+))$", re.MULTILINE)
_FOLDER, _SNAPSHOTS = "models--", "snapshots"


def find_model(path: str) -> Path:
    """Return the directory that a path or a name of the hub means.

    Args:
        path: A directory, or a name such as ``Qwen/Qwen3-4B``. A directory of that name comes first. The name means the
            revision that was downloaded last.
    """
    return (None if os.path.exists(path) else _cached(path)) or Path(path)


def model_name(folder: Path) -> str:
    """Return what a model in a directory is called: by its name of the hub if it lies in the cache."""
    return hub_name(folder) or folder.resolve().name


def hub_name(folder: Path) -> str | None:
    """Return the name that the hub has for a directory of its cache; None: it is elsewhere."""
    folder = folder.resolve()
    if folder.parent.name == _SNAPSHOTS and folder.parents[1].name.startswith(_FOLDER):
        return folder.parents[1].name.removeprefix(_FOLDER).replace("--", "/", 1)
    return None


def home_folder() -> Path:
    """Return where Hugging Face keeps its files, which may not be there."""
    return Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()


def cache_folder() -> Path:
    """Return where Hugging Face keeps what it downloads, which may not be there."""
    return Path(os.environ.get("HF_HUB_CACHE") or home_folder() / "hub").expanduser()


def download_hint(path: str) -> str:
    """Return how to get a model that is not there, if the path may be a name of the hub; else empty."""
    hint = f"; `hf download {path}` puts a model of that name into the cache"
    return hint if _may_be_name(path) else _shipped_hint(path)


def data_set_hint(path: str) -> str:
    """Return how to get a data set that is not there, if the path may be a name of the hub; else empty."""
    if not _may_be_name(path) or os.path.splitext(path)[1]:
        return _shipped_hint(path)
    return f"; `hf download {path} --repo-type dataset --local-dir {path}` fetches a data set of that name"


def _shipped_hint(path: str) -> str:
    """Return the command of a shipped recipe's first lines that fetches what it names; empty: none does."""
    for recipe in sorted(shipped("launch/recipes").glob("*.yaml")):
        for command, folder in _FETCHES.findall(recipe.read_text(encoding="utf-8")):
            if path == folder or path.startswith(f"{folder}/"):
                return f"; `{command}` fetches it"
    return ""


def _may_be_name(path: str) -> bool:
    owner = path.partition("/")[0]
    return _NAME.fullmatch(path) is not None and owner not in _LOCAL and not os.path.isdir(owner)


def _cached(name: str) -> Path | None:
    if not _NAME.fullmatch(name):
        return None
    folder = cache_folder() / f"{_FOLDER}{name.replace('/', '--')}"
    try:
        revision = (folder / "refs/main").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    found = folder / _SNAPSHOTS / revision
    return found if _REVISION.fullmatch(revision) and (found / CONFIG).is_file() else None
