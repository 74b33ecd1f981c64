"""Handing a batch file to Slurm, and following what becomes of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridflow.errors import ConfigError, DeadlineError
from hybridflow.observe.console import complain
from hybridflow.parallel.scontrol import show_job

_SBATCH_DEADLINE_S = 120.0
_SCONTROL_DEADLINE_S = 60.0
_SILENCE_DEADLINE_S = 600.0
"""How long Slurm's controller may be away before a job is no longer followed."""

_POLL_S = 2.0

_GOING_ON = (
    *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING"),
    *("REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "STAGE_OUT", "RESV_DEL_HOLD", "POWER_UP_NODE"),
)


def submit(batch: Path, options: Iterable[str]) -> str:
    """Submit a batch file and return the job's number.

    Args:
        batch: The file.
        options: Those of its directives. They are given once more, since variables such as ``SBATCH_PARTITION`` rule
            over directives.

    Raises:
        ConfigError: This machine has no sbatch, or Slurm refuses the job.
        DeadlineError: Slurm does not answer.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "no sbatch on this machine; launch from a login node of the cluster, see the batch file with --print, or "
            "use `hybridflow launch local`"
        )
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", *options, str(batch)],
            capture_output=True,
            text=True,
            timeout=_SBATCH_DEADLINE_S,
            stdin=subprocess.DEVNULL,
            check=False,
            env=outside_job(os.environ),
        )
    except subprocess.TimeoutExpired:
        raise DeadlineError(
            f"sbatch did not answer within {_SBATCH_DEADLINE_S:g} s; see `squeue --me` whether the job is there"
        ) from None
    if done.returncode != 0:
        said = " ".join(done.stderr.replace("sbatch: ", "").split())
        remedies = [remedy for word, remedy in _REMEDIES.items() if word in said.lower()]
        if any(word in said.lower() for word in _AWAY) and _NO_CLUSTER not in remedies:
            raise DeadlineError(f"sbatch had no answer: {said}; see `squeue --me` whether the job is there")
        remedies.append("change the site settings or the command accordingly")
        raise ConfigError(f"Slurm refuses the job: {said}; {remedies[0]}")
    # The name of the cluster may follow.
    return done.stdout.strip().partition(";")[0]


def outside_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables without those that Slurm gave a job from which another is submitted: it would inherit them.

    It would take itself for a task of the other's array, for instance, and put that task back into the queue.
    """
    if "SLURM_JOB_ID" not in environ:
        return dict(environ)
    return {
        name: value
        for name, value in environ.items()
        if name in _OF_CLUSTER or not name.startswith(("SLURM_", "SLURMD_", "SRUN_"))
    }


_OF_CLUSTER = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")
"""Variables that say where Slurm is."""

_AWAY = ("timed out", "unable to contact", "zero bytes", "connection failure", "standby mode")
"""Words of sbatch where the controller did not answer: it may have the job."""

_NO_CLUSTER = "no cluster answers here; submit on a login node, or set SLURM_CONF"

_REMEDIES = {
    "resolve_ctls": _NO_CLUSTER,
    "configuration source": _NO_CLUSTER,
    "account": "set account and partition in the site settings (`sacctmgr show associations user=$USER`)",
    "partition": "set partition in the site settings, or give --partition (`sinfo -s` lists them)",
    "qos": "set qos in the site settings (`sacctmgr show qos`)",
    "time limit": "give a shorter --time (`sinfo -o '%P %l'` shows the limits)",
    "node": "ask for what a node has: gpus_per_node, gpu_type, cpus_per_task, ranks_per_node, memory (`sinfo -Nel`)",
}


@dataclass(frozen=True, kw_only=True)
class JobState:
    """State of a job, as Slurm tells it.

    Attributes:
        state: Slurm's word, such as ``RUNNING``.
        reason: Why it is so.
        nodes: Where it runs.
        status: Exit status, 128 + the signal where a signal ended it.
    """

    state: str
    reason: str
    nodes: str
    status: int

    @property
    def is_over(self) -> bool:
        """Return whether nothing more will come."""
        return self.state not in _GOING_ON

    @property
    def has_run(self) -> bool:
        """Return whether it was given nodes."""
        return self.nodes not in ("", "(null)")

    def __str__(self) -> str:
        where = f" on {self.nodes}" if self.has_run else ""
        return f"{self.state}{where}" + (f" ({self.reason})" if self.reason != "None" else "")


def job_state(records: Sequence[Mapping[str, str]]) -> JobState | None:
    """Return the job's state in the first of Slurm's records, or None without records."""
    job = records[0] if records else {}
    if "JobState" not in job:
        return None
    status, _, signal = job.get("ExitCode", "").partition(":")
    return JobState(
        state=job["JobState"],
        reason=job.get("Reason", ""),
        nodes=job.get("NodeList", ""),
        status=128 + int(signal) if signal not in ("", "0") else int(status or 0),
    )


def follow(job_id: str, log: Path) -> int:
    """Print a job's log as it grows, and changes of its state on standard error, until the job is over.

    A requeued job is followed further.

    Returns:
        The job's exit status; 1 where Slurm ended it without one.

    Raises:
        DeadlineError: Slurm was away for too long; the job may go on.
        KeyboardInterrupt: The reader has seen enough, and is told what becomes of the job.
    """
    try:
        return _follow(job_id, log)
    except KeyboardInterrupt:
        complain(f"job {job_id} goes on; `scancel {job_id}` ends it, and its log is {log}")
        raise


def _follow(job_id: str, log: Path) -> int:
    place, last, seen = 0, "", time.monotonic()
    while True:
        state = job_state(show_job(job_id, deadline_s=_SCONTROL_DEADLINE_S))
        place = _print_new(log, place)
        if state is None:
            if time.monotonic() - seen > _SILENCE_DEADLINE_S:
                raise DeadlineError(
                    f"job {job_id}: Slurm has told nothing for {_SILENCE_DEADLINE_S:g} s; the job may go on, its log "
                    f"is {log}"
                )
        else:
            seen = time.monotonic()
            if str(state) != last:
                last = str(state)
                print(f"job {job_id}: {last}", file=sys.stderr, flush=True)
            if state.is_over:
                _print_new(log, place)
                if state.has_run and not log.exists():
                    complain(
                        f"job {job_id} left no log {log}: {state.nodes} cannot write there, or this machine sees "
                        "another file system; set run_dir to a directory that all nodes see"
                    )
                return 0 if state.state == "COMPLETED" else state.status or 1
        time.sleep(_POLL_S)


def _print_new(log: Path, place: int) -> int:
    """Print what a log has from a place on; return where it ends now."""
    try:
        with log.open("rb") as file:
            # A shorter file was begun anew: by --open-mode=truncate, or by who rotates logs.
            place = file.seek(place if place <= file.seek(0, os.SEEK_END) else 0)
            content = file.read()
    except FileNotFoundError:
        return place
    sys.stdout.flush()
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()
    return place + len(content)
