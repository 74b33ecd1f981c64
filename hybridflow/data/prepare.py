"""One pass over what training draws from: rows are checked, rendered and put into a store, where each has a number.

The files are cut into pieces, and the pieces dealt to all ranks and their processes, so that nobody reads what another
reads; of each run of pieces comes a part of the store. A store is kept under a name made of what it was made from, so
a run that goes on, or another with the same data, finds it.

    python -m hybridflow.data.prepare FOLDER PART     what a process of a rank does
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hybridflow.config.data import DataSourceConfig
from hybridflow.data.files import File, find_files
from hybridflow.data.readers import Piece, cut, format_of, place_of, read
from hybridflow.data.row_store import FORMAT, MANIFEST, RowStore, RowWriter, encode_row, rows_written
from hybridflow.data.rows import HERE, Row, plain_row
from hybridflow.data.shaping import Shape, Shaper, no_rows, shaped_row
from hybridflow.data.tokenizer import tokenizer_settings
from hybridflow.errors import DataError, HybridflowError, WriteError
from hybridflow.exit_status import DONE, FAILURE, TARGET, refuses_writes
from hybridflow.observe.console import print_out
from hybridflow.observe.files import replace_file, sync_path, writing
from hybridflow.sections import read_section, to_dict

_FILES = "files.json"
_REMEDY = "make room, or set data.cache_dir"
_MOST_PARTS = 64
_SHOWN, _REASONS = 5, 20
_STALLED_S = 600.0
_TELL_S = 10.0
_LEFTOVER_S = 3600.0


class Everyone(Protocol):
    """The ranks that prepare and share a store; ``parallel.coordinator.Coordinator`` is one."""

    rank: int
    ranks: tuple[int, ...]

    @property
    def is_lead(self) -> bool:
        """Return whether this is the first of the ranks."""

    def decide(self, name: str, value: Any) -> Any:
        """Return the lead's JSON value on every rank."""

    def gather(self, value: Any, name: str = "gather") -> list[Any]:
        """Return every rank's JSON value, on every rank."""


class Alone:
    """A process that shares with nobody."""

    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    is_lead: bool = True

    def decide(self, name: str, value: Any) -> Any:
        """Return the value."""
        return value

    def gather(self, value: Any, name: str = "gather") -> list[Any]:
        """Return the value alone."""
        return [value]


class _Problem(NamedTuple):
    """What went wrong on one rank, for all of them.

    Attributes:
        text: The message.
        is_of_writing: Whether the file system takes nothing more.
    """

    text: str
    is_of_writing: bool

    @staticmethod
    def of(error: HybridflowError | OSError) -> _Problem:
        return _Problem(str(error), isinstance(error, WriteError) or refuses_writes(error))

    def error(self) -> HybridflowError:
        return (WriteError if self.is_of_writing else DataError)(self.text)


class Given(NamedTuple):
    """Rows that a program has in memory, in the place of files.

    Attributes:
        rows: Mappings; read once, or twice where they have a length.
        title: What messages call them.
        weight: As in ``DataSource``.
    """

    rows: Iterable[Any]
    title: str
    weight: float | None = None


class ReadRows(NamedTuple):
    """Rows of JSON that were read elsewhere, in the place of files.

    Attributes:
        rows: Each, or what is wrong with it, at ``HERE``; read once.
        place: What messages call one, by its number.
        title: What a store keeps about their origin.
    """

    rows: Iterable[Row | DataError]
    place: Callable[[int], str]
    title: str = ""


def agree(everyone: Everyone, name: str, act: Callable[[], Any]) -> Any:
    """Return the JSON result of the lead's act on every rank. Collective: ``everyone``.

    Args:
        everyone: The ranks.
        name: What they wait for, in errors.
        act: The function to call on the lead.

    Raises:
        DataError: On every rank: the act raised an error of ours or of the file system, with its message.
        WriteError: Likewise, where the file system takes nothing more.
    """
    told: dict[str, Any] = {}
    if everyone.is_lead:
        try:
            told = {"value": act()}
        except (HybridflowError, OSError) as error:
            told = {"problem": _Problem.of(error)}
    told = everyone.decide(name, told)
    if "problem" in told:
        raise _Problem(*told["problem"]).error()
    return told["value"]


