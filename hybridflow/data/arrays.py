"""Arrays and texts of one dim in HDF5 files that are there whole or not at all. No torch."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.data.hdf5 import h5py, is_own, item_in, open_hdf5, rows_at_once, try_file
from hybridflow.errors import CheckpointError, ConfigError, HybridflowError
from hybridflow.observe.files import replace_by_pieces

_CHUNK_BYTES, _MAX_CHUNK_BYTES = 2 << 20, 16 << 20
# Texts of another program may be compressed.
_MAX_GROWTH = 50


def write_arrays(path: Path, arrays: Mapping[str, Any], form: str) -> None:
    """Write arrays of one dim, checksummed, as a file that is there whole or not at all.

    Args:
        path: Path of the file; what is there is replaced.
        arrays: Name -> array of numpy, at least one element.
        form: What kind of file it is, for ``lengths_of_arrays``.

    Raises:
        OSError: The file system refuses; ``path`` is as it was.
    """

    def fill(file: h5py.File) -> None:
        for name, array in arrays.items():
            chunks = (min(len(array), _CHUNK_BYTES // array.dtype.itemsize),)
            file.create_dataset(name, data=array, chunks=chunks, fletcher32=True)

    _replace(path, form, fill)


def write_rows(path: Path, texts: Mapping[str, Sequence[str]], arrays: Mapping[str, Any], form: str) -> None:
    """Write texts and arrays of one dim, of any length, as a file that is there whole or not at all.

    Args:
        path: Path of the file; what is there is replaced.
        texts: Name -> texts, kept as strings of variable length in UTF-8.
        arrays: Name -> array of numpy.
        form: What kind of file it is.

    Raises:
        OSError: The file system refuses; ``path`` is as it was.
    """

    def fill(file: h5py.File) -> None:
        for name, values in texts.items():
            # HDF5's strings of variable length end at a zero.
            clean = [value.replace("\0", "\ufffd").encode("utf-8", "replace") for value in values]
            file.create_dataset(name, data=clean, shape=(len(clean),), dtype=h5py.string_dtype())
        for name, array in arrays.items():
            file.create_dataset(name, data=array)

    _replace(path, form, fill)


def read_texts(path: Path, name: str) -> list[str]:
    """Read the texts of a dataset of strings.

    Raises:
        CheckpointError: There is no such dataset, or it cannot be read.
    """
    with reading_hdf5(path, name):
        try_file(path)
    with reading_hdf5(path, name), open_hdf5(path) as file:
        dataset = item_in(file, name)
        if not is_own(dataset) or dataset.ndim != 1 or h5py.check_string_dtype(dataset.dtype) is None:
            raise ValueError(f"has no dataset {name!r} of strings in this file")
        return list(_texts(dataset, path.stat().st_size))


def _texts(dataset: h5py.Dataset, file_bytes: int) -> Iterator[str]:
    """Yield texts. Refuse more than a file of that size can hold, since many of them may be one and the same."""
    left = file_bytes * _MAX_GROWTH
    at_once = rows_at_once({"texts": dataset}, file_bytes, file_bytes)
    for first in range(0, len(dataset), at_once):
        for text in dataset.asstr()[first : first + at_once]:
            left -= len(text)
            if left < 0:
                raise ValueError(f"its texts have more than {_MAX_GROWTH} times the {file_bytes} bytes of the file")
            yield str(text)


def join_arrays(path: Path, parts: Mapping[str, Mapping[str, int]], dtypes: Mapping[str, Any], form: str) -> None:
    """Write a file whose arrays are those of other files one behind the other, by reference.

    What is missing when it is read is NaN, or -1.

    Args:
        path: Path of the file; what is there is replaced.
        parts: File, relative to ``path``'s directory -> what ``lengths_of_arrays`` gave for it, in order.
        dtypes: Name -> type of numpy, of every array.
        form: What kind of file it is.

    Raises:
        OSError: The file system refuses; ``path`` is as it was.
    """

    def fill(file: h5py.File) -> None:
        file.attrs["parts"] = json.dumps(list(parts))
        for name, dtype in dtypes.items():
            layout = h5py.VirtualLayout((sum(lengths[name] for lengths in parts.values()),), dtype)
            end = 0
            for part, lengths in parts.items():
                start, end = end, end + lengths[name]
                if end > start:
                    layout[start:end] = h5py.VirtualSource(part, name, (lengths[name],), dtype)
            missing = np.nan if np.dtype(dtype).kind == "f" else -1
            file.create_virtual_dataset(name, layout, fillvalue=missing)

    _replace(path, form, fill)


def lengths_of_arrays(path: Path, dtypes: Mapping[str, Any], form: str) -> dict[str, int]:
    """Return the length of each array of a file of ``write_arrays``.

    Raises:
        CheckpointError: It is no such file, or is damaged where that can be told without reading the numbers.
    """
    with reading_hdf5(path), open_hdf5(path) as file:
        if attribute(file, "format") != form:
            raise ValueError(f"is of the format {attribute(file, 'format')}, expected {form}")
        for name, dtype in dtypes.items():
            array = item_in(file, name)
            if not is_own(array) or array.ndim != 1 or array.dtype != dtype:
                raise ValueError(f"has no {name} of one dim and type {np.dtype(dtype)} in this file")
            check_storage(array, array.nbytes, path.stat().st_size)
        return {name: len(file[name]) for name in dtypes}


def read_arrays(path: Path, dtypes: Mapping[str, Any], form: str) -> dict[str, Any]:
    """Name -> array of numpy, of a file of ``write_arrays``.

    Raises:
        CheckpointError: It is no such file, or is damaged.
    """
    lengths_of_arrays(path, dtypes, form)
    with reading_hdf5(path), open_hdf5(path) as file:
        return {name: file[name][:] for name in dtypes}


def read_slices(path: Path, slices: Mapping[str, tuple[Any, Sequence[slice]]], form: str) -> dict[str, list[Any]]:
    """Read parts of arrays of a file of ``write_arrays``, and no other part of them.

    Args:
        path: Path of the file.
        slices: Name -> type of numpy, and the parts.
        form: What kind of file it is.

    Returns:
        Name -> the parts, arrays of numpy.

    Raises:
        CheckpointError: It is no such file, or is damaged.
    """
    lengths_of_arrays(path, {name: dtype for name, (dtype, _) in slices.items()}, form)
    with reading_hdf5(path), open_hdf5(path) as file:
        return {name: [array[part] for part in parts] for name, (_, parts) in slices.items() for array in (file[name],)}


def _replace(path: Path, form: str, fill: Callable[[h5py.File], None]) -> None:
    # In memory, since the library writes what a full disk has refused once more when the file is forgotten, and
    # then complains to the console by itself.
    content = io.BytesIO()
    with h5py.File(content, "w", libver="v110") as file:
        file.attrs["format"] = form
        fill(file)
    replace_by_pieces(path, [content.getvalue()])


def attribute(item: Any, name: str) -> str:
    """Return an attribute that is a text. Raises ValueError where it is none."""
    value = item.attrs[name]
    if not isinstance(value, str):
        raise ValueError(f"attribute {name} is no text")
    return value


def check_storage(dataset: h5py.Dataset, num_bytes: int, file_bytes: int) -> None:
    """Refuse storage that we do not write: data in other files, filters but the checksum, holes, and shared chunks."""
    creation = dataset.id.get_create_plist()
    filters = [creation.get_filter(index)[0] for index in range(creation.get_nfilters())]
    if not is_own(dataset) or dataset.chunks is None:
        raise ValueError("does not lie in chunks of this file")
    if filters != [h5py.h5z.FILTER_FLETCHER32]:
        raise ValueError(f"has the filters {filters}, expected the checksum fletcher32 alone")
    stored = dataset.id.get_storage_size()
    if not num_bytes <= stored <= file_bytes:
        raise ValueError(f"has {stored} bytes, expected {num_bytes} of the {file_bytes} of the file")
    if math.prod(dataset.chunks) * dataset.dtype.itemsize > _MAX_CHUNK_BYTES:
        raise ValueError(f"has chunks of {dataset.chunks}, expected at most {_MAX_CHUNK_BYTES} bytes")


@contextmanager
def reading_hdf5(path: Path, dataset: str = "") -> Iterator[None]:
    """Turn any error of the library or a check into an error that names the place."""
    try:
        yield
    except (HybridflowError, OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = (
            str(error) if isinstance(error, (ConfigError, ValueError, OSError)) else f"{type(error).__name__}: {error}"
        )
        where = f"{path}: {dataset}" if dataset else str(path)
        raise CheckpointError(
            f"{where}: cannot be read as HDF5 of hybridflow: {reason}; restore it from a copy"
        ) from error


@contextmanager
def writing_hdf5(path: Path) -> Iterator[None]:
    """Turn a full disk, which the library reports in several ways, into the file system's error."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        found = re.search(r"errno = (\d+), error message = '([^']*)'", str(error))
        told = OSError(f"{path}: {error}") if found is None else OSError(int(found[1]), found[2], str(path))
        raise told from error
