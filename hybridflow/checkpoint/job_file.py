"""What ``job.json`` and ``latest`` say of a checkpoint. Whoever wrote them, no path in them leaves ``checkpoints/``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hybridflow.errors import CheckpointError
from hybridflow.foreign import read_small
from hybridflow.observe.files import plain_name

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
    """Return the text of ``latest`` or ``best``, or what stands in its place; None: there is no such file."""
    try:
        return read_small(note, _MOST_NOTE_BYTES).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        return str(error.strerror).removeprefix("has ")


def step_of(name: str) -> int | None:
    """Return the step in a complete checkpoint's name; None for any other name."""
    match = re.fullmatch(r"step_([0-9]{6,15})", name)
    return int(match[1]) if match is not None else None
