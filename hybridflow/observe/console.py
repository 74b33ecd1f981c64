"""What the commands on checkpoints have in common: printing to whoever listens, and ending when asked to."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

from hybridflow.exit_status import Ended


def print_out(text: str) -> None:
    """Print to whoever still listens: ``| head`` closes its end early."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # What Python would flush at exit has nowhere to go either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
