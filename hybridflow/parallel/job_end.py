"""When Slurm will end this job. No torch."""

from __future__ import annotations

import calendar
import os
import re
import time
from collections.abc import Mapping

from hybridflow.parallel.scontrol import show_job


def find_job_end(environ: Mapping[str, str] | None = None, *, is_fresh: bool = False) -> float | None:
    """Return the Unix time of this job's time limit, in seconds; None outside Slurm, or without a limit.

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
    jobs = show_job(env["SLURM_JOB_ID"])
    asked = end_of(jobs[0]) if jobs else None
    return asked if asked is not None else float(told) if told.isdigit() else None


def end_of(job: Mapping[str, str]) -> float | None:
    """Return the end time in a record of ``show_job``, as Unix time in seconds; None where it is unknown."""
    text = job.get("EndTime", "")
    if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", text) is None:
        return None
    return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%S")))
