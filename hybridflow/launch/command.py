"""The command ``hybridflow launch``. Light at import; it runs on a login node."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridflow.config.recipe import Recipe
from hybridflow.errors import ConfigError
from hybridflow.exit_status import DONE
from hybridflow.launch.batch import BatchJob, directives, render_batch
from hybridflow.launch.checks import check_job, missing_files, site_of, try_job
from hybridflow.launch.layout import with_layouts
from hybridflow.launch.local import local_environment, run_local
from hybridflow.launch.site import SITE_FILE, absolute
from hybridflow.launch.snapshot import next_folder, write_snapshot
from hybridflow.launch.submit import follow, submit
from hybridflow.observe.console import complain
from hybridflow.observe.files import replace_file
from hybridflow.observe.rank_log import LOG_KINDS, LOG_VARIABLE, say_event
from hybridflow.recipe.dry_run import try_inputs
from hybridflow.recipe.inputs import check_inputs
from hybridflow.recipe.load import find_recipe, load_recipe
from hybridflow.recipe.run_dir import try_run_dir
from hybridflow.trainer.banner import first_line
from hybridflow.trainer.plan import plan_job

EXAMPLES = """examples:
  hybridflow launch slurm ppo-70b --time 24:00:00 --print
  hybridflow launch slurm quickstart trainer.steps=20 --time 30 --partition debug --follow
  hybridflow launch slurm recipe.yaml --nodes 6-8 --site sites/alps.yaml --parsable
  hybridflow launch local quickstart --resume
  hybridflow launch mpi quickstart --hostfile hosts.txt

exit status: 0 submitted, or done; 2 the request is wrong, or Slurm refuses it; 3 the run's latest checkpoint belongs to
  another recipe; 4 the run directory cannot be written; with --follow, local and mpi: the exit status of the job
"""


def add_launch(commands: Any) -> None:
    """Add the sub-command to those of a parser."""
    launch = commands.add_parser(
        "launch",
        help="start a recipe on a cluster or on this machine",
        description="Check that a recipe fits nodes, memory and time limit, and start it. "
        "The command imports torch only to compare the recipe with the run's latest checkpoint.",
        epilog=EXAMPLES,
    )
    kinds = launch.add_subparsers(required=True, metavar="WHERE")
    slurm = kinds.add_parser(
        "slurm",
        help="submit a recipe to Slurm",
        description="Submit a recipe to Slurm. Keep the full recipe, the site settings and a copy of hybridflow's "
        "source in RUN_DIR/launch/. The job runs these copies, so later edits do not change a waiting job. The job "
        "resumes from the run's latest checkpoint, if there is one.",
        epilog=EXAMPLES,
    )
    add_recipe(slurm)
    add_slurm_options(slurm)
    slurm.add_argument(
        "--print",
        dest="prints",
        action="store_true",
        help="check recipe, nodes and memory, and print the batch file; submit and write nothing",
    )
    slurm.add_argument(
        "--dry-run",
        action="store_true",
        help="as --print, and open the data files, call the reward on the first row, and look for the container image",
    )
    slurm.add_argument("--parsable", action="store_true", help="print only the job id")
    slurm.add_argument(
        "--follow", action="store_true", help="print the job's log until the job ends; exit with its status"
    )
    slurm.add_argument("--installed", action="store_true", help="run the installed hybridflow instead of a copy")
    slurm.set_defaults(run=_slurm)
    for kind, run, text in (
        ("local", _local, "as processes on this machine, as `hybridflow train` does"),
        ("mpi", _mpi, "with mpirun"),
    ):
        parser = kinds.add_parser(kind, help=f"start a recipe {text}", description=f"Start a recipe {text}.")
        add_recipe(parser)
        parser.add_argument("--resume", action="store_true", help="resume from the run's latest checkpoint, if any")
        add_log(parser)
        parser.add_argument("--print", dest="prints", action="store_true", help="print the commands and start nothing")
        parser.add_argument(
            "--dry-run",
            action="store_true",
            help="as --print, and open the data files and call the reward on the first row",
        )
        if kind == "mpi":
            parser.add_argument(
                "--hostfile", type=Path, metavar="FILE", help="list of hosts in the format of this mpirun"
            )
        parser.set_defaults(run=run)


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the recipe and its overrides."""
    parser.add_argument("recipe", help="YAML file, or name of a shipped recipe such as quickstart")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="settings that override the recipe's"
    )


