"""Slurm: its version, its settings that matter to a long job, its partitions' limits, and those of the own job."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence

from hybridflow.doctor.finding import NOTE, OK, Finding, note, problem
from hybridflow.exit_status import REQUEUE
from hybridflow.parallel.scontrol import parse_records
from hybridflow.programs import try_program

AREA = "Slurm"

_FIRST_PSEUDO_STEP = 0xFFFFFFFA
"""From here on numbers of steps stand for the interactive shell of a job, its batch script and the like."""

_SHORT_S = 30
_NULL = ("", "(null)", "None", "N/A")


def in_step(environ: Mapping[str, str]) -> bool:
    """Return whether ``srun`` started this process, rather than a batch script or an interactive shell."""
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < _FIRST_PSEUDO_STEP


def parse_config(text: str) -> dict[str, str]:
    """Parse the output of ``scontrol show config``, by key."""
    lines = (line.partition("=") for line in text.splitlines())
    return {key.strip(): value.strip() for key, equals, value in lines if equals and re.fullmatch(r"[\w\[\]]+\s*", key)}


def leading_number(text: str) -> float | None:
    """Return the leading number, such as 30 of ``30 sec``; None if there is none."""
    match = re.match(r"\d+", text)
    return float(match[0]) if match else None


def read_config() -> tuple[dict[str, str], str]:
    """Return Slurm's settings; and why there are none, empty if there are."""
    if not shutil.which("scontrol"):
        return {}, "absent"
    text, failure = try_program(["scontrol", "show", "config"])
    return parse_config(text), failure


def check_slurm(config: Mapping[str, str], failure: str) -> list[Finding]:
    """Check Slurm as this machine sees it.

    Args:
        config: From ``read_config``.
        failure: Likewise.
    """
    if failure == "absent":
        return [Finding(area=AREA, name="Slurm", value="not on this machine: hybridflow launch local or mpi")]
    if "configuration source" in failure:
        return [
            note(
                AREA,
                "Slurm",
                "its programs are here, and no cluster: " + failure,
                "on a node of a cluster, set SLURM_CONF or ask the site",
            )
        ]
    if failure:
        return [
            problem(
                AREA,
                "controller",
                f"does not answer: {failure}",
                "is slurmctld up (scontrol ping), SLURM_CONF right, and munge running here?",
            )
        ]
    partitions, _ = try_program(["scontrol", "show", "partition", "-o"])
    findings = config_findings(config) + partition_findings(parse_records(partitions), config)
    if "SLURM_JOB_ID" in os.environ:
        job, _ = try_program(["scontrol", "show", "job", os.environ["SLURM_JOB_ID"], "-o"])
        findings += job_findings(parse_records(job))
    return findings


def config_findings(config: Mapping[str, str]) -> list[Finding]:
    """Judge the cluster's settings for a job that is to be saved, requeued and begun again."""
    findings = [
        Finding(area=AREA, name="version", value=config.get("SLURM_VERSION", "unknown")),
        Finding(area=AREA, name="MpiDefault", value=config.get("MpiDefault", "unknown")),
    ]

    def note(name: str, value: str, is_fine: bool = True, remedy: str = "") -> None:
        findings.append(Finding(area=AREA, name=name, value=value).unless(is_fine, NOTE, remedy))

    kill_wait, wait, silent = (
        leading_number(config.get(name, "")) for name in ("KillWait", "WaitTime", "SlurmdTimeout")
    )
    if kill_wait is not None:
        note(
            "KillWait",
            f"{kill_wait:g} s between TERM and KILL at the time limit",
            kill_wait >= _SHORT_S,
            "a save may take longer: ask for an earlier signal, #SBATCH --signal=B:USR1@300",
        )
    requeue = config.get("JobRequeue", "")
    if requeue:
        note(
            "JobRequeue",
            "jobs may be requeued" if requeue == "1" else "jobs are not requeued by default",
            requeue == "1",
            "add #SBATCH --requeue, or a preempted or failed job does not come back",
        )
    is_named = str(REQUEUE) in re.split(r"[,\s]+", config.get("RequeueExit", ""))
    note("RequeueExit", f"{REQUEUE} is {'' if is_named else 'not '}in it")
    if wait is not None:
        note(
            "WaitTime",
            f"{wait:g} s" + ("" if wait == 0 else " after the first task ends srun kills the others"),
            wait == 0 or wait >= 10,
            "start with srun --wait=150: ranks leave together, but not within a second",
        )
    if config.get("KillOnBadExit", "0") != "0":
        note("KillOnBadExit", "1", False, "start with srun --kill-on-bad-exit=0: it hides the ranks' own status")
    expire = re.search(r"cred_expire=(\d+)", config.get("AuthInfo", ""))
    shown = "" if expire else ", where the site has not set cred_expire"
    note("requeue", f"a requeued job waits {(int(expire[1]) if expire else 120) + 1} s or more{shown}")
    if silent is not None:
        note("SlurmdTimeout", f"{silent:g} s until a silent node counts as down")
    return findings


def partition_findings(records: Sequence[Mapping[str, str]], config: Mapping[str, str]) -> list[Finding]:
    """Judge time limits and preemption of each partition."""
    findings = []
    for record in records:
        name = f"partition {record.get('PartitionName', '?')}"
        mode = record.get("PreemptMode", "OFF")
        grace = leading_number(record.get("GraceTime", "")) or 0
        nodes = f"{record.get('TotalNodes', '?')} nodes, at most {record.get('MaxNodes', '?')} a job"
        value = f"{record.get('State', '?')}, {nodes}, time {record.get('DefaultTime')} up to {record.get('MaxTime')}"
        verdict, remedy = OK, ""
        if config.get("PreemptType", "preempt/none") != "preempt/none" and mode not in ("OFF", *_NULL):
            value += f", preemption {mode} with GraceTime {grace:g} s"
            if mode == "REQUEUE" and grace < _SHORT_S:
                verdict, remedy = NOTE, "a preempted job has no time to save: save often (trainer.save_every)"
            elif mode != "REQUEUE":
                verdict, remedy = NOTE, f"a preempted job meets {mode}: only REQUEUE lets it go on from its last save"
        elif record.get("State", "UP") != "UP":
            verdict, remedy = NOTE, "no job starts there now"
        findings.append(Finding(area=AREA, name=name, value=value, verdict=verdict, remedy=remedy))
    return findings


def job_findings(records: Sequence[Mapping[str, str]]) -> list[Finding]:
    """Judge the limits of the own job, or of each component of a heterogeneous one."""
    findings = []
    for record in records:
        value = (
            f"{record.get('NumNodes', '?')} nodes ({record.get('NodeList', '?')}), partition "
            f"{record.get('Partition', '?')}, time limit {record.get('TimeLimit', '?')}, "
            f"ends {record.get('EndTime', '?')}, restarts {record.get('Restarts', '0')}"
        )
        is_fine = record.get("Requeue", "1") == "1" or record.get("BatchFlag", "0") == "0"
        found = Finding(
            area=AREA,
            name=f"this job {record.get('JobId', '?')}",
            value=value + ("" if is_fine else ", not to be requeued"),
        )
        findings.append(found.unless(is_fine, NOTE, "submit with sbatch --requeue"))
    return findings
