"""The door: the commands of ``hybridflow``. Light at import; what a command needs it imports itself."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow import __version__
from hybridflow.checkpoint.convert.command import add_convert
from hybridflow.checkpoint.inspect_command import add_inspect_and_diff
from hybridflow.config.recipe import Recipe
from hybridflow.doctor.command import add_doctor
from hybridflow.errors import ConfigError, HybridflowError, MissingFileError, did_you_mean
from hybridflow.exit_status import DONE, FAILURE, REQUEUE, exit_status, system_status
from hybridflow.launch.checks import planned_recipe
from hybridflow.launch.command import (
    add_launch,
    add_log,
    add_recipe,
    add_slurm_options,
    batch_file,
    choose_log,
    settle_layouts,
    train_here,
    try_here,
)
from hybridflow.launch.init import add_init
from hybridflow.mapping.auto_command import add_auto
from hybridflow.mapping.estimate_command import add_estimate
from hybridflow.mapping.reshard_command import add_reshard
from hybridflow.observe.console import complain, ensure_streams, flushed, print_out
from hybridflow.observe.rank_log import say_event
from hybridflow.observe.status_command import add_status
from hybridflow.parallel.rank import MEETING_VARIABLE, run_rank
from hybridflow.parallel.signals import COPIES_S, CaughtSignals
from hybridflow.parallel.start import find_start, is_launched, local_rank_hint, passes_interrupts, rank_hint
from hybridflow.recipe.defaults import defaults_text
from hybridflow.recipe.inputs import check_inputs
from hybridflow.recipe.load import find_recipe, load_recipe, recipe_for_ranks
from hybridflow.recipe.other_names import key_of_option
from hybridflow.recipe.run_dir import try_run_dir
from hybridflow.report.command import add_report
from hybridflow.rollout.rollouts_command import add_rollouts
from hybridflow.serving.command import add_serving

if TYPE_CHECKING:
    from hybridflow.dataflow.graph import Flow
    from hybridflow.mapping.planned import Planned
    from hybridflow.parallel.start import Start
    from hybridflow.parallel.world import World

_AFTER_RANK_0_S = 3.0

_EXIT_STATUS = """\
exit status: 0 done; 1 a rank was lost or hybridflow itself failed: starting again may help; 2 an error in the request;
  3 a checkpoint is damaged, or belongs to another recipe; 4 a file cannot be written;
  75 saved, more to do: start again with --resume; 128 + n ended by signal n
"""

_EXAMPLES = f"""examples:
  hybridflow init --algorithm grpo --model models/Qwen2.5-0.5B-Instruct --data data/train.jsonl
  hybridflow train quickstart
  hybridflow train launch/recipes/grpo.yaml trainer.steps=20 run_dir=runs/try
  torchrun --nproc-per-node 4 -m hybridflow train quickstart
  srun --ntasks 4 hybridflow train quickstart
  hybridflow train quickstart --resume
  hybridflow train quickstart model=models/sums warm_start=null trainer.steps=0 run_dir=runs/eval    # evaluates
  hybridflow status runs/quickstart
  hybridflow rollouts runs/grpo --worst
  hybridflow report runs/quickstart
  hybridflow launch slurm quickstart --time 30 --print
  hybridflow generate --model models/sums --prompts prompts.jsonl --out answers.jsonl
  hybridflow serve --model models/sums
  hybridflow plan job split
  hybridflow doctor --nodes runs
  hybridflow plan reshard --from tp4.pp2.dp2 --to tp2.pp1.dp8
  hybridflow plan estimate --phase train --model llama3-8b --layout tp2 --nodes 2 --batch 64
  hybridflow plan auto ppo-70b --nodes 64 --out ppo-70b-64.yaml

{_EXIT_STATUS}"""

_TRAIN_EXAMPLES = f"""examples:
  hybridflow train quickstart
  hybridflow train launch/recipes/grpo.yaml trainer.steps=20 run_dir=runs/try
  hybridflow train grpo model=models/llama data=data/train.jsonl reward=rewards:score --dry-run
  srun --ntasks 4 hybridflow train quickstart --resume

