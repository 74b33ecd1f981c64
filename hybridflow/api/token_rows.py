"""Rows of token ids as transformers has them, padded side by side, and as they are computed here, each on its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridflow.errors import DataError
from hybridflow.roles.stepped_actor import LabelledRows

IGNORED = -100
"""The label of a token that is not to be predicted, as transformers has it."""


class TokenRows(NamedTuple):
    """Rows without their padding.

    Attributes:
        padded: As they were given, ``[rows, tokens]`` int64 in host memory.
        sequences: The tokens of each, ``[length]`` int64 each, at least one.
        starts: Where each of these begins in its padded row.
    """

    padded: Tensor
    sequences: list[Tensor]
    starts: list[int]

    def side_by_side(self, rows: Any, *, fill: float = 0.0) -> Tensor:
        """Return per-token values at their places in the padded rows; differentiable.

        Args:
            rows: Of each row ``[length, …]``.
            fill: What stands where padding does.
        """
        shape = (*self.padded.shape, *rows[0].shape[1:])
        found = torch.full(shape, fill, dtype=rows[0].dtype, device=rows[0].device)
        for index, (row, start) in enumerate(zip(rows, self.starts, strict=True)):
            found[index, start : start + len(row)] = row
        return found


def token_rows(input_ids: Any, attention_mask: Any, *, vocab_size: int, most_tokens: int) -> TokenRows:
    """Return rows from the output of a transformers tokenizer, padded on the left or on the right.

    Args:
        input_ids: ``[rows, tokens]`` ids, or those of one row.
        attention_mask: 1 where there is a token, 0 where there is padding; None: nothing is padding.
        vocab_size: Ids that the model knows.
        most_tokens: Longest row without padding.

    Raises:
        DataError: They are no ids, a row is empty or too long, or has padding between tokens.
    """
    padded = _table(input_ids, "input_ids")
    mask = torch.ones_like(padded) if attention_mask is None else _table(attention_mask, "attention_mask")
    if mask.shape != padded.shape:
        raise DataError(
            f"attention_mask of shape {list(mask.shape)} for input_ids of shape {list(padded.shape)}; give equal shapes"
        )
    sequences, starts = [], []
    for index, (row, kept) in enumerate(zip(padded, mask.bool(), strict=True)):
        places = kept.nonzero()[:, 0]
        if not len(places):
            raise DataError(f"input_ids[{index}]: no token that attention_mask keeps; give at least one")
        start, stop = int(places[0]), int(places[-1]) + 1
        if stop - start != len(places):
            raise DataError(f"attention_mask[{index}]: has 0 between tokens; padding may be on the left or the right")
        if stop - start > most_tokens:
            raise DataError(f"input_ids[{index}]: {stop - start} tokens; at most {most_tokens} have room: shorten it")
        smallest, largest = (int(each) for each in row[start:stop].aminmax())
        if smallest < 0 or largest >= vocab_size:
            wrong = smallest if smallest < 0 else largest
            raise DataError(f"input_ids[{index}]: token {wrong}; the model knows 0 to {vocab_size - 1}")
        sequences.append(row[start:stop])
        starts.append(start)
    return TokenRows(padded, sequences, starts)


def labelled(rows: TokenRows, labels: Any, *, vocab_size: int, is_needed: bool = True) -> LabelledRows:
    """Return the rows with labels: the label at a place is the token there, predicted from those before it.

    Args:
        rows: The rows.
        labels: ``[rows, tokens]``: an id, or -100 where nothing is to be predicted. At padding, and at the first token
            of a row, which nothing precedes, none counts.
        vocab_size: Ids that the model knows.
        is_needed: At least one must count.

    Raises:
        DataError: They are no ids, or none counts.
    """
    table = _table(labels, "labels")
    if table.shape != rows.padded.shape:
        raise DataError(
            f"labels of shape {list(table.shape)} for input_ids of shape {list(rows.padded.shape)}; give equal shapes: "
            "they are shifted here"
        )
    strange = (table != IGNORED) & ((table < 0) | (table >= vocab_size))
    if strange.any():
        row, place = (int(each) for each in strange.nonzero()[0])
        raise DataError(
            f"labels[{row}][{place}]: {int(table[row, place])}; give 0 to {vocab_size - 1}, or {IGNORED} where nothing "
            "is to be predicted"
        )
    found = [
        row[start + 1 : start + len(tokens)]
        for row, start, tokens in zip(table, rows.starts, rows.sequences, strict=True)
    ]
    given = LabelledRows(sequences=rows.sequences, labels=found)
    if is_needed and given.num_labels == 0:
        raise DataError(f"labels: all are {IGNORED}, at padding or at the first token of a row; there is no loss")
    return given


def _table(values: Any, name: str) -> Tensor:
    try:
        table = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{name}: {error}; give ids [rows, tokens], as a tokenizer of transformers does with return_tensors='pt'"
        ) from error
    table = table[None] if table.dim() == 1 else table
    if table.dim() != 2 or table.is_floating_point() or table.is_complex() or table.numel() == 0:
        raise DataError(f"{name}: of shape {list(table.shape)} and {table.dtype}; give ids [rows, tokens]")
    return table.detach().cpu().long()
