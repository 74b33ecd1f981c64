"""Waiting for what comes soon."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], *, within_s: float = 30.0, what: str = "") -> None:
    """Return as soon as the condition holds; fail where it does not in time."""
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {within_s:g} s: {what or condition}"
        time.sleep(0.01)
