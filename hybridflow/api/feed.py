"""What a program gives as prompts: texts, rows, token ids; and problems given all at once, or batch by batch."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hybridflow.config.data import DataConfig
from hybridflow.data.chat import chat_template
from hybridflow.data.order import permuted
from hybridflow.data.preferences import JudgedResponse
from hybridflow.data.prompts import RESPONSE, Example, Solution, prompt_tokens
from hybridflow.data.shaping import Shape, Shaper, examples_of
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import ConfigError, DataError
from hybridflow.parallel.coordinator import Coordinator

_KEPT = 16
"""Batches whose rows are remembered, for the updates that are still to come on them."""


@dataclass(frozen=True, kw_only=True)
class GivenPrompt:
    """A prompt, as text, or as token ids, or both, or as messages.

    Attributes:
        example: The text, the right answer if there is one, and the row with all its fields.
        tokens: Token ids; None: those of the text.
        is_conversation: The row holds messages, which the tokenizer's template turns into text.
    """

    example: Example
    tokens: tuple[int, ...] | None = None
    is_conversation: bool = False


def prompts_of(batch: Any, place: str = "prompts") -> list[GivenPrompt]:
    """Return the prompts of a batch that a program passes.

    Args:
        batch: Texts; rows (``{"prompt": …, "answer": …}``, or with ``messages``, see docs/data.md); columns of these;
            token ids ``[prompts, tokens]``, alone or as ``input_ids`` with an ``attention_mask``, as a tokenizer of
            transformers gives them.
        place: Name of the batch in messages.

    Raises:
        DataError: It is nothing of these, or is empty.
    """
    if isinstance(batch, Tensor):
        batch = {"input_ids": batch}
    if isinstance(batch, Mapping) and batch and all(hasattr(part, "column_names") for part in batch.values()):
        raise DataError(
            f"{place}: {type(batch).__name__} of splits; give one of them: "
            f"{', '.join(f'dataset[{name!r}]' for name in batch)}"
        )
    if hasattr(batch, "column_names"):
        # A data set of the package datasets.
        batch = [dict(row) for row in batch]
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        found = _of_columns(dict(batch), place)
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        found = [_of_row(row, f"{place}[{index}]") for index, row in enumerate(batch)]
    else:
        raise DataError(
            f"{place}: {type(batch).__name__}; expected a list of texts or of rows with a prompt, token ids, or for a "
            "file DataProvider(data_path=…)"
        )
    if not found:
        raise DataError(f"{place}: no prompt; give at least one")
    return found


def _of_row(row: Any, place: str) -> GivenPrompt:
    if isinstance(row, Example):
        return GivenPrompt(example=row)
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, Mapping):
        raise DataError(f"{place}: found {row!r:.60}; expected a text, or a row with a text as 'prompt'")
    row = {name: value for name, value in row.items() if not _is_missing(value)}
    prompt, is_conversation = row.get("prompt", ""), False
    if isinstance(prompt, list) or ("prompt" not in row and "messages" in row):
        prompt, is_conversation = "", True
    elif not isinstance(prompt, str) or prompt == "":
        raise DataError(
            f"{place}: found {row!r:.60}; expected a text, or a row with a text or messages as 'prompt', or 'messages'"
        )
    answer = row.get("answer", "")
    if "answer" not in row and "solution" not in row:
        # As in a file: the only response is the answer.
        answer = next((row[name] for name in ("completion", RESPONSE) if isinstance(row.get(name), str)), "")
    example = Example(prompt=prompt, answer=_answer_of(answer, place), place=place, row=row)
    return GivenPrompt(example=example, is_conversation=is_conversation)


def _is_missing(value: Any) -> bool:
    """Return whether a row lacks a value: a frame of pandas has NaN there."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _answer_of(answer: Any, place: str) -> Any:
    try:
        json.dumps(answer)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"{place}: 'answer' is {answer!r:.60}: {error}; expected text, or another value that JSON can hold"
        ) from None
    return answer


