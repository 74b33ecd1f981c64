"""Rows of Parquet files: the one door to ``pyarrow``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from hybridflow.data.files import open_file
from hybridflow.data.rows import HERE
from hybridflow.errors import DataError

_ROWS_AT_ONCE = 1024


def count_rows_of_groups(path: str) -> list[int]:
    """Count the rows of each row group of a file. Raises DataError: it is no Parquet file, or cannot be read."""
    with _opened(path) as table:
        return [table.metadata.row_group(index).num_rows for index in range(table.num_row_groups)]


def read_parquet(path: str, start: int, stop: int) -> Iterator[Mapping[str, Any] | DataError]:
    """Read the rows from ``start`` to ``stop``, where row groups begin.

    Yields:
        The row, or what is wrong with it.

    Raises:
        DataError: The file is damaged.
    """
    with _opened(path) as table:
        groups, begin = [], 0
        for index in range(table.num_row_groups):
            if start <= begin < stop:
                groups.append(index)
            begin += table.metadata.row_group(index).num_rows
        for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=groups):
            yield from _rows(batch)


def _rows(batch: Any) -> Iterator[Mapping[str, Any] | DataError]:
    try:
        yield from batch.to_pylist()
        return
    except UnicodeDecodeError:
        pass
    # One row says what is not UTF-8, and the others are good.
    for index in range(batch.num_rows):
        try:
            yield batch.slice(index, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            yield DataError(f"{HERE}: not UTF-8: {error.reason}; write the column's text as UTF-8")


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(
            f"{path}: reading Parquet takes the package pyarrow, which is not installed; pip install 'hybridflow[data]'"
        ) from error
    with open_file(path) as file:
        try:
            with parquet.ParquetFile(file, pre_buffer=False) as table:
                yield table
        except (pyarrow.ArrowException, OSError, MemoryError) as error:
            reason = " ".join(str(error).split())
            raise DataError(
                f"{path}: cannot be read as Parquet: {type(error).__name__}: {reason:.200}; copy it anew, or set "
                "data.file_format"
            ) from error
