"""Options that commands of ``mapping`` share. Light at import."""

from __future__ import annotations

import argparse
import re


def count(text: str) -> int:
    """Return a whole number of 1 or more.

    Raises:
        ArgumentTypeError: It is none.
    """
    if not re.fullmatch("[1-9][0-9]{0,11}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of 1 or more")
    return int(text)
