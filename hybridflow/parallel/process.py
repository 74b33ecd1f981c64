"""Processes of this machine as Linux knows them: how many files they may open, and whether they run.

A call that holds Python's lock silences all threads of a process that runs.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from pathlib import Path

Process = tuple[int, int]
"""Its id, and when it began in ticks since the machine did, which tells it from another of the same id."""

_RUNS = "RSDI"


def allow_many_files() -> None:
    """Let this process open as many files as the system lets it.

    The usual limit of 1024 stands for the sake of old programs; of 512 ranks the first alone has several connections
    with each of the others, and their checkpoint has that many files for each role.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def own_process() -> Process:
    """Return this process, for others to look at."""
    return find_process(os.getpid()) or (os.getpid(), 0)


def find_process(pid: int) -> Process | None:
    """Return the process that has an id now; None: there is none, or the system does not tell."""
    found = _state(pid)
    return None if found is None else (pid, found[1])


def is_running(process: Process) -> bool:
    """Return whether a process is there, and neither stopped nor dead. False where the system does not tell."""
    found = _state(process[0])
    return found is not None and found[0] in _RUNS and found[1] == process[1]


def kill(process: Process) -> None:
    """End a process of this user, stopped or not, if it is still the one that is meant."""
    found = _state(process[0])
    if found is not None and found[1] == process[1]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process[0], signal.SIGKILL)


def _state(pid: int) -> tuple[str, int] | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
