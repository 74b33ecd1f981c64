"""How attention turns queries and keys into weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How a layer turns queries and keys into weights.

    Attributes:
        scale: Factor on the scores.
        softcap: Scores s become cap * tanh(s / cap); None: they do not.
        window: Tokens that each token sees, itself included; None: all before it.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
