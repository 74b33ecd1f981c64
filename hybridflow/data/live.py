"""Prompts that come while the job runs, wherever from: the lowest rank takes them, and all read what it has taken.

    FOLDER/journal.jsonl      a line for each part that was taken, in the order of the prompt indices
    FOLDER/part-00000.rows    its rows, as in ``row_store``
    FOLDER/problem.txt        why nothing more is taken
    FOLDER/note.txt           what is in the way just now

A part is on disk before the journal has its line, and the journal decides what each prompt index is: who takes goes on
from what it says, so a run that was killed at any moment neither repeats nor misses a row.
"""

from __future__ import annotations

import abc
import bisect
import json
import math
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridflow.data.part import ReadRows, make_part
from hybridflow.data.readers import Piece
from hybridflow.data.row_store import PartFiles, Stored
from hybridflow.data.shaping import Shape
from hybridflow.errors import DataError
from hybridflow.observe.files import json_objects, replace_file, sync_path
from hybridflow.observe.rank_log import tell

_JOURNAL, _PROBLEM, _NOTE = "journal.jsonl", "problem.txt", "note.txt"
_LOOK_S = 0.2
_MOST_OPEN = 128

Entry = dict[str, Any]


class Taken:
    """What was taken, by the prompt index: in the order in which it was taken, each row once.

    Attributes:
        num_rows: None: more may come.
        seed: None: nothing is shuffled.

    Args:
        folder: Folder of the journal and its parts.
        title: What messages call that from which it is taken.
        key: The section of the recipe that says so, such as ``data.spool``.
        more: What to do where no more comes, in errors.
        place: Place of a row: the journal's entry, and the row's number in the part.
        deadline_s: Longest wait for a row.
    """

    num_rows: None = None
    seed: None = None

    def __init__(
        self,
        folder: Path,
        *,
        title: str,
        key: str,
        more: str,
        place: Callable[[Entry, int], str],
        deadline_s: float,
    ) -> None:
        self._folder, self._title, self._key, self._more = folder, title, key, more
        self._place, self._deadline_s = place, deadline_s
        self._files = PartFiles(folder)
        self._lock = threading.Lock()
        self._read_bytes = 0
        self._token = ""
        self._entries: list[Entry] = []
        self._starts: list[int] = []
        self._num_rows = 0
        self._grew_s = 0.0

    @property
    def sha256(self) -> str:
        """Return the token at the journal's start; the journal itself grows."""
        self._wait(lambda: self._token != "", "its journal")
        return self._token

    def look(self, prompt_index: int, since_s: float, within_s: float) -> bool:
        """Return whether the row of a prompt index and those before it come within so many seconds.

        Args:
            prompt_index: The prompt index.
            since_s: When the wait for it began, in seconds of ``time.monotonic``.
            within_s: Longest wait here; there may be others after it.

        Raises:
            DataError: No row has come for longer than the deadline, or nothing more is taken.
        """
        return self._look(lambda: prompt_index < self._num_rows, f"prompt {prompt_index}", since_s, within_s)

    def place(self, prompt_index: int) -> tuple[int, int]:
        """Return a row for each prompt index: every prompt index has its own."""
        return 0, prompt_index

    def stored(self, place: tuple[int, int]) -> Stored:
        """Return the row of a prompt index; waits for it.

        Raises:
            DataError: It does not come, or cannot be taken, or the store is damaged.
        """
        prompt_index = place[1]
        self._wait(lambda: prompt_index < self._num_rows, f"prompt {prompt_index}")
        number = bisect.bisect_right(self._starts, prompt_index) - 1
        entry = self._entries[number]
        try:
            line = self._line(entry["part"], prompt_index - self._starts[number])
            at, which, begins, row = json.loads(line)
        except (OSError, ValueError, struct.error) as error:
            raise DataError(
                f"{self._folder / entry['part']}: row {prompt_index} cannot be read: {error}; restore it from a copy"
            ) from error
        return Stored(row, self._place(entry, at), bool(begins), which, len(line))

    def _line(self, part: str, number: int) -> bytes:
        with self._lock:
            # In weeks a job takes more parts than a process may have open.
            if self._files.num_open > _MOST_OPEN:
                self._files.close()
            return self._files.read(part, number)

    def _wait(self, is_there: Callable[[], bool], what: str) -> None:
        self._look(is_there, what, time.monotonic(), math.inf)

    def _look(self, is_there: Callable[[], bool], what: str, since_s: float, within_s: float) -> bool:
        end_s = time.monotonic() + within_s
        while True:
            with self._lock:
                self._read_on()
                if is_there():
                    return True
            problem = text_of(self._folder / _PROBLEM)
            if problem:
                raise DataError(problem)
            if time.monotonic() > max(since_s, self._grew_s) + self._deadline_s:
                note = text_of(self._folder / _NOTE)
                raise DataError(
                    f"{self._title}: {what} did not come within {self._key}.deadline_s={self._deadline_s:g}; "
                    f"{self._num_rows} rows were taken so far{note and f', and {note}'}: {self._more} and resume, or "
                    "raise the key"
                )
            if time.monotonic() > end_s:
                return False
            time.sleep(_LOOK_S)

    def _read_on(self) -> None:
        """Read the new lines of the journal that are whole."""
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
                self._grew_s = time.monotonic()


