"""Where a run's checkpoints lie; complete or absent.

    <run_dir>/checkpoints/latest                     the name of the newest complete checkpoint
    <run_dir>/checkpoints/best                       the name of the one with the best validation, where it is kept
    <run_dir>/checkpoints/step_000010/job.json       the job's state; directory and sha256 of each role's manifest
    <run_dir>/checkpoints/step_000010/actor/         a model directory: see ``manifest``
    <run_dir>/checkpoints/reference/                 what does not change: written once, named by every job.json
    <run_dir>/checkpoints/base/                      likewise the weights below the adapters that ``actor`` holds
    <run_dir>/checkpoints/step_000020.tmp/           one that is being written, or whose writer was killed

What ``latest`` names was synced before, so a kill at any moment leaves it whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.job_file import (
    JOB,
    MALFORMED,
    RoleRecord,
    checkpoints_folder,
    complete_steps,
    malformed,
    read_note,
    read_roles,
    step_of,
    step_path,
)
from hybridflow.checkpoint.job_file import choices as choices
from hybridflow.checkpoint.job_file import latest_step as latest_step
from hybridflow.checkpoint.manifest import NAME, digest, read_digested, versions
from hybridflow.checkpoint.model_dir import ModelDir, write_bytes
from hybridflow.errors import CheckpointError, WriteError
from hybridflow.foreign import open_regular
from hybridflow.observe.files import sync_path, write_remedy, writing

BASE = "base"
"""The role that is the actor's weights below its adapters."""

_REMOVED = ".removed.tmp"
"""Ends the name of what is being removed."""

FORMAT = "hybridflow-job-1"
"""Raised when a change makes old checkpoints unreadable."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        run_dir: Directory of the run.
        path: Its directory.
        step: Training steps that it has behind it.
        state: What ``complete_step`` was given.
        roles: Role -> where its model is.
    """

    run_dir: Path
    path: Path
    step: int
    state: Mapping[str, Any]
    roles: Mapping[str, RoleRecord]


def clear_leftovers(run_dir: Path) -> None:
    """Remove what killed writers left, so that a new one finds its place empty.

    For one rank, while no other writes.

    Raises:
        WriteError: The file system refuses.
    """
    folder = checkpoints_folder(run_dir)
    if not folder.is_dir():
        return
    with writing(folder):
        for path in [*folder.glob("*.tmp"), *folder.glob(".*.part")]:
            # What could not be removed before may stay: NFS keeps files that a process holds.
            _remove(path, may_stay=path.name.endswith(_REMOVED))
        if latest_step(run_dir) is None:
            # Written by a run that was killed before its first checkpoint; nothing names it.
            for path in folder.iterdir():
                if path.is_dir() and (path / NAME).is_file():
                    _remove(path)


def role_path(run_dir: Path, step: int, role: str, *, is_frozen: bool) -> Path:
    """Return where a role's files are written; ``.tmp`` goes from the name when the whole is complete."""
    return checkpoints_folder(run_dir) / f"{role}.tmp" if is_frozen else _tmp_path(run_dir, step) / role


def complete_role(run_dir: Path, step: int, role: str, num_bytes: int, *, is_frozen: bool) -> RoleRecord:
    """Take up a model directory whose manifest is synced; one of what does not change gets its lasting name.

    For the role's lead alone.

    Raises:
        WriteError: The file system refuses.
    """
    path = role_path(run_dir, step, role, is_frozen=is_frozen)
    sha256 = _sha256(path / NAME)
    if not is_frozen:
        return RoleRecord(f"{step_path(run_dir, step).name}/{role}", sha256, num_bytes)
    target = checkpoints_folder(run_dir) / role
    try:
        if target.is_dir():
            # Of a run that was killed before its next checkpoint, or has gone back: the latest names no such model.
            _remove(target)
        path.rename(target)
        sync_path(checkpoints_folder(run_dir))
    except OSError as error:
        remedy = write_remedy(error, "choose another place")
        raise WriteError(f"{path}: cannot be renamed to {role}: {error}; {remedy}") from error
    return RoleRecord(role, sha256, num_bytes)


def complete_step(
    run_dir: Path,
    step: int,
    state: Mapping[str, Any],
    roles: Mapping[str, RoleRecord],
    *,
    keep_last: int,
    keep_every: int = 0,
    best: int | None = None,
) -> None:
    """Make what all ranks wrote the latest checkpoint, and remove the oldest.

    For one rank, after every role was completed.

    Args:
        run_dir: Directory of the run.
        step: Training steps done.
        state: JSON: whatever the job needs to go on.
        roles: What ``complete_role`` returned, now or, of what does not change, earlier.
        keep_last: How many checkpoints stay, this one included; at least 1.
        keep_every: Those of steps that are a multiple of it stay beside them; 0: none.
        best: Step of the one that ``best`` names from now on; None: as it is. What it names stays too.

    Raises:
        CheckpointError: The run is already at this step or past it.
        WriteError: The file system refuses.
    """
    assert keep_last >= 1, f"keep_last={keep_last}: the checkpoint just written must stay"
    folder, tmp, path = checkpoints_folder(run_dir), _tmp_path(run_dir, step), step_path(run_dir, step)
    saved = latest_step(run_dir)
    if saved is not None and saved >= step:
        raise CheckpointError(
            f"{folder / 'latest'}: found step {saved}, asked to save step {step}; expected a later one: "
            "resume from it, or give the run another run_dir"
        )
    body = {
        "format": FORMAT,
        "step": step,
        "written_by": versions(),
        "roles": {role: record._asdict() for role, record in roles.items()},
        "state": dict(state),
    }
    body = json.loads(json.dumps(body))
    with writing(tmp):
        tmp.mkdir(parents=True, exist_ok=True)
    write_bytes(tmp / JOB, (json.dumps({"sha256": digest(body), **body}, indent=1) + "\n").encode())
    try:
        # Renamed just before a kill, or left behind by going on from an older one: as good as unwritten.
        for number in complete_steps(run_dir):
            if saved is None or number > saved:
                if number == best_step(run_dir):
                    # The step may be made again, and be no better than others.
                    (folder / "best").unlink()
                _remove(step_path(run_dir, number))
        tmp.rename(path)
        sync_path(folder)
        if saved is None:
            sync_path(run_dir)
    except OSError as error:
        remedy = write_remedy(error, "choose another place")
        raise WriteError(f"{tmp}: cannot be renamed to {path.name}: {error}; {remedy}") from error
    if best is not None:
        # First, so that a kill between the two is mended by the start that makes this step again.
        name_best(run_dir, best)
    write_bytes(folder / "latest", f"{path.name}\n".encode())
    kept = best_step(run_dir)
    for old in complete_steps(run_dir)[:-keep_last]:
        if old != kept and (keep_every == 0 or old % keep_every):
            # NFS keeps a directory while a file in it is being read: no reason to end a run whose checkpoint is whole.
            _remove(step_path(run_dir, old), may_stay=True)