def _of_columns(columns: dict[str, Any], place: str) -> list[GivenPrompt]:
    if "input_ids" not in columns:
        # Any other column goes to a reward that asks for it.
        names = [name for name in columns if hasattr(columns[name], "__len__") and not isinstance(columns[name], str)]
        if "prompt" not in names or ("answer" in columns and "answer" not in names):
            raise DataError(f"{place}: found {sorted(columns)}; expected lists of texts as 'prompt' and 'answer'")
        lengths = {name: len(columns[name]) for name in names}
        if len(set(lengths.values())) > 1:
            raise DataError(f"{place}: columns of unequal length, {lengths}; give a value for each prompt")
        rows = zip(*(columns[name] for name in names), strict=True)
        return [_of_row(dict(zip(names, row, strict=True)), f"{place}[{index}]") for index, row in enumerate(rows)]
    ids = torch.as_tensor(columns["input_ids"])
    if ids.dim() != 2 or ids.dtype.is_floating_point:
        raise DataError(
            f"{place}: input_ids of shape {list(ids.shape)} and {ids.dtype}; expected [prompts, tokens] ids"
        )
    mask = torch.as_tensor(columns.get("attention_mask", torch.ones_like(ids))).bool()
    if mask.shape != ids.shape:
        raise DataError(
            f"{place}: attention_mask {list(mask.shape)} for input_ids {list(ids.shape)}; give equal shapes"
        )
    if len(ids) and int(ids.min()) < 0:
        raise DataError(f"{place}: input_ids have the negative id {int(ids.min())}; give ids of the tokenizer")
    answers = columns.get("answer", [""] * len(ids))
    if len(answers) != len(ids):
        raise DataError(f"{place}: {len(answers)} answers to {len(ids)} prompts; give one to each")
    found = []
    for index, (row, kept, answer) in enumerate(zip(ids, mask, answers, strict=True)):
        tokens = tuple(row[kept].tolist())
        if not tokens:
            raise DataError(f"{place}[{index}]: no token that attention_mask keeps; a prompt needs at least one")
        answer = _answer_of("" if answer is None else answer, f"{place}[{index}]")
        example = Example(prompt="", answer=answer, place=f"{place}[{index}]")
        found.append(GivenPrompt(example=example, tokens=tokens))
    return found


def check_same(given: Sequence[GivenPrompt], everyone: Coordinator, name: str = "prompts") -> None:
    """Refuse prompts that are not the same on all ranks. Collective: all ranks.

    Args:
        given: The prompts.
        everyone: All ranks.
        name: Of the argument, for messages.

    Raises:
        DataError: They are not; names the first that differs.
    """
    rows = [(each.example.prompt, each.example.answer, each.tokens, _messages_in(each)) for each in given]
    check_same_rows(rows, name, everyone)


def check_same_rows(rows: Sequence[Any], name: str, everyone: Coordinator) -> None:
    """Refuse rows that are not the same on all ranks. Collective: all ranks.

    Args:
        rows: What ``repr`` tells apart.
        name: Of the argument, for messages.
        everyone: All ranks.

    Raises:
        DataError: They are not; names the first that differs.
    """
    if len(everyone.ranks) == 1:
        return
    digests = [hashlib.blake2b(repr(row).encode(), digest_size=8).hexdigest() for row in rows]
    whole = hashlib.blake2b("".join(digests).encode()).hexdigest()
    if len(set(everyone.gather(whole, f"whether all ranks have the same {name}"))) == 1:
        return
    shares = everyone.gather(digests, f"which {name} differ")
    shortest = min(map(len, shares))
    index = next((at for at in range(shortest) if len({share[at] for share in shares}) > 1), shortest)
    raise DataError(
        f"{name}: number {index} is another on some ranks than on others; every rank gives the same rows, in the "
        "same order: seed what shuffles, and sort what is a set"
    )


def _shape_of(tokenizer: Tokenizer) -> Shape:
    return Shape(
        data=DataConfig(train="given by the program"),
        kind="problems",
        needs_answer=False,
        template=chat_template(tokenizer),
        tokenizer=str(tokenizer.path),
        num_rows=tokenizer.vocab_size,
    )


def _messages_in(given: GivenPrompt) -> Any:
    return [given.example.row.get(name) for name in ("prompt", "messages")] if given.is_conversation else None


@dataclass(frozen=True, kw_only=True)
class GivenProblems:
    """Problems that a program gives all at once, in the order of training: shuffled anew in each epoch.

    The example of a prompt index is a function of the index, the seed and the number of examples. So a checkpoint
    keeps one integer of the data order.

    Attributes:
        examples: The examples in the order in which they were given.
        seed: Seed of the order.
        prompts: Token ids of each example's prompt.
        solutions: What to imitate of each example; empty where there is nothing.
        all_responses: For each preference its responses, the better one first; else one.
    """

    examples: tuple[Example, ...]
    seed: int
    prompts: tuple[tuple[int, ...], ...]
    solutions: tuple[Solution, ...] = ()
    all_responses: tuple[tuple[JudgedResponse, ...], ...] = ()

    def __post_init__(self) -> None:
        if any(each.images for each in self.examples):
            raise ConfigError("data.images_field: rows that a program gives are text; read images by data.train")

    def row(self, prompt_index: int) -> int:
        """Return the index into ``examples`` of a prompt index, counted from 0 over all epochs."""
        epoch, index = divmod(prompt_index, len(self.examples))
        return permuted(index, size=len(self.examples), key=(self.seed, epoch))

    def example(self, prompt_index: int) -> Example:
        """Return the example of a prompt index."""
        return self.examples[self.row(prompt_index)]

    def prompt(self, prompt_index: int) -> tuple[int, ...]:
        """Return the token ids of the prompt."""
        return self.prompts[self.row(prompt_index)]

    def solution(self, prompt_index: int) -> Solution:
        """Return the text to imitate of a prompt index."""
        return self.solutions[self.row(prompt_index)]

    def responses(self, prompt_index: int) -> tuple[JudgedResponse, ...]:
        """Return the responses of a prompt index."""
        return self.all_responses[self.row(prompt_index)]

    @property
    def num_rows(self) -> int:
        """Return the number of different prompts; that many prompt indices are an epoch."""
        return len(self.examples)

    @functools.cached_property
    def sha256(self) -> str:
        """Return the sha256 of the problems in order; with the seed they decide each prompt index."""
        return hashlib.sha256(json.dumps([each.content for each in self.examples]).encode()).hexdigest()


