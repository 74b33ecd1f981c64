"""Replacing a file so that a reader, or a job killed at any moment, finds the old one or the new one, whole."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Write the content aside, sync it, then rename it over ``path``. One writer per path.

    Raises:
        OSError: The disk refused; ``path`` is as it was.
    """
    aside = path.with_name(f".{path.name}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    # The rename itself lasts only once the directory that records it is on disk.
    sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Bring to the disk what was written to a file, or the names in a directory.

    Raises:
        OSError: The file system refuses.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
