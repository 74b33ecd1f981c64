"""Prepared rows on disk, any of which is read by its number: JSON, and where each begins. Memory does not grow.

    FOLDER/manifest.json          what was read, how many rows, where they are; written last
    FOLDER/part-00000.rows        one row on each line
    FOLDER/part-00000.places      where each of them begins and the last ends, 8 bytes each

A row is ``[number, which, begins, fields]``: its number in the piece of a file that it was read from, which of the
prompt indices that this row makes, whether the prompt's text has the beginning of a sequence in it, and its fields.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hybridflow.data.rows import Row
from hybridflow.errors import DataError
from hybridflow.observe.files import plain_name

MANIFEST = "manifest.json"
FORMAT = "hybridflow-rows-5"
"""Also another one where rows are shaped otherwise, so that no older store is used for the same files."""

_PLACE = struct.Struct("<Q")
_FLUSH_ROWS = 1024


class Stored(NamedTuple):
    """A row that was read from a store.

    Attributes:
        row: Its fields.
        place: File and line, or row, that it came from.
        begins: As in ``shaping.Shaped``.
        which: Which of the prompt indices that the row makes.
        num_bytes: Its size on disk.
    """

    row: Row
    place: str
    begins: bool
    which: int
    num_bytes: int


class RowWriter:
    """Writes a part of a store, one row after the other; a context.

    Args:
        stem: Path of the part without what its two files end in.

    Raises:
        OSError: The file system refuses, in any call.
    """

    def __init__(self, stem: Path) -> None:
        self._rows, self._places = (stem.with_suffix(end).open("wb") for end in (".rows", ".places"))
        self._end = 0
        self.num_rows = 0
        self._places.write(_PLACE.pack(0))

    def add(self, line: bytes) -> None:
        """Add a row, from ``encode_row``."""
        self._rows.write(line)
        self._end += len(line)
        self._places.write(_PLACE.pack(self._end))
        self.num_rows += 1
        if self.num_rows % _FLUSH_ROWS == 0:
            # So that who watches the file sees how far it is.
            self._places.flush()

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with contextlib.closing(self._rows), contextlib.closing(self._places):
            for file in (self._rows, self._places) if kind is None else ():
                file.flush()
                os.fsync(file.fileno())


def encode_row(number: int, which: int, begins: bool, row: Row) -> bytes:
    """Encode the line of a row; see the module. Raises RecursionError where it is nested too deeply."""
    return json.dumps([number, which, int(begins), row]).encode() + b"\n"


def rows_written(stem: Path) -> int:
    """Count the rows of a part that is being written, or was."""
    try:
        return max(0, stem.with_suffix(".places").stat().st_size // _PLACE.size - 1)
    except OSError:
        return 0


class PartFiles:
    """The files of parts in a folder that are complete. May be used from any thread, and from forks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, int] = {}

    @property
    def num_open(self) -> int:
        """Return how many files are open."""
        return len(self._files)

    def read(self, name: str, number: int) -> bytes:
        """Read a line of a part, by its number there. Raises OSError, or ``struct.error`` where the part is cut off."""
        ends = os.pread(self._file(f"{name}.places"), 2 * _PLACE.size, number * _PLACE.size)
        start, stop = struct.unpack("<QQ", ends)
        return os.pread(self._file(f"{name}.rows"), stop - start, start)

    def close(self) -> None:
        """Close the files; what is read afterwards opens them again."""
        files, self._files = self._files, {}
        for file in files.values():
            os.close(file)

    def __del__(self) -> None:
        self.close()

    def _file(self, name: str) -> int:
        if name not in self._files:
            found = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC)
            # Of two threads that come at once, one closes its own again.
            if self._files.setdefault(name, found) != found:
                os.close(found)
        return self._files[name]


class RowStore:
    """A store that is complete. May be used from any thread, and from forks.

    Attributes:
        folder: Where it is.
        sha256: Of what makes its rows other rows, in their order.
        facts: All that its manifest says.

    Args:
        folder: From ``prepare.prepare``.

    Raises:
        DataError: It is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.facts: Mapping[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            if self.facts["format"] != FORMAT:
                raise ValueError(f"its format is {self.facts['format']!r}, expected {FORMAT!r}")
            for part in self.facts["parts"]:
                size = (folder / f"{plain_name(part['name'])}.rows").stat().st_size
                if size != part["num_bytes"]:
                    raise ValueError(f"{part['name']}.rows has {size} bytes, expected {part['num_bytes']}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{folder}: is no complete store of rows: {error}; remove the directory to have it made anew"
            ) from error
        self.sha256: str = self.facts["sha256"]
        self._files = PartFiles(folder)
        self._parts = [part["name"] for part in self.facts["parts"]]
        # Where each part ends and each piece of a file begins, in rows.
        self._ends: list[int] = list(itertools.accumulate(part["num_rows"] for part in self.facts["parts"]))
        self._piece_starts = [piece["first_row"] for piece in self.facts["pieces"]]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Stored:
        """Return a row by its number. Raises DataError: the file system refuses."""
        assert 0 <= number < len(self)
        part = bisect.bisect_right(self._ends, number)
        try:
            line = self._files.read(self._parts[part], number - (self._ends[part - 1] if part else 0))
            at, which, begins, row = json.loads(line)
        except (OSError, ValueError, struct.error) as error:
            raise DataError(
                f"{self.folder}: row {number} cannot be read: {error}; remove the directory to have it made anew"
            ) from error
        return Stored(row, self._place(number, at), bool(begins), which, len(line))

    def close(self) -> None:
        """Close the files; what is read afterwards opens them again."""
        self._files.close()

    def _place(self, number: int, at: int) -> str:
        piece = self.facts["pieces"][bisect.bisect_right(self._piece_starts, number) - 1]
        mark = ":" if piece["is_lines"] else ": row "
        return f"{piece['path']}{mark}{piece['first_number'] + at}"