def prepare(
    source: DataSourceConfig | Given,
    shape: Shape,
    folder: Path,
    *,
    everyone: Everyone | None = None,
    num_workers: int = 1,
    say: Callable[[str], None] = print_out,
) -> RowStore:
    """Return the store of a source's rows: the existing one, or one that all ranks make now.

    Collective: ``everyone``.

    Args:
        source: Files, or rows of which the lead's are taken.
        shape: What rows have to be.
        folder: Where stores are kept; shared by all.
        everyone: The ranks; None: this process alone.
        num_workers: Processes of each rank, where there is work for several.
        say: Told by the lead of long work, and of rows that are left out.

    Raises:
        DataError: A file cannot be read; a row cannot be used, and ``on_bad_row`` is ``error``; no row is left.
        WriteError: The file system takes nothing more.
    """
    everyone = Alone() if everyone is None else everyone
    most = min(_MOST_PARTS, len(everyone.ranks) * num_workers)
    plan = agree(everyone, "what to read", lambda: _plan(source, shape, folder, most))
    final = plan["final"]
    if plan["aside"] is not None:
        aside = Path(plan["aside"])
        try:
            _work(aside, plan["num_parts"], everyone, source if isinstance(source, Given) else None, say)
            final = agree(everyone, "rows prepared", lambda: str(_join(aside, plan, shape)))
        except (DataError, WriteError):
            if everyone.is_lead:
                shutil.rmtree(aside, ignore_errors=True)
            raise
    store = RowStore(Path(final))
    if everyone.is_lead:
        _tell_left_out(store, say)
    return store


def _plan(source: DataSourceConfig | Given, shape: Shape, folder: Path, most: int) -> dict[str, Any]:
    """Plan where the store is or will be, and the input of each part."""
    runs: list[list[Piece]] = [[]]
    files: tuple[File, ...] = ()
    if isinstance(source, Given):
        title, told = source.title, _told_of(source, folder)
    else:
        title, files = source.path, find_files(source.path)
        told = [[list(file), format_of(file.path, source.file_format)] for file in files]
    final = None if told is None else folder / _key(told, shape)
    if final is not None and (final / MANIFEST).is_file():
        return {"final": str(final), "aside": None}
    with writing(folder, _REMEDY):
        _make_folder(folder)
    if not isinstance(source, Given):
        max_row_bytes = shape.data.max_row_bytes
        pieces = [
            piece
            for file in files
            for piece in cut(file, format_of(file.path, source.file_format), max_row_bytes=max_row_bytes)
        ]
        runs = _deal(pieces, most)
    aside = folder / f".{secrets.token_hex(8)}.tmp"
    with writing(aside, _REMEDY):
        aside.mkdir()
        (aside / _FILES).write_text(json.dumps(files), encoding="utf-8")
        for number, run in enumerate(runs):
            order = {"pieces": run, "shape": to_dict(shape)}
            (aside / f"{_name(number)}.order").write_text(json.dumps(order), encoding="utf-8")
    place = None if final is None else str(final)
    return {"final": place, "aside": str(aside), "num_parts": len(runs), "title": title}


def _told_of(given: Given, folder: Path) -> list[Any] | None:
    """Return what rows in memory add to their store's key; None: it is known once they are written."""
    fingerprint = _fingerprint_of(given)
    if fingerprint is not None:
        return [fingerprint]
    # Others may be read once alone: they are written first.
    if not isinstance(given.rows, Sized) or next(folder.glob(f"*/{MANIFEST}"), None) is None:
        return None
    hashed = _Hashed(given.rows)
    try:
        deque(hashed, maxlen=0)
    # Whoever writes them meets it again, and tells of it.
    except Exception:
        return None
    return [given.title, hashed.sha256]


