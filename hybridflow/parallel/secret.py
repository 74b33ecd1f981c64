"""The job's secret, which its ranks know and nobody else does. No torch.

1. Where MPI started the ranks, rank 0 makes one and broadcasts it (``parallel.mpi``).
2. ``HYBRIDFLOW_SECRET``: hybridflow's own launchers and batch scripts set it anew for each start.
3. Else a key of the user: ``~/.hybridflow/secret``. The rank that comes first makes it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
import stat
import time
from pathlib import Path

from hybridflow.errors import LayoutError

VARIABLE = "HYBRIDFLOW_SECRET"

_FEWEST_CHARACTERS = 16
_NAME = "secret"
_TRIES, _TRY_S = 20, 0.1
"""A network's file system may show a moment later what another node made."""

_REMEDY = f"export {VARIABLE} with the same random value, of {_FEWEST_CHARACTERS} characters or more, for all ranks"


def new_secret() -> str:
    """Return a fresh secret, for a variable of the environment."""
    return secrets.token_hex(32)


def find_secret(given: bytes = b"") -> bytes:
    """Return the job's secret, ``[32]`` bytes.

    Args:
        given: What MPI brought; empty: nothing.

    Raises:
        LayoutError: The variable is too short, or the user's key cannot be used.
    """
    return hashlib.sha256(given or _from_environment() or read_key(key_folder())).digest()


def key_folder() -> Path:
    """Return the directory of the user's key."""
    return Path(os.path.expanduser("~")) / ".hybridflow"


def secret_source() -> str:
    """Return in words where this process finds the job's secret if MPI brings none.

    Raises:
        LayoutError: As ``find_secret``.
    """
    path = key_folder() / _NAME
    if _from_environment():
        return VARIABLE
    if not path.exists():
        there = path.parent if path.parent.exists() else path.parent.parent
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            raise LayoutError(f"{path} cannot be made: {there} is no directory that can be written; {_REMEDY}")
        return f"{path}, which the first start makes"
    read_key(path.parent)
    return str(path)


@functools.cache
def _from_environment() -> bytes:
    """Take the secret out of the environment, so that what this process starts does not get it."""
    text = os.environ.pop(VARIABLE, "")
    if text and len(text) < _FEWEST_CHARACTERS:
        raise LayoutError(f"{VARIABLE} has {len(text)} characters, which can be guessed; {_REMEDY}")
    return text.encode()


def read_key(folder: Path) -> bytes:
    """Return the user's key from a directory; make both if they are not there.

    Raises:
        LayoutError: They cannot be made or read, or others could have written or read them.
    """
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _check(os.fstat(directory), folder, stat.S_IWGRP | stat.S_IWOTH)
            return _read_or_make(directory, folder / _NAME)
        finally:
            os.close(directory)
    except OSError as error:
        raise LayoutError(f"the key of this user in {folder} cannot be used: {error}; {_REMEDY}") from error


def _read_or_make(directory: int, path: Path) -> bytes:
    for turn in range(_TRIES):
        try:
            # O_NONBLOCK: what lies there may be a pipe.
            file = os.open(_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
        except FileNotFoundError:
            if turn > 0:
                time.sleep(_TRY_S)
            _make(directory)
            continue
        with os.fdopen(file, "rb") as opened:
            _check(os.fstat(file), path, 0o077)
            key = opened.read(4096)
        if len(key) < _FEWEST_CHARACTERS:
            raise OSError(f"{path} has {len(key)} bytes, which can be guessed: remove it")
        return key
    raise OSError(f"{path} does not appear, though it was made")


def _make(directory: int) -> None:
    """Put a fresh key into a directory, complete, unless there is one."""
    name = f".{_NAME}-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(name, flags, 0o600, dir_fd=directory), "wb") as file:
        file.write(new_secret().encode())
        file.flush()
        os.fsync(file.fileno())
    try:
        with contextlib.suppress(FileExistsError):
            os.link(name, _NAME, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
    finally:
        os.unlink(name, dir_fd=directory)


def _check(found: os.stat_result, path: Path, forbidden: int) -> None:
    if found.st_uid != os.geteuid():
        raise OSError(f"{path} belongs to user {found.st_uid}, and this process is of user {os.geteuid()}")
    if found.st_mode & forbidden:
        allowed = "0700" if stat.S_ISDIR(found.st_mode) else "0600"
        raise OSError(f"{path} has mode {stat.S_IMODE(found.st_mode):04o}, so that others get at it: chmod {allowed}")
    if not stat.S_ISDIR(found.st_mode) and not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path} is no file")
