"""Disks that are full, or take no writes."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A file system of a given size, at a folder that is made; skips where this machine does not let us have one."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    if os.getuid() != 0 or shutil.which("mount") is None or subprocess.run(command, check=False).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        yield folder
    finally:
        # Lazily: what was read may still be mapped.
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Take all that is left of a file system."""
    with contextlib.suppress(OSError), (folder / "filler").open("ab", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def make_read_only(folder: Path, *, is_over: bool = False) -> None:
    """Let a file system take no writes, or take them again; no file may be open for writing."""
    subprocess.run(["mount", "-o", f"remount,{'rw' if is_over else 'ro'}", str(folder)], check=True)


@contextlib.contextmanager
def no_room(num_bytes: int = 0) -> Iterator[None]:
    """No file of this process, nor of those that it starts, can grow beyond a size, as under ``ulimit -f``."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
