"""Pairs of a token and one of its experts, as rows: each row from its token, and the sum of each token's rows.

For the backward pass, in which each is the other, both keep indices alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Pairs:
    """Where pairs are among rows.

    Attributes:
        tokens: Token of each row, ``[rows]``; the number of tokens for a row of zeros.
        slots: Row of each pair, ``[tokens, pairs of a token]``.
    """

    tokens: Tensor
    slots: Tensor


def in_order(order: Tensor, shape: torch.Size) -> Pairs:
    """Lay pairs out in an order; see ``at_places``."""
    return at_places(order, torch.arange(len(order), device=order.device), len(order), shape)


def at_places(order: Tensor, places: Tensor, num_rows: int, shape: torch.Size) -> Pairs:
    """Lay pairs out at places among rows.

    Args:
        order: Numbers of the pairs, ``[pairs]``; those of a token follow each other.
        places: Row of each, ``[pairs]``.
        num_rows: Rows; those without a pair are zeros.
        shape: Tokens, and pairs of each.
    """
    slots = torch.empty_like(places).index_copy(0, order, places).view(shape)
    tokens = places.new_full((num_rows,), shape[0]).index_copy(0, places, order // shape[1])
    return Pairs(tokens, slots)


def spread(values: Tensor, pairs: Pairs) -> Tensor:
    """Return the row of each pair, ``[rows, columns]``, from values of its token, ``[tokens, columns]``."""
    rows: Tensor = _Move.apply(values, pairs.tokens, pairs.slots, True)
    return rows


def collect(rows: Tensor, pairs: Pairs) -> Tensor:
    """Return the sum of each token's rows, ``[tokens, columns]``, from ``[rows, columns]``."""
    values: Tensor = _Move.apply(rows, pairs.tokens, pairs.slots, False)
    return values


class _Move(torch.autograd.Function):
    """Either of the two; the gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, tokens: Tensor, slots: Tensor, is_spread: bool) -> Tensor:
        ctx.save_for_backward(tokens, slots)
        ctx.is_spread = is_spread
        return _moved(values, tokens, slots, is_spread)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        tokens, slots = ctx.saved_tensors
        return _moved(gradients[0], tokens, slots, not ctx.is_spread), None, None, None


def _moved(values: Tensor, tokens: Tensor, slots: Tensor, is_spread: bool) -> Tensor:
    if is_spread:
        padded = pad(values, (0, 0, 0, 1)) if len(tokens) > slots.numel() else values
        return padded.index_select(0, tokens)
    by_token = values.index_select(0, slots.flatten())
    if slots.shape[1] == 1:
        return by_token
    # All tokens have equally many, so that the sum has one order on every device.
    return by_token.view(*slots.shape, values.shape[1]).sum(1)
