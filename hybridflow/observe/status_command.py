"""``hybridflow status``. Light at import."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridflow.errors import HybridflowError
from hybridflow.exit_status import DONE, exit_status
from hybridflow.observe.console import complain, print_out

_EXAMPLES = """examples:
  hybridflow status runs/quickstart
  hybridflow status runs/*
  hybridflow status runs/quickstart --json | jq .left_s
  watch hybridflow status runs/quickstart

exit status: 0 all runs were shown, in whatever state; 2 a directory holds no run; 3 a file cannot be read
"""


def add_status(commands: Any, planned_of: Callable[[Path], Any]) -> None:
    """Add it to the sub-commands of a parser; ``planned_of`` returns the estimate for a run's directory, or None."""
    status = commands.add_parser(
        "status",
        help="show the state of a run",
        description="Print progress, speed, last checkpoint, and current activity or cause of the end of a run, from "
        "its files alone. Print several runs as a table. A run whose recipe sets cluster.hardware has the "
        "estimate of its step beside the measured times. The command imports no torch.",
        epilog=_EXAMPLES,
    )
    status.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory of a run, or of runs")
    status.add_argument("--json", action="store_true", help="print JSON, one object per run and line")
    status.set_defaults(run=functools.partial(run, planned_of=planned_of))


def run(arguments: argparse.Namespace, planned_of: Callable[[Path], Any]) -> int:
    """Run the command and return the exit status."""
    from hybridflow.observe.status import holds_data_alone, read_status, runs_in
    from hybridflow.observe.status_text import as_table, as_text

    found, end = [], DONE
    # A shell's ``runs/*`` also names where recipes put the data that they make.
    several = len(arguments.runs) > 1
    for folder in [each for each in arguments.runs if not (several and holds_data_alone(each))]:
        try:
            found += [read_status(run_dir) for run_dir in runs_in(folder)]
        except (HybridflowError, OSError) as error:
            complain(error)
            end = exit_status(error)
    if arguments.json:
        plans = [planned_of(Path(status.run)) for status in found]
        lines = [
            json.dumps({**asdict(status), "planned": plan and asdict(plan)})
            for status, plan in zip(found, plans, strict=True)
        ]
    elif len(found) == len(arguments.runs) == 1:
        lines = [as_text(found[0], planned_of(Path(found[0].run)))]
    else:
        lines = [as_table(found)] if found else []
    if lines:
        print_out("\n".join(lines))
    return end
