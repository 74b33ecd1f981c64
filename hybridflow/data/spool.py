"""A directory as a live queue of prompts: other programs put files into it while the job runs.

    SPOOL/2026-05-01.jsonl        a file to be taken: written under another name, then renamed
    SPOOL/taken/…                 files that were taken
    SPOOL/.taken-by               the directory of the run that takes from it

    RUN_DIR/rows/spool/journal.jsonl      a line for each file that was taken, in the order of the draws
    RUN_DIR/rows/spool/part-00000.rows    its rows, as in ``row_store``

The lowest rank takes files in the order of their names into the run's own store, and says so in the journal; every rank
reads from there, and waits where its draw is not there yet. The journal decides what each draw is, so a run that was
killed goes on where it was: a file is either in the journal, or still in the spool.
"""

from __future__ import annotations

import bisect
import json
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybridflow.config import Spool
from hybridflow.data.prepare import Alone, Everyone, agree, make_part
from hybridflow.data.problems import StoredProblems
from hybridflow.data.readers import Piece
from hybridflow.data.row_store import PartFiles, Stored
from hybridflow.data.shaping import Shape
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import DataError
from hybridflow.observe.files import json_objects, replace_file, sync_path

FOLDER = "spool"
_JOURNAL, _PROBLEM, _OWNER, _TAKEN = "journal.jsonl", "problem.txt", ".taken-by", "taken"
_LOOK_S = 0.2


