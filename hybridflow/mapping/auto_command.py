"""``hybridflow plan auto``: its options. Light at import; the search is imported where it is run."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybridflow.config.recipe import Recipe
from hybridflow.dataflow.graph import Flow
from hybridflow.mapping.arguments import HARDWARE_HELP, add_like, count

_EXAMPLES = """examples:
  hybridflow plan auto ppo-llama-3.1-8b model.path=models/Llama-3.1-8B-Instruct --nodes 2 --prompt 200 --response 400
  hybridflow plan auto ppo-70b --nodes 64 --out ppo-70b-64.yaml
  hybridflow plan auto ppo-70b --gpus 4 --hardware b200 --json
  hybridflow plan auto mine.yaml --nodes 4 --like runs/mine
"""


def add_auto(plans: Any, flow_of: Callable[[Recipe], Flow]) -> None:
    """Add it to the sub-commands of ``plan``; ``flow_of`` returns the flow of a recipe's step."""
    parser = plans.add_parser(
        "auto",
        help="find the placement and layouts with which a step takes the least time",
        description="Search which models share which GPUs, the layout of each model in each phase, recomputation, "
        "offloading, micro-batches and the number of samples decoded together. Print the best of the best ways to "
        "share GPUs, and with --out write the fastest as a recipe. Times are those of `hybridflow plan estimate`. The "
        "command starts no process and imports no torch.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file, or the name of a shipped recipe")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="overrides of the recipe")
    number = parser.add_mutually_exclusive_group()
    number.add_argument(
        "--nodes", type=count, metavar="N", help="nodes, of 8 GPUs unless cluster.ranks_per_node says otherwise"
    )
    number.add_argument(
        "--gpus", type=count, metavar="N", help="GPUs, in as few nodes as can be (default: the recipe's)"
    )
    parser.add_argument("--hardware", metavar="NAME", help=HARDWARE_HELP)
    add_like(parser)
    parser.add_argument(
        "--prompt",
        type=count,
        metavar="N",
        help="tokens of a prompt (default: half of what model.max_context leaves beside rollout.max_new_tokens)",
    )
    parser.add_argument(
        "--response",
        type=count,
        metavar="N",
        help="mean tokens of a response; lengths are spread around it (default: half of rollout.max_new_tokens)",
    )
    parser.add_argument(
        "--ahead",
        action="store_true",
        help="try asynchronous rollout too (trainer.max_staleness=1), if the algorithm has it: rollout and update run "
        "at the same time, and samples are one update old",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the fastest as a recipe")
    parser.add_argument("--json", action="store_true", help="print JSON, in seconds and bytes")
    parser.set_defaults(run=functools.partial(run, flow_of=flow_of))


def run(arguments: argparse.Namespace, flow_of: Callable[[Recipe], Flow]) -> int:
    """Run the command and return the exit status."""
    from hybridflow.mapping.auto import find_layouts

    return find_layouts(arguments, flow_of)
