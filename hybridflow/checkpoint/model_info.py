"""The settings of a model in a directory, whoever wrote it. No torch: a login node checks the recipe that names it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hybridflow.checkpoint import manifest
from hybridflow.checkpoint.job_file import checkpoints_folder, complete_steps, latest_step, step_path
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.families.assets import CONFIG, FOLDER, read_json
from hybridflow.families.model_info import ModelInfo
from hybridflow.families.other_config import read_info
from hybridflow.families.weight_files import read_shapes


def read_model_info(folder: Path) -> ModelInfo:
    """Read the settings of a directory of Hugging Face or hybridflow; its weights are not looked at.

    Raises:
        ConfigError: There is no such directory, or its model can be neither computed here nor by ``transformers``.
        CheckpointError: ``config.json`` or the manifest is damaged.
    """
    if (folder / manifest.NAME).is_file():
        held = manifest.read_manifest(folder)
        # Whose code may run is the recipe's to say, not a file's.
        model = replace(held.model, trust_remote_code=False)
        return ModelInfo(model, held.has_value_head, held.family, folder / FOLDER)
    path = folder / CONFIG
    if not path.is_file():
        found = "a directory without either" if folder.is_dir() else "a file" if folder.exists() else "nothing there"
        raise ConfigError(
            f"expected a directory of Hugging Face, with {CONFIG}, or a model directory, with {manifest.NAME}; found "
            f"{found}; {_remedy(folder)}"
        )
    return read_info(read_json(path), where=str(path), assets=folder)


def latest_actor(folder: Path) -> Path:
    """Return the actor of a run's latest checkpoint, or of a checkpoint; any other directory as it is.

    Raises:
        CheckpointError: The note of the run's latest checkpoint is damaged.
    """
    if (folder / CONFIG).is_file() or (folder / manifest.NAME).is_file():
        return folder
    step = latest_step(folder)
    actor = (folder if step is None else step_path(folder, step)) / "actor"
    return actor if (actor / manifest.NAME).is_file() else folder


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of a model's tensors by name, from a manifest or the headers of its files.

    Returns:
        None where not all files of weights lie in the directory, or one cannot be read.

    Raises:
        CheckpointError: The manifest is damaged.
    """
    if (folder / manifest.NAME).is_file():
        tensors = manifest.read_manifest(folder).tensors.get(manifest.WEIGHT, {})
        return {name: entry.shape for name, entry in tensors.items()}
    try:
        return read_shapes(folder)
    except CheckpointError:
        # Who reads the weights says so. To plan, settings will do.
        return None


def _remedy(folder: Path) -> str:
    if not folder.exists():
        run_dir = next((each.parent for each in folder.parents if checkpoints_folder(each.parent) == each), None)
        if run_dir is None:
            return "name a directory that is there"
        there = [step_path(run_dir, step).name for step in complete_steps(run_dir)]
        return f"{run_dir} has {', '.join(there)}: name one of them" if there else f"train the run {run_dir} first"
    if (folder / "actor" / manifest.NAME).is_file():
        return f"of a checkpoint name a model: {folder / 'actor'}"
    steps = complete_steps(folder)
    return f"of a run name a model: {step_path(folder, max(steps)) / 'actor'}" if steps else "name the directory itself"