class Spooled:
    """What was taken from a spool, by the serial number of a draw: in the order in which it was taken, each row once.

    Args:
        folder: Of the journal and its parts.
        spool: The directory, for messages.
        deadline_s: Longest wait for a row.
    """

    def __init__(self, folder: Path, spool: Path, deadline_s: float) -> None:
        self._folder, self._spool, self._deadline_s = folder, spool, deadline_s
        self._files = PartFiles(folder)
        self._lock = threading.Lock()
        self._read_bytes = 0
        self._token = ""
        self._entries: list[dict[str, Any]] = []
        self._starts: list[int] = []
        self._num_rows = 0

    @property
    def sha256(self) -> str:
        """Of the journal: what it begins with, since it grows."""
        self._wait(lambda: self._token != "", "its journal")
        return self._token

    def place(self, draw: int) -> tuple[int, int]:
        """A draw is a row of its own."""
        return 0, draw

    def stored(self, place: tuple[int, int]) -> Stored:
        """The row of a draw; waits for it.

        Raises:
            DataError: It does not come, a file cannot be taken, or the store is damaged.
        """
        draw = place[1]
        self._wait(lambda: draw < self._num_rows, f"prompt {draw}")
        number = bisect.bisect_right(self._starts, draw) - 1
        entry = self._entries[number]
        try:
            line = self._files.read(entry["part"], draw - self._starts[number])
            at, which, begins, row = json.loads(line)
        except (OSError, ValueError, struct.error) as error:
            raise DataError(f"{self._folder / entry['part']}: row {draw} cannot be read: {error}") from error
        return Stored(row, f"{entry['path']}:{at + 1}", bool(begins), which, len(line))

    def _wait(self, is_there: Callable[[], bool], what: str) -> None:
        end_s = time.monotonic() + self._deadline_s
        while True:
            with self._lock:
                self._read_on()
                if is_there():
                    return
            problem = _text_of(self._folder / _PROBLEM)
            if problem:
                raise DataError(problem)
            if time.monotonic() > end_s:
                raise DataError(
                    f"{self._spool}: {what} did not come within data.spool.deadline_s={self._deadline_s:g}; "
                    f"{self._num_rows} rows were taken so far: rename more files into it and resume, or raise the key"
                )
            time.sleep(_LOOK_S)

    def _read_on(self) -> None:
        """What the journal has more, as far as its lines are whole."""
        try:
            with (self._folder / _JOURNAL).open("rb") as file:
                file.seek(self._read_bytes)
                new = file.read()
        except FileNotFoundError:
            return
        except OSError as error:
            raise DataError(f"{self._folder / _JOURNAL}: cannot be read: {error}") from error
        whole = new[: new.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for entry in json_objects(whole.decode().splitlines()):
            if "token" in entry:
                self._token = entry["token"]
            else:
                self._entries.append(entry)
                self._starts.append(self._num_rows)
                self._num_rows += entry["num_rows"]


class Taker:
    """Takes files from a spool into a run's store; one rank does, in a thread.

    Args:
        spool: The directory.
        folder: Of the journal and its parts.
        shape: What rows have to be.
        poll_s: How often it looks for new files.
        say: Told of what is left out.

    Raises:
        DataError: There is no such directory, or another run takes from it.
    """

    def __init__(self, spool: Path, folder: Path, shape: Shape, poll_s: float, say: Callable[[str], None]) -> None:
        self._spool, self._folder, self._shape, self._poll_s, self._say = spool, folder, shape, poll_s, say
        self._is_over = threading.Event()
        try:
            _own(spool, folder)
            folder.mkdir(parents=True, exist_ok=True)
            (spool / _TAKEN).mkdir(exist_ok=True)
            (folder / _PROBLEM).unlink(missing_ok=True)
            self._entries = self._mended()
        except OSError as error:
            raise DataError(
                f"data.spool.path={str(spool)!r}: cannot be used: {error}; name a directory that the lowest rank may "
                "write to"
            ) from error
        self._thread = threading.Thread(target=self._run, name="spool", daemon=True)

    def start(self) -> None:
        """Begin to take, until ``stop``."""
        self._thread.start()

    def stop(self) -> None:
        """End, after the file in hand."""
        self._is_over.set()
        self._thread.join()

    def take(self) -> int:
        """Take the files that are there now, in the order of their names; how many.

        Raises:
            DataError: A row cannot be used, and ``on_bad_row`` is ``error``; the file stays where it is.
            OSError: The file system refuses.
        """
        count = 0
        for path in sorted(self._spool.glob("*.jsonl")):
            if self._is_over.is_set():
                break
            found = path.stat()
            known = [path.name, found.st_size, found.st_mtime_ns]
            # Of a run that was killed between the journal and the move.
            if known not in [entry["file"] for entry in self._entries]:
                self._add(path, known)
                count += 1
            path.rename(self._spool / _TAKEN / path.name)
        return count

    def _add(self, path: Path, known: list[Any]) -> None:
        number = len(self._entries)
        told = make_part(self._folder, number, self._shape, [Piece(str(path), "jsonl", 0, known[1])])
        sync_path(self._folder)
        if told["bad"]:
            self._say(f"data: {path}: {sum(told['bad'].values())} bad rows skipped; the first: {told['shown'][0]}")
        if told["num_long"]:
            self._say(f"data: {path}: {told['num_long']} rows left out, whose prompts are longer than asked for")
        entry = {"file": known, "path": str(path), "part": told["name"], "num_rows": told["num_rows"]}
        with (self._folder / _JOURNAL).open("ab") as file:
            file.write(json.dumps(entry).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._entries.append(entry)

    def _mended(self) -> list[dict[str, Any]]:
        """The journal's entries, without a line that a kill has cut short; a new journal where there is none."""
        path = self._folder / _JOURNAL
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        if not whole:
            whole = [json.dumps({"token": secrets.token_hex(16)}).encode() + b"\n"]
        if whole != lines:
            replace_file(path, b"".join(whole))
        return [entry for entry in json_objects(line.decode() for line in whole) if "token" not in entry]

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                self.take()
            # Who waits for rows has it from there, on every rank; a thread would be silent about it.
            except Exception as error:
                replace_file(self._folder / _PROBLEM, f"{error}; mend the file, and resume".encode())
                return
            self._is_over.wait(self._poll_s)


def open_spool(
    spool: Spool,
    shape: Shape,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    everyone: Everyone | None = None,
    say: Callable[[str], None] = print,
) -> StoredProblems:
    """Begin to take from a spool, on the lowest rank, and to wait for what it takes. Collective: ``everyone``.

    Args:
        spool: The directory and its deadlines.
        shape: What rows have to be.
        tokenizer: Gives the tokens.
        folder: Where the run keeps its rows.
        everyone: The ranks; None: this process alone.
        say: Told of rows that are left out.

    Raises:
        DataError: The directory cannot be used, or another run takes from it.
    """
    everyone = Alone() if everyone is None else everyone
    inner, path = folder / FOLDER, Path(spool.path)
    agree(everyone, "the spool", lambda: Taker(path, inner, shape, spool.poll_s, say).start())
    return StoredProblems(Spooled(inner, path, spool.deadline_s), shape, tokenizer)


def _own(spool: Path, folder: Path) -> None:
    """Take a spool for one run; two would share its rows by chance, and could not go on."""
    mine, path = str(folder.resolve()), spool / _OWNER
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(mine)
    except FileExistsError:
        other = _text_of(path)
        if other != mine:
            raise DataError(
                f"data.spool.path={str(spool)!r}: {other!r} takes from it; give each run a directory of its own, or "
                f"remove {path} if that run is over"
            ) from None


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
