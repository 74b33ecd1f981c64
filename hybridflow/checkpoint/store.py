"""Checkpoints on disk, complete or absent.

    <run_dir>/checkpoints/latest                          the name of the newest complete checkpoint
    <run_dir>/checkpoints/step_000010/state.json          the job's state, and every file's size and sha256
    <run_dir>/checkpoints/step_000010/actor-00003.safetensors   what rank 3 holds of the actor
    <run_dir>/checkpoints/step_000020.tmp/                one that is being written, or whose writer was killed

A step is saved in three moves with a barrier of the caller between them: the lead (the job's lowest rank) calls
``begin_step``; every rank calls ``write_shard`` for each of its roles; the lead gathers what those returned and calls
``complete_step``. What ``latest`` names was synced before, so a kill at any moment leaves it whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from hybridflow.errors import CheckpointError

FORMAT = 1
"""Raised when a change makes old checkpoints unreadable."""


class FileRecord(NamedTuple):
    """What the manifest says of one file. A JSON list on its way between ranks."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint, whose files are all there.

    Attributes:
        path: Its directory.
        step: Training steps that it has behind it.
        state: What ``complete_step`` was given.
        files: Its manifest, by file name.
    """

    path: Path
    step: int
    state: dict[str, Any]
    files: dict[str, FileRecord]


def begin_step(run_dir: Path, step: int) -> None:
    """Make room for a checkpoint: remove what killed writers left, and open its directory.

    For the lead alone; a barrier follows.

    Raises:
        CheckpointError: The run is already at this step or past it.
    """
    folder = _folder(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    saved = latest_step(run_dir)
    if saved is not None and saved >= step:
        raise CheckpointError(
            f"{folder / 'latest'}: found step {saved}, asked to save step {step}; expected a later one: "
            "resume from it, or give the run another run_dir"
        )
    for path in list(folder.glob("*.tmp")):
        _remove(path)
    # A checkpoint renamed just before a kill, which latest does not name yet, is as good as unwritten.
    for number in _steps(run_dir):
        if saved is None or number > saved:
            _remove(_path(run_dir, number))
    _tmp_path(run_dir, step).mkdir()


def write_shard(run_dir: Path, step: int, role: str, rank: int, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write and sync one rank's tensors of one role, between ``begin_step`` and ``complete_step``.

    Args:
        run_dir: Of the run.
        step: The step begun.
        role: Whose tensors these are (``"actor"``, ``"actor-optimizer"``).
        rank: Global rank that holds them.
        tensors: By name; on any device, of any shape and dtype.

    Returns:
        What ``complete_step`` needs to know of the file.

    Raises:
        CheckpointError: The file system refuses.
    """
    path = _tmp_path(run_dir, step) / shard_name(role, rank)
    try:
        save_file(_on_host(tensors), path)
        return _sync(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: cannot be written: {error}; run_dir must have room, and be on a file system that all ranks share"
        ) from error


def complete_step(
    run_dir: Path, step: int, state: Mapping[str, Any], files: Iterable[FileRecord | list[Any]], keep_last: int
) -> Path:
    """Make what all ranks wrote the latest checkpoint, and remove the oldest.

    For the lead alone, after every rank's ``write_shard``; a barrier follows.

    Args:
        run_dir: Of the run.
        step: The step begun.
        state: JSON: data position, config, versions, whatever the job needs to go on.
        files: What every ``write_shard`` returned, on all ranks.
        keep_last: How many checkpoints stay, this one included; at least 1.

    Returns:
        The checkpoint's directory.
    """
    assert keep_last >= 1, f"keep_last={keep_last}: the checkpoint just written must stay"
    folder, tmp, path = _folder(run_dir), _tmp_path(run_dir, step), _path(run_dir, step)
    body = {"format": FORMAT, "step": step, "state": dict(state), "files": sorted(FileRecord(*file) for file in files)}
    body = json.loads(json.dumps(body))
    (tmp / "state.json").write_text(json.dumps({**body, "sha256": _digest(body)}, indent=1) + "\n")
    _sync(tmp / "state.json")
    _sync_folder(tmp)
    tmp.rename(path)
    _sync_folder(folder)
    note = folder / "latest.tmp"
    note.write_text(path.name + "\n")
    _sync(note)
    note.replace(folder / "latest")
    _sync_folder(folder)
    for old in _steps(run_dir)[:-keep_last]:
        _remove(_path(run_dir, old))
    return path


def latest_step(run_dir: Path) -> int | None:
    """The step of the latest checkpoint; None before the first.

    Raises:
        CheckpointError: ``latest`` does not hold the name of a checkpoint.
    """
    note = _folder(run_dir) / "latest"
    if not note.exists():
        return None
    name = note.read_text().strip()
    step = _step_of(name)
    if step is None:
        raise CheckpointError(
            f"{note}: found {name[:80]!r}, expected a name such as 'step_000010'; {_choices(run_dir)}"
        )
    return step


