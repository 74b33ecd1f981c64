"""What Slurm says of its jobs, partitions and nodes, and when it will end this job. No torch."""

from __future__ import annotations

import calendar
import os
import re
import time
from collections.abc import Mapping

from hybridflow.programs import try_program


def parse_records(text: str) -> list[dict[str, str]]:
    """Parse the output of ``scontrol show … -o``: one record per line, of ``Key=value`` whose values may hold ``=``.

    A value with spaces runs on until the next ``Key=``. If a key is there twice, the first one counts: a job's comment
    may hold anything and comes late.
    """
    records = []
    for line in text.splitlines():
        pairs = re.findall(r"(?:^|\s)([A-Z][\w/:]*)=((?:(?!\s[A-Z][\w/:]*=).)*)", line)
        if pairs:
            records.append({key: value.strip() for key, value in reversed(pairs)})
    return records


def show_job(job_id: str, *, deadline_s: float = 20.0) -> list[dict[str, str]]:
    """Return Slurm's record of each component of a job, with times in UTC.

    Empty where Slurm does not answer, knows the job no more, or is not there, as in some containers.
    """
    # Times are printed as the clock of this zone shows them.
    environ = {**os.environ, "TZ": "UTC", "SLURM_TIME_FORMAT": "standard"}
    command = ["scontrol", "show", "job", "--oneliner", job_id]
    text, failure = try_program(command, environ=environ, deadline_s=deadline_s)
    return [] if failure else parse_records(text)


def find_job_end(*, is_fresh: bool = False) -> float | None:
    """Return the Unix time of this job's time limit, in seconds; None outside Slurm, or without a limit.

    Args:
        is_fresh: Ask Slurm, since a limit can be changed while the job runs; else what it said at the start is enough.
    """
    if "SLURM_JOB_ID" not in os.environ:
        return None
    told = os.environ.get("SLURM_JOB_END_TIME", "")
    if told.isdigit() and not is_fresh:
        return float(told)
    jobs = show_job(os.environ["SLURM_JOB_ID"])
    asked = end_of(jobs[0]) if jobs else None
    return asked if asked is not None else float(told) if told.isdigit() else None


def end_of(job: Mapping[str, str]) -> float | None:
    """Return the end time in a record of ``show_job``, as Unix time in seconds; None where it is unknown."""
    text = job.get("EndTime", "")
    if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", text) is None:
        return None
    return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%S")))