{_EXIT_STATUS}"""

_SINGLE_TASK = "a step of a single task is 1 rank (`hybridflow launch local` starts all ranks of a recipe there)"

_JOB_EXAMPLES = """examples:
  hybridflow plan job quickstart
  hybridflow plan job recipe.yaml cluster.hardware=h100-sxm
  hybridflow plan job recipe.yaml --nodes 2
  hybridflow plan job recipe.yaml --nodes 2 --time 24:00:00 --script
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    ensure_streams()
    arguments = _parse(argv)
    try:
        with flushed():
            status: int = arguments.run(arguments)
        return status
    except HybridflowError as error:
        if arguments.recipe is None or rank_hint() == 0:
            complain(error)
        elif isinstance(error, MissingFileError):
            return _lacks_file(error)
        return exit_status(error)
    except OSError as error:
        # ESHUTDOWN, of a file system that has cut off this node, is a BrokenPipeError too.
        if isinstance(error, BrokenPipeError) and error.errno != errno.ESHUTDOWN:
            # Who reads has seen enough, as with `| head`.
            return 128 + signal.SIGPIPE
        complain(error)
        return system_status(error)
    except KeyboardInterrupt:
        # The terminal has shown ^C in the line that stands there.
        print(file=sys.stderr)
        return 128 + signal.SIGINT


def _lacks_file(error: MissingFileError) -> int:
    """Tell on the first rank of a node other than rank 0 that a file is missing, and return the exit status.

    Most errors from before the ranks have met all ranks find, and rank 0 tells them. A file may be missing on one node
    alone, and then another node may do. If rank 0 lacks it too, that ends with an error of the request: srun returns
    the largest status, and a launcher that ends all ranks with the first one ends this rank during the wait.
    """
    time.sleep(_AFTER_RANK_0_S)
    if local_rank_hint() == 0:
        complain(f"rank {rank_hint()} on {socket.gethostname()}: {error}")
    return FAILURE


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser, commands = _parser()
    words = list(sys.argv[1:] if argv is None else argv)
    _answer_with_command(parser, words, commands)
    arguments, rest = parser.parse_known_args(words)
    arguments.words = words
    # argparse does not take settings that follow an option, as in: train quickstart --resume trainer.steps=10
    strangers = [word for word in rest if word.startswith("-")]
    if arguments.recipe is None:
        strangers = rest
    if strangers and arguments.recipe is not None:
        _answer_with_key(parser, strangers[0], arguments.words)
    name = strangers[0].partition("=")[0] if strangers else ""
    if name in _AXES and "layout" in arguments:
        parser.error(f"{name}: not an option here; give --layout, such as --layout tp2")
    if strangers:
        parser.error(f"unrecognized arguments: {' '.join(strangers)}")
    arguments.overrides = [*arguments.overrides, *rest]
    return arguments


_AXES = {f"--{name}" for axis in ("tensor", "pipeline", "data") for name in (f"{axis[0]}p", f"{axis}-parallel-size")}
_OPTIONS_ELSEWHERE = {
    "--config": "give the recipe alone, without an option",
    "--resume": "a job of `hybridflow launch slurm` always resumes",
    "--nodes": "`hybridflow launch slurm` and `hybridflow plan job` take it",
}


_COMMANDS_ELSEWHERE = {
    **dict.fromkeys(
        ("evaluate", "eval"),
        "`hybridflow train RECIPE model=DIR warm_start=null trainer.steps=0 run_dir=runs/eval` evaluates a model",
    ),
    **dict.fromkeys(("export", "merge"), "`hybridflow convert runs/NAME DIR --to hf` writes a model"),
    "resume": "`hybridflow train RECIPE --resume` continues a run",
}


def _answer_with_command(parser: argparse.ArgumentParser, words: Sequence[str], commands: Collection[str]) -> None:
    """End with the command that a person meant who gave a recipe, or a word of others, in its place."""
    if words[:1] == ["launch"] and len(words) > 1 and words[1] not in ("slurm", "local") and _is_recipe(words[1]):
        parser.error(f"launch {words[1]}: where is missing; write hybridflow launch slurm {words[1]}, or local or mpi")
    first = words[0] if words else "-"
    if first in commands or first.startswith("-"):
        return
    if first in _COMMANDS_ELSEWHERE:
        parser.error(f"{first}: not a command; {_COMMANDS_ELSEWHERE[first]}")
    if _is_recipe(first):
        parser.error(f"{first}: not a command; write hybridflow train {first}")
    parser.error(f"{first}: not a command; {did_you_mean(first, commands)}the commands are {', '.join(commands)}")


def _is_recipe(word: str) -> bool:
    try:
        find_recipe(word)
    except MissingFileError:
        return False
    return True


def _answer_with_key(parser: argparse.ArgumentParser, option: str, words: Sequence[str]) -> None:
    """End with the command that takes an option, or the key of a recipe that a person gave as one, if there is one."""
    name, equals, value = option.partition("=")
    if name in _OPTIONS_ELSEWHERE:
        parser.error(f"{name}: not an option here; {_OPTIONS_ELSEWHERE[name]}")
    key = key_of_option(option)
    if key is None and words[:2] == ["launch", "slurm"]:
        parser.error(f"{name}: not an option here; options of sbatch go into the site settings (docs/slurm.md)")
    if key is None:
        return
    following = words[words.index(option) + 1 :]
    if not equals:
        value = following[0] if following and not following[0].startswith("-") else "VALUE"
    parser.error(f"{name}: not an option; write {key}={value}")


