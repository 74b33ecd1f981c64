"""Rows of HDF5 files, each of whose datasets is a column: the one door to ``h5py``.

    python -m hybridflow.data.hdf5 MEMORY_BYTES     what ``try_file`` begins

What else reads or writes HDF5 has the package from here. A file of others is opened by ``open_hdf5``. What lies in it
is found by ``item_in``, so that no other file is opened because the file says so.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py

from hybridflow.data.files import is_address, open_file
from hybridflow.data.limited import LimitedProcess
from hybridflow.data.rows import check_num_rows
from hybridflow.errors import DataError
from hybridflow.foreign import limit_cpu, limit_process, open_regular

__all__ = ["count_rows", "h5py", "is_own", "item_in", "open_hdf5", "read_hdf5", "rows_at_once", "try_file"]

_LEAST_ROWS, _MOST_ROWS = 8, 1024
# A block of rows takes about so much, or 8 times the file.
_BLOCK_BYTES = 1 << 26
_MAX_CHUNK_BYTES = 1 << 26
_MEMORY_BYTES, _FREE_BYTES, _MEMORY_PER_BYTE = 4 << 30, 200 << 20, 10
_CPU_S, _BYTES_PER_S = 5, 8 << 20
# The process waits for a processor where the machine is busy, which is no fault of the file.
_WAITS = 20
_FILTERS = {h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32, h5py.h5z.FILTER_LZF}


def open_hdf5(path: str | os.PathLike[str], **settings: Any) -> h5py.File:
    """Open a file to be read. Raises OSError: it is no regular file, or no HDF5."""
    # The library would wait for who writes into a pipe.
    with open_regular(os.fspath(path)):
        return h5py.File(path, "r", **settings)


def try_file(path: str | os.PathLike[str]) -> None:
    """Have a process of its own look through a file, since some damaged ones crash the library or never end.

    A file of which that is known is not tried again in this process.

    Raises:
        OSError: The library crashes or does not end.
    """
    with open_regular(os.fspath(path)) as file:
        found = os.fstat(file.fileno())
    # The other process keeps the working directory of its start.
    _try(os.path.abspath(path), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _try(path: str, device: int, inode: int, num_bytes: int, changed_ns: int) -> None:
    process, cpu_s = _process(os.getpid()), _CPU_S + num_bytes // _BYTES_PER_S
    try:
        process.exchange(json.dumps([path, cpu_s]).encode(), _WAITS * cpu_s)
    except (OSError, EOFError) as error:
        process.close()
        raise OSError(
            f"the library crashes or needs over {cpu_s} s or much memory to look through it; {error}"
        ) from error


@functools.lru_cache(maxsize=1)
def _process(owner: int) -> LimitedProcess:
    """Return the process of this one; a fork would write into the pipes of the other."""
    return LimitedProcess("hybridflow.data.hdf5", (str(_MEMORY_BYTES),), max_answer_bytes=1 << 10)


def main() -> int:
    """Look through files until the input ends, or one takes too much."""
    limit_process(int(sys.argv[1]))
    begin_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for line in sys.stdin.buffer:
        path, cpu_s = json.loads(line)
        num_bytes = os.stat(path).st_size
        limit_cpu(cpu_s)
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        wanted = begin_bytes + _FREE_BYTES + _MEMORY_PER_BYTE * num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (min(wanted, most), most))
        with _unless_lacking(), open_hdf5(path, locking=False) as file:
            _look(file, num_bytes)
            file.visititems(lambda _, item, num_bytes=num_bytes: _look(item, num_bytes))
        print("{}", flush=True)
    return 0


def _look(item: Any, num_bytes: int) -> None:
    """Read what the library keeps in trees and heaps: attributes, the places of chunks, texts of variable length."""
    with _unless_lacking():
        for name in item.attrs:
            with _unless_lacking():
                item.attrs[name]
    with _unless_lacking():
        if is_own(item) and item.chunks is not None:
            item.id.chunk_iter(lambda _: None)
        if is_own(item) and item.dtype.hasobject:
            at_once = rows_at_once({"": item}, num_bytes, num_bytes)
            for first in range(0, len(item), at_once):
                item[first : first + at_once]


@contextlib.contextmanager
def _unless_lacking() -> Iterator[None]:
    """Suppress errors, which who reads the file meets and names; end this process if it lacks memory."""
    try:
        yield
    except Exception as error:
        # The library has no error of its own for that.
        if isinstance(error, MemoryError) or "allocat" in str(error):
            sys.exit(1)


def item_in(file: h5py.Group, path: str) -> Any:
    """Return the group or dataset at a path. Return None if nothing is there, or a link to another place or file."""
    item = file
    for name in path.strip("/").split("/"):
        if not isinstance(item, h5py.Group) or not isinstance(item.get(name, getlink=True), h5py.HardLink):
            return None
        item = item[name]
    return item


def is_own(item: Any) -> bool:
    """Return whether an item is a dataset whose values lie in its own file."""
    return isinstance(item, h5py.Dataset) and not item.is_virtual and not item.external


def count_rows(path: str, max_row_bytes: int) -> int:
    """Count the rows of a file's columns.

    Raises:
        DataError: It has none, of several lengths, or cannot be read; or a row is longer than ``max_row_bytes``.
    """
    if not is_address(path):
        with _problems_told(path):
            try_file(path)
    with _opened(path, max_row_bytes) as (columns, _):
        return len(next(iter(columns.values())))


def read_hdf5(path: str, start: int, stop: int, max_row_bytes: int) -> Iterator[dict[str, Any] | DataError]:
    """Read the rows from ``start`` to ``stop``.

    Yields:
        The row, or what is wrong with it.

    Raises:
        DataError: The file is damaged.
    """
    with _opened(path, max_row_bytes) as (columns, at_once):
        for first in range(start, stop, at_once):
            blocks = {name: column[first : min(first + at_once, stop)] for name, column in columns.items()}
            for values in zip(*blocks.values(), strict=True):
                yield dict(zip(blocks, values, strict=True))


@contextlib.contextmanager
def _opened(path: str, max_row_bytes: int) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Open a file's columns by name; also give how many rows to read at once."""
    with contextlib.ExitStack() as stack, _problems_told(path):
        if is_address(path):
            source = stack.enter_context(open_file(path))
            num_bytes = source.seek(0, os.SEEK_END)
            file = stack.enter_context(h5py.File(source, "r"))
        else:
            num_bytes = os.stat(path).st_size
            file = stack.enter_context(open_hdf5(path))
        columns = _columns(file)
        yield columns, rows_at_once(columns, num_bytes, max_row_bytes)