class Feed:
    """Problems that a program gives batch by batch; a prompt index is the place of a prompt among all of them.

    Args:
        tokenizer: Gives the tokens of texts, and the texts of tokens.
        max_prompt_tokens: Longest prompt.
        needs_answer: Whether a prompt needs its answer, since the reward compares with it.
    """

    def __init__(self, tokenizer: Tokenizer, max_prompt_tokens: int, *, needs_answer: bool = False) -> None:
        self._tokenizer = tokenizer
        self._max_tokens, self._needs_answer = max_prompt_tokens, needs_answer
        self._rows: dict[int, tuple[Example, tuple[int, ...]]] = {}
        self._batches: list[range] = []
        self._shaper: Shaper | None = None

    def add(self, given: Sequence[GivenPrompt], first_prompt_index: int) -> range:
        """Take a batch. Returns its prompt indices.

        Raises:
            DataError: A prompt leaves no room for a response, or has no answer and needs one.
        """
        prompt_indices = range(first_prompt_index, first_prompt_index + len(given))
        for prompt_index, each in zip(prompt_indices, given, strict=True):
            example = self._rendered(each.example) if each.is_conversation else each.example
            tokens = prompt_tokens(example, self._tokenizer) if each.tokens is None else each.tokens
            if len(tokens) > self._max_tokens:
                raise DataError(
                    f"{example.place}: prompt of {len(tokens)} tokens; at most {self._max_tokens} leave room for a "
                    "response: shorten it, lower max_new_tokens or raise max_context"
                )
            if self._needs_answer and example.answer == "" and example.row.get("answer") is None:
                raise DataError(
                    f"{example.place}: has no answer, with which the reward compares a response; give rows {{'prompt': "
                    "…, 'answer': …}, or reward=…, such as a function (prompt, response, answer) -> score"
                )
            if example.prompt == "":
                example = replace(example, prompt=self._tokenizer.decode(tokens))
            self._rows[prompt_index] = (example, tokens)
        self._batches.append(prompt_indices)
        for old in self._batches[:-_KEPT]:
            for prompt_index in old:
                self._rows.pop(prompt_index, None)
        self._batches = self._batches[-_KEPT:]
        return prompt_indices

    def _rendered(self, example: Example) -> Example:
        """Return the example of a row of messages, as text."""
        if self._shaper is None:
            self._shaper = Shaper(_shape_of(self._tokenizer))
        shaped = self._shaper(dict(example.row), example.place)
        assert shaped is not None, "no prompt is too long here"
        (found,) = examples_of(shaped.row, example.place, shaped.begins, self._shaper.shape)
        return found

    def example(self, prompt_index: int) -> Example:
        """Return the example of a prompt index."""
        return self._row(prompt_index)[0]

    def prompt(self, prompt_index: int) -> tuple[int, ...]:
        """Return the token ids of the prompt."""
        return self._row(prompt_index)[1]

    def solution(self, prompt_index: int) -> Solution:
        """Refuse, since there is nothing to imitate. Raises DataError."""
        raise DataError(
            f"prompt {prompt_index}: a program that gives prompts gives no solutions; train on a file of them"
        )

    def responses(self, prompt_index: int) -> tuple[JudgedResponse, ...]:
        """Refuse, since there are no preferences. Raises DataError."""
        raise DataError(f"prompt {prompt_index}: a program that gives prompts gives no preferences; use DPOTrainer")

    @property
    def num_rows(self) -> None:
        """Return None: a program passes as many problems as it likes."""

    @property
    def sha256(self) -> str:
        """Return a constant, since a resumed program may pass other problems."""
        return "given by a program"

    @property
    def seed(self) -> None:
        """Return None, since the program decides the order."""

    def _row(self, prompt_index: int) -> tuple[Example, tuple[int, ...]]:
        if prompt_index not in self._rows:
            raise DataError(f"prompt {prompt_index}: forgotten; an update must come within {_KEPT} rollouts of its own")
        return self._rows[prompt_index]
