"""An algorithm: the stages of its training step, and what it asks of a recipe. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridflow.config.algorithm import AlgorithmTraits
from hybridflow.dataflow.graph import Step, step
from hybridflow.flows import nodes

ONLINE = frozenset({"loss", "kl", "shaping", "correction", "reward"})
"""Sections that every algorithm reads that learns from scores of its own samples."""

CRITIC = frozenset({"critic", "advantage"})

KL_LOSS: Mapping[str, Any] = {"place": "loss", "estimator": "k3"}
"""Defaults of ``kl`` where it is a term of the loss."""

PREFERENCES: Mapping[str, Any] = {
    "is_offline": True,
    "has_preferences": True,
    # Nothing is generated; the context keeps room for one token.
    "defaults": {"rollout": {"max_new_tokens": 1}},
}
"""Traits of algorithms that learn from preferences in a file."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One file of this package defines one, as ``ALGORITHM``.

    Attributes:
        name: Value of the recipe key ``algorithm``.
        step: The stages of a training step, with everything that some recipe may need.
        traits: The recipe sections that it reads, and its defaults.
    """

    name: str
    step: Step
    traits: AlgorithmTraits


def scored(advantages: str) -> Step:
    """Return the step of an algorithm that learns from the scores of single rollouts, without a critic.

    Args:
        advantages: How scores become advantages: a call of ``roles.advantage``.
    """
    return step(sample=nodes.SAMPLE, score=nodes.SCORE) >> learn(advantages)


def learn(advantages: str, *, reads: tuple[str, ...] = ()) -> Step:
    """Return the stages after the scores: log-probabilities and advantages, then the actor's updates.

    Args:
        advantages: As for ``scored``.
        reads: Columns that it reads beside those of every algorithm.
    """
    return step(
        experience=nodes.ACTOR_LOG_PROBS >> nodes.REFERENCE_LOG_PROBS >> nodes.advantages(advantages, reads=reads),
        update=nodes.ACTOR_UPDATE,
    )
