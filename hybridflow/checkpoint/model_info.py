"""The settings of a model in a directory, whoever wrote it. No torch: a login node checks the recipe that names it."""

from __future__ import annotations

from pathlib import Path

from hybridflow.checkpoint import manifest
from hybridflow.errors import ConfigError
from hybridflow.families.assets import CONFIG, FOLDER, read_json
from hybridflow.families.config_json import read_config
from hybridflow.families.model_info import ModelInfo


def read_model_info(folder: Path) -> ModelInfo:
    """Read the settings of a directory of Hugging Face or hybridflow; its weights are not looked at.

    Raises:
        ConfigError: There is no such directory, or its model is not computed here.
        CheckpointError: ``config.json`` or the manifest is damaged.
    """
    if (folder / manifest.NAME).is_file():
        held = manifest.read_manifest(folder)
        return ModelInfo(held.model, held.has_value_head, held.family, folder / FOLDER)
    path = folder / CONFIG
    if not path.is_file():
        found = "a directory without either" if folder.is_dir() else "a file" if folder.exists() else "nothing there"
        raise ConfigError(
            f"expected a directory of Hugging Face, with {CONFIG}, or a model directory, with {manifest.NAME}; found "
            f"{found}; name the directory itself, downloaded to this machine"
        )
    described = read_config(read_json(path), where=str(path))
    return ModelInfo(described.model, described.has_value_head, described.family.name, folder)
