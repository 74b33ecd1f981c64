"""Rows of Parquet files, and what their types say of rows in other tables: the one door to ``pyarrow``."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from hybridflow.data.files import needing, open_file
from hybridflow.data.rows import HERE, check_num_rows, too_long
from hybridflow.errors import DataError

_LEAST_ROWS, _MOST_ROWS = 8, 1024
_BATCH_BYTES = 1 << 26
# Row groups of text are a few times smaller when compressed. One of zeros is thousands of times smaller.
_MAX_GROWTH, _FREE_GROWTH_BYTES = 50, 1 << 24


def count_rows_of_groups(path: str, max_row_bytes: int) -> list[int]:
    """Count the rows of each row group of a file.

    Raises:
        DataError: It is no Parquet file, cannot be read, or takes far more memory than its size.
    """
    with _opened(path) as (table, num_bytes):
        counts = [table.metadata.row_group(index).num_rows for index in range(table.num_row_groups)]
        if any(count < 0 for count in counts):
            raise ValueError(f"it has row groups of {min(counts)} rows")
        check_num_rows(sum(counts), num_bytes)
        for index in range(table.num_row_groups):
            _rows_at_once(table.metadata.row_group(index), num_bytes, max_row_bytes)
        return counts


def read_parquet(path: str, start: int, stop: int, max_row_bytes: int) -> Iterator[Mapping[str, Any] | DataError]:
    """Read the rows from ``start`` to ``stop``, where row groups begin.

    Yields:
        The row, or what is wrong with it.

    Raises:
        DataError: The file is damaged.
    """
    with _opened(path) as (table, num_bytes):
        columns = nested_columns(table.schema_arrow)
        begin = 0
        for index in range(table.num_row_groups):
            group = table.metadata.row_group(index)
            if start <= begin < stop:
                rows_at_once = _rows_at_once(group, num_bytes, max_row_bytes)
                for batch in table.iter_batches(batch_size=rows_at_once, row_groups=[index]):
                    for row in _rows(batch, max_row_bytes):
                        yield row if isinstance(row, DataError) else untabled(row, columns, parses=True)
            begin += group.num_rows


def nested_columns(schema: Any) -> dict[str, Any]:
    """Return the types of a table's columns that hold lists, objects or JSON, by name."""
    from pyarrow import types

    return {field.name: field.type for field in schema if types.is_nested(field.type) or _is_json(field.type)}


def untabled(row: Mapping[str, Any], columns: Mapping[str, Any], *, parses: bool) -> Mapping[str, Any]:
    """Return a row as it was before it became one of a table.

    In a column of objects each has the fields of all, and those that it lacked are null. A chat template would write
    them into the prompt, so messages and tools do without. Nulls within JSON were there before, and stay.

    Args:
        row: A row.
        columns: From ``nested_columns``.
        parses: Whether values of a type of JSON are still text.
    """
    given = {name: _untabled(row.get(name), kind, parses, name == "tools") for name, kind in columns.items()}
    return {**row, **given} if given else row


def _untabled(value: Any, kind: Any, parses: bool, drops: bool) -> Any:
    from pyarrow import types

    if _is_json(kind):
        return _parsed(value) if parses else value
    if isinstance(value, dict) and types.is_struct(kind):
        return {
            field.name: _untabled(value.get(field.name), field.type, parses, drops or field.name == "tools")
            for field in kind
            if value.get(field.name) is not None or not drops
        }
    if isinstance(value, list) and (types.is_list(kind) or types.is_large_list(kind)):
        inner = kind.value_type
        drops = drops or (types.is_struct(inner) and inner.get_field_index("role") >= 0)
        return [_untabled(each, inner, parses, drops) for each in value]
    return value


def _is_json(kind: Any) -> bool:
    return getattr(kind, "extension_name", None) == "arrow.json"


def _parsed(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return text


def _rows_at_once(group: Any, num_bytes: int, max_row_bytes: int) -> int:
    """Return how many rows to read at once, in memory that follows from the size of the file."""
    # Not that of its columns: to ask for a damaged one ends the process.
    plain: int = group.total_byte_size
    if not 0 <= plain <= _FREE_GROWTH_BYTES + _MAX_GROWTH * num_bytes:
        raise ValueError(
            f"a row group has {plain} bytes without compression, more than {_MAX_GROWTH} times the {num_bytes} of the "
            "file; write it without compression"
        )
    if group.num_rows > 0 and plain > group.num_rows * max_row_bytes:
        raise ValueError(f"a row is longer than data.max_row_bytes={max_row_bytes}; shorten it, or raise the key")
    # A text that is the value of all rows lies in the file once.
    return max(_LEAST_ROWS, min(_MOST_ROWS, _BATCH_BYTES // max(1, plain)))


def _rows(batch: Any, max_row_bytes: int) -> Iterator[Mapping[str, Any] | DataError]:
    if batch.nbytes <= max_row_bytes:
        try:
            yield from batch.to_pylist()
            return
        except UnicodeDecodeError:
            pass
    # One row is too long or says what is not UTF-8, and the others are good.
    for index in range(batch.num_rows):
        row = batch.slice(index, 1)
        try:
            yield too_long(max_row_bytes) if row.nbytes > max_row_bytes else row.to_pylist()[0]
        except UnicodeDecodeError as error:
            yield DataError(f"{HERE}: not UTF-8: {error.reason}; write the column's text as UTF-8")


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[Any, int]]:
    """Open a file; also give its size."""
    with needing(f"{path}: reading Parquet", "pyarrow", "data"):
        import pyarrow
        from pyarrow import parquet
    with open_file(path) as file:
        try:
            num_bytes = file.seek(0, os.SEEK_END)
            with parquet.ParquetFile(file, pre_buffer=False) as table:
                yield table, num_bytes
        except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
            reason = " ".join(str(error).split())
            raise DataError(
                f"{path}: cannot be read as Parquet: {type(error).__name__}: {reason:.200}; copy it anew, or set "
                "data.file_format"
            ) from error
