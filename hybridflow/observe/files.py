"""Files that a job may be killed over: replaced in one piece, and read as far as they are whole."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hybridflow.errors import WriteError


@contextlib.contextmanager
def writing(path: Path, remedy: str = "make room there, or set another run_dir") -> Iterator[None]:
    """Turn an OSError into a WriteError.

    Args:
        path: What is written; named where the system names no file.
        remedy: What to do.

    Raises:
        WriteError: The file system refuses.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise WriteError(f"{error.filename or path}: cannot be written: {reason}; {remedy}") from error


def replace_file(path: Path, content: bytes) -> None:
    """Write the content aside, sync it, then rename it over ``path``, so that a reader finds the old or the new one.

    One writer per path.

    Raises:
        OSError: The disk refused; ``path`` is as it was.
    """
    replace_by_pieces(path, [content])


def replace_by_pieces(path: Path, pieces: Iterable[bytes]) -> None:
    """Replace a file as ``replace_file`` does, with content that need not fit in memory.

    Raises:
        OSError: The disk refused, or the pieces did; ``path`` is as it was.
    """
    aside = path.with_name(f".{path.name}.tmp")
    try:
        with aside.open("wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    # The rename itself lasts only once the directory that records it is on disk.
    sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Flush a file's content, or a directory's names, to the disk.

    Raises:
        OSError: The file system refuses.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def json_objects(texts: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the lines that are each a JSON object; skip others, such as a line that a kill has cut short."""
    for text in texts:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value
