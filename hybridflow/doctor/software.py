"""Python, torch, CUDA, megatron-core and what is optional beside them.

What may crash, which is whatever loads a driver or a compiled extension, runs in a process of its own
(``doctor/probe.py``) and reports line by line; this module only judges what it wrote.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hybridflow
from hybridflow.doctor.finding import NOTE, OK, PROBLEM, Finding, problem
from hybridflow.observe.files import json_objects
from hybridflow.programs import try_program

MEGATRON = "0.16.1"
"""The release that our code is written against; setup.py pins it."""

OPTIONAL = {
    # module: (distribution, what is used without it)
    "transformer_engine": ("transformer-engine", "megatron-core's local layers are used"),
    "apex": ("apex", "the fused Adam of Transformer Engine is used if that is there, else torch's"),
}

_ATTENTION = {
    "varlen": "torch on packed tokens",
    "rectangles": "torch on padded tokens",
}

LAUNCHER_VARIABLES = ("SLURM_", "PMI_", "PMIX_", "OMPI_", "PRTE_", "MPI_", "MPIEXEC_", "HYDRA_", "HYDI_", "PALS_")


def probe(parts: tuple[str, ...], deadline_s: float = 100.0) -> dict[str, Any]:
    """Run parts of ``doctor/probe.py``. Returns what they wrote; under ``failure`` why the process ended badly."""
    # Without the launcher's variables: an MPI that is asked here must not believe it is a rank of the job.
    environ = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    source = str(Path(hybridflow.__file__).parents[1])
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (source, environ.get("PYTHONPATH", ""))))
    text, failure = try_program(
        [sys.executable, "-m", "hybridflow.doctor.probe", *parts], environ=environ, deadline_s=deadline_s
    )
    return {**merge_lines(text), "failure": failure}


def merge_lines(text: str) -> dict[str, Any]:
    """Merge the JSON objects of a probe's lines; lines that libraries print in between are skipped."""
    merged: dict[str, Any] = {}
    for part in json_objects(text.splitlines()):
        merged.update(part)
    return merged


def check_software() -> list[Finding]:
    """Check versions of Python and hybridflow, torch and its GPUs, megatron-core, and optional packages."""
    found = probe(("torch", "megatron", "kernels", *OPTIONAL))
    return [
        *_base(),
        *torch_findings(found),
        megatron_finding(found),
        kernels_finding(found),
        *(optional(name, found) for name in OPTIONAL),
    ]


def _base() -> list[Finding]:
    area = "software"
    supported = (3, 10) <= sys.version_info[:2] < (3, 14)
    return [
        Finding(area=area, name="hybridflow", value=f"{hybridflow.__version__}, code {code_hash()}"),
        Finding(
            area=area,
            name="Python",
            value=f"{platform.python_version()}, {sys.executable}",
        ).unless(supported, PROBLEM, "use a Python from 3.10 to 3.13"),
    ]


