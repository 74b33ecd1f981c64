"""What Slurm says of its jobs, partitions and nodes. No torch."""

from __future__ import annotations

import os
import re

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
