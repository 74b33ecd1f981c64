"""What a conversion that was ended left behind: the plan that it followed, and which parts are on the disk for good.

OUT.part/plan.json                the plan's digest, and what it was in words
OUT.part/journal-00000.jsonl …    a line for each part of a tensor, one file per rank
OUT.part/files/                   what becomes OUT
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from hybridflow.checkpoint.model_dir import write_bytes
from hybridflow.errors import WriteError
from hybridflow.observe.files import write_all

FILES = "files"
_PLAN = "plan.json"


class Plan(NamedTuple):
    """What is converted into what.

    Attributes:
        digest: Equal exactly for conversions whose files are the same, byte for byte.
        text: The same for a person.
    """

    digest: str
    text: str


class Part(NamedTuple):
    """A tensor of a file that is on the disk for good.

    Attributes:
        file: Name of the file.
        key: Key of the tensor within the file.
        sha256: Of its bytes.
    """

    file: str
    key: str
    sha256: str


def part_folder(out: Path) -> Path:
    """Return the folder in which a conversion is written before it is complete.

    Raises:
        WriteError: The path has no name.
    """
    if out.name in ("", ".."):
        raise WriteError(f"{out}: is no name of a new file or directory; give one")
    return out.with_name(f"{out.name}.part")


def write_plan(folder: Path, plan: Plan) -> None:
    """Note which plan the folder follows.

    Raises:
        WriteError: The file system refuses.
    """
    write_bytes(folder / _PLAN, (json.dumps(plan._asdict()) + "\n").encode())


def read_plan(folder: Path) -> Plan | None:
    """Read the plan that the folder follows; None where there is none yet.

    Raises:
        WriteError: What is there was not left by a conversion.
    """
    try:
        found = json.loads((folder / _PLAN).read_text(encoding="utf-8"))
        return Plan(digest=str(found["digest"]), text=str(found["text"]))
    except FileNotFoundError:
        strangers = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        if _PLAN in strangers:
            return read_plan(folder)  # Another rank has written it at this moment.
        if not strangers:
            return None
        reason = f"found {strangers[0]} and no {_PLAN}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{_PLAN} cannot be read: {type(error).__name__}: {error}"
    raise WriteError(f"{folder}: {reason}: it was not left by a conversion; move it away, or choose another OUT")


def discard(folder: Path) -> None:
    """Remove what a conversion left in its folder, the plan last: what a kill interrupts is begun anew by the next.

    Raises:
        OSError: The file system refuses.
    """
    if (folder / FILES).exists():
        shutil.rmtree(folder / FILES)
    for path in folder.glob("journal-*.jsonl"):
        path.unlink()
    (folder / _PLAN).unlink(missing_ok=True)


class ConversionJournal:
    """A rank's list of parts that are on the disk for good.

    Args:
        folder: OUT.part.
        rank: Rank of the conversion.

    Raises:
        OSError: The file system refuses.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        path = folder / f"journal-{rank:05d}.jsonl"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        # A line that was cut by a kill would spoil the one written after it.
        text = path.read_bytes()
        os.ftruncate(self._file, text.rfind(b"\n") + 1)

    def append(self, parts: Iterable[Part]) -> None:
        """Note parts whose bytes have been synced."""
        write_all(self._file, "".join(json.dumps(part) + "\n" for part in parts).encode())
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_journals(folder: Path) -> list[Part]:
    """Read the parts that any rank, of this or an earlier attempt, has noted; skip lines that a crash spoiled."""
    parts: list[Part] = []
    for path in sorted(folder.glob("journal-*.jsonl")):
        for line in path.read_bytes().split(b"\n")[:-1]:
            with contextlib.suppress(ValueError, TypeError):
                parts.append(Part(*json.loads(line)))
    return parts