def add_log(parser: argparse.ArgumentParser) -> None:
    """Add the form of the job's console."""
    parser.add_argument(
        "--log",
        choices=LOG_KINDS,
        help="form of the job's lines: text, or a JSON object for each (default: text, or $HYBRIDFLOW_LOG)",
    )


def choose_log(arguments: argparse.Namespace) -> None:
    """Settle the form of the job's console, for this process and those that it starts.

    Raises:
        ConfigError: The variable names no form.
    """
    kind = arguments.log or os.environ.get(LOG_VARIABLE) or LOG_KINDS[0]
    if kind not in LOG_KINDS:
        raise ConfigError(f"${LOG_VARIABLE} is {kind!r}; set it to {' or '.join(LOG_KINDS)}, or use --log")
    arguments.log = os.environ[LOG_VARIABLE] = kind


def add_slurm_options(parser: argparse.ArgumentParser) -> None:
    """Add what a job is asked for with."""
    parser.add_argument("--site", type=Path, metavar="FILE", help=f"site settings (default: {SITE_FILE})")
    parser.add_argument(
        "--nodes",
        metavar="N|MIN-MAX",
        help="number of nodes (default: as many as the ranks fill); fewer nodes need fallbacks in the recipe",
    )
    parser.add_argument("--time", metavar="LIMIT", help="time limit, such as 24:00:00 or 1-12 (default: the site's)")
    parser.add_argument("--partition", metavar="NAME", help="partition (default: the site's)")


def batch_file(arguments: argparse.Namespace) -> str:
    """Return the batch file of a launch that is checked and not made, from a recipe and ``add_slurm_options``.

    Raises:
        HybridflowError: As for ``check_job``.
    """
    _, job, warnings = check_job(arguments, site_of(arguments))
    _warn(warnings)
    return render_batch(as_kept(job, next_folder(job.run_dir), with_code=True))


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        complain(f"warning: {warning}")


def _slurm(arguments: argparse.Namespace) -> int:
    site = site_of(arguments)
    recipe, job, warnings = check_job(arguments, site)
    _warn(warnings)
    folder = next_folder(job.run_dir)
    job = as_kept(job, folder, with_code=not arguments.installed)
    text = render_batch(job)
    beside = find_recipe(arguments.recipe).parent
    found: list[str] = []
    if arguments.dry_run:
        _see_modules()
        found, warnings = try_job(recipe, beside, site)
    else:
        warnings = missing_files(recipe, beside, site)
    _warn(warnings)
    if arguments.prints or arguments.dry_run:
        print(text, end="")
        _print_found(found)
        return DONE
    write_snapshot(
        folder,
        recipe,
        site,
        text,
        source=arguments.recipe,
        overrides=arguments.overrides,
        with_code=not arguments.installed,
    )
    try:
        job_id = submit(folder / "batch.sh", directives(job))
    except ConfigError:
        # What never became a job is no launch of the run.
        shutil.rmtree(folder, ignore_errors=True)
        raise
    try:
        replace_file(folder / "job_id", f"{job_id}\n".encode())
    except OSError as error:
        # The job is there. Who reads a failure would submit another.
        _warn([f"{folder / 'job_id'}: cannot be written: {error}; note the number of the job, {job_id}"])
    log = job.run_dir / f"slurm-{job_id}.out"
    print(job_id if arguments.parsable else f"job {job_id}, log {log}, launched as {folder}", flush=True)
    return follow(job_id, log) if arguments.follow else DONE


def as_kept(job: BatchJob, folder: Path, *, with_code: bool) -> BatchJob:
    """Return the job that runs from the folder of a launch."""
    return replace(job, recipe=folder / "recipe.yaml", code=folder / "code" if with_code else None)


def _train_words(arguments: argparse.Namespace) -> list[str]:
    log = [] if arguments.log == "text" else ["--log", arguments.log]
    return ["train", arguments.recipe, *arguments.overrides, *(["--resume"] if arguments.resume else []), *log]


