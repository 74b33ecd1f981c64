"""A rank's own log, and the console that all share: the lowest rank's output, which Slurm writes to the job's file.

Until the log is opened everything goes to the console. Then every rank but the lowest writes its output, and that of
the libraries in it, to ``logs/NUMBER/rank-RANK.log`` of the run. No torch.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hybridflow.observe.console import accept_all_letters, has_styles, printable, styled
from hybridflow.observe.files import write_all, writing

LOGS_DIR = "logs"
LOG_KINDS = ("text", "json")
LOG_VARIABLE = "HYBRIDFLOW_LOG"
"""``json``: the console gets a JSON object for each line. ``train --log`` sets it."""

_STYLE_OF = {"start": "heading", "end": "heading"}
_ERASE = "\r\x1b[2K"
_USUAL_COLUMNS = 80

_MOST_EARLY_NOTES = 200

_console_fds = (1, 2)
_log_fd: int | None = None
_log_path: Path | None = None
_early_notes: list[str] = []
_console_lock = threading.Lock()
_has_live_line = False


def open_rank_log(run_dir: Path, start_number: int, rank: int) -> None:
    """Open this rank's log, once per process; the first start of a run is number 1.

    Rank 0 keeps the console, and notes events in its log.

    Raises:
        WriteError: It cannot be made.
    """
    global _console_fds, _log_fd, _log_path
    path = run_dir / LOGS_DIR / f"{start_number:04d}" / f"rank-{rank:05d}.log"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _log_fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        for line in _early_notes:
            _write(_log_fd, line)
    _log_path = path
    _early_notes.clear()
    accept_all_letters()
    if rank != 0:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            if isinstance(stream, io.TextIOWrapper):
                # A file is written in blocks otherwise, the last of which a kill would take along.
                stream.reconfigure(line_buffering=True)
        # The descriptors themselves, so that what C++ and NCCL print comes along.
        _console_fds = (os.dup(1), os.dup(2))
        os.dup2(_log_fd, 1)
        os.dup2(_log_fd, 2)


def own_log() -> Path | None:
    """Return the path of this rank's log; None before it is open."""
    return _log_path


def say(text: str) -> None:
    """Print a line on the job's console, from whichever rank. The job goes on whatever becomes of its console."""
    say_event("message", text)


def say_event(event: str, text: str, **facts: Any) -> None:
    """Print what happened on the job's console: a line of text, or of JSON with ``train --log json``.

    Args:
        event: Its kind: ``start``, ``step``, ``validation``, ``end``, or ``message``.
        text: Lines for a person.
        **facts: More for a program, of JSON's types.
    """
    global _has_live_line
    if writes_json():
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        lines = json.dumps({"time": now, "event": event, "message": text, **facts})
    else:
        first, newline, rest = printable(text).partition("\n")
        lines = (styled(first, _STYLE_OF[event], _console_fds[0]) if event in _STYLE_OF else first) + newline + rest
    try:
        with _console_lock:
            lines, _has_live_line = (_ERASE if _has_live_line else "") + lines, False
            if _console_fds[0] != 1 or not _printed(lines):
                _write_raw(_console_fds[0], f"{lines}\n")
    except OSError:
        # So that neither what Python still holds, nor what others print, ends the job.
        os.dup2(os.open(os.devnull, os.O_WRONLY), _console_fds[0])


def _printed(lines: str) -> bool:
    """Print on Python's stdout, and return whether it took the lines. Raises OSError where nobody listens any more."""
    try:
        print(lines, flush=True)
    except ValueError:
        # The program has closed it, or put another in its place that lacks a letter.
        return False
    return True


def show_live(text: str) -> None:
    """Show what goes on now in the last line of a terminal, in the place of what was shown there; empty: nothing."""
    global _has_live_line
    with contextlib.suppress(OSError), _console_lock:
        # Some terminals do not know theirs.
        width = os.get_terminal_size(_console_fds[0]).columns or _USUAL_COLUMNS
        _write_raw(_console_fds[0], _ERASE + styled(printable(text)[: width - 1], "quiet", _console_fds[0]))
        _has_live_line = bool(text)


def can_show_live() -> bool:
    """Return whether the console is a terminal in which a line can be replaced."""
    return has_styles(_console_fds[0]) and not writes_json()


def writes_json() -> bool:
    """Return whether the console gets JSON, as with ``train --log json``."""
    return os.environ.get(LOG_VARIABLE) == "json"


def tell(text: str) -> None:
    """Print lines about an error on the job's console, from whichever rank and thread; if it can be."""
    with contextlib.suppress(OSError):
        # Without the lock, which a stuck thread may hold.
        _write_raw(_console_fds[1], _ERASE if _has_live_line else "")
        _write(_console_fds[1], f"{text}\n")


def note(text: str) -> None:
    """Add lines to this rank's log, the first with the time; before the log is open they are kept for it.

    A log that cannot be written, as on a full disk, hides no error.
    """
    time = datetime.now(timezone.utc).isoformat(sep=" ", timespec="milliseconds").replace("+00:00", "Z")
    line = f"{time} {text}\n"
    if _log_fd is None:
        _early_notes[:] = [*_early_notes[-_MOST_EARLY_NOTES:], line]
    else:
        with contextlib.suppress(OSError):
            _write(_log_fd, line)


def _write(descriptor: int, text: str) -> None:
    """Write all of it, at once if the file takes it, past the buffers that a stuck thread may hold."""
    _write_raw(descriptor, printable(text))


def _write_raw(descriptor: int, text: str) -> None:
    write_all(descriptor, text.encode())
