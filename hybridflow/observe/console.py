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


def printable(text: str) -> str:
    r"""Return a text that others may have written, with what a terminal would obey as ``\u001b``, as JSON has it."""
    return _COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


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
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Letters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    with contextlib.suppress(BrokenPipeError), flushed():
        print(printable(text))


def complain(what: object) -> None:
    """Print an error or a warning on standard error. No line of it looks like the beginning of another message."""
    text = printable(str(what)).replace("\n", "\n  ")
    print(f"hybridflow: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Turn what asks the process to end into ``Ended``; a second one ends it at once."""

    def end(number: int, frame: object) -> NoReturn:
        signal.signal(number, signal.SIG_DFL)
        raise Ended(number)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
