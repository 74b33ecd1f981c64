"""Problems, their tokens, and the order in which training draws them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hybridflow.config.data import DataConfig
from hybridflow.data.images import Image, with_images
from hybridflow.data.rows import Row, are_messages
from hybridflow.data.tokenizer import Tokenizer, first_new, split_stop
from hybridflow.errors import DataError

RESPONSE = "response"
"""The field of a row's only response where none is named."""

_ANSWER = "answer"
_MISSING = object()


class Judged(NamedTuple):
    """A response with a verdict.

    Attributes:
        text: The response.
        is_wanted: Whether it is; of a pair, whether it is the better one.
    """

    text: str
    is_wanted: bool


@dataclass(frozen=True, kw_only=True)
class Example:
    """A problem.

    Attributes:
        prompt: What the model is given.
        answer: The right answer, for the reward, as JSON has it; empty text where there is none. Of preferences the
            response that is wanted.
        solution: Text to imitate in the warm start, if the row has one; of a conversation several: what to write, what
            is then observed, what to write, …
        responses: The responses of a preference, the better one first; else one.
        margin: By how much the first response of a preference is better.
        images: Those in the prompt, in their order.
        row_number: Says which row it is, in the ids of the images' tokens, see ``data.images``.
        begins: Whether the prompt's text has the beginning of a sequence in it, as a chat template writes it.
        place: File and line, or row, for messages.
        row: All that the data says of it.
    """

    prompt: str
    answer: Any
    solution: str | tuple[str, ...] | None = None
    responses: tuple[Judged, ...] = ()
    margin: float = 0.0
    images: tuple[Image, ...] = ()
    row_number: int = field(default=0, compare=False)
    begins: bool = False
    place: str
    row: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def content(self) -> list[Any]:
        """Return the content that makes it another problem where it differs; JSON."""
        judged = [self.responses, self.margin] if self.responses else []
        images = [[[each.source, *each.grid] for each in self.images]] if self.images else []
        return [self.prompt, self.answer, self.solution, *judged, *images]

    @property
    def turns(self) -> tuple[str, ...]:
        """Return the texts to imitate: texts to write at even places, and observations between them."""
        if isinstance(self.solution, tuple):
            return self.solution
        return (as_text(self.answer) if self.solution is None else self.solution,)


class Ends(NamedTuple):
    """What ends a text to imitate.

    Attributes:
        end_id: The token that is put behind a text; None: the end of sequence.
        stop: ``rollout.stop``: texts and names of tokens, each of which ends a response too.
    """

    end_id: int | None = None
    stop: tuple[str, ...] = ()


END_OF_SEQUENCE = Ends()


class Solution(NamedTuple):
    """What the warm start imitates.

    Attributes:
        prompt: Token ids.
        tokens: Token ids of all that follows.
        is_written: For each of ``tokens``, whether it is to be imitated; the others are observed.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    is_written: tuple[bool, ...]


def example_of(row: Row, place: str, data: DataConfig, *, needs_answer: bool = False) -> Example:
    """Return the problem of a row.

    Args:
        row: As JSON has it.
        place: File and line, for messages.
        data: Names the fields.
        needs_answer: The reward compares with the answer, so that a row without one is of no use.

    Raises:
        DataError: It lacks a field, or has something else there than it should.
    """
    solution = solution_of(row, place, data)
    if solution is None:
        solution = _completion_of(row, place, data)
    return Example(
        prompt=prompt_of(row, place, data),
        answer=_answer_of(row, place, data, solution, is_needed=needs_answer),
        solution=solution,
        place=place,
        row=row,
    )


def _completion_of(row: Row, place: str, data: DataConfig) -> str | None:
    """Return the text that a row has under another of the usual names of a solution."""
    name = response_field(row, data)
    return text_of(row, name, place) if isinstance(value_of(row, name), str) else None


def response_field(row: Row, data: DataConfig) -> str:
    """Return the field of a row's only response: the named one, or ``response`` where that is missing."""
    is_other = value_of(row, data.completion_field) is None and value_of(row, RESPONSE) is not None
    return RESPONSE if is_other else data.completion_field