@contextlib.contextmanager
def _problems_told(path: str) -> Iterator[None]:
    try:
        yield
    # h5py raises each of these where the file is damaged, and ValueError is ours too.
    except (OSError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: cannot be read as rows of HDF5: {reason:.300}; write or copy it anew") from error


def _columns(file: Any) -> dict[str, Any]:
    columns = {}
    for name in file:
        # A link or an external dataset would have another file read, which nobody named.
        found = item_in(file, name)
        if not is_own(found):
            raise ValueError(f"{name!r} is not a dataset of this file itself; give one dataset for each field")
        if found.ndim == 0 or found.dtype.names is not None:
            raise ValueError(
                f"dataset {name!r} of shape {found.shape} and type {found.dtype} is not a column of values"
            )
        _check_chunks(name, found)
        columns[name] = found
    lengths = {name: len(column) for name, column in columns.items()}
    if not lengths:
        raise ValueError("it has no dataset; give one for each field, of one length")
    if len(set(lengths.values())) > 1:
        raise ValueError(f"its datasets are of several lengths: {lengths}; a row has a value of each, make them equal")
    return columns


def _check_chunks(name: str, dataset: Any) -> None:
    """Refuse chunks that take much memory however little of them is read, and filters that are programs of others."""
    creation = dataset.id.get_create_plist()
    filters = {creation.get_filter(index)[0] for index in range(creation.get_nfilters())}
    if not filters <= _FILTERS:
        raise ValueError(f"dataset {name!r} has the filters {sorted(filters)}; use gzip, lzf, shuffle and fletcher32")
    chunk_bytes = math.prod(dataset.chunks or ()) * dataset.dtype.itemsize
    if dataset.chunks is not None and chunk_bytes > _MAX_CHUNK_BYTES:
        raise ValueError(f"dataset {name!r} has chunks of {chunk_bytes} bytes; write chunks of {_MAX_CHUNK_BYTES}")


def rows_at_once(columns: Mapping[str, Any], num_bytes: int, max_row_bytes: int) -> int:
    """Return how many rows to read at once, in memory that follows from the size of the file."""
    check_num_rows(len(next(iter(columns.values()))), num_bytes)
    row_bytes: int = sum(math.prod(column.shape[1:]) * column.dtype.itemsize for column in columns.values())
    if row_bytes > max_row_bytes:
        raise ValueError(f"its rows have {row_bytes} bytes, more than data.max_row_bytes={max_row_bytes}")
    if any(column.dtype.hasobject for column in columns.values()):
        # Each value of variable length may be as long as the file, and all of them may be the same one.
        row_bytes += num_bytes
    return max(_LEAST_ROWS, min(_MOST_ROWS, _BLOCK_BYTES // max(1, row_bytes)))


if __name__ == "__main__":
    sys.exit(main())
