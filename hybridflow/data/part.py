"""One part of a store: its rows are read, checked, rendered and written.

``python -m hybridflow.data.part FOLDER NUMBER`` makes a part that ``prepare`` has ordered, in a process of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hybridflow.data.parquet import nested_columns, untabled
from hybridflow.data.readers import Piece, place_of, read
from hybridflow.data.row_store import RowWriter, encode_row
from hybridflow.data.rows import HERE, Row, plain_row
from hybridflow.data.shaping import Shape, Shaper, shaped_row
from hybridflow.errors import DataError, HybridflowError
from hybridflow.exit_status import DONE, exit_status, pack_error
from hybridflow.observe.files import replace_file, writing
from hybridflow.sections import read_section

REMEDY = "set data.cache_dir"
"""What errors of writing advise, besides making room."""

MOST_SHOWN = 5
"""Messages about rows that are left out which a store keeps."""

_REASONS = 20


class Given(NamedTuple):
    """Rows that a program has in memory, in the place of files.

    Attributes:
        rows: Mappings; read once, or twice where they have a length.
        title: What messages call them.
        weight: As in ``DataSource``.
    """

    rows: Iterable[Any]
    title: str
    weight: float | None = None


class ReadRows(NamedTuple):
    """Rows of JSON that were read elsewhere, in the place of files.

    Attributes:
        rows: Each, or what is wrong with it, at ``HERE``; read once.
        place: What messages call one, by its number.
        title: What a store keeps about their origin.
    """

    rows: Iterable[Row | DataError]
    place: Callable[[int], str]
    title: str = ""


def fingerprint_of(given: Given) -> str | None:
    """Return what the package ``datasets`` knows a data set by; None of other rows."""
    fingerprint: str | None = getattr(given.rows, "_fingerprint", None)
    return fingerprint


class Hashed:
    """Rows in memory as plain JSON, and what is wrong with others; hashed as they are read.

    Iterating raises a DataError where the program's own iterator has an OSError.
    """

    def __init__(self, given: Given) -> None:
        self._given = given
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Return the sha256 of the rows that were read."""
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[Row | DataError]:
        try:
            yield from self._read()
        except OSError as error:
            raise DataError(f"{self._given.title}: cannot be read: {error}; look at what gives the rows") from error

    def _read(self) -> Iterator[Row | DataError]:
        # Only rows of the package ``datasets`` have one.
        schema = getattr(getattr(self._given.rows, "features", None), "arrow_schema", None)
        columns = {} if schema is None else nested_columns(schema)
        for given in self._given.rows:
            row = plain_row(untabled(given, columns, parses=False) if columns else given)
            # One that is nested too deeply is used by nobody.
            with contextlib.suppress(RecursionError):
                text = str(row) if isinstance(row, DataError) else json.dumps(row)
                self._digest.update(text.encode(errors="backslashreplace"))
            self._digest.update(b"\n")
            yield row


def part_name(number: int) -> str:
    """Return what the names of a part's files begin with."""
    return f"part-{number:05d}"


def make_part(folder: Path, number: int, shape: Shape, pieces: Sequence[Piece | ReadRows]) -> dict[str, Any]:
    """Write a part of a store.

    Args:
        folder: Where it goes; what is there of that number is replaced.
        number: Number of the part.
        shape: What rows have to be.
        pieces: What it is made from.

    Returns:
        Its ``name``, ``num_rows`` and ``num_bytes``; what is told of its ``pieces``; how many rows are ``bad`` by
        reason, the first messages ``shown``, and ``num_long``, those with a prompt longer than asked for.

    Raises:
        DataError: A piece cannot be read; a row cannot be used, and ``on_bad_row`` is ``error``.
        OSError: The file system refuses.
    """
    part, shaper, stem = _Part(shape), Shaper(shape), folder / part_name(number)
    try:
        with RowWriter(stem) as writer:
            told = [part.write(piece, shaper, writer) for piece in pieces]
    finally:
        shaper.close()
    return {
        "name": stem.name,
        "num_rows": writer.num_rows,
        "num_bytes": stem.with_suffix(".rows").stat().st_size,
        "pieces": told,
        "bad": part.bad,
        "shown": part.shown,
        "num_long": part.num_long,
    }


def carry_out(aside: Path, number: int, given: Given | None = None) -> HybridflowError | None:
    """Make a part as was ordered, and a file that says what is in it; return what went wrong."""
    stem = aside / part_name(number)
    try:
        with writing(aside, REMEDY):
            _make_ordered(stem, number, given)
    except HybridflowError as error:
        return error
    # A thread would print it and be silent to who waits for it.
    except Exception as error:
        return DataError(f"{stem}: {type(error).__name__}: {error}")
    return None


