"""The side of an engine's process: a line of JSON in, a line of JSON out.

Only the standard library, since engines have environments of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def serve(load: Callable[[], Callable[[], Any]]) -> None:
    """Answer jobs until standard input ends.

    A job names a method of the engine in ``do``, the rest are its arguments. Of ``generate`` the time and the memory
    are added to the answer.

    Args:
        load: Imports what the engine needs; what it returns makes the engine. Memory counts from between the two.
    """
    answer = open_answers()
    make = load()
    before_bytes = _status_bytes("VmRSS")
    engine = make()
    answer({"versions": engine.versions})
    for line in sys.stdin:
        job = json.loads(line)
        method = getattr(engine, job.pop("do"))
        answer(method(**job) if method != engine.generate else _timed(method, job, before_bytes))


def open_answers() -> Callable[[dict[str, Any]], None]:
    """What writes a line of JSON to where standard output went; what libraries print goes to the log from now on."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(found: dict[str, Any]) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    return answer


def _timed(generate: Callable[..., dict[str, Any]], job: dict[str, Any], before_bytes: int) -> dict[str, Any]:
    _reset_peak()
    began_s = time.perf_counter()
    found = generate(**job)
    wall_s = time.perf_counter() - began_s
    return {**found, "wall_s": wall_s, "peak_bytes": _peak_bytes(before_bytes)}


def _reset_peak() -> None:
    # Where the kernel does not let us, the peak is that of the process so far.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _peak_bytes(before_bytes: int) -> int:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return _status_bytes("VmHWM") - before_bytes


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}; measuring memory needs Linux")
