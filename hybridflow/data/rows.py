"""Rows as JSON has them, whatever they were read from."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from hybridflow.data.images import as_address
from hybridflow.errors import DataError

Row = dict[str, Any]

_FREE_ROWS, _MAX_ROWS_PER_BYTE = 1 << 20, 50

_LIST = re.compile(rb"\s*\[\s*(\{|$)")
"""How a file of one list begins, in which other programs keep rows."""

_REMEDY = "expected one object on each line, as `jq -c '.[]' FILE > rows.jsonl` writes them"

CONVERSATIONS = "conversations"
"""Field of messages in rows of ShareGPT."""

_ROLES = {"human": "user", "gpt": "assistant", **{role: role for role in ("system", "user", "assistant")}}
"""Who speaks in ShareGPT -> role."""

HERE = "<here>"
"""Stands in messages for the place of a row, which is looked up when somebody is to read it."""


def object_of(line: bytes) -> Row | DataError:
    """Return the row of a line of JSON, or what is wrong with it; a field that is null is absent."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return DataError(f"{HERE}: not UTF-8: {error.reason} at byte {error.start}; save the file as UTF-8")
    except (ValueError, RecursionError) as error:
        if _LIST.match(line):
            return DataError(f"{HERE}: begins a list of JSON; {_REMEDY}")
        return DataError(f"{HERE}: not valid JSON: {error}; expected one object on each line")
    if not isinstance(row, dict):
        remedy = f"; {_REMEDY}" if _LIST.match(line) else ""
        return DataError(f"{HERE}: expected a JSON object, found {type(row).__name__} {row!r:.60}{remedy}")
    return with_roles(row)


def plain_row(row: object) -> Row | DataError:
    """Convert a row to plain JSON: times and bytes become text, images an address; a column that is null is absent."""
    if not isinstance(row, Mapping):
        return DataError(f"{HERE}: expected a row of named fields, found {type(row).__name__} {row!r:.60}")
    try:
        return with_roles({str(name): _plain(value) for name, value in row.items()})
    except UnicodeDecodeError as error:
        return DataError(f"{HERE}: not UTF-8: {error.reason} at byte {error.start}; write the text as UTF-8")
    except (TypeError, ValueError, RecursionError) as error:
        return DataError(f"{HERE}: has what cannot be written as JSON: {error}; convert or remove that column")


def are_messages(value: Any) -> bool:
    """Return whether a value is a list of messages, at least one."""
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) and "role" in each for each in value)


def with_roles(row: Mapping[str, Any]) -> Row:
    """Return the fields of a row that are not null; turns of ``from`` and ``value``, as ShareGPT has, as messages."""
    return {name: _with_roles(value) for name, value in row.items() if value is not None}


def unknown_speaker(value: Any) -> str | None:
    """Return the first speaker of a ShareGPT conversation that is no role here; None: there is none such."""
    turns = value if isinstance(value, list) else []
    names = [str(each["from"]) for each in turns if isinstance(each, dict) and "from" in each and "role" not in each]
    return next((name for name in names if name not in _ROLES), None)


def with_messages(row: Row) -> Row:
    """Return a row of a format without lists of objects: texts that are messages as JSON become messages."""
    return {name: _messages_in(value) for name, value in row.items()}


def too_long(max_row_bytes: int) -> DataError:
    """Return what is wrong with a row of more than so many bytes."""
    return DataError(f"{HERE}: longer than data.max_row_bytes={max_row_bytes}; shorten it, or raise the key")


def check_num_rows(num_rows: int, num_bytes: int) -> None:
    """Refuse more rows than a file of so many bytes can have. Raises ValueError.

    Equal rows take much less than a byte each where a format or its compression writes them once.
    """
    most = _FREE_ROWS + _MAX_ROWS_PER_BYTE * num_bytes
    if num_rows > most:
        raise ValueError(
            f"it has {num_rows} rows in {num_bytes} bytes, where {most} may be; write equal rows once, or rows to "
            "several files"
        )


def num_bytes_of(value: Any) -> int:
    """Return about how many bytes a value of plain JSON takes: the characters of its texts, 8 for anything else."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return 8 + sum(map(num_bytes_of, value))
    if isinstance(value, dict):
        return 8 + sum(len(name) + num_bytes_of(inner) for name, inner in value.items())
    return 8


def _with_roles(value: Any) -> Any:
    if not isinstance(value, list) or not value or not all(map(_is_turn, value)):
        return value
    return [
        {
            "role": _ROLES[turn["from"]],
            "content": turn["value"],
            **{name: more for name, more in turn.items() if name not in ("from", "value")},
        }
        for turn in value
    ]


def _is_turn(value: Any) -> bool:
    return isinstance(value, dict) and "role" not in value and "value" in value and str(value.get("from")) in _ROLES


def _messages_in(value: Any) -> Any:
    if not isinstance(value, str) or not value.lstrip().startswith("[") or '"role"' not in value:
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return found if are_messages(found) else value


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, bytes | bytearray):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            if (address := as_address(bytes(value))) is None:
                raise
            return address
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if hasattr(value, "tolist"):  # of numpy and torch, which are not imported for this
        return _plain(value.tolist())
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if type(value).__name__ in ("Decimal", "UUID"):
        return str(value)
    raise TypeError(f"{type(value).__name__} {value!r:.40}")
