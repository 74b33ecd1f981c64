"""The ranks of a conversion, which meet in the folder that they share: no sockets, no MPI.

Rank 0 gives the attempt a name, since files of an attempt that was killed may lie about, and each rank answers it with
a number of its own, which rank 0 repeats. From then on each tells how far it is, and looks after the others: rank 0
after all, they after rank 0. What ends one of them ends all.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.convert.journal import part_folder
from hybridflow.errors import DeadlineError, WriteError
from hybridflow.exit_status import exit_status

FOLDER = ".ranks"
_POLL_S = 0.05
_REFUSAL_S = 10.0


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
        PeerError: One of them came to say that it takes no part.
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

    def tell(self, name: str, content: dict[str, Any]) -> None:
        """Publish ``progress-RANK``, ``done-RANK`` when its files are written, or ``failure``, which ends the others.

        A failure is the ``rank``, its ``message`` and the exit ``status``.
        """
        if self._others:
            _write(self._folder / name, {"attempt": self._attempt, **content})

    def look_after(self) -> dict[int, dict[str, int]]:
        """Return how far the watched ranks are.

        Raises:
            PeerError: A rank failed.
            DeadlineError: A watched rank made no progress for too long.
        """
        note = self._get("failure")
        if note is not None and note["rank"] != self.rank:
            raise _peer_error(note)
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

    def done(self) -> list[dict[str, int]] | None:
        """Return what the other ranks left; None before all of them have written their files."""
        found = [self._get(f"done-{worker}") for worker in self._others]
        done = [result for result in found if result is not None]
        return done if len(done) == len(found) else None

    def _call(self) -> str:
        """Name the attempt, and wait for the answers. For rank 0."""
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
                refusals = [answer["refusal"] for answer in answers.values() if answer and answer["refusal"]]
                refusal = refusals[0] if refusals else None
                _write(self._folder / "begin", {"attempt": attempt, "numbers": numbers, "refusal": refusal})
                if refusal is not None:
                    raise _peer_error(refusal)
                return attempt
            missing = [rank for rank in self._others if str(rank) not in numbers]
            _wait(end, f"rank(s) {missing} did not come to {self._folder} within {self._deadline_s:g} s (--deadline)")

    def _answer(self) -> str:
        """Answer the existing attempt, until rank 0 repeats the answer. For any other rank."""
        end = time.monotonic() + self._deadline_s
        answer = _Answer(self._folder, self.rank)
        while (begin := answer.begin()) is None:
            _wait(end, f"rank 0 did not come to {self._folder} within {self._deadline_s:g} s (--deadline)")
        if begin["refusal"] is not None:
            raise _peer_error(begin["refusal"])
        return str(begin["attempt"])

    def _get(self, name: str) -> dict[str, Any] | None:
        found = _read(self._folder / name) if self._others else None
        if found is None or found.pop("attempt") != self._attempt:
            return None
        return found


class _Answer:
    """A rank's answer to whichever attempt is there, until rank 0 repeats it."""

    def __init__(self, folder: Path, rank: int, refusal: dict[str, Any] | None = None) -> None:
        self._folder, self._rank, self._refusal = folder, rank, refusal
        self._number, self._answered = uuid.uuid4().hex, ""

    def begin(self) -> dict[str, Any] | None:
        """Return the words with which rank 0 repeats the answer; None before it does."""
        call, begin = _read(self._folder / "attempt"), _read(self._folder / "begin")
        if begin and self._answered == begin["attempt"] and begin["numbers"].get(str(self._rank)) == self._number:
            return begin
        if call and call["attempt"] != self._answered:
            answer = {"to": call["attempt"], "number": self._number, "refusal": self._refusal}
            # Rank 0 may clear the folder of an earlier attempt at this moment.
            with contextlib.suppress(FileNotFoundError):
                _write(self._folder / f"answer-{self._rank}", answer)
                self._answered = call["attempt"]
        return None


@contextlib.contextmanager
def refusing(out: Path, rank: int) -> Iterator[None]:
    """Report a failure of the block to the attempt that rank 0 names within seconds; all are told, and end.

    Where rank 0 names none, it has found the same, and is the one to say so first.

    Args:
        out: What is to be written.
        rank: This one; 0 has nobody to tell.
    """
    try:
        yield
    except Exception as error:
        if rank:
            refusal = {"rank": rank, "message": str(error), "status": exit_status(error)}
            # Where there is no such folder, no rank waits.
            with contextlib.suppress(WriteError, OSError):
                answer, end = _Answer(part_folder(out) / FOLDER, rank, refusal), time.monotonic() + _REFUSAL_S
                while answer.begin() is None and time.monotonic() < end:
                    time.sleep(_POLL_S)
        raise


def _peer_error(note: dict[str, Any]) -> PeerError:
    return PeerError(f"rank {note['rank']} failed: {note['message']}", note["status"])


def _wait(end: float, message: str) -> None:
    if time.monotonic() > end:
        raise DeadlineError(f"{message}; all ranks must be started, and OUT be on a file system that they share")
    time.sleep(_POLL_S)


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write a file whole or not at all; do not sync it, since a restart begins without it."""
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