def _answer_of(
    row: Row, place: str, data: DataConfig, solution: str | tuple[str, ...] | None, *, is_needed: bool
) -> Any:
    """Return a row's answer; else its only response; empty text where it has neither."""
    name = data.answer_field
    if name is None:
        return ""
    answer = value_of(row, name)
    if is_needed and isinstance(answer, float) and not math.isfinite(answer):
        raise DataError(
            f"{place}: field {name!r}: found {answer}, which is no answer, and may stand for one that is missing; mend "
            "the row, or give answers as text"
        )
    if answer is None:
        if isinstance(solution, str) and value_of(row, data.solution_field) is None:
            return solution
        if is_needed or name != _ANSWER:
            why = ", and the reward compares with it" if is_needed else ""
            raise DataError(
                f"{place}: no field {name!r}; found {sorted(row)}{why}; add it, set data.answer_field to its name "
                "here, or choose a reward that needs none (reward.function=module:function)"
            )
        return ""
    check_unicode(as_text(answer), name, place)
    return answer


def encode_prompt(example: Example, tokenizer: Tokenizer, *, max_new_tokens: int, max_context: int) -> tuple[int, ...]:
    """Encode a prompt's tokens, after the beginning-of-sequence token where the tokenizer has one.

    Args:
        example: The problem.
        tokenizer: Gives the tokens.
        max_new_tokens: Longest response in tokens.
        max_context: Longest sequence in tokens.

    Raises:
        DataError: A prompt leaves no room for the longest response; names its file and line.
    """
    prompt = prompt_tokens(example, tokenizer)
    if len(prompt) + max_new_tokens > max_context:
        lower = "lower max_new_tokens or " if max_new_tokens > 1 else ""
        raise DataError(
            f"{example.place}: prompt of {len(prompt)} tokens + rollout.max_new_tokens={max_new_tokens} = "
            f"{len(prompt) + max_new_tokens} exceeds model.max_context={max_context}; shorten the prompt to "
            f"{max_context - max_new_tokens} tokens, {lower}raise max_context; "
            f"data.max_prompt_tokens={max_context - max_new_tokens} leaves longer prompts out"
        )
    return prompt


def encode_solution(
    example: Example, tokenizer: Tokenizer, *, max_context: int, ends: Ends = END_OF_SEQUENCE
) -> Solution:
    """Encode the warm start's text: the tokens of a prompt, and of its solution with what ends it.

    A row without a solution gives its answer. Each text to write in a conversation ends like that; see ``ended``.

    Args:
        example: The problem.
        tokenizer: Gives the tokens.
        max_context: Longest sequence in tokens.
        ends: What ends a text to write.

    Raises:
        DataError: Prompt and solution together exceed ``max_context``; names the file and line.
    """
    prompt = prompt_tokens(example, tokenizer)
    tokens: list[int] = []
    is_written: list[bool] = []
    for number, text in enumerate(example.turns):
        part = tokens_at(example.place, text, tokenizer)
        part = part if number % 2 else ended(part, tokenizer, ends)
        tokens += part
        is_written += [number % 2 == 0] * len(part)
    check_length(example, len(prompt), "solution", len(tokens), max_context=max_context)
    return Solution(prompt, tuple(tokens), tuple(is_written))


def ended(tokens: list[int], tokenizer: Tokenizer, ends: Ends) -> list[int]:
    """Return the tokens of a text to imitate with the token that ends a response.

    A text gets none if a response would have ended with the last token of the text: with one that ends a response, or
    that completes a text of ``stop``.
    """
    texts, ids = split_stop(ends.stop, tokenizer)
    is_ended = bool(tokens) and tokens[-1] in (*tokenizer.stop_ids, *ids, ends.end_id)
    if texts and not is_ended:
        is_ended = first_new(tokenizer.decode(tokens[:-1]), tokenizer.decode(tokens), texts) is not None
    return tokens if is_ended else [*tokens, tokenizer.eos_id if ends.end_id is None else ends.end_id]