def _make_ordered(stem: Path, number: int, given: Given | None) -> None:
    order = json.loads(stem.with_suffix(".order").read_text(encoding="utf-8"))
    shape = read_section(Shape, order["shape"], source=str(stem))
    if given is None:
        told = make_part(stem.parent, number, shape, [Piece(*piece) for piece in order["pieces"]])
    else:
        hashed, title = Hashed(given), given.title
        told = make_part(stem.parent, number, shape, [ReadRows(hashed, lambda row: f"{title}: row {row}", title)])
        if fingerprint_of(given) is None:
            told["rows_sha256"] = hashed.sha256
    replace_file(stem.with_suffix(".json"), json.dumps(told).encode())


class _Part:
    """Writes the rows of some pieces, and keeps count of those that are left out."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self.bad: dict[str, int] = {}
        self.shown: list[str] = []
        self.num_long = 0

    def write(self, piece: Piece | ReadRows, shaper: Shaper, writer: RowWriter) -> dict[str, Any]:
        """Write the rows of a piece; return what a store keeps about their origin, and how many there are."""
        digest, before, number = hashlib.sha256(b"["), writer.num_rows, -1
        if isinstance(piece, ReadRows):
            rows: Iterable[Row | DataError | None] = piece.rows
            origin = {"path": piece.title, "is_lines": False, "start": 0}
        else:
            rows = read(piece, max_row_bytes=self._shape.data.max_row_bytes)
            origin = {"path": piece.path, "is_lines": piece.format == "jsonl", "start": piece.start}
        for number, row in enumerate(rows):
            try:
                prompt_indices = _prompt_indices_of(row, number, shaper)
            except DataError as error:
                self._leave_out(error, piece, number)
                continue
            self.num_long += row is not None and not prompt_indices
            for content, line in prompt_indices:
                # As json.dumps writes the list of all of them.
                digest.update(content if writer.num_rows == before else b", " + content)
                writer.add(line)
        digest.update(b"]")
        return {
            **origin,
            "num_read": number + 1,
            "num_rows": writer.num_rows - before,
            "sha256": digest.hexdigest(),
        }

    def _leave_out(self, error: DataError, piece: Piece | ReadRows, number: int) -> None:
        message = str(error)
        is_fatal = self._shape.data.on_bad_row == "error"
        if is_fatal or len(self.shown) < MOST_SHOWN:
            place = piece.place(number) if isinstance(piece, ReadRows) else place_of(piece, number)
            self.shown.append(message.replace(HERE, place, 1))
        if is_fatal:
            # The first row of a file is rather one of many that a key misreads.
            is_first = number == 0 and (isinstance(piece, ReadRows) or piece.start == 0)
            raise DataError(self.shown[-1] + ("" if is_first else "; data.on_bad_row=skip leaves such rows out"))
        reason = re.sub(r"\d+", "N", message.removeprefix(f"{HERE}: ").partition(";")[0])[:80]
        reason = reason if reason in self.bad or len(self.bad) < _REASONS else "other reasons"
        self.bad[reason] = self.bad.get(reason, 0) + 1


def _prompt_indices_of(row: Row | DataError | None, number: int, shaper: Shaper) -> list[tuple[bytes, bytes]]:
    """Return content and store line of each example of a row; none for a blank line or a long prompt."""
    shaped = shaped_row(row, shaper)
    if shaped is None:
        return []
    try:
        return [
            (json.dumps(content).encode(), encode_row(number, which, shaped.begins, shaped.row))
            for which, content in enumerate(shaped.contents)
        ]
    except RecursionError as error:
        raise DataError(f"{HERE}: is nested too deeply; flatten it") from error


def _end_with_parent() -> None:
    """End when the rank that started this process ends in any way, which closes the input."""
    while os.read(0, 1):
        pass
    os._exit(1)


def _work_here(aside: Path, number: int) -> int:
    """Make a part in a process of its own; its exit status tells of a disk that has no room for the message."""
    error = carry_out(aside, number)
    if error is None:
        return DONE
    with contextlib.suppress(OSError):
        replace_file((aside / part_name(number)).with_suffix(".error"), json.dumps(pack_error(error)).encode())
    return exit_status(error)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(_work_here(Path(sys.argv[1]), int(sys.argv[2])))
