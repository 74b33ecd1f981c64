"""The fields of a user's data in the recipe that ``hybridflow init`` writes, found in the first row. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.config.algorithm import AlgorithmTraits
from hybridflow.config.data import DataConfig
from hybridflow.data.files import find_files, is_address
from hybridflow.data.prompts import value_of
from hybridflow.data.readers import cut, format_of, place_of, read
from hybridflow.data.rows import CONVERSATIONS, HERE, are_messages
from hybridflow.errors import DataError

_MOST_ROW_BYTES = 1 << 24
_OTHER_NAMES = {
    "prompt_field": ("question", "problem", "instruction", "query", "input"),
    "answer_field": ("reward_model.ground_truth", "ground_truth", "solution", "label", "target", "output"),
    "solution_field": ("output", "target"),
    "chosen_field": ("preferred", "accepted"),
    "rejected_field": ("dispreferred", "declined"),
    "completion_field": ("response", "output"),
    "wanted_field": ("label", "desirable"),
}
"""Key of ``data`` -> what data sets call the field, the first that a row has is taken."""


def first_row(path: str) -> Mapping[str, Any] | None:
    """Return the first row of the data; None where there is none, or it lies elsewhere.

    Raises:
        DataError: It cannot be read.
    """
    if is_address(path):
        return None
    file = find_files(path)[0]
    for piece in cut(file, format_of(file.path, None), max_row_bytes=_MOST_ROW_BYTES):
        for number, row in enumerate(read(piece, max_row_bytes=_MOST_ROW_BYTES)):
            if isinstance(row, DataError):
                raise DataError(str(row).replace(HERE, place_of(piece, number), 1))
            if row is not None:
                return row
    return None


def fields_in(row: Mapping[str, Any], traits: AlgorithmTraits) -> tuple[dict[str, str], list[str]]:
    """Return the keys of ``data`` that name the fields of the first row, and those whose fields it lacks."""
    named, lacking = {}, []
    for key in _needed(row, traits):
        if value_of(row, getattr(DataConfig, key)) is not None:
            continue
        found = [name for name in _OTHER_NAMES[key] if value_of(row, name) is not None]
        if found:
            named[key] = found[0]
        elif key != "answer_field" or len(row) > 1:
            # Rewards may do without an answer, of which a row of the prompt alone says enough.
            lacking.append(key)
    return named, lacking


def _needed(row: Mapping[str, Any], traits: AlgorithmTraits) -> list[str]:
    fields = ("chosen", "completion", CONVERSATIONS)
    has_messages = "messages" in row or any(are_messages(row.get(name)) for name in fields)
    keys = [] if has_messages else ["prompt_field"]
    if traits.has_preferences:
        is_pair = traits.is_paired or "chosen" in row
        return [*keys, *(("chosen_field", "rejected_field") if is_pair else ("completion_field", "wanted_field"))]
    if has_messages or "completion" in row or "response" in row:
        return keys
    if traits.imitates:
        return keys if "answer" in row else [*keys, "solution_field"]
    return [*keys, "answer_field"]
