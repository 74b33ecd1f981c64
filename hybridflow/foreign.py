"""Open files that others wrote, and limit processes that run them.

To open a file never waits. To read a small one takes no more memory than is named.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import stat
from io import BufferedReader
from pathlib import Path

from hybridflow.errors import CheckpointError

MAX_SMALL_BYTES = 1 << 28
"""Largest settings file, index or tokenizer. Tokenizers of 250,000 tokens have 35 MB."""


def open_regular(path: str | Path) -> BufferedReader:
    """Open a regular file to be read.

    Raises:
        OSError: It cannot be opened, or is a pipe, a device, a socket or a directory.
    """
    # Without O_NONBLOCK the opening of a pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, "is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_small(path: str | Path, max_bytes: int = MAX_SMALL_BYTES) -> bytes:
    """Read a file that is small in every honest checkpoint, as long as it is when it is opened.

    Raises:
        OSError: It cannot be opened, is no regular file, or has more than ``max_bytes`` bytes.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise OSError(errno.EOVERFLOW, f"has {size} bytes, more than {max_bytes}", str(path))
        # Python takes memory for as much as is asked for, whatever is there.
        return file.read(size)


def names_in(folder: Path) -> list[str]:
    """Return the names in a directory in order, and say of links that they lead nowhere."""
    return [path.name + " (a link to nothing)" * (not path.exists()) for path in sorted(folder.iterdir())]


def check_link(path: Path) -> None:
    """Refuse a symbolic link to a file whose content would be copied under the name of the link.

    The cache of Hugging Face consists of such links: ``CACHE/snapshots/REVISION/NAME`` leads to ``CACHE/blobs/HASH``.
    A link like that is allowed, also where folders lie between.

    Raises:
        CheckpointError: ``path`` is another link.
    """
    if not path.is_symlink():
        return
    parents = path.parent.resolve().parents
    caches = [folder for folder in parents if path.parent.resolve().is_relative_to(folder / "snapshots")]
    if Path(os.path.realpath(path)).parent not in [cache / "blobs" for cache in caches]:
        raise CheckpointError(
            f"{path}: is a symbolic link to {os.readlink(path)!r}, whose content would be copied; expected a file: put "
            "the file itself there (cp -rL copies a directory so)"
        )


def limit_process(memory_bytes: int, *, cpu_s: int | None = None) -> None:
    """Limit this process, which is to run what others wrote: it may only compute.

    Args:
        memory_bytes: Memory that it may have. It can write no file and start no process.
        cpu_s: CPU time after which it is killed; None: no limit.
    """
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    if cpu_s is not None:
        limits[resource.RLIMIT_CPU] = cpu_s
    for limit, value in limits.items():
        _, most = resource.getrlimit(limit)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (value, value))


def limit_cpu(seconds: int) -> None:
    """Have this process killed when it has computed for so long again, also where nobody is left to end it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime) + seconds, most))