def _fingerprint_of(given: Given) -> str | None:
    """Return what the package ``datasets`` knows a data set by; None of other rows."""
    fingerprint: str | None = getattr(given.rows, "_fingerprint", None)
    return fingerprint


class _Hashed:
    """Rows in memory as plain JSON, and what is wrong with others; hashed as they are read."""

    def __init__(self, rows: Iterable[Any]) -> None:
        self._rows = rows
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Return the sha256 of the rows that were read."""
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[Row | DataError]:
        for given in self._rows:
            row = plain_row(given)
            # One that is nested too deeply is used by nobody.
            with contextlib.suppress(RecursionError):
                text = str(row) if isinstance(row, DataError) else json.dumps(row)
                self._digest.update(text.encode(errors="backslashreplace"))
            self._digest.update(b"\n")
            yield row


def _key(told: list[Any], shape: Shape) -> str:
    """Return a key of all that decides what the store holds."""
    # None of these changes a row.
    data = replace(shape.data, train=None, mixture=(), spool=None, kafka=None, held_out=None, arithmetic=None)
    data = replace(data, num_workers=1, cache_dir=None)
    whole = [FORMAT, told, to_dict(replace(shape, data=data, tokenizer=None))]
    if shape.tokenizer is not None:
        file = Path(shape.tokenizer)
        whole += [hashlib.sha256(file.read_bytes()).hexdigest(), tokenizer_settings(file.parent)]
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:16]


def _make_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(".*.tmp"):
        # Of a job that was killed; one that lives writes all the time.
        newest = max((each.stat().st_mtime for each in path.glob("*")), default=path.stat().st_mtime)
        if time.time() - newest > _LEFTOVER_S:
            shutil.rmtree(path, ignore_errors=True)


def _deal(pieces: Sequence[Piece], most: int) -> list[list[Piece]]:
    """Deal the pieces, in order, into at most ``most`` runs whose lengths differ by at most one."""
    count = max(1, min(most, len(pieces)))
    ends = [len(pieces) * number // count for number in range(count + 1)]
    return [list(pieces[start:stop]) for start, stop in itertools.pairwise(ends)]


def _work(aside: Path, num_parts: int, everyone: Everyone, given: Given | None, say: Callable[[str], None]) -> None:
    """Have all parts made; each rank its own, at most one for each of its processes, while all watch."""
    mine = range(everyone.ranks.index(everyone.rank), num_parts, len(everyone.ranks))
    crew = _Crew(aside, mine, is_inside=num_parts == 1, given=given)
    begin_s = told_s = time.monotonic()
    pause_s = 0.005
    try:
        while True:
            states = everyone.gather(crew.look(), "preparing rows")
            problems = [state["problem"] for state in states if state["problem"] is not None]
            if problems:
                raise _Problem(*problems[0]).error()
            if all(state["is_done"] for state in states):
                return
            now_s = time.monotonic()
            if everyone.is_lead and now_s - told_s > _TELL_S:
                told_s, count = now_s, sum(state["num_rows"] for state in states)
                say(f"data: {count} rows prepared, {count / (now_s - begin_s):.0f} rows/s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.5)
    finally:
        crew.stop()


class _Crew:
    """What makes a rank's parts: a process for each, or for one small part a thread."""

    def __init__(self, aside: Path, parts: Sequence[int], *, is_inside: bool, given: Given | None) -> None:
        self._aside, self._parts, self._given, self._is_inside = aside, parts, given, is_inside
        self._running: dict[int, subprocess.Popen[bytes] | threading.Thread] = {}
        self._told: dict[int, _Problem | None] = {}
        self._failure: _Problem | None = None
        self._num_rows, self._moved_s = -1, time.monotonic()
        try:
            for number in parts:
                self._running[number] = self._start(number)
        except OSError as error:
            text = f"{aside}: no process can be begun there: {error}; lower data.num_workers"
            self._failure = _Problem(text, refuses_writes(error))

    def look(self) -> dict[str, Any]:
        """Return how far it is, and what went wrong."""
        problem = self._failure
        for number, worker in list(self._running.items()):
            if isinstance(worker, threading.Thread):
                worker.join(0.005)
                is_over = not worker.is_alive()
            else:
                is_over = worker.poll() is not None
            if is_over:
                self._end(self._running.pop(number))
                problem = self._problem(number, worker) if problem is None else problem
        num_rows = sum(rows_written(self._aside / _name(number)) for number in self._parts)
        if num_rows != self._num_rows:
            self._num_rows, self._moved_s = num_rows, time.monotonic()
        if self._running and time.monotonic() - self._moved_s > _STALLED_S and problem is None:
            text = f"{self._aside}: no row in {_STALLED_S:g} s; look at the file system, or at who holds the store"
            problem = _Problem(text, False)
        return {"num_rows": num_rows, "is_done": not self._running, "problem": problem}

    def stop(self) -> None:
        """End what still runs."""
        for worker in self._running.values():
            self._end(worker)

    @staticmethod
    def _end(worker: subprocess.Popen[bytes] | threading.Thread) -> None:
        if isinstance(worker, subprocess.Popen):
            worker.kill()
            worker.wait()
            assert worker.stdin is not None, "it is a pipe"
            worker.stdin.close()

    def _start(self, number: int) -> subprocess.Popen[bytes] | threading.Thread:
        if self._is_inside:
            thread = threading.Thread(target=self._carry_out, args=(number,), daemon=True)
            thread.start()
            return thread
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        with (self._aside / f"{_name(number)}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "hybridflow.data.prepare", str(self._aside), str(number)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path},
            )

    def _carry_out(self, number: int) -> None:
        self._told[number] = _carry_out(self._aside, number, self._given)

    def _problem(self, number: int, worker: subprocess.Popen[bytes] | threading.Thread) -> _Problem | None:
        """Return the reason why a part was not made; None: it is made."""
        if isinstance(worker, threading.Thread):
            return self._told[number]
        stem = self._aside / _name(number)
        if stem.with_suffix(".json").is_file():
            return None
        is_of_writing = worker.returncode == TARGET
        said, log = (_text(stem.with_suffix(end)) for end in (".error", ".log"))
        if said or is_of_writing:
            return _Problem(said or f"{self._aside}: cannot be written; {_REMEDY}", is_of_writing)
        last = log.splitlines()[-1] if log else "it was killed"
        return _Problem(f"{stem}: the process that prepares it died: {last}; look at its memory", False)


