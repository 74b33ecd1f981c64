"""What commands have in common: printing to whoever listens, also what others have written, and ending when asked."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

from hybridflow.exit_status import Ended

# Control characters but tab and newline, marks that turn the direction of text, separators of lines, lone surrogates.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_STYLES = {"heading": "1", "quiet": "2", "warning": "1;33"}


def printable(text: str) -> str:
    r"""Return a text that others may have written, with what a terminal would obey as ``\u001b``, as JSON has it."""
    return _COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def duration(seconds: float) -> str:
    """Format a length of time by its two largest units: ``1 h 20 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = whole // 60
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 1440 else f"{minutes // 1440} d {minutes // 60 % 24} h"


def rough_duration(seconds: float) -> str:
    """Format an estimated length of time by its largest unit: ``80 s``, ``80 min``, ``9.5 h``, ``4.2 days``."""
    for unit, length_s, most in (("s", 1, 100), ("min", 60, 100), ("h", 3600, 72)):
        if seconds < most * length_s:
            return f"{seconds / length_s:.0f} {unit}" if unit != "h" else f"{seconds / length_s:.1f} h"
    return f"{seconds / 86400:.1f} days"


def format_bytes(number: int) -> str:
    """Format bytes with three digits, in powers of 1000: ``1.50 GB``."""
    size, unit = float(number), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    if unit == "B":
        return f"{number} B"
    return f"{size:.{2 if size < 9.995 else 1 if size < 99.95 else 0}f} {unit}"


def format_seconds(time_s: float) -> str:
    """Format seconds with three digits, in the unit that suits."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if time_s >= scale:
            return f"{time_s / scale:.3g} {unit}"
    return "0 s" if time_s == 0 else f"{time_s * 1e6:.3g} µs"


def styled(text: str, style: str, stream: int = 1) -> str:
    """Return a text for a standard stream: with a style, if that is a terminal and ``NO_COLOR`` is not set.

    Args:
        text: One line.
        style: A key of ``_STYLES``.
        stream: Number of the file.
    """
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if has_styles(stream) else text


def has_styles(stream: int = 1) -> bool:
    """Return whether a standard stream is a terminal that takes colors, and the user has not said no."""
    # https://no-color.org: any text that is not empty.
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and os.isatty(stream)


def ensure_streams() -> None:
    """Open /dev/null in the place of each standard stream that the caller closed, before a file takes its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free.
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    accept_all_letters()


def accept_all_letters() -> None:
    r"""Let what is printed hold letters that the streams' encoding lacks, such as ASCII: they come as ``\xd7``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # It is closed, or flushes to where nobody listens any more.
            with contextlib.suppress(OSError, ValueError):
                stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def flushed() -> Iterator[None]:
    """Flush stdout at the end of what prints there.

    Raises:
        OSError: Nobody listens any more, or the file is full. Python then complains at its end neither of what is left
            nor of what follows.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError:
        try:
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def print_out(text: str) -> None:
    """Print what may hold text of others to whoever still listens: ``| head`` closes its end early.

    Raises:
        OSError: The file is full.
    """
    accept_all_letters()
    with contextlib.suppress(BrokenPipeError), flushed():
        print(printable(text))


def complain(what: object) -> None:
    """Print an error or a warning on standard error. No line of it looks like the beginning of another message."""
    text = printable(str(what)).replace("\n", "\n  ")
    print(f"{styled('hybridflow:', 'warning', 2)} {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def signals_raise(*numbers: int) -> Iterator[None]:
    """Turn what asks the process to end into ``Ended``; a second one ends it at once.

    Args:
        numbers: Signals that ask for it; none: SIGINT and SIGTERM.
    """

    def end(number: int, frame: object) -> NoReturn:
        signal.signal(number, signal.SIG_DFL)
        raise Ended(number)

    before = {number: signal.signal(number, end) for number in numbers or (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
