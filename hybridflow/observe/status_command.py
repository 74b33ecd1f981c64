"""``hybridflow status``. Light at import."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridflow.errors import HybridflowError
from hybridflow.exit_status import DONE, exit_status
from hybridflow.observe.console import print_foreign

_EXAMPLES = """examples:
  hybridflow status runs/quickstart
  hybridflow status runs/*
  hybridflow status runs/quickstart --json | jq .left_s
  watch hybridflow status runs/quickstart

exit status: 0 shown, whatever the run's state; 2 one of the directories holds no run; 3 one cannot be read
"""


def add_status(commands: Any) -> None:
    """Add it to the sub-commands of a parser."""
    status = commands.add_parser(
        "status",
        help="how a run stands",
        description="Print how far a run is, how quick, when it last saved, what it does or what ended it, from its "
        "files alone; of several runs a table. Imports no torch.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    status.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the directory of a run")
    status.add_argument("--json", action="store_true", help="print JSON, an object on a line for each run")
    status.set_defaults(run=run, recipe=None, overrides=())


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    from hybridflow.observe.status import read_status
    from hybridflow.observe.status_text import as_table, as_text

    found, end = [], DONE
    for run_dir in arguments.runs:
        try:
            found.append(read_status(run_dir))
        except (HybridflowError, OSError) as error:
            print(f"hybridflow: {error}", file=sys.stderr, flush=True)
            end = exit_status(error)
    if arguments.json:
        lines = [json.dumps(asdict(status)) for status in found]
    else:
        lines = [as_text(found[0]) if len(arguments.runs) == 1 else as_table(found)] if found else []
    if lines:
        print_foreign("\n".join(lines))
    return end
