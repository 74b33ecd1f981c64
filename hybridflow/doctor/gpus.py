"""The GPUs and their driver, as nvidia-smi tells of them."""

from __future__ import annotations

import csv
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from hybridflow.doctor.finding import NOTE, OK, PROBLEM, Finding, note
from hybridflow.programs import try_program

AREA = "GPUs"

FIELDS = (
    "index",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "ecc.errors.uncorrected.volatile.total",
    "mig.mode.current",
)

_USED_MIB = 2048
"""More than what a driver and a display hold: another job is on this GPU."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One line of nvidia-smi.

    Attributes:
        index: Its number on the node.
        name: Its model.
        driver: Version of the driver.
        memory_mib: All of its memory.
        used_mib: What is taken of it.
        ecc_errors: Errors since the driver was loaded that its memory could not correct; None where it does not count.
        is_split: MIG is on.
    """

    index: int
    name: str
    driver: str
    memory_mib: float
    used_mib: float
    ecc_errors: int | None
    is_split: bool


def parse_smi(text: str) -> list[Gpu]:
    """Parse the output of ``nvidia-smi --query-gpu=… --format=csv,noheader,nounits``.

    Lines of another form are left out.
    """
    gpus = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != len(FIELDS) or not row[0].strip().isdigit():
            continue
        index, name, driver, total, used, errors, mig = (cell.strip() for cell in row)
        gpus.append(
            Gpu(
                index=int(index),
                name=name,
                driver=driver,
                memory_mib=_number(total),
                used_mib=_number(used),
                ecc_errors=int(errors) if errors.isdigit() else None,
                is_split=mig == "Enabled",
            )
        )
    return gpus


def _number(text: str) -> float:
    return float(text) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) else 0.0


def check_gpus() -> list[Finding]:
    """Check the driver's view of the GPUs; that of torch is with the software."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = visible is not None and visible.strip() in ("", "-1", "NoDevFiles")
    tool = shutil.which("nvidia-smi")
    has_device = any(Path("/dev").glob("nvidia[0-9]*"))
    if tool is None and has_device:
        return [
            note(
                AREA,
                "nvidia-smi",
                "is not there, though /dev has NVIDIA's devices",
                "inside a container, start it with the GPUs: apptainer --nv, or enroot's nvidia hook",
            )
        ]
    if tool is None:
        return [Finding(area=AREA, name="GPUs", value="none; the CPU is used")]
    text, failure = try_program([tool, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"])
    return gpu_findings(parse_smi(text), failure, is_hidden=hidden)


def gpu_findings(gpus: list[Gpu], failure: str, *, is_hidden: bool) -> list[Finding]:
    """Judge the driver's list of GPUs.

    Args:
        gpus: From ``parse_smi``.
        failure: Why nvidia-smi ended badly; empty if it did not.
        is_hidden: ``CUDA_VISIBLE_DEVICES`` names none.
    """
    findings = []
    if failure or not gpus:
        findings.append(
            Finding(
                area=AREA,
                name="driver",
                value=f"nvidia-smi lists no GPU: {failure or 'it printed nothing'}",
                verdict=PROBLEM if failure else NOTE,
                remedy="a node without GPUs keeps to the CPU; on one that has them tell the site, and leave it out: "
                "--exclude",
            )
        )
    if gpus:
        findings.append(Finding(area=AREA, name="driver", value=gpus[0].driver))
    if gpus and is_hidden:
        findings.append(
            note(
                AREA,
                "CUDA_VISIBLE_DEVICES",
                "hides all GPUs; the CPU is used",
                "ask Slurm for GPUs (--gpus-per-node), or unset it",
            )
        )
    return findings + [_gpu_finding(gpu) for gpu in gpus]


def _gpu_finding(gpu: Gpu) -> Finding:
    value, verdict, remedy = f"{gpu.name}, {gpu.memory_mib / 1024:.0f} GiB", OK, ""
    if gpu.ecc_errors:
        value += f", {gpu.ecc_errors} uncorrected memory errors"
        verdict, remedy = PROBLEM, "leave this node out (--exclude) and have the GPU reset or replaced"
    elif gpu.is_split:
        value += ", split by MIG"
        verdict, remedy = PROBLEM, "NCCL needs whole GPUs: ask for nodes without MIG; one rank alone works"
    elif gpu.used_mib > _USED_MIB:
        value += f", {gpu.used_mib / 1024:.0f} GiB of them taken"
        verdict, remedy = NOTE, "another process holds them: see nvidia-smi; ask for the node with --exclusive"
    return Finding(area=AREA, name=f"GPU {gpu.index}", value=value, verdict=verdict, remedy=remedy)
