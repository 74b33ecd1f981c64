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
from typing import Any

from hybridflow.observe import doing

STATUS_FILE = "status.json"
WRITE_EVERY_S = 5.0


class StatusFile:
    """Keeps ``status.json``; one rank has one. What it cannot write it leaves: the run goes on without.

    Args:
        run_dir: Of the run; made if absent.
        facts: What does not change, of JSON's types: the run's name, how many steps it is to make.
    """

    def __init__(self, run_dir: Path, *, facts: Mapping[str, Any]) -> None:
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
        began_s = doing.since_s()
        now = {"time_s": time.time()}
        work = {} if began_s is None else {"doing": doing.now(), "doing_since_s": began_s}
        aside = self._path.with_name(f".{self._path.name}.tmp")
        with contextlib.suppress(OSError):
            aside.write_text(json.dumps({**self._facts, **now, **work}, indent=1) + "\n", encoding="utf-8")
            os.replace(aside, self._path)