def _text(path: Path) -> str:
    """Return a file's text; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _name(number: int) -> str:
    return f"part-{number:05d}"


def make_part(folder: Path, number: int, shape: Shape, pieces: Sequence[Piece | ReadRows]) -> dict[str, Any]:
    """Write a part of a store.

    Args:
        folder: Where it goes; what is there of that number is replaced.
        number: Number of the part.
        shape: What rows have to be.
        pieces: What it is made from.

    Returns:
        Its ``name``, ``num_rows`` and ``num_bytes``; what is told of its ``pieces``; how many rows are ``bad`` by
        reason, the first messages ``shown``, and ``num_long``, those with a prompt longer than asked for.

    Raises:
        DataError: A piece cannot be read; a row cannot be used, and ``on_bad_row`` is ``error``.
        OSError: The file system refuses.
    """
    part, shaper, stem = _Part(shape), Shaper(shape), folder / _name(number)
    try:
        with RowWriter(stem) as writer:
            told = [part.write(piece, shaper, writer) for piece in pieces]
    finally:
        shaper.close()
    return {
        "name": stem.name,
        "num_rows": writer.num_rows,
        "num_bytes": stem.with_suffix(".rows").stat().st_size,
        "pieces": told,
        "bad": part.bad,
        "shown": part.shown,
        "num_long": part.num_long,
    }


def _carry_out(aside: Path, number: int, given: Given | None = None) -> _Problem | None:
    """Make a part as was ordered, and a file that says what is in it; return what went wrong."""
    stem = aside / _name(number)
    try:
        order = json.loads(stem.with_suffix(".order").read_text(encoding="utf-8"))
        shape = read_section(Shape, order["shape"], source=str(stem))
        pieces: list[Piece | ReadRows] = [Piece(*piece) for piece in order["pieces"]]
        hashed = _Hashed(() if given is None else given.rows)
        if given is not None:
            title = given.title
            pieces = [ReadRows(hashed, lambda row: f"{title}: row {row}", title)]
        told = make_part(aside, number, shape, pieces)
        if given is not None and _fingerprint_of(given) is None:
            told["rows_sha256"] = hashed.sha256
        replace_file(stem.with_suffix(".json"), json.dumps(told).encode())
        return None
    except HybridflowError as error:
        return _Problem.of(error)
    except OSError as error:
        return _Problem(f"{aside}: cannot be written: {error}; {_REMEDY}", refuses_writes(error))
    # A thread would print it and be silent to who waits for it.
    except Exception as error:
        return _Problem(f"{stem}: {type(error).__name__}: {error}", False)


class _Part:
    """Writes the rows of some pieces, and keeps count of those that are left out."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self.bad: dict[str, int] = {}
        self.shown: list[str] = []
        self.num_long = 0

    def write(self, piece: Piece | ReadRows, shaper: Shaper, writer: RowWriter) -> dict[str, Any]:
        """Write the rows of a piece; return what a store keeps about their origin, and how many there are."""
        digest, before, number = hashlib.sha256(b"["), writer.num_rows, -1
        if isinstance(piece, ReadRows):
            rows: Iterable[Row | DataError | None] = piece.rows
            origin = {"path": piece.title, "is_lines": False, "start": 0}
        else:
            rows = read(piece, max_row_bytes=self._shape.data.max_row_bytes)
            origin = {"path": piece.path, "is_lines": piece.format == "jsonl", "start": piece.start}
        for number, row in enumerate(rows):
            try:
                prompt_indices = _prompt_indices_of(row, number, shaper)
            except DataError as error:
                self._leave_out(error, piece, number)
                continue
            self.num_long += row is not None and not prompt_indices
            for content, line in prompt_indices:
                # As json.dumps writes the list of all of them.
                digest.update(content if writer.num_rows == before else b", " + content)
                writer.add(line)
        digest.update(b"]")
        return {
            **origin,
            "num_read": number + 1,
            "num_rows": writer.num_rows - before,
            "sha256": digest.hexdigest(),
        }

    def _leave_out(self, error: DataError, piece: Piece | ReadRows, number: int) -> None:
        message = str(error)
        is_fatal = self._shape.data.on_bad_row == "error"
        if is_fatal or len(self.shown) < _SHOWN:
            place = piece.place(number) if isinstance(piece, ReadRows) else place_of(piece, number)
            self.shown.append(message.replace(HERE, place, 1))
        if is_fatal:
            raise DataError(self.shown[-1])
        reason = re.sub(r"\d+", "N", message.removeprefix(f"{HERE}: ").partition(";")[0])[:80]
        reason = reason if reason in self.bad or len(self.bad) < _REASONS else "other reasons"
        self.bad[reason] = self.bad.get(reason, 0) + 1


