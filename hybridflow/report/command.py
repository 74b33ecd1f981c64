"""``hybridflow report``. Light at import."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

_EXAMPLES = """examples:
  hybridflow report runs/quickstart
  hybridflow report runs/try-1 runs/try-2 --out compared.html

A run writes its report.html at its end. Samples come from the run's archive; rollout.archive=true keeps all.

exit status: 0 written; 2 a directory holds no run; 3 a file is damaged; 4 the file cannot be written
"""


def add_report(commands: Any, planned_of: Callable[[Path], Any]) -> None:
    """Add it to the sub-commands of a parser; ``planned_of`` returns the estimate for a run's directory, or None."""
    report = commands.add_parser(
        "report",
        help="write runs as one HTML page: curves, samples, timeline, recipe",
        description="Write one HTML file with curves, samples, timeline, starts and recipe of one run, or of several "
        "runs to compare. A browser opens the file without a server or a network. The command also works while a run "
        "is running. It imports no torch.",
        epilog=_EXAMPLES,
    )
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory of a run")
    report.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file to write (default: report.html in the directory of a single run, else in the current one)",
    )
    report.set_defaults(run=functools.partial(run, planned_of=planned_of))


def run(arguments: argparse.Namespace, planned_of: Callable[[Path], Any]) -> int:
    """Run the command and return the exit status.

    Raises:
        DataError: A directory holds no run.
        CheckpointError: A file of a run is damaged.
        WriteError: The file cannot be written.
    """
    from hybridflow.observe.console import print_out
    from hybridflow.observe.files import named_file
    from hybridflow.observe.summary import REPORT_FILE
    from hybridflow.report.page import write_report

    folder = arguments.runs[0] if len(arguments.runs) == 1 else Path()
    out = folder / REPORT_FILE if arguments.out is None else named_file(arguments.out, "--out")
    path = write_report(arguments.runs, out, planned_of)
    print_out(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB); open it in a browser")
    return 0
