"""``status.json`` of a run: what it does now, written by a thread of one rank every few seconds. Torch-free.

A thread writes it, so that a long phase does not look like a death. It is replaced in one piece but not synced: it
tells of now, and what a crash of the machine leaves of it does not matter.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hybridflow.observe import activity

STATUS_FILE = "status.json"
WRITE_EVERY_S = 5.0
SILENT_AFTER_S = 6 * WRITE_EVERY_S
"""A run that has given no sign of life for so long is taken for dead."""

_MOST_SKEW_S = 3600.0
"""The clocks of two nodes differ by less. A file's time is no better: some file systems take it from the writer."""


class StatusFile:
    """Keeps ``status.json``; one rank has one. What it cannot write it leaves: the run goes on without.

    Args:
        run_dir: Directory of the run; made if absent.
        facts: What does not change, of JSON's types: the run's name, how many steps it is to make.
    """

    def __init__(self, run_dir: Path, *, facts: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):
            run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / STATUS_FILE
        place = {"host": socket.gethostname(), "pid": os.getpid(), "job_id": os.environ.get("SLURM_JOB_ID")}
        self._facts = {**facts, **place, "began_s": time.time()}
        self._is_closed = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._thread.start()

    def note(self, *, step: int, job_end_s: float | None) -> None:
        """Tell, with the next write, what has changed.

        Args:
            step: Training steps done.
            job_end_s: When the job's time is up, Unix time in seconds; None: it has no end that is known.
        """
        self._facts = {**self._facts, "step": step, "job_end_s": job_end_s}

    def close(self) -> None:
        """End the thread, after a last write."""
        self._is_closed.set()
        self._thread.join()
        self._write()

    def _run(self) -> None:
        while not self._is_closed.wait(WRITE_EVERY_S):
            self._write()

    def _write(self) -> None:
        began_s = activity.since_s()
        now = {"time_s": time.time()}
        work = {} if began_s is None else {"activity": activity.now(), "activity_since_s": began_s}
        aside = self._path.with_name(f".{self._path.name}.tmp")
        with contextlib.suppress(OSError):
            aside.write_text(json.dumps({**self._facts, **now, **work}, indent=1) + "\n", encoding="utf-8")
            os.replace(aside, self._path)


class Writer(NamedTuple):
    """The process that keeps ``status.json`` of a run.

    Attributes:
        name: For a message.
        job_id: Slurm's job id; None elsewhere.
    """

    name: str
    job_id: str | None


def living_writer(run_dir: Path, began_s: float) -> Writer | None:
    """Return the other process that keeps ``status.json`` of a run; waits for it to write again.

    A process of this host that is gone is known at once. So is a writer that has been silent for longer than clocks
    differ. Otherwise only a sign of life during this call is proof.

    Args:
        run_dir: Directory of the run.
        began_s: When its last start began, Unix time in seconds; what was written before is no sign of it.

    Returns:
        The process; None: there is none.
    """
    first = _kept(run_dir)
    told_s = first.get("time_s", 0.0)
    # A job that has just begun may not have written its first sign of life.
    has_told = told_s >= began_s
    since_s = told_s if has_told else began_s
    if since_s < time.time() - _MOST_SKEW_S or (has_told and (has_ended(first) or _is_own(first))):
        return None
    end_s, is_over = time.monotonic() + 2 * WRITE_EVERY_S, False
    # A process that gets no time on a core for long still looks once more at the end.
    while not is_over:
        is_over = time.monotonic() >= end_s
        now = _kept(run_dir)
        # Not only a later time: another node may have written the first one.
        if now and now["time_s"] != told_s:
            job_id = str(now["job_id"]) if now.get("job_id") else None
            job = f" of Slurm's job {job_id}" if job_id is not None else ""
            return Writer(f"process {now.get('pid')} on {now.get('host')}{job}", job_id)
        time.sleep(0.1)
    return None


def _kept(run_dir: Path) -> dict[str, Any]:
    try:
        found = json.loads((run_dir / STATUS_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    has_time = isinstance(found, dict) and isinstance(found.get("time_s"), int | float)
    return found if has_time else {}


def has_ended(kept: Mapping[str, Any]) -> bool:
    """Return whether the process that kept ``status.json`` was one of this host, and is there no more.

    Args:
        kept: Content of the file.
    """
    pid = kept.get("pid")
    if kept.get("host") != socket.gethostname() or not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _is_own(kept: Mapping[str, Any]) -> bool:
    """Return whether this process has kept the file itself."""
    return (kept.get("host"), kept.get("pid")) == (socket.gethostname(), os.getpid())
