"""The door: ``hybridflow train / plan``. Light at import; what a command needs it imports itself."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybridflow import __version__
from hybridflow.config import Recipe, find_recipe, load_recipe
from hybridflow.errors import ConfigError, HybridflowError
from hybridflow.parallel.start import find_start, rank_hint

if TYPE_CHECKING:
    from hybridflow.parallel.start import Start

USER_ERROR = 2
"""Exit status after an error that has been explained on stderr."""

FAILURE = 1
"""Exit status after a failure of ours, with a traceback on stderr."""

_EXPLAINED = (HybridflowError, OSError)
"""Errors whose message is enough for a user; an OSError names its file."""

_AFTER_RANK_0_S = 3.0

_EXAMPLES = """examples:
  hybridflow train quickstart
  hybridflow train launch/recipes/grpo.yaml trainer.steps=20 run_dir=runs/try
  torchrun --nproc-per-node 4 -m hybridflow train quickstart
  srun --ntasks 4 hybridflow train quickstart
  hybridflow train quickstart --resume
  hybridflow plan job split

exit status: 0 done, 2 an error that was explained, 1 a failure of hybridflow itself,
  128 + the signal where a signal ended it
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    arguments = _parse(argv)
    try:
        return arguments.run(arguments)
    except HybridflowError as error:
        if _speaks(arguments.recipe):
            print(f"hybridflow: {error}", file=sys.stderr, flush=True)
        return USER_ERROR


def _speaks(recipe: str) -> bool:
    """Whether this rank prints what is wrong before the ranks have met: rank 0, since all find the same in a recipe.

    Another rank does only where it sees no recipe at all, and rank 0 may see one; a launcher that ends all ranks with
    the first has ended this one meanwhile if rank 0 does not.
    """
    if rank_hint() == 0:
        return True
    try:
        find_recipe(recipe)
    except ConfigError:
        time.sleep(_AFTER_RANK_0_S)
        return True
    return False


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    # argparse does not take settings that follow an option, as in: train quickstart --resume trainer.steps=10
    strangers = [word for word in rest if word.startswith("-")]
    if strangers:
        parser.error(f"unrecognized arguments: {' '.join(strangers)}")
    arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hybridflow",
        description="RL post-training of language models on HPC clusters.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hybridflow {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="run a recipe",
        description="Run a recipe. Started plainly it brings up the recipe's number of ranks on this machine; under "
        "torchrun, mpirun or srun it joins the ranks that are there.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_recipe(train)
    train.add_argument("--resume", action="store_true", help="go on from the run's latest checkpoint, if there is one")
    train.add_argument("--dry-run", action="store_true", help="check the recipe, print the plan, and stop")
    train.set_defaults(run=_train)
    plan = commands.add_parser("plan", help="show what a recipe would do, without starting it")
    plans = plan.add_subparsers(required=True, metavar="WHAT")
    job = plans.add_parser(
        "job",
        help="which rank calls what, and the compiled schedule",
        description="Print rank × role × calls for every rank, and the program of the job. Starts no process and "
        "imports no torch.",
    )
    _add_recipe(job)
    job.add_argument("--mermaid", action="store_true", help="print one step as a mermaid flowchart instead")
    job.set_defaults(run=_plan_job)
    return parser


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a YAML file, or the name of a shipped recipe such as quickstart")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the recipe's")


def _plan_job(arguments: argparse.Namespace) -> int:
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if arguments.mermaid:
        from hybridflow.dataflow.render import mermaid
        from hybridflow.trainer.plan import plan_job

        plan = plan_job(recipe)
        print(mermaid(plan.train, plan.meshes))
    else:
        _print_plan(recipe)
    return 0


def _print_plan(recipe: Recipe) -> None:
    from hybridflow.dataflow.render import plan_table
    from hybridflow.trainer.plan import plan_job

    plan = plan_job(recipe)
    print(plan_table(plan.whole, plan.meshes, recipe.cluster.ranks))


def _train(arguments: argparse.Namespace) -> int:
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if arguments.dry_run:
        _print_plan(recipe)
        return 0
    start = find_start()
    if start.launcher == "alone" and recipe.cluster.ranks > 1:
        from hybridflow.launch.local import run_local
        from hybridflow.trainer.plan import plan_job

        plan_job(recipe)  # what does not fit is said before ranks are started
        command = ["train", arguments.recipe, *arguments.overrides, *(["--resume"] if arguments.resume else [])]
        return run_local(command, num_ranks=recipe.cluster.ranks, threads_per_rank=recipe.cluster.threads_per_rank)
    return _train_rank(recipe, start, resume=arguments.resume)


def _train_rank(recipe: Recipe, start: Start, *, resume: bool) -> int:
    """One rank's part of a job: whatever goes wrong ends the process at once, and is told by one rank alone."""
    # A reward function may lie in the working directory, also for the console script.
    sys.path.insert(0, os.getcwd())
    # The launcher, which Ctrl-C reaches too, speaks for its ranks.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # What megatron-core and torch say about themselves; none of it is for our user to act on.
    warnings.filterwarnings("ignore", module=r"megatron\b|torch\b")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from hybridflow.parallel.failure import lost_contact, tell_once
    from hybridflow.parallel.world import join_world, open_store
    from hybridflow.trainer.trainer import train

    cluster, store = recipe.cluster, None
    try:
        store = open_store(start, start_deadline_s=cluster.start_deadline_s)
        with lost_contact("the job", tuple(range(start.size)), cluster.deadline_s):
            world = join_world(start, store, deadline_s=cluster.deadline_s, start_deadline_s=cluster.start_deadline_s)
            train(recipe, world, resume=resume)
            world.close()
    except Exception as error:
        failure = error
        tell_once(failure, lambda: _tell(failure, start.rank), store, start.rank)
        sys.stdout.flush()
        # No interpreter shutdown: it could wait for ranks that are gone.
        os._exit(USER_ERROR if isinstance(failure, _EXPLAINED) else FAILURE)
    return 0


def _tell(error: Exception, rank: int) -> None:
    """Print an error of a rank: a message for what was foreseen, else the traceback."""
    if isinstance(error, _EXPLAINED):
        print(f"hybridflow: rank {rank}: {error}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)
        print(
            f"hybridflow: rank {rank} failed, see above; this is an error of hybridflow's own",
            file=sys.stderr,
            flush=True,
        )