def name_best(run_dir: Path, step: int) -> None:
    """Name a step's checkpoint as the best, if it is there. For one rank.

    Raises:
        WriteError: The file system refuses.
    """
    path = step_path(run_dir, step)
    if path.is_dir():
        write_bytes(checkpoints_folder(run_dir) / "best", f"{path.name}\n".encode())


def best_step(run_dir: Path) -> int | None:
    """Return the step of the checkpoint that is kept as the best; None: there is none."""
    name = read_note(checkpoints_folder(run_dir) / "best")
    return None if name is None else step_of(name)


def load_latest(run_dir: Path) -> Checkpoint | None:
    """Load the latest checkpoint, its state checked, its models not yet: see ``open_role``. None before the first.

    Raises:
        CheckpointError: It is missing, incomplete or damaged; names the file, what was found, what was expected.
    """
    step = latest_step(run_dir)
    if step is None:
        return None
    path = step_path(run_dir, step)
    if not path.is_dir():
        raise CheckpointError(
            f"{checkpoints_folder(run_dir) / 'latest'}: names {path.name}, expected that directory beside it, found "
            f"none; {choices(run_dir)}"
        )
    body = read_digested(path / JOB, choices(run_dir))
    if body.get("format") != FORMAT:
        raise CheckpointError(
            f"{path / JOB}: found format {body.get('format')!r}, expected {FORMAT!r}; "
            "resume with the version of hybridflow that wrote it"
        )
    roles = read_roles(body, path, choices(run_dir))
    try:
        if type(body["step"]) is not int or body["step"] != step or not isinstance(body["state"], dict):
            raise ValueError(f"found step {str(body['step'])[:80]}, expected {step}, and an object as its state")
    except MALFORMED as error:
        raise malformed(path, error, choices(run_dir)) from error
    return Checkpoint(run_dir=run_dir, path=path, step=step, state=body["state"], roles=roles)


@contextlib.contextmanager
def reading_state(checkpoint: Checkpoint) -> Iterator[None]:
    """Turn what a state of another form than expected raises into an error that names its file.

    Raises:
        CheckpointError: The state has another form.
    """
    try:
        yield
    except MALFORMED as error:
        raise malformed(checkpoint.path, error, choices(checkpoint.run_dir)) from error


def open_role(checkpoint: Checkpoint, role: str) -> ModelDir:
    """Open a role's model; check that its manifest is the one that was written and its files are there.

    Raises:
        CheckpointError: It is missing, incomplete or damaged, or the checkpoint has no such role.
    """
    if role not in checkpoint.roles:
        raise CheckpointError(
            f"{checkpoint.path / JOB}: has no {role}, which was expected; it has {', '.join(checkpoint.roles)}: "
            "resume with the recipe that wrote it"
        )
    record = checkpoint.roles[role]
    path = checkpoints_folder(checkpoint.run_dir) / record.directory
    remedy = "all checkpoints share it: restore it from a copy" if record.is_shared else choices(checkpoint.run_dir)
    try:
        found = _sha256(path / NAME)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path / NAME}: found {reason}, expected a file; {remedy}") from error
    if found != record.sha256:
        raise CheckpointError(f"{path / NAME}: found sha256 {found}, expected {record.sha256}; {remedy}")
    with naming_others(checkpoint, role):
        return ModelDir(path)


@contextlib.contextmanager
def naming_others(checkpoint: Checkpoint, role: str) -> Iterator[None]:
    """Say with an error of a role's files which other checkpoints there are.

    Raises:
        CheckpointError: With them.
    """
    try:
        yield
    except CheckpointError as error:
        others = f"or {choices(checkpoint.run_dir).partition(', or ')[2]}"
        if checkpoint.roles[role].is_shared:
            others = "all checkpoints share it"
        raise CheckpointError(f"{error}; {others}") from error


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def _remove(path: Path, *, may_stay: bool = False) -> None:
    """Remove a checkpoint or a leftover; a kill half-way leaves a name that is ignored.

    Args:
        path: The directory or file.
        may_stay: Whether files that cannot be removed are left for the next start, under such a name.
    """
    if path.is_dir() and path.suffix != ".tmp":
        path = path.rename(path.with_name(f"{path.name}.{secrets.token_hex(4)}{_REMOVED}"))
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=may_stay)
    else:
        path.unlink()


def _tmp_path(run_dir: Path, step: int) -> Path:
    return checkpoints_folder(run_dir) / f"step_{step:06d}.tmp"