def code_hash() -> str:
    """Return a hash of this package's modules: nodes with the same version may still run different code."""
    digest = hashlib.sha256()
    root = Path(hybridflow.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def torch_findings(found: Mapping[str, Any]) -> list[Finding]:
    """Judge a probe of torch and CUDA."""
    area = "software"
    if "torch" not in found:
        return [
            problem(
                area,
                "torch",
                f"cannot be imported: {found.get('torch_error') or found['failure'] or 'no answer'}",
                "install torch 2.12 or newer into this environment, and load the modules it was built with",
            )
        ]
    built = f"CUDA {found['cuda']}" if found["cuda"] else (f"ROCm {found['hip']}" if found.get("hip") else "CPU alone")
    findings = [Finding(area=area, name="torch", value=f"{found['torch']}, built for {built}")]
    if found["cuda"] or found.get("hip"):
        findings += _cuda_findings(found)
    nccl = found.get("nccl", "")
    if found.get("gpus"):
        used = f"NCCL {nccl} for models, gloo for columns and decisions"
    else:
        used = "gloo for all (no GPU is used)"
    findings.append(Finding(area=area, name="communication", value=used))
    return findings


def _cuda_findings(found: Mapping[str, Any]) -> list[Finding]:
    findings = []
    if "gpus" not in found:
        why = found.get("gpu_error") or found["failure"] or "no answer"
        findings.append(
            problem(
                "GPUs",
                "CUDA in torch",
                f"does not answer: {why}",
                "see whether nvidia-smi answers on this node; the driver must be new enough for torch's CUDA",
            )
        )
        return findings
    for gpu in found["gpus"]:
        shown = f"{gpu['name']}, {gpu['memory_gib']:.0f} GiB, sm_{gpu['capability']}"
        if "attention" in gpu:
            shown += f", attention by {_ATTENTION[gpu['attention']]}"
        failure = gpu.get("error", "")
        findings.append(
            Finding(
                area="GPUs",
                name=f"GPU {gpu['index']} in torch",
                value=f"{shown}: a product of matrices fails: {failure}" if failure else shown,
            ).unless(
                not failure,
                PROBLEM,
                "another process may hold it, or torch was built without kernels for it; see nvidia-smi",
            )
        )
    return findings


def megatron_finding(found: Mapping[str, Any]) -> Finding:
    """Judge whether megatron-core is there, whole, and of the release that our code needs."""
    version = found.get("megatron", "")
    if not version:
        why = found.get("megatron_error") or found["failure"] or "no answer"
        remedy = f"pip install megatron-core=={MEGATRON}; if the message names Transformer Engine or Apex, mend those"
        value, verdict = f"cannot be imported: {why}", PROBLEM
    elif version != MEGATRON:
        value, verdict, remedy = version, PROBLEM, f"pip install megatron-core=={MEGATRON}: others differ inside"
    else:
        value, verdict, remedy = version, OK, ""
    return Finding(area="software", name="megatron-core", value=value, verdict=verdict, remedy=remedy)


def kernels_finding(found: Mapping[str, Any]) -> Finding:
    """Judge whether decoding on a CPU has its compiled kernels."""
    why = found.get("kernels_error") or found.get("kernels")
    if why is None:
        why = f"could not be looked at: {found['failure'] or 'no answer'}"
    value = f"{why} (without them, decoding on a CPU is slower)" if why else "used where a CPU decodes"
    return Finding(area="software", name="compiled kernels", value=value, verdict=NOTE if why else OK)


def optional(module: str, found: Mapping[str, Any]) -> Finding:
    """Judge whether an optional package can be imported, and say what is used without it."""
    distribution, without = OPTIONAL[module]
    state, verdict, remedy = found.get(module), OK, ""
    if state is None or state == "absent":
        value = f"not installed: {without}"
        if state is None:
            value, verdict = f"could not be looked at: {found['failure'] or 'no answer'}", NOTE
    elif found.get(f"{module}_error"):
        value, verdict = f"is installed and cannot be imported: {found[f'{module}_error']}", PROBLEM
        remedy = f"build {distribution} again for this torch and CUDA, or remove it: pip uninstall {distribution}"
    elif module == "apex" and not found.get("apex_is_nvidia", False):
        value, verdict = "this is PyPI's package of that name, which is another project", PROBLEM
        remedy = "pip uninstall apex; NVIDIA's is installed from its repository, see docs/gpu.md"
    elif found.get(f"{module}_misfit"):
        value, verdict = f"{state}, not used: {found[f'{module}_misfit']}; {without}", NOTE
        remedy = "pip install 'hybridflow[gpu]' takes a release that fits"
    elif not found.get("gpus"):
        value = f"{state}, not used: it needs a GPU"
    else:
        value = f"{state}, used"
    return Finding(area="software", name=distribution, value=value, verdict=verdict, remedy=remedy)


def versions() -> dict[str, str]:
    """Return what must be equal on all nodes of a job, as far as it is known without importing it."""
    found = {"hybridflow": f"{hybridflow.__version__} {code_hash()}", "Python": platform.python_version()}
    for name in ("torch", "megatron-core", "numpy", "mpi4py", *(pair[0] for pair in OPTIONAL.values())):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found
