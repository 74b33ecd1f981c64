"""When Slurm will end this job. No torch."""

from __future__ import annotations

import calendar
import os
import re
import subprocess
import time
from collections.abc import Mapping

_ANSWERS_S = 20.0


def find_job_end(environ: Mapping[str, str] | None = None, *, is_fresh: bool = False) -> float | None:
    """Unix time at which this job's time limit is reached, in seconds; None outside Slurm, or without a limit.

    Args:
        environ: What Slurm left; None: this process's environment.
        is_fresh: Ask Slurm, since a limit can be changed while the job runs; else what it said at the start is enough.
    """
    env = os.environ if environ is None else environ
    if "SLURM_JOB_ID" not in env:
        return None
    told = env.get("SLURM_JOB_END_TIME", "")
    if told.isdigit() and not is_fresh:
        return float(told)
    asked = _ask(env["SLURM_JOB_ID"])
    return asked if asked is not None else float(told) if told.isdigit() else None


def _ask(job_id: str) -> float | None:
    """What ``scontrol`` says; None where it does not run, as in some containers, or does not answer."""
    try:
        shown = subprocess.run(
            ["scontrol", "show", "job", "--oneliner", job_id],
            # Times are printed as the clock of this zone shows them.
            env={**os.environ, "TZ": "UTC", "SLURM_TIME_FORMAT": "standard"},
            capture_output=True,
            text=True,
            check=True,
            timeout=_ANSWERS_S,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_end_time(shown)


def parse_end_time(shown: str) -> float | None:
    """The end time in a line of ``scontrol show job``, in UTC, as Unix time in seconds; None where it is unknown."""
    match = re.search(r"\bEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\b", shown)
    if match is None:
        return None
    return float(calendar.timegm(time.strptime(match[1], "%Y-%m-%dT%H:%M:%S")))
