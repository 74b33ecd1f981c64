"""The settings of a model in a directory, whoever wrote it. No torch: a login node checks the recipe that names it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hybridflow.checkpoint import manifest
from hybridflow.checkpoint.assets import CONFIG, FOLDER, read_json
from hybridflow.errors import ConfigError
from hybridflow.families.config_json import read_config
from hybridflow.families.model import Model


class Settings(NamedTuple):
    """What a directory, or a program that has it in memory, says of a model.

    Attributes:
        model: Its settings, the vocabulary included.
        has_value_head: Whether it gives a number instead of logits.
        family: Of Hugging Face; None where that is not known.
        assets: Where the small files are that travel along; None of a model that a program has in memory.
        is_cut: Whether a layout may cut it; not a class of a user's own.
    """

    model: Model
    has_value_head: bool
    family: str | None
    assets: Path | None
    is_cut: bool = True


def read_settings(folder: Path) -> Settings:
    """The settings of a directory of Hugging Face or a model directory of ours; its weights are not looked at.

    Raises:
        ConfigError: There is no such directory, or its model is not computed here.
        CheckpointError: ``config.json`` or the manifest is damaged.
    """
    if (folder / manifest.NAME).is_file():
        held = manifest.read_manifest(folder)
        return Settings(held.model, held.has_value_head, held.family, folder / FOLDER)
    path = folder / CONFIG
    if not path.is_file():
        found = "a directory without either" if folder.is_dir() else "a file" if folder.exists() else "nothing there"
        raise ConfigError(
            f"expected a directory of Hugging Face, with {CONFIG}, or a model directory, with {manifest.NAME}; found "
            f"{found}; name the directory itself, downloaded to this machine"
        )
    described = read_config(read_json(path), where=str(path))
    return Settings(described.model, described.has_value_head, described.family.name, folder)
