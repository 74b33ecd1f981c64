"""The batch file of a job, as a pure function of the job: what is printed is what is submitted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hybridflow.errors import ConfigError
from hybridflow.launch.site import Site, check_line, check_mount
from hybridflow.shipped import shipped

_BORDER = "# ----"


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """All that a batch file says.

    Attributes:
        name: Of the job.
        folder: Working directory of the job.
        run_dir: Of the run; its log goes there.
        recipe: The file that is trained.
        code: Directory to put before the places where Python looks for packages; None: what is installed runs.
        nodes: Fewest and most nodes.
        ranks_per_node: Ranks on each.
        threads_per_rank: CPU threads of each rank.
        time: Time limit in Slurm's words.
        site: The cluster.
        body: Shell commands behind the settings, as ``shipped_body`` gives them.
        inputs: Directories that a container mounts beside the two above, such as those of data and models.
    """

    name: str
    folder: Path
    run_dir: Path
    recipe: Path
    code: Path | None
    nodes: tuple[int, int]
    ranks_per_node: int
    threads_per_rank: int
    time: str
    site: Site
    body: str
    inputs: tuple[Path, ...] = ()


def shipped_body() -> str:
    """Return the body of ``slurm/train.sbatch``, without its directives and its block of settings."""
    text = (shipped("slurm") / "train.sbatch").read_text(encoding="utf-8")
    parts = re.split(rf"^{_BORDER}.*\n", text, flags=re.MULTILINE)
    assert len(parts) == 3, "slurm/train.sbatch has one block of settings between two borders"
    return parts[2].lstrip("\n")


def render_batch(job: BatchJob) -> str:
    """Return the text of the batch file.

    Raises:
        ConfigError: A path cannot be written in a batch file.
    """
    for what, path in (("working directory", job.folder), ("run_dir", job.run_dir), ("recipe", job.recipe)):
        check_line(str(path), what)
    if job.code is not None and ":" in str(job.code):
        raise ConfigError(
            f"run_dir {job.run_dir}: its ':' would split PYTHONPATH, by which the job finds its copy of hybridflow; "
            "use a path without it, or --installed"
        )
    lines = [
        "#!/bin/bash",
        "# Written by `hybridflow launch slurm` from the recipe and the site settings beside this file.",
        *(f"#SBATCH {_in_directive(option)}" for option in directives(job)),
        "",
        f"{_BORDER} settings of this job ----",
        *_settings(job),
        f"{_BORDER}---------------------------",
    ]
    return "\n".join(lines) + "\n\n" + job.body


def directives(job: BatchJob) -> Iterator[str]:
    """Yield options of sbatch, each one word; the site's own come last and override the others."""
    site, (fewest, most) = job.site, job.nodes
    yield f"--job-name={job.name}"
    yield f"--chdir={job.folder}"
    yield f"--output={_output(job.run_dir)}"
    yield from ("--open-mode=append", "--requeue", "--no-kill", f"--signal=B:USR1@{site.signal_lead_s}")
    yield f"--time={job.time}"
    yield f"--nodes={fewest}" if fewest == most else f"--nodes={fewest}-{most}"
    yield f"--ntasks-per-node={job.ranks_per_node}"
    yield f"--cpus-per-task={job.threads_per_rank if site.cpus_per_task is None else site.cpus_per_task}"
    gpus = f"{job.ranks_per_node}" if site.gpu_type is None else f"{site.gpu_type}:{job.ranks_per_node}"
    if site.gpus_per_node and site.gpu_option != "none":
        yield f"--gpus-per-node={gpus}" if site.gpu_option == "gpus-per-node" else f"--gres=gpu:{gpus}"
    for key, value in (
        ("account", site.account),
        ("partition", site.partition),
        ("qos", site.qos),
        ("constraint", site.constraint),
        ("mem", site.memory),
    ):
        if value is not None:
            yield f"--{key}={value}"
    if site.exclusive:
        yield "--exclusive"
    yield from site.options


def _output(run_dir: Path) -> str:
    if "\\" in str(run_dir):
        raise ConfigError(f"run_dir {run_dir}: Slurm takes a backslash in the name of a log for itself; remove it")
    return str(run_dir).replace("%", "%%") + "/slurm-%j.out"


def _in_directive(word: str) -> str:
    """Quote a word for a directive of sbatch: a backslash hides no space there, and counts within quotes."""
    return re.sub(r"[^A-Za-z0-9_@%+=:,./-]", lambda found: '" "' if found[0] == " " else f"\\{found[0]}", word)


def _settings(job: BatchJob) -> Iterator[str]:
    site = job.site
    if site.modules or site.setup:
        yield "# A signal that comes before the job can act on it must not end it; a line that fails must."
        yield "trap : USR1 USR2 TERM"
        yield "set -e"
        yield from (f"module load {shlex.quote(module)}" for module in site.modules)
        yield from site.setup
        yield "set +eu"
    if job.code is not None:
        yield f"export PYTHONPATH={shlex.quote(str(job.code))}${{PYTHONPATH:+:$PYTHONPATH}}"
    container, options = _container(job)
    if site.mpi != "none":
        options.append(f"--mpi={site.mpi}")
    yield f"container=({shlex.join(container)})"
    yield f"srun_options=({shlex.join(options)})"
    yield f"set -- {shlex.quote(str(job.recipe))}"


def _container(job: BatchJob) -> tuple[list[str], list[str]]:
    """Return the words before the command, and options of srun."""
    container = job.site.container
    if container.kind == "none" or container.image is None:
        return [], []
    own: list[Path] = []
    for path in (job.folder, job.run_dir, *job.inputs):
        check_mount(f"{path}:{path}", "working directory, run_dir and paths of the recipe")
        if not any(each == path or each in path.parents for each in own):
            own.append(path)
    mounts = [*(f"{path}:{path}" for path in own), *container.mounts]
    if container.kind == "apptainer":
        gpu = ["--nv"] if job.site.gpus_per_node else []
        binds = [word for mount in mounts for word in ("--bind", mount)]
        return ["apptainer", "exec", *gpu, *binds, "--pwd", str(job.folder), container.image], []
    both = [mount if ":" in mount else f"{mount}:{mount}" for mount in mounts]
    return [], [
        f"--container-image={container.image}",
        f"--container-mounts={','.join(both)}",
        f"--container-workdir={job.folder}",
    ]
