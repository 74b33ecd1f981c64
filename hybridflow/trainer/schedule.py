"""The learning rates of each training step. Torch-free."""

from __future__ import annotations

import math

from hybridflow.config.recipe import CRITICS, Recipe
from hybridflow.config.roles import OptimizerConfig


def learning_rates(recipe: Recipe, step: int, num_critic_steps: int) -> dict[str, float]:
    """Return the learning rate of each role that learns, in a step.

    Args:
        recipe: The recipe.
        step: Number of the training step, 1 for the first.
        num_critic_steps: First steps in which only the critics learn. The actor's steps begin behind them.
    """
    rates = {}
    for name in ("actor", *CRITICS):
        if (section := getattr(recipe, name)) is not None:
            before = num_critic_steps if name == "actor" else 0
            rates[name] = learning_rate(section.optimizer, max(1, step - before), recipe.trainer.steps - before)
    return rates


def learning_rate(settings: OptimizerConfig, step: int, num_steps: int) -> float:
    """Return the rate of a step, a function of its arguments alone, so that a resumed run has the same.

    The rate rises linearly over the warm-up, and is ``lr`` at its last step, or at the first step without one. It is
    ``min_lr`` at the last step.

    Args:
        settings: Settings of the model's optimizer.
        step: Number of the training step, 1 for the first.
        num_steps: Training steps of the run; later ones have the rate of the last.
    """
    if step <= settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    peak = max(settings.warmup_steps, 1)
    if settings.schedule == "constant" or step <= peak:
        return settings.lr
    done = min(1.0, (step - peak) / max(num_steps - peak, 1))
    left = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.min_lr + (settings.lr - settings.min_lr) * left
