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


def print_out(text: str) -> None:
    """Print what may hold text of others to whoever still listens: ``| head`` closes its end early."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Letters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(printable(text), flush=True)
    except BrokenPipeError:
        # What Python would flush at exit has nowhere to go either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