class Journal:
    """Where one rank puts what it takes.

    Attributes:
        entries: What was taken, in order.

    Args:
        folder: Folder of the journal and its parts; made if it is not there.
        shape: What rows have to be.
        say: Told of what is left out.
        source: What a journal is of; one that was begun for another is refused. None: of anything.

    Raises:
        DataError: The journal is of another source.
        OSError: The file system refuses.
    """

    def __init__(self, folder: Path, shape: Shape, say: Callable[[str], None], source: str | None = None) -> None:
        self._folder, self._shape, self._say = folder, shape, say
        folder.mkdir(parents=True, exist_ok=True)
        for name in (_PROBLEM, _NOTE):
            (folder / name).unlink(missing_ok=True)
        first, *self.entries = self._mended(source)
        if first.get("source") != source:
            raise DataError(
                f"{folder}: holds what was taken from {first.get('source')!r}, not from {source!r}; name that, or "
                "remove the directory to begin anew"
            )

    def add(self, pieces: Sequence[Piece | ReadRows], title: str, more: Mapping[str, Any]) -> None:
        """Take what the pieces have into the store.

        Args:
            pieces: The pieces of which a part is made.
            title: What messages call them.
            more: What the entry says beside the part's name and number of rows; JSON.

        Raises:
            DataError: A row cannot be used, and ``on_bad_row`` is ``error``; nothing is taken.
            OSError: The file system refuses.
        """
        told = make_part(self._folder, len(self.entries), self._shape, pieces)
        sync_path(self._folder)
        if told["bad"]:
            self._say(f"data: {title}: {sum(told['bad'].values())} bad rows skipped; the first: {told['shown'][0]}")
        if told["num_long"]:
            self._say(f"data: {title}: {told['num_long']} rows left out, whose prompts are longer than asked for")
        entry = {**more, "part": told["name"], "num_rows": told["num_rows"]}
        with (self._folder / _JOURNAL).open("ab") as file:
            file.write(json.dumps(entry).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.entries.append(entry)

    def end(self, problem: str) -> None:
        """Let all who wait for rows have this error."""
        replace_file(self._folder / _PROBLEM, problem.encode())

    def note(self, text: str) -> None:
        """Note the obstacle for waiting readers; empty: there is none."""
        if text:
            replace_file(self._folder / _NOTE, text.encode())
        else:
            (self._folder / _NOTE).unlink(missing_ok=True)

    def _mended(self, source: str | None) -> list[Entry]:
        """Return the journal's lines, without one that a kill cut short; start a new journal where there is none."""
        path = self._folder / _JOURNAL
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        if not whole:
            begins = {"token": secrets.token_hex(16), **({} if source is None else {"source": source})}
            whole = [json.dumps(begins).encode() + b"\n"]
        if whole != lines:
            replace_file(path, b"".join(whole))
        return list(json_objects(line.decode() for line in whole))


class Taker(abc.ABC):
    """Takes what comes into a run's store; one rank does, in a thread.

    Args:
        journal: Journal of the store.
        pause_s: Between two times that it takes.
    """

    def __init__(self, journal: Journal, pause_s: float) -> None:
        self._journal, self._pause_s = journal, pause_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)

    @abc.abstractmethod
    def take(self) -> int:
        """Take what is there now; how much that was.

        Raises:
            DataError: It cannot be used, or not be taken.
            OSError: The file system refuses.
        """

    def start(self) -> None:
        """Begin to take, until ``stop``."""
        self._thread.start()

    def stop(self) -> None:
        """End, after what is in hand."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                self.take()
            # Who waits for rows has it from there, on every rank; a thread would be silent about it.
            except Exception as error:
                problem = str(error) if isinstance(error, DataError) else f"{error}; mend that, and resume"
                try:
                    self._journal.end(problem)
                except OSError:
                    # The disk has no room for it.
                    tell(f"hybridflow: {problem}")
                return
            self._is_over.wait(self._pause_s)


def text_of(path: Path) -> str:
    """Return a file's text; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
