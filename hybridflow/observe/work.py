"""What this rank's models have computed, added up where they compute it. No torch."""

from __future__ import annotations

from typing import NamedTuple


class Work(NamedTuple):
    """An amount of it.

    Attributes:
        flops: Floating-point operations that the models need for it, this rank's share: those of a replica are shared
            out evenly over its ranks.
        tokens: Tokens that went through a model, or were sampled, this rank's share alike.
    """

    flops: float
    tokens: float


_done = Work(0.0, 0.0)
"""By the main thread, since the process began."""


def add_work(flops: float, tokens: float) -> None:
    """Add computed work to the total."""
    global _done
    _done = Work(_done.flops + flops, _done.tokens + tokens)


def work_done() -> Work:
    """Return all work since the process began."""
    return _done
