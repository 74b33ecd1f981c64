"""Checkpoints where a program wants them: whole, or the actor as transformers reads it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from hybridflow.checkpoint.convert.engine import convert
from hybridflow.checkpoint.formats.registry import for_export, make_target, open_model
from hybridflow.checkpoint.manifest import read_manifest
from hybridflow.checkpoint.store import load_latest
from hybridflow.errors import CheckpointError
from hybridflow.models.user_model import FAMILY
from hybridflow.observe.files import writing
from hybridflow.parallel.world import World


def export_actor(run_dir: Path, path: Path, world: World) -> None:
    """Write the actor of a run's latest checkpoint as a Hugging Face directory. Collective: all ranks.

    Raises:
        CheckpointError: ``path`` is there.
        WriteError: The file system refuses.
    """

    def write() -> None:
        checkpoint = load_latest(run_dir)
        assert checkpoint is not None, "has just been saved"
        if read_manifest(checkpoint.path / "actor").family == FAMILY:
            raise CheckpointError(
                f"{path}: the actor is a class of your own, which transformers does not read; save its state_dict() "
                "yourself, or save_checkpoint with save_optimizer=True"
            )
        # Of adapters what they change is in the weights.
        source = for_export(open_model(checkpoint.path / "actor"))
        convert(source, make_target("hf", source), path, what={"to": "hf"})

    _on_the_first(write, path, world)


def keep_checkpoint(run_dir: Path, path: Path, world: World) -> None:
    """Copy a run's latest checkpoint to a run directory of its own that can be resumed. Collective: all ranks.

    Raises:
        CheckpointError: ``path`` is there.
        WriteError: The file system refuses.
    """

    def write() -> None:
        aside = path.with_name(f"{path.name}.tmp")
        shutil.rmtree(aside, ignore_errors=True)
        # Fails where a link is that another user has put there.
        aside.mkdir()
        shutil.copytree(run_dir / "checkpoints", aside / "checkpoints", ignore=shutil.ignore_patterns("*.tmp"))
        aside.rename(path)

    _on_the_first(write, path, world)


def check_free(path: Path, world: World) -> None:
    """Refuse what is there already, before it is worked for. Collective: all ranks. Raises CheckpointError."""
    _on_the_first(lambda: None, path, world)


def _on_the_first(write: Callable[[], None], path: Path, world: World) -> None:
    """Write on the lowest rank; all learn how it went."""

    def work() -> None:
        if os.path.lexists(path):
            raise CheckpointError(f"{path}: is there already; remove it, or choose another place")
        with writing(path, "choose another place"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write()

    world.everyone().on_lead("the checkpoint", work)
