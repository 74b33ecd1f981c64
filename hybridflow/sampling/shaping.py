"""Scores with what the recipe adds to them."""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.shaping import overlong_penalty
from hybridflow.config.recipe import Recipe


def shaped(recipe: Recipe, scores: Tensor, lengths: Tensor) -> Tensor:
    """Return scores with the recipe's additions.

    Args:
        recipe: The recipe.
        scores: ``[samples]``.
        lengths: Tokens of each response, ``[samples]``: of all that ``rollout.max_new_tokens`` limits.
    """
    settings = recipe.shaping
    if not settings.overlong_buffer:
        return scores
    return scores + overlong_penalty(
        lengths,
        max_tokens=recipe.rollout.max_new_tokens,
        buffer_tokens=settings.overlong_buffer,
        factor=settings.overlong_factor,
    )
