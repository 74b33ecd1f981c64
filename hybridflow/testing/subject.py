"""What a contract test checks, and how it says what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hybridflow.errors import ContractError

LENGTHS = (7, 3, 9, 2)
"""Tokens of the sequences that are tried: unequal, so that batches of them have padding."""

Fail = Callable[[str, str, str, str], NoReturn]
"""``(check, what was found, what was expected, how to mend it)``. Raises ContractError."""


def failing(test: str, name: str) -> Fail:
    """Return the function by which a test reports an error.

    Args:
        test: Its name.
        name: What is tested.
    """

    def fail(check: str, found: str, expected: str, remedy: str) -> NoReturn:
        raise ContractError(f"{test}: {name}: {check}: {found}, expected {expected}; {remedy}")

    return fail


class Subject:
    """A model that is checked.

    Attributes:
        module: The model, in evaluation mode.
        fail: See ``failing``.
    """

    def __init__(self, module: nn.Module, fail: Fail, ask: Callable[[Tensor, Tensor], Any]) -> None:
        self.module = module
        self.fail = fail
        self._ask = ask
        module.eval()
        self._device = next(module.parameters()).device

    def ask(self, ids: Tensor, mask: Tensor | None = None) -> Any:
        """Return the subject's output for ids ``[samples, tokens]`` and a mask of that shape; None: no padding."""
        mask = torch.ones_like(ids) if mask is None else mask
        return self._ask(ids.to(self._device), mask.to(self._device))


def sequences(vocab_size: int, seed: int) -> list[Tensor]:
    """Return random sequences of ``LENGTHS`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in LENGTHS]


def side_by_side(rows: Sequence[Tensor], fill: int = 0) -> tuple[Tensor, Tensor]:
    """Return ids and mask, ``[samples, tokens]``; padding comes last."""
    ids = nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=fill)
    lengths = torch.tensor([len(row) for row in rows])
    return ids, (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()


def largest(one: Tensor, other: Tensor) -> str:
    """Describe in words by how much two tensors differ."""
    return f"{float((one - other).abs().max()):.3g}"
