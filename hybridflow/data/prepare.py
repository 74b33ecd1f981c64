"""One pass over what training draws from: rows are checked, rendered and put into a store, where each has a number.

The files are cut into pieces, and the pieces dealt to all ranks and their processes, so that nobody reads what another
reads; of each run of pieces comes a part of the store (``part.py``). A store is kept under a name made of what it was
made from, so a run that goes on, or another with the same data, finds it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import secrets
import shutil
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from hybridflow.config.data import DataSourceConfig
from hybridflow.data.files import File, find_files
from hybridflow.data.limited import own_module
from hybridflow.data.part import MOST_SHOWN, REMEDY, Given, Hashed, carry_out, fingerprint_of, part_name
from hybridflow.data.readers import Piece, cut, format_of
from hybridflow.data.row_store import FORMAT, MANIFEST, RowStore, rows_written
from hybridflow.data.shaping import Shape, no_rows
from hybridflow.data.tokenizer import tokenizer_settings
from hybridflow.errors import DataError, HybridflowError, WriteError
from hybridflow.exit_status import TARGET, pack_error, unpack_error
from hybridflow.observe.console import print_out
from hybridflow.observe.files import replace_file, sync_path, writing
from hybridflow.sections import to_dict

_FILES = "files.json"
_MOST_PARTS = 64
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

    def on_lead(self, name: str, work: Callable[[], Any]) -> Any:
        """Return on every rank what ``work`` gives on the lead, in JSON; an error there is raised on every rank."""

    def gather(self, value: Any, name: str = "gather") -> list[Any]:
        """Return every rank's JSON value, on every rank."""


class Alone:
    """A process that shares with nobody."""

    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    is_lead: bool = True

    def on_lead(self, name: str, work: Callable[[], Any]) -> Any:
        """Return what ``work`` gives."""
        return work()

    def gather(self, value: Any, name: str = "gather") -> list[Any]:
        """Return the value alone."""
        return [value]


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
        WriteError: The file system refuses to write.
        OSError: It refuses to read.
    """
    everyone = Alone() if everyone is None else everyone
    most = min(_MOST_PARTS, len(everyone.ranks) * num_workers)
    plan = everyone.on_lead("what to read", lambda: _plan(source, shape, folder, most))
    final = plan["final"]
    if plan["aside"] is not None:
        aside = Path(plan["aside"])
        try:
            _work(aside, plan["num_parts"], everyone, source if isinstance(source, Given) else None, say)
            final = everyone.on_lead("rows prepared", lambda: str(_join(aside, plan, shape)))
        except (HybridflowError, OSError):
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
    with writing(folder, REMEDY):
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
    with writing(aside, REMEDY):
        aside.mkdir()
        (aside / _FILES).write_text(json.dumps(files), encoding="utf-8")
        for number, run in enumerate(runs):
            order = {"pieces": run, "shape": to_dict(shape)}
            (aside / f"{part_name(number)}.order").write_text(json.dumps(order), encoding="utf-8")
    place = None if final is None else str(final)
    return {"final": place, "aside": str(aside), "num_parts": len(runs), "title": title}


def _told_of(given: Given, folder: Path) -> list[Any] | None:
    """Return what rows in memory add to their store's key; None: it is known once they are written."""
    fingerprint = fingerprint_of(given)
    if fingerprint is not None:
        return [fingerprint]
    # Others may be read once alone: they are written first.
    if not isinstance(given.rows, Sized) or next(folder.glob(f"*/{MANIFEST}"), None) is None:
        return None
    hashed = Hashed(given)
    try:
        deque(hashed, maxlen=0)
    # Whoever writes them meets it again, and tells of it.
    except Exception:
        return None
    return [given.title, hashed.sha256]


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
                raise unpack_error(*problems[0])
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
        self._told: dict[int, HybridflowError | None] = {}
        self._failure: HybridflowError | None = None
        self._num_rows, self._moved_s = -1, time.monotonic()
        try:
            for number in parts:
                self._running[number] = self._start(number)
        except OSError as error:
            failure = DataError(f"{aside}: no process can be begun there: {error}; lower data.num_workers")
            failure.__cause__ = error
            self._failure = failure

    def look(self) -> dict[str, Any]:
        """Return how far it is, and what went wrong."""
        problem: HybridflowError | OSError | None = self._failure
        for number, worker in list(self._running.items()):
            if isinstance(worker, threading.Thread):
                worker.join(0.005)
                is_over = not worker.is_alive()
            else:
                is_over = worker.poll() is not None
            if is_over:
                self._end(self._running.pop(number))
                problem = self._problem(number, worker) if problem is None else problem
        num_rows = sum(rows_written(self._aside / part_name(number)) for number in self._parts)
        if num_rows != self._num_rows:
            self._num_rows, self._moved_s = num_rows, time.monotonic()
        if self._running and time.monotonic() - self._moved_s > _STALLED_S and problem is None:
            problem = DataError(
                f"{self._aside}: no row in {_STALLED_S:g} s; look at the file system, or at who holds the store"
            )
        packed = None if problem is None else pack_error(problem)
        return {"num_rows": num_rows, "is_done": not self._running, "problem": packed}

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
        command, environment = own_module("hybridflow.data.part", str(self._aside), str(number))
        with (self._aside / f"{part_name(number)}.log").open("wb") as log:
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment)

    def _carry_out(self, number: int) -> None:
        self._told[number] = carry_out(self._aside, number, self._given)

    def _problem(
        self, number: int, worker: subprocess.Popen[bytes] | threading.Thread
    ) -> HybridflowError | OSError | None:
        """Return the reason why a part was not made; None: it is made."""
        if isinstance(worker, threading.Thread):
            return self._told[number]
        stem = self._aside / part_name(number)
        if stem.with_suffix(".json").is_file():
            return None
        said, log = (_text(stem.with_suffix(end)) for end in (".error", ".log"))
        if said:
            return unpack_error(*json.loads(said))
        if worker.returncode == TARGET:
            return WriteError(f"{self._aside}: cannot be written; make room there, or {REMEDY}")
        last = log.splitlines()[-1] if log else "it was killed"
        return DataError(f"{stem}: the process that prepares it died: {last}; look at its memory")


def _text(path: Path) -> str:
    """Return a file's text; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _join(aside: Path, plan: dict[str, Any], shape: Shape) -> Path:
    """Make one store of the parts, and give it its name. Returns where it then is."""
    for path, *facts in json.loads((aside / _FILES).read_text(encoding="utf-8")):
        (now,) = find_files(path)
        if [*now[1:]] != facts:
            raise DataError(f"{path}: was changed while it was read; let nothing write there, and start again")
    parts = [json.loads((aside / f"{part_name(number)}.json").read_text()) for number in range(plan["num_parts"])]
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
        "shown": [message for part in parts for message in part.pop("shown")][:MOST_SHOWN],
        "parts": parts,
        "pieces": _numbered(pieces),
    }
    if sum(part["num_rows"] for part in parts) == 0:
        raise DataError(_why_empty(facts, shape))
    with writing(aside, REMEDY):
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
