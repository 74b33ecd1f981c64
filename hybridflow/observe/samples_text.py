"""Responses that a person is shown: as lines for the console, and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_MOST_LETTERS = 80


def samples_text(samples: list[Mapping[str, Any]]) -> str:
    """Return samples of ``sampling.validation.shown_samples`` as lines for the console, each text cut to one line."""
    lines = []
    for each in samples:
        score = "no score" if each["score"] is None else f"score {each['score']:g}"
        lines.append(f"  prompt    {_one_line(each['prompt'])}")
        lines.append(f"  response  {_one_line(each['response'])}  ({score})")
    return "\n".join(lines)


def samples_markdown(samples: list[Mapping[str, Any]]) -> str:
    """Return samples of ``sampling.validation.shown_samples`` in whole, as Markdown."""
    parts = []
    for each in samples:
        score = "no score" if each["score"] is None else f"score {each['score']:g}"
        fence = "`" * (3 + max(_longest_fence(each["prompt"]), _longest_fence(each["response"])))
        texts = (f"**{name}**\n{fence}\n{each[name]}\n{fence}" for name in ("prompt", "response"))
        parts.append("\n\n".join([f"### held-out row {each['row'] + 1}, {score}", *texts]))
    return "\n\n".join(parts)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MOST_LETTERS else line[: _MOST_LETTERS - 1] + "…"


def _longest_fence(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
