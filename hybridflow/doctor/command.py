"""The command ``hybridflow doctor``. Light at import: a login node may have no torch that works."""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.doctor.files import check_directory
from hybridflow.doctor.finding import PROBLEM, Finding, worst
from hybridflow.doctor.gpus import check_gpus
from hybridflow.doctor.guard import run_checks
from hybridflow.doctor.host import check_host, check_network
from hybridflow.doctor.message_passing import check_mpi
from hybridflow.doctor.report import as_dict, as_text
from hybridflow.doctor.slurm import check_slurm, in_step, read_config
from hybridflow.doctor.software import check_software
from hybridflow.errors import ConfigError
from hybridflow.exit_status import DONE, REQUEST
from hybridflow.mapping.arguments import count
from hybridflow.mapping.hardware import MEASURED_FILE
from hybridflow.parallel.scontrol import show_job
from hybridflow.parallel.start import Start, expand_node_list, find_start

if TYPE_CHECKING:
    from hybridflow.config.recipe import Recipe
    from hybridflow.dataflow.graph import Flow
    from hybridflow.doctor.across import Allocation

_CHECKS_S = 120.0
_SRUN_S = 1800.0

# What a job asks for each of its own tasks is not for one that is alone on its node.
_OF_THE_JOBS_TASKS = tuple(
    f"SLURM_{name}"
    for name in (
        *("NTASKS", "NPROCS", "CPUS_PER_TASK", "GPUS_PER_TASK", "TRES_PER_TASK", "MEM_PER", "DISTRIBUTION"),
        *("STEP", "PROCID", "LOCALID"),
    )
)

_EXAMPLES = """examples:
  hybridflow doctor
  hybridflow doctor runs/sums
  hybridflow doctor --json | jq '.findings[] | select(.verdict != "ok")'
  hybridflow doctor --measure && hybridflow plan auto quickstart --hardware measured
  sbatch --nodes=4 --wrap 'hybridflow doctor --nodes runs'
  srun --nodes=4 --ntasks-per-node=1 hybridflow doctor --nodes runs
  torchrun --nnodes 2 --nproc-per-node 1 --rdzv-endpoint node1:29400 -m hybridflow doctor --nodes --json

exit status: 0 nothing found that would stop a run; 2 a problem that will stop a run or slow it down, or wrong
  arguments; 1 hybridflow itself failed
"""


def add_doctor(commands: Any, flow_of: Callable[[Recipe], Flow]) -> None:
    """Add it to the sub-commands of a parser; ``flow_of`` returns the flow of a recipe's step."""
    doctor = commands.add_parser(
        "doctor",
        help="check a machine or an allocation; name problems and remedies",
        description="Check software, GPUs, MPI, the run directory, the machine, its network and Slurm, and name each "
        "problem with its remedy. With --nodes, check and measure every node of the allocation, and name nodes that "
        "are slow, silent or different. Inside a Slurm job, --nodes starts one task on each node.",
        epilog=_EXAMPLES,
    )
    doctor.add_argument(
        "directory",
        nargs="?",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="directory for runs (default: the working directory)",
    )
    doctor.add_argument("--nodes", action="store_true", help="check, measure and compare all nodes of the allocation")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument(
        "--measure",
        action="store_true",
        help="time products, copies and short trainings on this machine for two minutes or more, and write the file "
        "that `hybridflow plan ... --hardware measured` reads",
    )
    doctor.add_argument(
        "--ranks",
        type=count,
        metavar="N",
        help="with --measure: ranks on this machine (default: its GPUs, or its cores)",
    )
    doctor.add_argument(
        "--out", type=Path, metavar="FILE.yaml", help=f"with --measure: write this file (default: {MEASURED_FILE})"
    )
    doctor.set_defaults(run=functools.partial(run, flow_of=flow_of))


def run(arguments: argparse.Namespace, flow_of: Callable[[Recipe], Flow]) -> int:
    """Run the checks, print the report and return the exit status; or measure.

    Raises:
        ConfigError: Options contradict each other, or the file cannot be written.
        HybridflowError: A short training failed.
    """
    if arguments.measure:
        from hybridflow.doctor.hardware import measure

        if arguments.nodes or arguments.json:
            raise ConfigError("doctor --measure: is for one machine and prints text; leave --nodes and --json out")
        return measure(arguments, flow_of)
    if arguments.ranks or arguments.out:
        raise ConfigError("doctor: --ranks and --out belong to --measure; add it")
    if not arguments.nodes:
        findings = check_machine(arguments.directory, of_many=False)
        _print(as_dict(findings) if arguments.json else as_text(findings))
        return _status(findings)
    start = find_start()
    if "SLURM_JOB_ID" in os.environ and not in_step(os.environ) and start.launcher == "alone":
        return _start_on_all_nodes(arguments)
    return _run_across(arguments, start)


