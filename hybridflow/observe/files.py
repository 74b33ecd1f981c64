"""Files that a job may be killed over: replaced in one piece, and read as far as they are whole.

Nothing here writes through a link that another user has put under a name that can be foreseen.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hybridflow.errors import ConfigError, WriteError
from hybridflow.exit_status import passing_number

_NO_ROOM = (None, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Libraries do not always tell the number."""


@contextlib.contextmanager
def writing(path: Path, otherwise: str = "set another run_dir") -> Iterator[None]:
    """Turn an OSError into a WriteError.

    Args:
        path: What is written; named where the system names no file.
        otherwise: What helps besides making room.

    Raises:
        WriteError: The file system refuses.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        remedy = write_remedy(error, otherwise)
        raise WriteError(f"{error.filename or path}: cannot be written: {reason}; {remedy}") from error


def write_remedy(error: OSError, otherwise: str = "set another run_dir") -> str:
    """Return what to do about what could not be written: to make room helps only where there is none."""
    if passing_number(error) is not None:
        return "start again once the file system answers"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "raise ulimit -n"
    return f"make room there, or {otherwise}" if error.errno in _NO_ROOM else otherwise


def named_file(path: Path, key: str) -> Path:
    """Return the file that a user names as an output: of a link, the one that it leads to.

    Args:
        path: As it was given.
        key: Its name in the message.

    Raises:
        ConfigError: A directory, device or pipe is there. To be replaced by a file is not its use.
    """
    if path.exists() and not path.is_file():
        found = "a directory" if path.is_dir() else "a device or a pipe"
        raise ConfigError(f"{key}: found {found} at {path}, expected a file or a new name; give another")
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def replace_file(path: Path, content: bytes) -> None:
    """Write the content aside, sync it, then rename it over ``path``, so that a reader finds the old or the new one.

    Several may write one path, as the jobs of an array do: the last one's content stays. One that is killed leaves a
    hidden file behind.

    Raises:
        OSError: The disk refused; ``path`` is as it was.
    """
    replace_by_pieces(path, [content])


def replace_by_pieces(path: Path, pieces: Iterable[bytes]) -> None:
    """Replace a file as ``replace_file`` does, with content that need not fit in memory.

    Raises:
        OSError: The disk refused, or the pieces did; ``path`` is as it was.
    """
    # Each writer's own, and no name that another user can foresee and put a link under.
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with aside.open("xb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        # Nobody has asked for the file aside.
        if error.filename == str(aside):
            error.filename = str(path)
        raise
    finally:
        # There only if something failed.
        aside.unlink(missing_ok=True)
    # The rename itself lasts only once the directory that records it is on disk.
    sync_path(path.parent)


def write_all(descriptor: int, data: bytes) -> None:
    """Write to a file's descriptor until all is written.

    Raises:
        OSError: The file system refuses.
    """
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


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


def check_own(folder: Path) -> None:
    """Refuse a directory of another user, who could put links there that lead to files of this user.

    Root's are not refused, and none where there is none.

    Raises:
        WriteError: It is another user's.
        OSError: The file system refuses.
    """
    if not folder.is_dir():
        return
    others = {folder.lstat().st_uid, folder.stat().st_uid} - {0, os.geteuid()}
    if not others:
        return
    # A network file system may show the files of this user as another one's.
    with tempfile.TemporaryFile(dir=folder, prefix=".") as file:
        own = os.fstat(file.fileno()).st_uid
    if others != {own}:
        raise WriteError(
            f"{folder}: belongs to user {others.pop()}, not to user {own}, who would write there; choose another place"
        )


def make_own_folder(folder: Path) -> None:
    """Make a directory for this user alone, or take the one that an earlier start has made so.

    Raises:
        WriteError: Another user has made it or may write there, or a link is in it.
        OSError: The file system refuses.
    """
    try:
        folder.mkdir(mode=0o700)
        return
    except FileExistsError:
        check_own(folder)
    mode = folder.stat().st_mode & 0o777
    if mode & 0o022:
        raise WriteError(f"{folder}: other users may write there (mode {mode:o}); remove it, or choose another place")
    for inner, folders, files in os.walk(folder):
        for name in (*folders, *files):
            if os.path.islink(os.path.join(inner, name)):
                raise WriteError(f"{inner}/{name}: is a link, and hybridflow has made none there; remove {folder}")


def plain_name(name: object) -> str:
    """Return the name of a file or directory that stays within its directory, whoever has written the name.

    Raises:
        ValueError: It is no text of printable letters, has separators, or leads up.
    """
    if not isinstance(name, str) or not name.isprintable() or Path(name).name != name or name in ("", ".."):
        raise ValueError(f"found {str(name)[:80]!r}, expected a plain name of a file")
    return name


def json_objects(texts: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the lines that are each a JSON object; skip others, such as a line that a kill has cut short."""
    for text in texts:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value
