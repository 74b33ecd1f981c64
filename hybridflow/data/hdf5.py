"""Rows of HDF5 files, each of whose datasets is a column: the one door to ``h5py``.

What else reads or writes HDF5 has the package from here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import h5py

from hybridflow.data.files import is_address, open_file
from hybridflow.errors import DataError

__all__ = ["count_rows", "h5py", "read_hdf5"]

_ROWS_AT_ONCE = 1024


def count_rows(path: str) -> int:
    """Count the rows of a file's columns. Raises DataError: it has none, of several lengths, or cannot be read."""
    with _opened(path) as columns:
        return len(next(iter(columns.values())))


def read_hdf5(path: str, start: int, stop: int) -> Iterator[dict[str, Any] | DataError]:
    """Read the rows from ``start`` to ``stop``.

    Yields:
        The row, or what is wrong with it.

    Raises:
        DataError: The file is damaged.
    """
    with _opened(path) as columns:
        for first in range(start, stop, _ROWS_AT_ONCE):
            blocks = {name: column[first : min(first + _ROWS_AT_ONCE, stop)] for name, column in columns.items()}
            for values in zip(*blocks.values(), strict=True):
                yield dict(zip(blocks, values, strict=True))


@contextlib.contextmanager
def _opened(path: str) -> Iterator[dict[str, Any]]:
    """Open a file's columns by name."""
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(open_file(path)) if is_address(path) else path
        try:
            file = stack.enter_context(h5py.File(source, "r"))
            yield _columns(file)
        # h5py raises each of these where the file is damaged, and ValueError is ours too.
        except (OSError, KeyError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"{path}: cannot be read as rows of HDF5: {reason:.300}; write or copy it anew") from error


def _columns(file: Any) -> dict[str, Any]:
    columns = {}
    for name in file:
        # A link or an external dataset would have another file read, which nobody named.
        found = file[name] if isinstance(file.get(name, getlink=True), h5py.HardLink) else None
        if not isinstance(found, h5py.Dataset) or found.is_virtual or found.external:
            raise ValueError(f"{name!r} is not a dataset of this file itself; give one dataset for each field")
        if found.ndim == 0 or found.dtype.names is not None:
            raise ValueError(
                f"dataset {name!r} of shape {found.shape} and type {found.dtype} is not a column of values"
            )
        columns[name] = found
    lengths = {name: len(column) for name, column in columns.items()}
    if not lengths:
        raise ValueError("it has no dataset; give one for each field, of one length")
    if len(set(lengths.values())) > 1:
        raise ValueError(f"its datasets are of several lengths: {lengths}; a row has a value of each, make them equal")
    return columns
