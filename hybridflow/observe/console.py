"""Printing to whoever listens, and ending when asked to."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

from hybridflow.exit_status import Ended


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
    """Print to whoever still listens: ``| head`` closes its end early."""
    with contextlib.suppress(BrokenPipeError), flushed():
        print(text)


def print_foreign(text: str) -> None:
    """Print as ``print_out`` does; letters that the terminal cannot show are escaped."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    print_out(text)


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
