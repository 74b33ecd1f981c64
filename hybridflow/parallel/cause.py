"""What ended a job, and where its ranks were then, in words. No torch."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType

from hybridflow.errors import DeadlineError, HybridflowError
from hybridflow.exit_status import FAILURE, exit_status, system_status
from hybridflow.layout.mesh import format_ranks
from hybridflow.observe.activity import activity_at, now
from hybridflow.plugins import is_library, is_ours

_MOST_PLACES = 32
"""Groups of ranks in a report; the logs have them all."""

_WITH_TRACEBACK = ("ours", "program")


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why a job ends.

    Attributes:
        kind: ``explained``: an error for the user to act on; ``ours``: a bug; ``program``: an error of a Python program
            outside of hybridflow; ``lost``: a rank is gone or silent; ``waited``: a rank waited in vain for another,
            which may know more.
        rank: The rank that failed.
        host: Its node.
        activity: What the rank was doing.
        text: The message, or the traceback.
        status: Exit status of every rank.
    """

    kind: str
    rank: int
    host: str
    activity: str
    text: str
    status: int


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank is.

    Attributes:
        host: Its node.
        activity: What it is doing.
        line: The line of code that its main thread is at; empty: the rank does not answer.
    """

    host: str
    activity: str
    line: str


def cause_of(error: Exception, rank: int, host: str) -> Cause:
    """Return the failure of this rank, from an exception."""
    kind = "waited" if isinstance(error, DeadlineError) else "ours"
    text, status = str(error), exit_status(error)
    # An OSError names its file.
    if isinstance(error, OSError):
        kind, status = "explained", system_status(error)
    elif isinstance(error, HybridflowError) and kind == "ours":
        kind = "explained"
    elif kind == "ours":
        text = "".join(traceback.format_exception(error)).rstrip()
        if not any(is_ours(each.filename) for each in traceback.extract_tb(error.__traceback__)):
            kind = "program"
    return Cause(kind=kind, rank=rank, host=host, activity=activity_at(error), text=text, status=status)


def lost_rank(rank: int, host: str, activity: str, *, is_closed: bool, dead_after_s: float) -> Cause:
    """Return the failure of a rank that cannot report it.

    Args:
        rank: Which.
        host: Its node.
        activity: What it said last that it was doing.
        is_closed: Its connection closed; else it was silent for ``dead_after_s``.
        dead_after_s: In seconds.
    """
    if is_closed:
        what = "its connection closed: it was killed, or left; if nobody killed it, memory ran out on its node"
    else:
        what = (
            f"no sign of life for {dead_after_s:g} s: its node or network is down, or it was stopped; if it was only "
            "busy in one long call of a library, raise cluster.dead_after_s"
        )
    return Cause(kind="lost", rank=rank, host=host, activity=activity, text=what, status=FAILURE)


def tell_cause(cause: Cause) -> str:
    """Format a cause for the console: one line, or a traceback between two lines."""
    who = f"hybridflow: rank {cause.rank} on {cause.host}"
    if cause.kind == "lost":
        return f"{who} was lost, last seen in {cause.activity}: {cause.text}"
    if cause.kind in _WITH_TRACEBACK:
        end = "hybridflow: this is an error of hybridflow's own"
        if cause.kind == "program":
            end = "hybridflow: this is an error of the program's own"
        return f"{who} failed in {cause.activity}:\n{cause.text}\n{end}"
    return f"{who}, in {cause.activity}: {cause.text}"


def in_a_line(cause: Cause) -> str:
    """Return a cause in one line: without its traceback but for the last line, which names the error."""
    first, *rest = tell_cause(cause).splitlines()
    return f"{first} {cause.text.splitlines()[-1]}" if cause.kind in _WITH_TRACEBACK and rest else first


def tell_places(places: Mapping[int, Place]) -> list[str]:
    """Return one line for all ranks at the same place, the fewest first: a rank that is alone is likely in trouble."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, place in sorted(places.items()):
        groups.setdefault((place.line, place.activity), []).append(rank)
    lines = []
    for (line, activity), ranks in sorted(groups.items(), key=lambda item: (item[0][0] != "", len(item[1]), item[1])):
        hosts = list(dict.fromkeys(places[rank].host for rank in ranks))
        where = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more nodes" if len(hosts) > 4 else "")
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranks(ranks)}"
        what = f"in {activity}, at {line}" if line else f"no answer, last seen in {activity}"
        lines.append(f"  {who} on {where}: {what}")
    if len(lines) > _MOST_PLACES:
        lines = [*lines[:_MOST_PLACES], f"  and {len(lines) - _MOST_PLACES} more places, which the ranks' logs have"]
    return lines


def own_place(host: str) -> Place:
    """Return where this process's main thread is; for another thread to ask."""
    return Place(host=host, activity=now(), line=_lines(sys._current_frames().get(threading.main_thread().ident or 0)))


def place_of(error: Exception, host: str) -> Place:
    """Return where an exception, or the one that caused it, was raised."""
    first: BaseException = error
    while first.__cause__ is not None:
        first = first.__cause__
    trace = first.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return Place(host=host, activity=activity_at(error), line=_lines(trace.tb_frame if trace is not None else None))


def _lines(frame: FrameType | None) -> str:
    """Return the innermost line outside libraries, then the innermost: ``rewards.py:12 score > parser.py:8 parse``."""
    lines: list[str] = []
    while frame is not None:
        path, is_own = frame.f_code.co_filename, _is_own(frame.f_code.co_filename)
        if is_own or not lines:
            lines.append(f"{os.path.basename(path)}:{frame.f_lineno} {frame.f_code.co_name}")
        if is_own:
            break
        frame = frame.f_back
    return " > ".join(reversed(lines)) or "no line"


def _is_own(path: str) -> bool:
    """Return whether a file belongs to hybridflow or its user."""
    return is_ours(path) or not is_library(path)


def all_stacks() -> str:
    """Return the stacks of this process's threads, the main thread's first, without the calling thread's."""
    frames, main = sys._current_frames(), threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    others = [ident for ident in frames if ident not in (main, threading.get_ident())]
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frames[ident])).rstrip()
        for ident in (main, *others)
        if ident in frames
    )
