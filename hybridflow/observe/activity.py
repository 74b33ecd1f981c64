"""What this rank's main thread is doing, in words, for whoever has to tell of a failure. No torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_open: list[tuple[str, float]] = []
"""Work of the main thread, and since when; outermost first."""

_waits: list[tuple[str, float]] = []
"""Waits of the main thread for a user's code."""

_between = "start"


@contextmanager
def current_activity(name: str) -> Iterator[None]:
    """Name the activity of a ``with`` block; an exception that leaves the block carries the name."""
    global _between
    _between = "the work between calls"
    _open.append((name, time.time()))
    try:
        yield
    except BaseException as error:
        # Where it was raised is known here alone: whoever tells of it stands outside.
        error.__dict__.setdefault("hybridflow_activity", now())
        raise
    finally:
        _open.pop()


@contextmanager
def waiting_for(what: str, since_s: float) -> Iterator[None]:
    """Say that the main thread waits for a user's code in a ``with`` block.

    Args:
        what: That code, for messages.
        since_s: When it last did something, on the monotonic clock.
    """
    _waits.append((what, since_s))
    try:
        yield
    finally:
        _waits.pop()


def waited_for() -> tuple[str, float] | None:
    """Return what ``waiting_for`` was told, while its block runs; for another thread to ask."""
    return next(iter(_waits[-1:]), None)


def now() -> str:
    """Return the innermost piece of work with the outermost around it: ``actor.update (train step 3)``."""
    names = [name for name, _ in _open[:]]
    if not names:
        return _between
    return names[-1] if len(names) == 1 else f"{names[-1]} ({names[0]})"


def since_s() -> float | None:
    """Return the Unix time at which the innermost piece of work began, in seconds; None when there is none."""
    # A slice, since another thread may end it between a look at the length and one at the item.
    return next((began_s for _, began_s in _open[-1:]), None)


def activity_at(error: BaseException) -> str:
    """Return the activity in which an exception or its cause was raised; the current activity when none is known."""
    found: BaseException | None = error
    words = now()
    while found is not None:
        words = found.__dict__.get("hybridflow_activity", words)
        found = found.__cause__ or found.__context__
    return words