def check_length(example: Example, num_prompt: int, what: str, num_tokens: int, *, max_context: int) -> None:
    """Refuse a prompt and what follows it, of so many tokens each, that exceed the context together.

    Raises:
        DataError: They do; names the file and line.
    """
    length = num_prompt + num_tokens
    if length > max_context:
        raise DataError(
            f"{example.place}: prompt of {num_prompt} tokens + {what} of {num_tokens} = {length} exceeds "
            f"model.max_context={max_context}; shorten it or raise max_context"
        )


def prompt_tokens(example: Example, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return a prompt's token ids, after the beginning-of-sequence token where the tokenizer has one.

    Raises:
        DataError: The text cannot be encoded, or has not a place for each image; names the file and line.
    """
    begin = () if tokenizer.bos_id is None or example.begins else (tokenizer.bos_id,)
    tokens = tokens_at(example.place, example.prompt, tokenizer)
    if example.images:
        tokens = with_images(tokens, example.images, example.row_number, example.place)
    return (*begin, *tokens)


def tokens_at(place: str, text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of a text of a row. Raises DataError: it cannot be encoded; names the file and line."""
    try:
        return tokenizer.encode(text)
    except DataError as error:
        raise DataError(f"{place}: {error}") from error


def prompt_of(row: Row, place: str, data: DataConfig, hint: str = "") -> str:
    """Return a row's prompt. Raises DataError: it is missing, with the hint; empty, or no text."""
    prompt = text_of(row, data.prompt_field, place, "prompt_field", hint)
    if prompt == "":
        raise DataError(f"{place}: field {data.prompt_field!r} is empty; a prompt needs at least one character")
    return prompt


def solution_of(row: Row, place: str, data: DataConfig) -> str | tuple[str, ...] | None:
    """Return a row's text or texts to imitate; None: it has none. Raises DataError: it is something else."""
    name = data.solution_field
    texts = value_of(row, name, _MISSING)
    if texts is _MISSING:
        return None
    if not isinstance(texts, list):
        return text_of(row, name, place)
    check_no_messages(row, name, place, data)
    if len(texts) % 2 == 0:
        raise DataError(
            f"{place}: field {name!r}: a list of {len(texts)} texts; a conversation is written, observed, …, written, "
            "so give an odd number"
        )
    return tuple(text_of({f"{name}[{index}]": text}, f"{name}[{index}]", place) for index, text in enumerate(texts))


def check_no_messages(row: Mapping[str, Any], name: str, place: str, data: DataConfig) -> None:
    """Refuse messages in a field whose text is imitated. Raises DataError."""
    if are_messages(value_of(row, name)):
        raise DataError(
            f"{place}: field {name!r}: found messages, expected text; give them as {data.completion_field!r}, or set "
            f"data.completion_field={name}"
        )


def value_of(row: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return a row's field; ``outer.inner`` names a field of a field, unless the row has that very name."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def as_text(value: Any) -> str:
    """Return text as it is, other JSON as it is written."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def text_of(row: Row, name: str, place: str, key: str = "*_field", hint: str = "") -> str:
    """Return a row's field of text, whose name stands in a key of ``data``.

    Raises:
        DataError: It is missing, or no text.
    """
    value = value_of(row, name, _MISSING)
    if value is _MISSING:
        remedy = f"add it, or set data.{key} to its name here{hint}"
        raise DataError(f"{place}: no field {name!r}; found {sorted(row)}; {remedy}")
    if not isinstance(value, str):
        raise DataError(f"{place}: field {name!r}: expected text, found {value!r:.60}; put it in quotes")
    check_unicode(value, name, place)
    return value


def check_unicode(text: str, name: str, place: str) -> None:
    """Refuse text that UTF-8 cannot write. Raises DataError."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}: field {name!r}: half of a surrogate pair at character {error.start}; mend it"
        ) from error
