"""What ``job.json`` and ``latest`` say of a checkpoint. Whoever wrote them, no path in them leaves ``checkpoints/``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hybridflow.errors import CheckpointError
from hybridflow.exit_status import passing_number
from hybridflow.foreign import read_small
from hybridflow.observe.files import plain_name, write_remedy

JOB = "job.json"
MALFORMED = (KeyError, TypeError, AttributeError, ValueError)
"""What reading JSON of another form than expected raises."""

_MOST_NOTE_BYTES = 200


class RoleRecord(NamedTuple):
    """Where a role's model directory lies. A JSON list on its way between ranks.

    Attributes:
        directory: Below ``checkpoints/``.
        sha256: Of its manifest, as a file.
        num_bytes: Bytes of its files.
    """

    directory: str
    sha256: str
    num_bytes: int

    @property
    def is_shared(self) -> bool:
        """Return whether it lies beside the steps' directories, for all of them, since it does not change."""
        return "/" not in self.directory


def read_roles(body: Mapping[str, Any], path: Path, remedy: str) -> dict[str, RoleRecord]:
    """Return the roles of what ``job.json`` holds.

    Args:
        body: Its values.
        path: The directory that it lies in.
        remedy: For the message.

    Raises:
        CheckpointError: They are malformed, or lie elsewhere than a run puts them.
    """
    try:
        roles = {plain_name(role): RoleRecord(**record) for role, record in body["roles"].items()}
        for role, record in roles.items():
            step, slash, name = record.directory.rpartition("/")
            if name != role or (slash and step_of(step) is None):
                raise ValueError(f"{role} lies in {record.directory[:80]!r}, expected {role!r} or 'step_000010/{role}'")
            if type(record.num_bytes) is not int or not isinstance(record.sha256, str):
                raise ValueError(f"{role}: expected a sha256 as text, and a number of bytes")
    except MALFORMED as error:
        raise malformed(path, error, remedy) from error
    return roles


def malformed(path: Path, error: Exception, remedy: str) -> CheckpointError:
    """Return the error of a checkpoint whose ``job.json`` holds something else than it should."""
    return CheckpointError(f"{path / JOB}: is malformed: {type(error).__name__}: {error}; {remedy}")


def read_note(note: Path) -> str | None:
    """Return the text of ``latest`` or ``best``, or what stands in its place; None: there is no such file.

    Raises:
        CheckpointError: The file system does not answer now.
    """
    try:
        return read_small(note, _MOST_NOTE_BYTES).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        if passing_number(error) is not None:
            raise CheckpointError(f"{note}: cannot be read: {error.strerror}; {write_remedy(error)}") from error
        return str(error.strerror).removeprefix("has ")


def step_of(name: str) -> int | None:
    """Return the step in a complete checkpoint's name; None for any other name."""
    match = re.fullmatch(r"step_([0-9]{6,15})", name)
    return int(match[1]) if match is not None else None


def checkpoints_folder(run_dir: Path) -> Path:
    """Return the directory of a run's checkpoints."""
    return run_dir / "checkpoints"


def step_path(run_dir: Path, step: int) -> Path:
    """Return the directory of a step's complete checkpoint."""
    return checkpoints_folder(run_dir) / f"step_{step:06d}"


def complete_steps(run_dir: Path) -> list[int]:
    """Return the steps that have a directory of a complete checkpoint's name, ascending."""
    found = (step_of(path.name) for path in checkpoints_folder(run_dir).glob("step_*"))
    return sorted(step for step in found if step is not None)


def latest_step(run_dir: Path) -> int | None:
    """Return the step of the latest checkpoint; None before the first.

    Raises:
        CheckpointError: ``latest`` does not hold the name of a checkpoint.
    """
    note = checkpoints_folder(run_dir) / "latest"
    name = read_note(note)
    if name is None:
        # Lost, or the first writer was killed before it wrote it: what has its lasting name is whole.
        return max(complete_steps(run_dir), default=None)
    step = step_of(name)
    if step is None:
        raise CheckpointError(f"{note}: found {name[:80]!r}, expected a name such as 'step_000010'; {choices(run_dir)}")
    return step


def choices(run_dir: Path) -> str:
    """Return the remedy for a damaged checkpoint: which others could be resumed from."""
    folder, names = checkpoints_folder(run_dir), [step_path(run_dir, step).name for step in complete_steps(run_dir)]
    note = folder / "latest"
    latest = read_note(note)
    others = [name for name in names if name != (max(names) if latest is None else latest)]
    if not others:
        return f"restore it from a copy, or remove {folder} to start the run anew"
    return f"restore it from a copy, or write one of {', '.join(others)} into {note} to resume from there"
