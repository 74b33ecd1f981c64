"""All ranks' spans of a run in one file that a browser's trace viewer opens: ``trace/timeline.json``. Torch-free.

The file is JSON in Chrome's trace event format, complete after each step: not every viewer takes an array without its
closing bracket. When it has become large it is set aside as ``timeline-before.json``, in place of what was set aside
before, and a new one is begun: a run never takes more than two of them.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from hybridflow.observe.files import json_objects, writing

TRACE_DIR = "trace"

LARGEST_BYTES = 64 * 2**20
"""Above this a new file is begun."""

_FILE, _BEFORE = "timeline.json", "timeline-before.json"
_OPENING, _BETWEEN, _CLOSING = b"[\n", b",\n", b"\n]\n"

# A node is shown as a process, a rank as one of its threads. Viewers take the numbers 0 for the kernel's idle process.
_STEPS_PID, _FIRST_NODE_PID, _FIRST_TID = 1, 2, 1
_STEP = re.compile(rb'"args":\{"step":([0-9]{1,15})\}\},?\n?$')

SpanRow = Sequence[str | float]
"""``kind``, ``name``, ``seconds``, ``start_s``: a ``Span``, or what a message has made of one."""


class TimelineFile:
    """The timeline of a run; written by one rank, which adds to what earlier starts of the run left.

    Args:
        run_dir: Directory of the run; gets ``trace/``.
        num_ranks: Ranks of the job.
        ranks_per_node: How many consecutive ranks share a node.

    Raises:
        WriteError: The file system refuses.
    """

    def __init__(self, run_dir: Path, *, num_ranks: int, ranks_per_node: int) -> None:
        self._path = run_dir / TRACE_DIR / _FILE
        self._places = [(_FIRST_NODE_PID + rank // ranks_per_node, _FIRST_TID + rank) for rank in range(num_ranks)]
        with writing(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _mend(self._path)
            _append(self._path, self._names())

    def add(self, step: int, start_s: float, step_s: float, spans: Iterable[Iterable[SpanRow]]) -> None:
        """Add a step.

        Args:
            step: Its number.
            start_s: When it began, Unix time in seconds.
            step_s: How long it took, in seconds.
            spans: The spans of each rank.

        Raises:
            WriteError: The file system refuses.
        """
        events = [_event(("step", f"step {step}", step_s, start_s), _STEPS_PID, _FIRST_TID, step)]
        for place, own in zip(self._places, spans, strict=True):
            events += [_event(row, *place, step) for row in own]
        with writing(self._path):
            if self._path.stat().st_size > LARGEST_BYTES:
                os.replace(self._path, self._path.with_name(_BEFORE))
                _append(self._path, self._names())
            _append(self._path, events)

    def _names(self) -> list[str]:
        """Return the names that viewers show for the nodes and ranks."""
        events = [_name("process_name", _STEPS_PID, _FIRST_TID, "steps")]
        for pid in dict.fromkeys(pid for pid, _ in self._places):
            events.append(_name("process_name", pid, _FIRST_TID, f"node {pid - _FIRST_NODE_PID}"))
        return events + [_name("thread_name", pid, tid, f"rank {tid - _FIRST_TID}") for pid, tid in self._places]


class RankSpan(NamedTuple):
    """A span of a step, as the file has it.

    Attributes:
        rank: Rank that it ran on.
        kind: Kind of work.
        name: Which piece of it.
        start_s: When it began, in seconds since the step began.
        seconds: Its length.
    """

    rank: int
    kind: str
    name: str
    start_s: float
    seconds: float


class StepTimeline(NamedTuple):
    """The timeline of one step.

    Attributes:
        seconds: Its length.
        spans: Spans of all ranks.
    """

    seconds: float
    spans: list[RankSpan]


def read_timeline(run_dir: Path, steps: Collection[int]) -> dict[int, StepTimeline]:
    """Read the timelines of some steps, also while the run writes; skip what is cut short.

    Of a step that was made again after a kill, return the last one. A step that is not in the files is left out.

    Raises:
        OSError: A file cannot be read.
    """
    found: dict[int, StepTimeline] = {}
    began: dict[int, float] = {}
    for path in (run_dir / TRACE_DIR / name for name in (_BEFORE, _FILE)):
        if not path.is_file():
            continue
        with path.open("rb") as file:
            for line in file:
                number = _STEP.search(line)
                if number is not None and int(number[1]) in steps:
                    _take_event(line, int(number[1]), found, began)
    return found


def _take_event(line: bytes, step: int, found: dict[int, StepTimeline], began: dict[int, float]) -> None:
    """Add an event to its step; the event of the step itself comes first, and begins the step anew."""
    event = next(json_objects([line.decode(errors="replace").rstrip(",\n")]), {})
    try:
        kind, name, pid = str(event["cat"]), str(event["name"]), int(event["pid"])
        start_s, seconds, rank = float(event["ts"]) / 1e6, float(event["dur"]) / 1e6, int(event["tid"]) - _FIRST_TID
    except (KeyError, TypeError, ValueError, OverflowError):
        return
    if not (math.isfinite(start_s) and math.isfinite(seconds)):
        return
    if pid == _STEPS_PID:
        found[step], began[step] = StepTimeline(seconds, []), start_s
    elif step in found:
        found[step].spans.append(RankSpan(rank, kind, name, start_s - began[step], seconds))


def _event(row: SpanRow, pid: int, tid: int, step: int) -> str:
    # Written out by hand: with hundreds of ranks there are tens of thousands in each step.
    kind, name, seconds, start_s = row
    times = f'"ts":{float(start_s) * 1e6:.0f},"dur":{float(seconds) * 1e6:.0f}'
    return f'{{{_what(kind, name)},{times},"pid":{pid},"tid":{tid},"args":{{"step":{step}}}}}'


@functools.lru_cache(maxsize=1024)
def _what(kind: object, name: object) -> str:
    return f'"name":{json.dumps(name)},"cat":{json.dumps(kind)},"ph":"X"'


def _name(what: str, pid: int, tid: int, name: str) -> str:
    event = {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
    return json.dumps(event, separators=(",", ":"))


def _append(path: Path, events: Sequence[str]) -> None:
    """Put events in before the closing bracket, in one write."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        end = os.fstat(descriptor).st_size
        place, before = (0, _OPENING) if end == 0 else (end - len(_CLOSING), _BETWEEN)
        left = memoryview(before + _BETWEEN.join(event.encode() for event in events) + _CLOSING)
        while left:
            num_written = os.pwrite(descriptor, left, place)
            place, left = place + num_written, left[num_written:]
    finally:
        os.close(descriptor)


def _mend(path: Path) -> None:
    """Close a file whose writer was killed while it wrote, without what it had not finished."""
    if not path.exists():
        return
    content = path.read_bytes()
    if content.startswith(_OPENING) and content.endswith(b"}" + _CLOSING):
        return
    last = content.rfind(b"}" + _BETWEEN)
    with path.open("r+b") as file:
        file.truncate(last + 1 if content.startswith(_OPENING) else 0)
        if file.seek(0, os.SEEK_END):
            file.write(_CLOSING)
