"""Options that commands of ``mapping`` share. Light at import."""

from __future__ import annotations

import argparse
import re

PROMPT_HELP = "tokens of a prompt (default: half of what model.max_context leaves beside rollout.max_new_tokens)"
RESPONSE_HELP = "mean tokens of a response; lengths are spread around it (default: half of rollout.max_new_tokens)"


def count(text: str) -> int:
    """Return a whole number of 1 or more.

    Raises:
        ArgumentTypeError: It is none.
    """
    if not re.fullmatch("[1-9][0-9]{0,11}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of 1 or more")
    return int(text)
