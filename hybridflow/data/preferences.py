"""Preferences: two responses to a prompt of which one is better, or one and whether it is wanted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hybridflow.config.data import DataConfig
from hybridflow.data.prompts import (
    END_OF_SEQUENCE,
    Ends,
    Example,
    Judged,
    check_length,
    check_no_messages,
    ended,
    prompt_of,
    prompt_tokens,
    response_field,
    solution_of,
    text_of,
    tokens_at,
    value_of,
)
from hybridflow.data.rows import Row, are_messages
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import DataError

_LABEL = "label"


class JudgedResponse(NamedTuple):
    """A response with a verdict, in tokens.

    Attributes:
        prompt: Token ids, at least one.
        tokens: Token ids of the response, with what ends it.
        is_wanted: Whether it is; of a pair, whether it is the better one.
        margin: By how much the better response of a pair is better.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    is_wanted: bool
    margin: float


def preferences_of(row: Row, place: str, data: DataConfig, *, is_paired: bool) -> tuple[Example, ...]:
    """Return the preferences of a row.

    Args:
        row: As JSON has it.
        place: File and line, for messages.
        data: Names the fields.
        is_paired: The row must have two responses. Else it may have one and whether it is wanted, and one with two
            gives two examples.

    Raises:
        DataError: It lacks a field, or has something else there than it should.
    """
    example = _preference(row, place, data, is_paired=is_paired)
    if is_paired:
        return (example,)
    return tuple(replace(example, responses=(judged,)) for judged in example.responses)


def encode_responses(
    example: Example, tokenizer: Tokenizer, *, max_context: int, ends: Ends = END_OF_SEQUENCE
) -> tuple[JudgedResponse, ...]:
    """Encode the responses of an example, the better one first.

    Args:
        example: A preference; any other has none.
        tokenizer: Gives the tokens.
        max_context: Longest sequence in tokens.
        ends: What ends a response.

    Raises:
        DataError: Prompt and response together exceed ``max_context``; names the file and line.
    """
    prompt = prompt_tokens(example, tokenizer)
    responses = []
    for judged in example.responses:
        tokens = tuple(ended(tokens_at(example.place, judged.text, tokenizer), tokenizer, ends))
        check_length(example, len(prompt), "response", len(tokens), max_context=max_context)
        responses.append(JudgedResponse(prompt, tokens, judged.is_wanted, example.margin))
    return tuple(responses)


def pairs_of(
    encoded: Sequence[tuple[JudgedResponse, ...]], path: str | Path
) -> tuple[tuple[JudgedResponse, JudgedResponse], ...]:
    """Pair each wanted response with an unwanted one for validation, in the order of the file.

    Args:
        encoded: From ``encode_responses``, of each example: two, or one.
        path: The file, for messages.

    Raises:
        DataError: There is no such pair.
    """
    whole = [(each[0], each[1]) for each in encoded if len(each) == 2]
    single = [each[0] for each in encoded if len(each) == 1]
    wanted, others = ([each for each in single if each.is_wanted is flag] for flag in (True, False))
    pairs = (*whole, *zip(wanted, others, strict=False))
    if not pairs:
        raise DataError(
            f"{path}: holds {len(wanted)} responses that are wanted and {len(others)} that are not; validation "
            "compares one of each, add some of the other"
        )
    return pairs


def check_imitable(example: Example, data: DataConfig) -> None:
    """Refuse a warm start on a response that is not wanted, on messages, or on nothing.

    Raises:
        DataError: There is such a response alone, an answer of messages, or no answer, and no solution; names the row.
    """
    # A problem's answer that is there and empty is a response that ends at once.
    name = None if example.responses else data.answer_field
    if name is not None and example.solution is None:
        check_no_messages(example.row, name, example.place, data)
    is_there = example.answer != "" or (name is not None and value_of(example.row, name) == "")
    has_text = is_there or any(each.is_wanted for each in example.responses)
    if example.solution is None and not has_text:
        found = "the response is not wanted" if example.responses else "the answer is empty"
        said = value_of(example.row, data.messages_field)
        if are_messages(said):
            found = f"the last of its messages is of {said[-1]['role']!r}, not of 'assistant'"
        others = "" if example.responses else f", {data.completion_field!r}"
        raise DataError(
            f"{example.place}: there is nothing to imitate: {found}, and there is no field {data.solution_field!r}"
            f"{others}; found {sorted(example.row)}; add it, set data.solution_field to its name here, or remove "
            "warm_start if there is one"
        )


def margin_of(row: Row, name: str, place: str) -> float:
    """Return by how much a row's better response is better, 0 by default. Raises DataError: it is no number."""
    found = value_of(row, name, 0.0)
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        raise DataError(f"{place}: field {name!r}: expected a finite number, found {found!r:.60}; mend or remove it")
    return float(found)


def _preference(row: Row, place: str, data: DataConfig, *, is_paired: bool) -> Example:
    hint = ""
    if isinstance(value_of(row, data.chosen_field), str):
        hint = f"; only messages may begin with the prompt in {data.chosen_field!r} and {data.rejected_field!r}"
    prompt, solution = prompt_of(row, place, data, hint), solution_of(row, place, data)
    completion = response_field(row, data) if value_of(row, data.chosen_field) is None else data.completion_field
    if not is_paired and value_of(row, completion) is not None:
        strangers = [name for name in (data.chosen_field, data.rejected_field) if value_of(row, name) is not None]
        if strangers:
            raise DataError(
                f"{place}: has field {completion!r} and {strangers[0]!r}; a row is one response or a pair, remove one "
                "of the two"
            )
        text, is_wanted = text_of(row, completion, place), _is_wanted(row, place, data)
        answer, margin = text if is_wanted else "", 0.0
        responses: tuple[Judged, ...] = (Judged(text, is_wanted),)
    elif not is_paired and value_of(row, data.chosen_field) is None:
        raise DataError(
            f"{place}: neither field {data.completion_field!r} nor {data.chosen_field!r}; found {sorted(row)}; add "
            "one, or set data.*_field to its name here"
        )
    else:
        answer, rejected = (text_of(row, name, place) for name in (data.chosen_field, data.rejected_field))
        if answer == rejected:
            raise DataError(
                f"{place}: fields {data.chosen_field!r} and {data.rejected_field!r} are the same text; a pair teaches "
                "by what differs, remove the row"
            )
        responses, margin = (Judged(answer, True), Judged(rejected, False)), margin_of(row, data.margin_field, place)
    return Example(
        prompt=prompt,
        answer=answer,
        solution=solution,
        responses=responses,
        margin=margin,
        place=place,
        row=row,
    )


def _is_wanted(row: Row, place: str, data: DataConfig) -> bool:
    """Return whether a row's only response is wanted; ``label`` says so too."""
    is_other = value_of(row, data.wanted_field) is None and value_of(row, _LABEL) is not None
    name = _LABEL if is_other else data.wanted_field
    found = value_of(row, name)
    if not isinstance(found, bool):
        raise DataError(f"{place}: field {name!r}: expected true or false, found {found!r:.60}; set it to one of them")
    return found