def load_latest(run_dir: Path) -> Checkpoint | None:
    """The latest checkpoint, its state checked, its files present; None before the first. Any rank, no collective.

    Raises:
        CheckpointError: It is missing, incomplete or damaged; names the file, what was found, what was expected.
    """
    step = latest_step(run_dir)
    if step is None:
        return None
    path = _path(run_dir, step)
    if not path.is_dir():
        raise CheckpointError(
            f"{_folder(run_dir) / 'latest'}: names {path.name}, expected that directory beside it, found none; "
            f"{_choices(run_dir)}"
        )
    body = _read_state(run_dir, path / "state.json")
    if body["format"] != FORMAT:
        raise CheckpointError(
            f"{path / 'state.json'}: found format {body['format']}, expected {FORMAT}; "
            "resume with the version of hybridflow that wrote it"
        )
    files = {file[0]: FileRecord(*file) for file in body["files"]}
    for record in files.values():
        file = path / record.name
        found = f"{file.stat().st_size} bytes" if file.is_file() else "no such file"
        if found != f"{record.size_bytes} bytes":
            raise CheckpointError(f"{file}: found {found}, expected {record.size_bytes} bytes; {_choices(run_dir)}")
    return Checkpoint(path=path, step=body["step"], state=body["state"], files=files)


def read_shard(checkpoint: Checkpoint, role: str, rank: int) -> dict[str, Tensor]:
    """One rank's tensors of one role, in host memory, after their hash was checked.

    Raises:
        CheckpointError: The checkpoint has no such file, or its bytes are not those that were written.
    """
    name = shard_name(role, rank)
    path = checkpoint.path / name
    run_dir = checkpoint.path.parent.parent
    if name not in checkpoint.files:
        raise CheckpointError(
            f"{path}: not part of this checkpoint, which has {', '.join(sorted(checkpoint.files))}; "
            "resume with the ranks and the roles that wrote it"
        )
    expected = checkpoint.files[name].sha256
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: found {error.strerror}, expected a file; {_choices(run_dir)}") from error
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise CheckpointError(f"{path}: found sha256 {found}, expected {expected}; {_choices(run_dir)}")
    try:
        return load(content)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: found {error}, expected safetensors; {_choices(run_dir)}") from error


def shard_name(role: str, rank: int) -> str:
    """The file of one rank's tensors of one role."""
    return f"{role}-{rank:05d}.safetensors"


def _read_state(run_dir: Path, path: Path) -> dict[str, Any]:
    try:
        body: dict[str, Any] = json.loads(path.read_text())
        expected = body.pop("sha256")
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path}: found {reason}, expected JSON with its sha256; {_choices(run_dir)}") from error
    if _digest(body) != expected:
        raise CheckpointError(f"{path}: found sha256 {_digest(body)}, expected {expected}; {_choices(run_dir)}")
    return body


def _choices(run_dir: Path) -> str:
    """The remedy: which other checkpoints could be resumed from."""
    folder = _folder(run_dir)
    latest = (folder / "latest").read_text().strip()
    others = [name for step in _steps(run_dir) if (name := _path(run_dir, step).name) != latest]
    if not others:
        return f"restore it from a copy, or remove {folder} to start the run anew"
    return f"restore it from a copy, or write one of {', '.join(others)} into {folder / 'latest'} to resume from there"


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous host tensors, no two in the same memory, as safetensors wants them."""
    found: dict[str, Tensor] = {}
    addresses: set[int] = set()
    for name, tensor in tensors.items():
        host = tensor.detach().cpu().contiguous()
        found[name] = host.clone() if host.data_ptr() in addresses else host
        addresses.add(host.data_ptr())
    return found


def _sync(path: Path) -> FileRecord:
    """Bring a file to the disk and hash what is there."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return FileRecord(path.name, path.stat().st_size, digest.hexdigest())


def _sync_folder(path: Path) -> None:
    """Bring a directory's names to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Remove a checkpoint or a leftover; a kill half-way leaves a name that is ignored."""
    if path.suffix != ".tmp":
        path = path.rename(path.with_name(path.name + ".tmp"))
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _folder(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def _path(run_dir: Path, step: int) -> Path:
    return _folder(run_dir) / f"step_{step:06d}"


def _tmp_path(run_dir: Path, step: int) -> Path:
    return _folder(run_dir) / f"step_{step:06d}.tmp"


def _steps(run_dir: Path) -> list[int]:
    """The steps that have a directory of a complete checkpoint's name, ascending."""
    return sorted(step for path in _folder(run_dir).iterdir() if (step := _step_of(path.name)) is not None)


def _step_of(name: str) -> int | None:
    """The step in a complete checkpoint's name; None for any other name."""
    match = re.fullmatch(r"step_([0-9]{6,})", name)
    return int(match[1]) if match is not None else None
