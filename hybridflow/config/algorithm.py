"""What an algorithm asks of a recipe. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class AlgorithmTraits:
    """An algorithm, as far as a recipe concerns it.

    Attributes:
        reads: Sections beside those of every training run; any other of ``CHOSEN`` would be ignored, and is refused.
        defaults: Section -> key -> value, where it is another than the section's own.
        needs: Sections that must be given.
        is_scorer: Whether what it trains gives scores, not text.
        is_offline: Whether it learns from given responses, and samples to validate at most.
        resamples: Why a step may sample more than once, in words. None: it samples once.
        has_preferences: Whether its rows are preferences: two responses to a prompt, or one and whether it is wanted.
        is_paired: Whether it learns from the two responses of a row together.
        preference_keys: What of ``preference`` it reads.
        lr: Learning rate of the actor, for a recipe that leaves it out.
        group_size: Responses to each prompt, for a recipe that leaves its sizes to hybridflow.
    """

    reads: frozenset[str]
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    is_scorer: bool = False
    is_offline: bool = False
    resamples: str | None = None
    has_preferences: bool = False
    is_paired: bool = False
    preference_keys: frozenset[str] = frozenset()
    lr: float = 1e-6
    group_size: int = 1

    @property
    def imitates(self) -> bool:
        """Return whether it learns from given solutions."""
        return self.is_offline and not self.has_preferences

    @property
    def not_ahead(self) -> str | None:
        """Return in words why no sample can be made ahead of the step that learns from it; None: it can."""
        return "samples nothing to learn from" if self.is_offline else self.resamples