def check_machine(directory: Path, *, of_many: bool) -> list[Finding]:
    """Run all checks of one machine; ``of_many``: it is one of several nodes."""
    config, failure = read_config()
    return run_checks(
        {
            "software": check_software,
            "GPUs": check_gpus,
            "MPI": lambda: check_mpi(config.get("MpiDefault", "")),
            "run directory": lambda: check_directory(directory),
            "machine": check_host,
            "network": lambda: check_network(of_many=of_many),
            "Slurm": lambda: check_slurm(config, failure),
        },
        _CHECKS_S,
    )


def srun_command(
    environ: Mapping[str, str], nodes: Sequence[str], words: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts one task on each of these nodes, and its environment.

    The tasks have all that the job has there.

    ``--overlap`` lets it start beside a run that is going on.
    """
    number = len(nodes)
    kept = {name: value for name, value in environ.items() if not name.startswith(_OF_THE_JOBS_TASKS)}
    options = [
        f"--nodes={number}",
        f"--ntasks={number}",
        f"--nodelist={','.join(nodes)}",
        "--ntasks-per-node=1",
        "--overlap",
        "--mem=0",
    ]
    options += ["--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=0", "--wait=0", "--immediate=120"]
    return ["srun", *options, sys.executable, "-m", "hybridflow", *words], kept


def nodes_left(listed: Sequence[str], jobs: Sequence[Mapping[str, str]]) -> tuple[list[str], list[str]]:
    """Return the nodes that a job still has, and those that it has lost.

    A step on lost ones would wait for them.

    Args:
        listed: The nodes that the job began with.
        jobs: Slurm's records of it now, one for each component; none: Slurm does not tell.
    """
    now = {
        node for job in jobs if job.get("NodeList", "(null)") != "(null)" for node in expand_node_list(job["NodeList"])
    }
    left = [node for node in listed if node in now] if now else list(listed)
    return left, [node for node in listed if node not in left]


def _start_on_all_nodes(arguments: argparse.Namespace) -> int:
    words = ["doctor", "--nodes", *(["--json"] if arguments.json else []), str(arguments.directory.resolve())]
    listed = expand_node_list(os.environ.get("SLURM_JOB_NODELIST", ""))
    nodes, lost = nodes_left(listed, show_job(os.environ["SLURM_JOB_ID"]))
    command, environ = srun_command(os.environ, nodes, words)
    try:
        status = subprocess.run(command, env=environ, timeout=_SRUN_S, check=False).returncode
    except FileNotFoundError as error:
        raise ConfigError(
            "doctor --nodes: srun is not on PATH; load the site's Slurm module, or start with mpirun or torchrun"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"doctor --nodes: srun did not end within {_SRUN_S:g} s; see `squeue --steps` and `sinfo -R`"
        ) from error
    if status not in (DONE, REQUEST):
        first = environ.get("SLURM_JOB_NODELIST", "the job")
        raise ConfigError(
            f"doctor --nodes: srun ended with status {status} and maybe without a report, see above; a node of {first} "
            "does not take tasks, or the first node is not reached by the others: see `sinfo -R`, and try with "
            "--exclude=NODE"
        )
    if lost:
        raise ConfigError(
            f"doctor --nodes: the job has lost {', '.join(lost)}, which the report above leaves out: see `sinfo -R`"
        )
    return status


def _run_across(arguments: argparse.Namespace, start: Start) -> int:
    # What torch says of connections; what is wrong with them is told in the report.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from hybridflow.doctor.across import Deadlines, leave, look_across

    directory = arguments.directory
    board, found = look_across(start, directory, lambda of_many: check_machine(directory, of_many=of_many), Deadlines())
    status = DONE
    if found is not None:
        status = _tell(found, as_json=arguments.json)
    status = leave(board, start, status, Deadlines())
    sys.stdout.flush()
    if start.size > 1 and status != DONE:
        os._exit(status)  # no interpreter shutdown: it could wait for nodes that are gone
    return status


def _tell(found: Allocation, *, as_json: bool) -> int:
    from hybridflow.doctor.compare import merge_findings

    findings = [*merge_findings(found.reports), *found.findings]
    if as_json:
        _print(as_dict(findings, found.reports, found.pairs))
    else:
        _print(as_text(findings, found.reports))
    return _status(findings)


def _print(report: str | dict[str, Any]) -> None:
    print(report if isinstance(report, str) else json.dumps(report, indent=2, ensure_ascii=False), flush=True)


def _status(findings: list[Finding]) -> int:
    return REQUEST if worst(findings) == PROBLEM else DONE
