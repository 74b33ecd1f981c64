"""Rows of files, whatever their format, one at a time: JSONL, Parquet, HDF5, and what ``datasets`` has saved.

A file is cut into pieces, which depend on the file alone, so that several processes can share it.
"""

from __future__ import annotations

import functools
import os
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

from hybridflow.config.data import FileFormat
from hybridflow.data.files import File, is_address, is_gzip, opened_text
from hybridflow.data.rows import HERE, Row, num_bytes_of, object_of, plain_row, too_long, with_messages
from hybridflow.errors import DataError

_ENDINGS: dict[str, FileFormat] = {".parquet": "parquet", ".pq": "parquet", ".h5": "hdf5", ".hdf5": "hdf5"}
_PIECE_BYTES = 64 << 20
_PIECE_ROWS = 1 << 16
_BLOCK_BYTES = 1 << 20


class Piece(NamedTuple):
    """A stretch of a file.

    Attributes:
        path: The file.
        format: Its format.
        start: First byte of the stretch in JSONL, else its first row. Lines belong to where they begin.
        stop: Where it ends; None: at the end.
    """

    path: str
    format: FileFormat
    start: int
    stop: int | None


def format_of(path: str, named: FileFormat | None) -> FileFormat:
    """Return a file's format: the named one, or else the one of its name or kind.

    Raises:
        DataError: It is none that is read.
    """
    if named is not None:
        return named
    if not is_address(path) and os.path.isdir(path):
        return "datasets"
    ending = os.path.splitext(path)[1].lower()
    if ending in (".csv", ".tsv"):
        raise DataError(
            f"{path}: {ending[1:].upper()} is not read; write it as JSONL, for instance with pandas: read_csv(FILE, "
            "dtype=str).to_json('rows.jsonl', orient='records', lines=True)"
        )
    return _ENDINGS.get(ending, "jsonl")


def cut(file: File, file_format: FileFormat, *, max_row_bytes: int) -> list[Piece]:
    """Return the pieces of a file, in order; of one without rows none, or an empty one.

    Args:
        file: From ``find_files``.
        file_format: Its format.
        max_row_bytes: Longest row.

    Raises:
        DataError: It cannot be read.
    """
    path = file.path
    if file_format == "jsonl":
        if is_gzip(path):
            return [Piece(path, file_format, 0, None)]
        starts = range(0, max(1, file.num_bytes), _PIECE_BYTES)
        return [Piece(path, file_format, start, min(start + _PIECE_BYTES, file.num_bytes)) for start in starts]
    count, _ = _reader(file_format)
    counted = count(path, max_row_bytes)
    stops = _stops_of(counted) if isinstance(counted, int) else _stops(counted)
    return [Piece(path, file_format, start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


def read(piece: Piece, *, max_row_bytes: int) -> Iterator[Row | DataError | None]:
    """Read the rows of a piece in order; one per line of JSONL. Memory does not grow with the file.

    Args:
        piece: From ``cut``.
        max_row_bytes: Longest row: of JSONL its line, else about what its values take.

    Yields:
        The row, what is wrong with it (at ``HERE``), or None for a blank line.

    Raises:
        DataError: The file cannot be read on.
    """
    if piece.format == "jsonl":
        yield from _read_lines(piece, max_row_bytes)
        return
    assert piece.stop is not None, "only compressed files have no known end"
    _, read_rows = _reader(piece.format)
    for row in read_rows(piece.path, piece.start, piece.stop, max_row_bytes):
        found = row if isinstance(row, DataError) else plain_row(row)
        if num_bytes_of(found) > max_row_bytes:
            found = too_long(max_row_bytes)
        yield with_messages(found) if piece.format == "hdf5" and not isinstance(found, DataError) else found


def _reader(
    file_format: FileFormat,
) -> tuple[
    Callable[[str, int], int | list[int]], Callable[[str, int, int, int], Iterable[Mapping[str, Any] | DataError]]
]:
    """Return what counts a file's rows, in all or in each group that cannot be cut, and what reads some of them."""
    if file_format == "parquet":
        from hybridflow.data.parquet import count_rows_of_groups, read_parquet

        return count_rows_of_groups, read_parquet
    if file_format == "hdf5":
        from hybridflow.data.hdf5 import count_rows, read_hdf5

        return count_rows, read_hdf5
    from hybridflow.data.saved import count_saved_rows, read_saved

    return count_saved_rows, read_saved


def place_of(piece: Piece, index: int) -> str:
    """Return the place of a piece's row: file and line counted from 1, or file and row counted from 0."""
    if piece.format != "jsonl":
        return f"{piece.path}: row {piece.start + index}"
    before = _lines_before(piece.path, piece.start) if piece.start else 0
    return f"{piece.path}:{before + index + 1}"


def _read_lines(piece: Piece, most: int) -> Iterator[Row | DataError | None]:
    try:
        with opened_text(piece.path) as file:
            for line in _lines(file, piece.start, piece.stop, most):
                if line is None:
                    yield DataError(
                        f"{HERE}: longer than data.max_row_bytes={most}; shorten it, raise the key, or end lines with "
                        "a line feed"
                    )
                else:
                    yield object_of(line) if line.strip() else None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{piece.path}: cannot be read to its end: {error}; copy it anew") from error


def _lines(file: BinaryIO, start: int, stop: int | None, most: int) -> Iterator[bytes | None]:
    """Read the lines that begin in a stretch of a file; None in place of a line that is too long for memory."""
    at = start
    if start > 0:
        # A line that begins before is another piece's, and so is one that ends with the byte before.
        file.seek(start - 1)
        at = start - 1 + _skip_line(file)
    while stop is None or at < stop:
        line = file.readline(most + 1)
        if not line:
            return
        mark = BOM_UTF8 if at == 0 else b""
        at += len(line)
        if len(line) > most and not line.endswith(b"\n"):
            at += _skip_line(file)
            yield None
        else:
            yield line.rstrip(b"\n").removeprefix(mark)


def _skip_line(file: BinaryIO) -> int:
    """Read to the end of the line; how many bytes it had."""
    count = 0
    while True:
        part = file.readline(_BLOCK_BYTES)
        count += len(part)
        if len(part) < _BLOCK_BYTES or part.endswith(b"\n"):
            return count


@functools.lru_cache(maxsize=64)
def _lines_before(path: str, start: int) -> int:
    """Count the lines that begin before a byte."""
    count, left, last = 0, start, b"\n"
    with opened_text(path) as file:
        while left > 0 and (block := file.read(min(left, _BLOCK_BYTES))):
            count += block.count(b"\n")
            left -= len(block)
            last = block[-1:]
    return count + (last != b"\n")


def _stops(counts: Iterable[int]) -> list[int]:
    """Return the ends of pieces, each of whole groups of rows and at least ``_PIECE_ROWS`` rows."""
    stops, begin, end = [], 0, 0
    for count in counts:
        end += count
        if end - begin >= _PIECE_ROWS:
            stops.append(end)
            begin = end
    return [*stops, end] if end > begin else stops


def _stops_of(num_rows: int) -> list[int]:
    return [min(start + _PIECE_ROWS, num_rows) for start in range(0, num_rows, _PIECE_ROWS)]