def _prompt_indices_of(row: Row | DataError | None, number: int, shaper: Shaper) -> list[tuple[bytes, bytes]]:
    """Return content and store line of each example of a row; none for a blank line or a long prompt."""
    shaped = shaped_row(row, shaper)
    if shaped is None:
        return []
    try:
        return [
            (json.dumps(content).encode(), encode_row(number, which, shaped.begins, shaped.row))
            for which, content in enumerate(shaped.contents)
        ]
    except RecursionError as error:
        raise DataError(f"{HERE}: is nested too deeply; flatten it") from error


def _join(aside: Path, plan: dict[str, Any], shape: Shape) -> Path:
    """Make one store of the parts, and give it its name. Returns where it then is."""
    for path, *facts in json.loads((aside / _FILES).read_text(encoding="utf-8")):
        (now,) = find_files(path)
        if [*now[1:]] != facts:
            raise DataError(f"{path}: was changed while it was read; let nothing write there, and start again")
    parts = [json.loads((aside / f"{_name(number)}.json").read_text()) for number in range(plan["num_parts"])]
    rows_sha256 = parts[0].pop("rows_sha256", None)
    final = Path(plan["final"]) if rows_sha256 is None else aside.with_name(_key([plan["title"], rows_sha256], shape))
    pieces = [piece for part in parts for piece in part.pop("pieces")]
    bad = sum((Counter(part.pop("bad")) for part in parts), Counter[str]())
    digests = [piece["sha256"] for piece in pieces if piece["num_rows"]]
    facts = {
        "format": FORMAT,
        "title": plan["title"],
        # That of its rows as JSON where one piece has them all, else that of the list of the pieces'.
        "sha256": digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest(),
        "num_read": sum(piece["num_read"] for piece in pieces),
        "num_bad": bad.total(),
        "num_long": sum(part.pop("num_long") for part in parts),
        "bad": bad,
        "shown": [message for part in parts for message in part.pop("shown")][:_SHOWN],
        "parts": parts,
        "pieces": _numbered(pieces),
    }
    if sum(part["num_rows"] for part in parts) == 0:
        raise DataError(_why_empty(facts, shape))
    with writing(aside, _REMEDY):
        for path in aside.iterdir():
            if path.suffix not in (".rows", ".places"):
                path.unlink()
        replace_file(aside / MANIFEST, json.dumps(facts, indent=1).encode())
        try:
            aside.rename(final)
        except OSError:
            # Another job was first; what it has made is the same.
            if not (final / MANIFEST).is_file():
                raise
            shutil.rmtree(aside, ignore_errors=True)
        sync_path(final.parent)
    return final


