"""Options that commands of ``mapping`` share. Light at import."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from hybridflow.mapping.hardware import DEFAULT_HARDWARE, hardware_names

HARDWARE_HELP = (
    f"{', '.join(hardware_names())} (by `hybridflow doctor --measure`), or a YAML file with the same keys as that "
    f"(default: the recipe's cluster.hardware, else {DEFAULT_HARDWARE})"
)


def add_like(parser: argparse.ArgumentParser) -> None:
    """Add ``--like``."""
    parser.add_argument(
        "--like",
        type=Path,
        metavar="RUN",
        help="fit the hardware's figures to what the phases of this run took, and take its response lengths",
    )


def count(text: str) -> int:
    """Return a whole number of 1 or more.

    Raises:
        ArgumentTypeError: It is none.
    """
    if not re.fullmatch("[1-9][0-9]{0,11}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of 1 or more")
    return int(text)
