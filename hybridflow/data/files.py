"""Files by path or address, on this machine or wherever fsspec reaches: the one door to ``fsspec``."""

from __future__ import annotations

import contextlib
import glob
import gzip
import hashlib
import io
import json
import os
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple, cast

from hybridflow.errors import DataError
from hybridflow.foreign import open_regular

_BUFFER_BYTES = 1 << 20
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PATTERN = re.compile(r"[*?[]")


class File(NamedTuple):
    """A file, and what tells whether it is still the same.

    Attributes:
        path: Path or address.
        num_bytes: Its size.
        version: Changes when the content does: the time of the last change, or what an object store goes by. Of a
            directory it is a hash over its files.
    """

    path: str
    num_bytes: int
    version: str


def find_files(path: str) -> tuple[File, ...]:
    """Find the files of a path, an address, or a pattern with ``*``, ``?`` or ``[``, in the order of the names.

    Raises:
        DataError: There is nothing, or it cannot be looked at.
    """
    files = _far(path) if is_address(path) else _near(path)
    if not files:
        raise DataError(f"{path}: no file has such a name; set data.train and data.held_out to files that are there")
    return files


def is_address(path: str) -> bool:
    """Return whether a path begins as ``s3://`` does."""
    return _ADDRESS.match(path) is not None


def open_file(path: str) -> BinaryIO:
    """Open a file to be read, as it is on disk.

    Raises:
        DataError: It cannot be.
    """
    if is_address(path):
        system, name = _system(path)
        with _told(path):
            # Not all of them can read a line of a limited length.
            return io.BufferedReader(system.open(name, "rb"), _BUFFER_BYTES)
    try:
        return open_regular(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; set data.train and data.held_out") from error


@contextlib.contextmanager
def opened_text(path: str) -> Iterator[BinaryIO]:
    """Open a text file to be read, uncompressed where its name ends in ``.gz``. Raises DataError."""
    with open_file(path) as file:
        if not is_gzip(path):
            yield file
            return
        with gzip.GzipFile(fileobj=file) as inner:
            yield cast(BinaryIO, inner)


def is_gzip(path: str) -> bool:
    """Return whether the name says that a file is compressed, so that it can only be read from its beginning."""
    return path.endswith(".gz")


def _near(path: str) -> tuple[File, ...]:
    is_pattern = _PATTERN.search(path) is not None and not os.path.exists(path)
    names = sorted(glob.glob(path, recursive=True)) if is_pattern else [path]
    files = []
    for name in names:
        try:
            found = os.stat(name)
            version = _version_in(name) if os.path.isdir(name) else str(found.st_mtime_ns)
        except OSError as error:
            raise DataError(f"{name}: cannot be read: {error.strerror}; set data.train and data.held_out") from error
        files.append(File(name, found.st_size, version))
    return tuple(files)


def _version_in(folder: str) -> str:
    """Return the version of a directory. Its own time does not change when files in it are written anew."""
    with os.scandir(folder) as entries:
        found = sorted((entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in entries)
    return _hash(found)


@contextlib.contextmanager
def needing(what: str, package: str, extra: str) -> Iterator[None]:
    """Turn the failure to import an optional package into an error that says what to install.

    Args:
        what: What takes the package.
        package: Its name, as pip knows it.
        extra: Which extra of hybridflow brings it.

    Raises:
        DataError: It is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise DataError(
            f"{what} takes the package {package}, which is not installed; pip install 'hybridflow[{extra}]'"
        ) from error


def _hash(found: object) -> str:
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def _far(address: str) -> tuple[File, ...]:
    system, root = _system(address)
    with _told(address):
        names = sorted(system.glob(root)) if _PATTERN.search(root) else [root]
        return tuple(_far_file(system, name) for name in names)


def _far_file(system: Any, name: str) -> File:
    found, version = system.info(name), system.ukey(name)
    if found["type"] == "directory":
        version = _hash(sorted(system.ukey(inner) for inner in system.find(name)))
    return File(system.unstrip_protocol(name), int(found["size"] or 0), version)


def _system(address: str) -> tuple[Any, str]:
    with needing(f"{address}: reading it", "fsspec", "s3"):
        import fsspec
    with _told(address):
        system, root = fsspec.core.url_to_fs(address)
        return system, root


@contextlib.contextmanager
def _told(address: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise DataError(
            f"{address}: a package for such addresses is not installed: {error}; for s3:// pip install 'hybridflow[s3]'"
        ) from error
    # Each store has exceptions of its own.
    except Exception as error:
        raise DataError(
            f"{address}: cannot be read: {type(error).__name__}: {error}; look at the address, and at what the "
            "environment says of the store and its keys"
        ) from error
