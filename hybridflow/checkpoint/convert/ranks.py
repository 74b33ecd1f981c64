"""The ranks of a conversion, which meet in the folder that they share: no sockets, no MPI.

Rank 0 gives the attempt a name, since files of an attempt that was killed may lie about, and each rank answers it with
a number of its own, which rank 0 repeats. From then on each tells how far it is, and looks after the others: rank 0
after all, they after rank 0. What ends one of them ends all.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hybridflow.errors import DeadlineError

FOLDER = ".ranks"
_POLL_S = 0.05


class PeerError(Exception):
    """Another rank failed, and has told why.

    Attributes:
        status: Its exit status.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Ranks:
    """This rank among those that have files to write; rank 0 is always one of them.

    Args:
        folder: OUT.part, which is there.
        rank: This one.
        workers: All of them, 0 first.
        deadline_s: How long a rank that makes no progress is waited for.

    Raises:
        DeadlineError: They did not all come.
    """

    def __init__(self, folder: Path, rank: int, workers: Iterable[int], deadline_s: float) -> None:
        self.rank = rank
        self._others = [worker for worker in workers if worker != rank]
        self._folder = folder / FOLDER
        self._deadline_s = deadline_s
        self._watched = self._others if rank == 0 else [0]
        self._attempt = ""
        if self._others:
            self._attempt = self._call() if rank == 0 else self._answer()
        now = time.monotonic()
        self._seen: dict[int, tuple[Any, float]] = {worker: (None, now) for worker in self._watched}

    def tell(self, progress: dict[str, int]) -> None:
        """Publish how far this rank is."""
        if self._others:
            self._put(f"progress-{self.rank}", progress)

    def tell_done(self, result: dict[str, int]) -> None:
        """Publish that this rank has written its files."""
        if self._others:
            self._put(f"done-{self.rank}", result)

    def tell_failure(self, message: str, status: int) -> None:
        """Leave a note that ends the other ranks."""
        if self._others:
            self._put("failure", {"rank": self.rank, "message": message, "status": status})

    def look_after(self) -> dict[int, dict[str, int]]:
        """How far the watched ranks are.

        Raises:
            PeerError: A rank failed.
            DeadlineError: A watched rank made no progress for too long.
        """
        note = self._get("failure")
        if note is not None and note["rank"] != self.rank:
            raise PeerError(f"rank {note['rank']} failed: {note['message']}", note["status"])
        found, now = {}, time.monotonic()
        for worker in self._watched:
            progress = self._get(f"done-{worker}")
            if progress is not None:
                found[worker] = progress
                continue
            progress = self._get(f"progress-{worker}")
            before, since = self._seen[worker]
            if progress != before:
                self._seen[worker] = progress, now
            elif now - since > self._deadline_s:
                raise DeadlineError(
                    f"rank {worker} has made no progress for {self._deadline_s:g} s (--deadline): look for what ended "
                    "or holds it; the same command goes on where this one was"
                )
            if progress is not None:
                found[worker] = progress
        return found

    def done(self) -> dict[int, dict[str, int]] | None:
        """What the other ranks left, by rank; None before all of them have written their files."""
        found = {worker: self._get(f"done-{worker}") for worker in self._others}
        done = {worker: result for worker, result in found.items() if result is not None}
        return done if len(done) == len(self._others) else None

    def _call(self) -> str:
        """Rank 0: name the attempt, and wait for the answers."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(exist_ok=True)
        attempt = uuid.uuid4().hex
        _write(self._folder / "attempt", {"attempt": attempt})
        end = time.monotonic() + self._deadline_s
        while True:
            answers = {rank: _read(self._folder / f"answer-{rank}") for rank in self._others}
            numbers = {
                str(rank): answer["number"] for rank, answer in answers.items() if answer and answer["to"] == attempt
            }
            if len(numbers) == len(self._others):
                _write(self._folder / "begin", {"attempt": attempt, "numbers": numbers})
                return attempt
            missing = [rank for rank in self._others if str(rank) not in numbers]
            _wait(end, f"rank(s) {missing} did not come to {self._folder} within {self._deadline_s:g} s (--deadline)")

    def _answer(self) -> str:
        """Any other rank: answer the attempt that is there, until rank 0 repeats the answer."""
        number, answered = uuid.uuid4().hex, ""
        end = time.monotonic() + self._deadline_s
        while True:
            call, begin = _read(self._folder / "attempt"), _read(self._folder / "begin")
            if begin and answered == begin["attempt"] and begin["numbers"].get(str(self.rank)) == number:
                return answered
            if call and call["attempt"] != answered:
                try:
                    _write(self._folder / f"answer-{self.rank}", {"to": call["attempt"], "number": number})
                    answered = call["attempt"]
                except FileNotFoundError:
                    pass  # Rank 0 clears the folder of an earlier attempt at this moment.
            _wait(end, f"rank 0 did not come to {self._folder} within {self._deadline_s:g} s (--deadline)")

    def _put(self, name: str, content: dict[str, Any]) -> None:
        _write(self._folder / name, {"attempt": self._attempt, **content})

    def _get(self, name: str) -> dict[str, Any] | None:
        found = _read(self._folder / name) if self._others else None
        if found is None or found.pop("attempt") != self._attempt:
            return None
        return found


def _wait(end: float, message: str) -> None:
    if time.monotonic() > end:
        raise DeadlineError(f"{message}; all ranks must be started, and OUT be on a file system that they share")
    time.sleep(_POLL_S)


def _write(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all; not synced, since a restart begins without."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    aside.write_text(json.dumps(content), encoding="utf-8")
    aside.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    except OSError:
        # Not there; or, on a network file system, replaced while it was read. The deadline covers what stays so.
        return None