class _Parser(argparse.ArgumentParser):
    """Keeps the lines of descriptions and examples, as those of its commands do."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)


def _parser() -> tuple[argparse.ArgumentParser, Collection[str]]:
    """Return the parser, and the names of its commands."""
    parser = _Parser(
        prog="hybridflow",
        description="RL post-training of language models on HPC clusters.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"hybridflow {__version__}")
    # For commands without a recipe.
    parser.set_defaults(recipe=None, overrides=())
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="run a recipe",
        description="Run a recipe. Without a launcher, start the recipe's ranks on this machine; under torchrun, "
        "mpirun or srun, join the ranks that are there. In a step of srun with a single task, a recipe with fallbacks "
        "runs as that one rank, and any other starts its ranks on this machine.",
        epilog=_TRAIN_EXAMPLES,
    )
    add_recipe(train)
    train.add_argument("--resume", action="store_true", help="resume from the run's latest checkpoint, if there is one")
    add_log(train)
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="check the recipe, print the plan, open the data files, call the reward on the first row, and stop",
    )
    train.set_defaults(run=_train)
    plan = commands.add_parser("plan", help="show what a recipe or a reshard would do, without starting it")
    plans = plan.add_subparsers(required=True, metavar="WHAT")
    job = plans.add_parser(
        "job",
        help="show which rank calls what, the schedule, and the memory of each rank",
        description="Print roles and calls of every rank, the program of the job, and the memory of each rank. With "
        "--nodes or --script these are of its Slurm job. With --script, check the job against the site settings and "
        "print the batch file too. The command starts no process, and imports torch only with --script, to compare the "
        "recipe with the run's latest checkpoint.",
        epilog=_JOB_EXAMPLES,
    )
    add_recipe(job)
    what = job.add_mutually_exclusive_group()
    what.add_argument("--mermaid", action="store_true", help="print one step as a mermaid flowchart instead")
    what.add_argument("--script", action="store_true", help="print the batch file of `hybridflow launch slurm` too")
    add_slurm_options(job)
    job.set_defaults(run=_plan_job)
    add_reshard(plans)
    add_estimate(plans, _flow_of)
    add_auto(plans, _flow_of)
    add_init(commands)
    add_serving(commands)
    add_launch(commands)
    add_convert(commands)
    add_inspect_and_diff(commands)
    add_status(commands, _planned_of)
    add_rollouts(commands)
    add_report(commands, _planned_of)
    add_doctor(commands, _flow_of)
    return parser, commands.choices


def _plan_job(arguments: argparse.Namespace) -> int:
    for option in ("time", "partition"):
        if getattr(arguments, option) is not None and not arguments.script:
            raise ConfigError(f"--{option} is for the batch file; give --script too, or leave it out")
    if arguments.script or arguments.nodes is not None:
        recipe, num_ranks = planned_recipe(arguments)
    else:
        recipe, num_ranks = load_recipe(arguments.recipe, arguments.overrides), None
    recipe, _ = settle_layouts(recipe, arguments, num_ranks)
    if arguments.mermaid:
        from hybridflow.dataflow.render import mermaid
        from hybridflow.trainer.plan import plan_job

        plan = plan_job(recipe)
        print_out(mermaid(plan.train, plan.meshes))
        return 0
    _print_plan(recipe, arguments.site)
    if arguments.script:
        # Last, so that what does not fit can be looked up above.
        print(f"\nbatch file\n{batch_file(arguments)}", end="")
    return 0


def _planned_of(run_dir: Path) -> Planned | None:
    from hybridflow.mapping.planned import planned_run

    return planned_run(run_dir, _flow_of)


def _flow_of(recipe: Recipe) -> Flow:
    from hybridflow.trainer.plan import training_step

    return training_step(recipe).flow


def _print_plan(recipe: Recipe, site_file: Path | None) -> None:
    from hybridflow.dataflow.render import plan_table
    from hybridflow.launch.site import load_site
    from hybridflow.mapping.memory import job_memory, planned_gpu_bytes, usable_bytes, with_micro_batches
    from hybridflow.mapping.memory_check import check_memory
    from hybridflow.mapping.memory_table import memory_summary, memory_table
    from hybridflow.trainer.plan import placement_warnings, plan_job, transformers_note
    from hybridflow.trainer.warnings import recipe_warnings

    plan = plan_job(recipe)
    gpu_bytes = planned_gpu_bytes(recipe, load_site(site_file).gpu_memory_gb)
    recipe = with_micro_batches(recipe, plan.meshes, gpu_bytes)
    if recipe.defaults:
        print_out(f"{defaults_text(recipe.defaults)}\n")
    print_out(plan_table(plan.whole, plan.meshes, recipe.cluster.ranks))
    memory = job_memory(recipe, plan.meshes, gpu_bytes=gpu_bytes)
    print_out(f"\nmemory of each rank, estimated\n{memory_table(memory)}\n{memory_summary(memory)}")
    is_open = "trainer.micro_batch_tokens" in recipe.defaults and recipe.cluster.hardware is None
    if is_open and usable_bytes(recipe, gpu_bytes) is None:
        print_out(
            f"with micro-batches of {recipe.trainer.micro_batch_tokens} tokens; on GPUs a job takes the largest that "
            "fit: name the GPU to see them, as in cluster.hardware=h100-sxm"
        )
    for warning in (*transformers_note(recipe), *placement_warnings(plan.meshes), *recipe_warnings(recipe)):
        complain(warning)
    for warning in check_memory(recipe, memory, gpu_bytes):
        complain(warning)


def _train(arguments: argparse.Namespace) -> int:
    # As early as can be: a signal that comes before ends the rank, and with it the job.
    signals = _signals_of_rank() if is_launched() and not arguments.dry_run else None
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    check_inputs(recipe, find_recipe(arguments.recipe).parent)
    if arguments.dry_run:
        try_run_dir(recipe, resume=arguments.resume)
        _print_plan(settle_layouts(recipe, arguments)[0], None)
        print_out("\ninputs\n" + "\n".join(try_here(recipe)))
        return 0
    choose_log(arguments)
    start = find_start()
    # A step of a single task is a rank where the recipe says what to do on one: a job of 1 to 4 nodes got one.
    is_rank = start.launcher != "alone" or ("SLURM_STEP_ID" in os.environ and bool(recipe.fallbacks))
    if not is_rank and recipe.cluster.ranks > 1:
        return train_here(recipe, arguments)
    if recipe.layout is not None:
        if start.launcher != "alone" and recipe.cluster.ranks_per_node is None:
            # As `launch` has searched.
            recipe = replace(recipe, cluster=replace(recipe.cluster, ranks_per_node=start.ranks_per_node))
        recipe, _ = settle_layouts(recipe, arguments, start.size, is_told=start.rank == 0)
    elif is_rank:
        told = _SINGLE_TASK if start.launcher == "alone" else None
        recipe = recipe_for_ranks(recipe, arguments.recipe, arguments.overrides, start.size, told=told)
        if start.rank >= recipe.cluster.ranks:
            from hybridflow.parallel.rendezvous import stand_by

            stand_by(start, start_deadline_s=recipe.cluster.start_deadline_s, signals=signals)
            return DONE
        start = start.first(recipe.cluster.ranks)
    signals = CaughtSignals(asks_at_interrupt=True) if signals is None else signals
    return _train_rank(recipe, start, signals, resume=arguments.resume)


def _signals_of_rank() -> CaughtSignals:
    """Return the signals that a rank catches; the launcher is known by its variables alone."""
    if MEETING_VARIABLE in os.environ:
        # hybridflow's own launcher, which alone Ctrl-C reaches, has spoken, and passes on the first one.
        return CaughtSignals(asks_at_interrupt=True, speaks=False)
    if passes_interrupts():
        return CaughtSignals(asks_at_interrupt=True, speaks=rank_hint() == 0, copies_s=COPIES_S)
    # srun acts for several tasks. A shell that it has started is one, and what is started there has the terminal.
    is_only = "RANK" not in os.environ and os.environ.get("SLURM_STEP_NUM_TASKS") == "1"
    return CaughtSignals(asks_at_interrupt=is_only)


def _train_rank(recipe: Recipe, start: Start, signals: CaughtSignals, *, resume: bool) -> int:
    """Run one rank's part of a job and return its exit status."""
    from hybridflow.trainer.banner import first_line

    if start.rank == 0 and MEETING_VARIABLE not in os.environ:
        # hybridflow's own launcher has said so.
        say_event("start", first_line(recipe))
    # A reward function may lie in the working directory, also for the console script.
    sys.path.insert(0, os.getcwd())

    def load() -> Callable[[World], int]:
        from hybridflow.trainer.trainer import train

        return lambda world: DONE if train(recipe, world, resume=resume) else REQUEUE

    return run_rank(start, signals, load, recipe.cluster)
