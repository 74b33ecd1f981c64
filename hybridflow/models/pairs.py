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
    """Lay pairs out in an order.

    Args:
        order: Numbers of the pairs, ``[pairs]``; those of a token follow each other.
        shape: Tokens, and pairs of each.
    """
    places = torch.arange(len(order), device=order.device)
    return Pairs(order // shape[1], torch.empty_like(order).index_copy(0, order, places).view(shape))


def spread(values: Tensor, pairs: Pairs) -> Tensor:
    """Return the row of each pair, ``[rows, columns]``, from values of its token, ``[tokens, columns]``."""
    rows: Tensor = _Spread.apply(values, pairs)
    return rows


def collect(rows: Tensor, pairs: Pairs) -> Tensor:
    """Return the sum of each token's rows, ``[tokens, columns]``, from ``[rows, columns]``."""
    values: Tensor = _Collect.apply(rows, pairs)
    return values


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, pairs: Pairs) -> Tensor:
        ctx.save_for_backward(pairs.tokens, pairs.slots)
        return _spread(values, pairs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _collect(gradients[0], Pairs(*ctx.saved_tensors)), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, pairs: Pairs) -> Tensor:
        ctx.save_for_backward(pairs.tokens, pairs.slots)
        return _collect(rows, pairs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _spread(gradients[0], Pairs(*ctx.saved_tensors)), None


def _spread(values: Tensor, pairs: Pairs) -> Tensor:
    if len(pairs.tokens) > pairs.slots.numel():
        values = pad(values, (0, 0, 0, 1))
    return values.index_select(0, pairs.tokens)


def _collect(rows: Tensor, pairs: Pairs) -> Tensor:
    by_token = rows.index_select(0, pairs.slots.flatten())
    if pairs.slots.shape[1] == 1:
        return by_token
    # All tokens have equally many, so that the sum has one order on every device.
    return by_token.view(*pairs.slots.shape, rows.shape[1]).sum(1)