def try_here(recipe: Recipe) -> list[str]:
    """Try the inputs of a recipe whose ranks are processes of this machine; see ``try_inputs``."""
    _see_modules()
    return try_inputs(recipe)


def _print_found(found: Sequence[str]) -> None:
    """Print what a dry run found, as comments behind the shell's lines."""
    for line in found:
        print(f"# {line}")


def _see_modules() -> None:
    """Look for modules of the user in the working directory, as ranks do."""
    sys.path.insert(0, os.getcwd())


def train_here(recipe: Recipe, arguments: argparse.Namespace) -> int:
    """Train a recipe on ranks that are processes of this machine. Returns their exit status.

    Raises:
        HybridflowError: It does not fit its ranks, which are not started.
    """
    recipe, arguments.overrides = settle_layouts(recipe, arguments)
    plan_job(recipe)
    ranks, threads = recipe.cluster.ranks, recipe.cluster.threads_per_rank
    say_event("start", first_line(recipe))
    return run_local(
        _train_words(arguments), num_ranks=ranks, threads_per_rank=threads, ahead="hybridflow.trainer.trainer"
    )


def settle_layouts(
    recipe: Recipe, arguments: argparse.Namespace, num_ranks: int | None = None, *, is_told: bool = True
) -> tuple[Recipe, list[str]]:
    """Return the recipe with the layouts of ``layout: auto``, and overrides that give it to the ranks; tell of them.

    Args:
        recipe: Of the arguments.
        arguments: Of the command.
        num_ranks: Those that are there; None: as many as the recipe says.
        is_told: Whether this process tells what was found.
    """
    ranks = recipe.cluster.ranks if num_ranks is None else num_ranks
    recipe, overrides, line = with_layouts(recipe, arguments.recipe, arguments.overrides, ranks)
    if line is not None and is_told:
        complain(line)
    return recipe, overrides


def _local(arguments: argparse.Namespace) -> int:
    choose_log(arguments)
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if not arguments.prints:
        check_inputs(recipe, find_recipe(arguments.recipe).parent)
    if not arguments.prints and not arguments.dry_run:
        return train_here(recipe, arguments)
    if arguments.dry_run:
        try_run_dir(recipe, resume=arguments.resume)
    recipe, arguments.overrides = settle_layouts(recipe, arguments)
    plan_job(recipe)
    found = try_here(recipe) if arguments.dry_run else []
    ranks, threads = recipe.cluster.ranks, recipe.cluster.threads_per_rank
    for rank in range(ranks):
        # A free port is found when they start.
        variables = local_environment(rank, ranks, threads, port=29500)
        words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        print(" ".join(words), shlex.join([sys.executable, "-m", "hybridflow", *_train_words(arguments)]))
    _print_found(found)
    return DONE


def _mpi(arguments: argparse.Namespace) -> int:
    choose_log(arguments)
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if arguments.dry_run:
        try_run_dir(recipe, resume=arguments.resume)
    recipe, arguments.overrides = settle_layouts(recipe, arguments)
    plan_job(recipe)
    if not arguments.prints:
        check_inputs(recipe, find_recipe(arguments.recipe).parent)
    command = mpi_command(_train_words(arguments), recipe.cluster.ranks, arguments.hostfile)
    found = try_here(recipe) if arguments.dry_run else []
    if arguments.prints or arguments.dry_run:
        print(shlex.join(command))
        _print_found(found)
        return DONE
    if shutil.which("mpirun") is None:
        raise ConfigError("no mpirun on this machine; install MPI, or use `hybridflow launch local`")
    sys.stdout.flush()
    os.environ.setdefault("OMP_NUM_THREADS", str(recipe.cluster.threads_per_rank))
    os.execvp(command[0], command)


def mpi_command(argv: Sequence[str], num_ranks: int, hostfile: Path | None) -> list[str]:
    """Return the command that starts the ranks with MPI: options that Open MPI and MPICH both know."""
    if hostfile is not None and not hostfile.is_file():
        raise ConfigError(f"--hostfile {hostfile}: no such file")
    hosts = [] if hostfile is None else ["-hostfile", str(absolute(hostfile))]
    return ["mpirun", *hosts, "-n", str(num_ranks), sys.executable, "-m", "hybridflow", *argv]
