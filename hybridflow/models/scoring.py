"""How attention turns queries and keys into weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How a layer turns queries and keys into weights.

    Attributes:
        scale: Factor on the scores.
        softcap: Scores s become cap * tanh(s / cap); None: they do not.
        window: Tokens that each token sees, itself included; None: all before it.
        sinks: One more score for each head, ``[heads/tp]``, whose weight goes to no value; None: there is none.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = field(default=None, compare=False)
