"""The trial of a ``tokenizer.json`` in a process of its own, before this process loads the file.

The file is a program for a library in Rust: it can abort the library, or make it replace text without end.
No limit inside a process stops that. So a process with little memory and time loads the file and encodes sample texts
first. A file that passed is remembered by its hash in the user's cache, so the trial is made once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from pathlib import Path

from hybridflow.data.limited import own_module
from hybridflow.errors import DataError

_MEMORY_BYTES, _MEMORY_PER_BYTE = 1 << 29, 32
_CPU_S, _BYTES_PER_S = 5, 1 << 20
# The process waits for a processor where the machine is busy, which is no fault of the file.
_DEADLINE_S = 300.0


def try_tokenizer(content: bytes, where: str, version: str) -> None:
    """Try a file, unless one with this content has passed.

    Args:
        content: The ``tokenizer.json``.
        where: What messages call it.
        version: Version of the package that reads it.

    Raises:
        DataError: The package refuses it, or it takes too much memory or time.
    """
    note = _note(f"{hashlib.sha256(content).hexdigest()}-{version}")
    if note is not None and note.exists():
        return
    problem = _problem(content)
    if problem is not None:
        raise DataError(f"tokenizer {where}: cannot be read: {problem}; copy it anew, or update the package tokenizers")
    if note is not None:
        with contextlib.suppress(OSError):
            note.touch()


def _problem(content: bytes) -> str | None:
    memory_bytes = _MEMORY_BYTES + _MEMORY_PER_BYTE * len(content)
    cpu_s = _CPU_S + len(content) // _BYTES_PER_S
    command, environment = own_module("hybridflow.data.fast", str(memory_bytes), str(cpu_s))
    try:
        done = subprocess.run(
            command,
            input=content,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment, "TOKENIZERS_PARALLELISM": "false"},
            timeout=_DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"its trial failed: {error}"
    if done.returncode == 0:
        return None
    said = " ".join(done.stdout.decode(errors="replace").split())
    return said[:200] or f"its trial was stopped, it takes more than {cpu_s} s or {memory_bytes >> 20} MiB"


def _note(name: str) -> Path | None:
    """Return the file that says that a trial was passed; None where this user has no cache of their own."""
    try:
        cache = os.environ.get("XDG_CACHE_HOME")
        folder = (Path.home() / ".cache" if not cache else Path(cache)) / "hybridflow" / "tokenizers"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError):
        return None
    # Who else can write there could let any file pass.
    return folder / name if found.st_uid == os.geteuid() and not found.st_mode & 0o022 else None