def _numbered(pieces: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Number the pieces by their first row in the store and their first line or row in the file."""
    found, first_row = [], 0
    lines: dict[str, int] = {}
    for piece in pieces:
        path, is_lines = piece["path"], piece["is_lines"]
        first_number = lines.get(path, 1) if is_lines else piece["start"]
        lines[path] = first_number + piece["num_read"]
        if piece["num_rows"]:
            found.append({"path": path, "is_lines": is_lines, "first_row": first_row, "first_number": first_number})
        first_row += piece["num_rows"]
    return found


def _why_empty(facts: dict[str, Any], shape: Shape) -> str:
    title, data = facts["title"], shape.data
    if facts["num_bad"]:
        return f"{title}: none of its rows can be used, {facts['num_bad']} are bad; the first: {facts['shown'][0]}"
    if facts["num_long"]:
        return (
            f"{title}: the prompts of all its {facts['num_long']} rows are longer than data.max_prompt_tokens="
            f"{data.max_prompt_tokens}; raise it"
        )
    return f"{no_rows(title, shape)}, or rows of columns"


def _tell_left_out(store: RowStore, say: Callable[[str], None]) -> None:
    facts = store.facts
    if facts["num_long"]:
        say(f"data: {facts['title']}: {facts['num_long']} rows left out, whose prompts are longer than asked for")
    if facts["num_bad"]:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in facts["bad"].items())
        say(f"data: {facts['title']}: {facts['num_bad']} bad rows skipped: {reasons}; the first: {facts['shown'][0]}")


def _end_with_parent() -> None:
    """End when the rank that started this process ends in any way, which closes the input."""
    while os.read(0, 1):
        pass
    os._exit(1)


def _work_here(aside: Path, number: int) -> int:
    """Make a part in a process of its own; its exit status tells of a disk that has no room for the message."""
    problem = _carry_out(aside, number)
    if problem is None:
        return DONE
    with contextlib.suppress(OSError):
        replace_file((aside / _name(number)).with_suffix(".error"), problem.text.encode())
    return TARGET if problem.is_of_writing else FAILURE


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(_work_here(Path(sys.argv[1]), int(sys.argv[2])))
