"""What a program gives as prompts: texts, rows, token ids; and problems that are given batch by batch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridflow.data.preferences import Response
from hybridflow.data.prompts import Example, Solution, prompt_tokens
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import DataError
from hybridflow.parallel.coordinator import Coordinator

_KEPT = 16
"""Batches whose rows are remembered, for the updates that are still to come on them."""


@dataclass(frozen=True, kw_only=True)
class GivenPrompt:
    """A prompt, as text, or as token ids, or both.

    Attributes:
        example: The text, and the right answer if there is one.
        tokens: Token ids; None: those of the text.
    """

    example: Example
    tokens: tuple[int, ...] | None = None


def prompts_of(batch: Any, place: str = "prompts") -> list[GivenPrompt]:
    """Return the prompts of a batch that a program passes.

    Args:
        batch: Texts; rows (``{"prompt": …, "answer": …}``); columns of these; token ids ``[prompts, tokens]``, alone
            or as ``input_ids`` with an ``attention_mask``, as a tokenizer of transformers gives them.
        place: Name of the batch in messages.

    Raises:
        DataError: It is nothing of these, or is empty.
    """
    if isinstance(batch, Tensor):
        batch = {"input_ids": batch}
    if hasattr(batch, "column_names"):
        # A data set of the package datasets.
        batch = [dict(row) for row in batch]
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        found = _of_columns(dict(batch), place)
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        found = [_of_row(row, f"{place}[{index}]") for index, row in enumerate(batch)]
    else:
        raise DataError(f"{place}: {type(batch).__name__}; expected texts, rows with a prompt, or token ids")
    if not found:
        raise DataError(f"{place}: no prompt; give at least one")
    return found


def _of_row(row: Any, place: str) -> GivenPrompt:
    if isinstance(row, Example):
        return GivenPrompt(example=row)
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, Mapping) or not isinstance(row.get("prompt"), str) or row["prompt"] == "":
        raise DataError(f"{place}: found {row!r:.60}; expected a text, or a row with a text as 'prompt'")
    answer = row.get("answer", "")
    if not isinstance(answer, str):
        raise DataError(f"{place}: 'answer' is {answer!r:.60}; expected text, put it in quotes")
    return GivenPrompt(example=Example(prompt=row["prompt"], answer=answer, place=place))


def _of_columns(columns: dict[str, Any], place: str) -> list[GivenPrompt]:
    if "input_ids" not in columns:
        names = [name for name in ("prompt", "answer") if name in columns]
        if any(isinstance(columns[name], str) for name in names) or "prompt" not in names:
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
        if not isinstance(answer, str):
            raise DataError(f"{place}[{index}]: 'answer' is {answer!r:.60}; expected text, put it in quotes")
        example = Example(prompt="", answer=answer, place=f"{place}[{index}]")
        found.append(GivenPrompt(example=example, tokens=tokens))
    return found


def check_same(given: Sequence[GivenPrompt], everyone: Coordinator) -> None:
    """Refuse prompts that are not the same on all ranks. Collective: all ranks.

    Raises:
        DataError: They are not; names the first that differs.
    """
    rows = [(each.example.prompt, each.example.answer, each.tokens) for each in given]
    digests = [hashlib.blake2b(repr(row).encode(), digest_size=8).hexdigest() for row in rows]
    whole = hashlib.blake2b("".join(digests).encode()).hexdigest()
    if len(set(everyone.gather(whole, "whether all ranks have the same prompts"))) == 1:
        return
    shares = everyone.gather(digests, "which prompts differ")
    shortest = min(map(len, shares))
    index = next((at for at in range(shortest) if len({share[at] for share in shares}) > 1), shortest)
    raise DataError(
        f"prompts: number {index} is another on some ranks than on others; every rank gives the same batch, in the "
        "same order: seed what shuffles, and sort what is a set"
    )


class Feed:
    """Problems that a program gives batch by batch; a prompt index is the place of a prompt among all of them.

    Args:
        tokenizer: Gives the tokens of texts, and the texts of tokens.
        max_prompt_tokens: Longest prompt.
    """

    def __init__(self, tokenizer: Tokenizer, max_prompt_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_prompt_tokens
        self._rows: dict[int, tuple[Example, tuple[int, ...]]] = {}
        self._batches: list[range] = []

    def add(self, given: Sequence[GivenPrompt], first_prompt_index: int) -> range:
        """Take a batch. Returns its prompt indices.

        Raises:
            DataError: A prompt leaves no room for a response.
        """
        prompt_indices = range(first_prompt_index, first_prompt_index + len(given))
        for prompt_index, each in zip(prompt_indices, given, strict=True):
            example = each.example
            tokens = prompt_tokens(example, self._tokenizer) if each.tokens is None else each.tokens
            if len(tokens) > self._max_tokens:
                raise DataError(
                    f"{example.place}: prompt of {len(tokens)} tokens; at most {self._max_tokens} leave room for a "
                    "response: shorten it, lower max_new_tokens or raise max_context"
                )
            if example.prompt == "":
                example = Example(prompt=self._tokenizer.decode(tokens), answer=example.answer, place=example.place)
            self._rows[prompt_index] = (example, tokens)
        self._batches.append(prompt_indices)
        for old in self._batches[:-_KEPT]:
            for prompt_index in old:
                self._rows.pop(prompt_index, None)
        self._batches = self._batches[-_KEPT:]
        return prompt_indices

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

    def responses(self, prompt_index: int) -> tuple[Response, ...]:
        """Refuse, since there are no preferences. Raises DataError."""
        raise DataError(f"prompt {prompt_index}: a program that gives prompts gives no preferences; use DPOTrainer")

    @property
    def num_rows(self) -> None:
        """Return None: a program passes as many problems as it likes."""

    @property
    def sha256(self) -> str:
        """Return a constant, since a resumed program may pass other problems."""
        return "given by a program"

    def _row(self, prompt_index: int) -> tuple[Example, tuple[int, ...]]:
        if prompt_index not in self._rows:
            raise DataError(f"prompt {prompt_index}: forgotten; an update must come within {_KEPT} rollouts of its own")
        return self._rows[prompt_index]
