"""Running a program of the system for what it prints, with a deadline. No torch."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence


def try_program(
    argv: Sequence[str], *, environ: Mapping[str, str] | None = None, deadline_s: float = 20.0
) -> tuple[str, str]:
    """Run a program and return its standard output and the reason of a failure, empty on success."""
    name = os.path.basename(argv[0])
    try:
        done = subprocess.run(
            argv,
            env=None if environ is None else dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        written = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else ""
        return written, f"{name} did not end within {deadline_s:g} s"
    except OSError as error:
        return "", f"{name} cannot be run: {error.strerror}"
    if done.returncode == 0:
        return done.stdout, ""
    said = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "and said nothing")
    return done.stdout, f"{name} {_ending(done.returncode)}: {said.strip()[:300]}"


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
