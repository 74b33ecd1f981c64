"""What each algorithm is made of: the sections of a recipe that it reads, and its own defaults. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Preset:
    """An algorithm, as far as a recipe concerns it.

    Attributes:
        reads: Sections beside those of every training run; any other of ``CHOSEN`` would be ignored, and is refused.
        defaults: Section -> key -> value, where it is another than the section's own.
        needs: Sections that must be given.
        is_scorer: Whether what it trains gives scores, not text.
        is_offline: Whether it learns from given responses, and samples to validate at most.
        generates: Whether it ever samples from what it trains.
        has_preferences: Whether its rows are preferences: two responses to a prompt, or one and whether it is wanted.
        is_paired: Whether it learns from the two responses of a row together.
        preference_keys: What of ``preference`` it reads.
    """

    reads: frozenset[str]
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    is_scorer: bool = False
    is_offline: bool = False
    generates: bool = True
    has_preferences: bool = False
    is_paired: bool = False
    preference_keys: frozenset[str] = frozenset()


_ONLINE = frozenset({"loss", "kl", "shaping", "correction", "reward"})
_CRITIC = frozenset({"critic", "advantage"})
_SAFE = frozenset({"cost", "cost_critic", "lagrange"})
_KL_LOSS = {"place": "loss", "estimator": "k3"}
# Preferences are read, never sampled; of what generates, a token at least is left to a response.
_SILENT: dict[str, Any] = {
    "is_offline": True,
    "generates": False,
    "has_preferences": True,
    "defaults": {"rollout": {"max_new_tokens": 1}},
}
_WEIGHTS = frozenset({"desirable_weight", "undesirable_weight"})

PRESETS: Mapping[str, Preset] = {
    "ppo": Preset(reads=_ONLINE | _CRITIC, needs=("critic",)),
    "grpo": Preset(
        reads=_ONLINE, defaults={"kl": {**_KL_LOSS, "coef": 0.04}, "loss": {"aggregation": "seq-mean-token-mean"}}
    ),
    "dr-grpo": Preset(reads=_ONLINE, defaults={"kl": _KL_LOSS, "loss": {"aggregation": "seq-mean-token-sum-norm"}}),
    "dapo": Preset(reads=_ONLINE | {"dynamic_sampling"}, defaults={"kl": _KL_LOSS, "loss": {"clip_high": 0.28}}),
    "gspo": Preset(
        reads=_ONLINE,
        defaults={
            "kl": _KL_LOSS,
            "loss": {"kind": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-mean"},
        },
    ),
    "cispo": Preset(reads=_ONLINE, defaults={"kl": _KL_LOSS, "loss": {"kind": "cispo", "clip_low": 1.0}}),
    "rloo": Preset(reads=_ONLINE),
    "reinforce++": Preset(reads=_ONLINE | {"advantage"}),
    "reinforce++-baseline": Preset(reads=_ONLINE, defaults={"kl": {**_KL_LOSS, "estimator": "k2"}}),
    "remax": Preset(reads=_ONLINE),
    "opo": Preset(reads=_ONLINE, defaults={"kl": _KL_LOSS}),
    "safe-rlhf": Preset(reads=_ONLINE | _CRITIC | _SAFE, needs=("critic", "cost", "cost_critic")),
    "sft": Preset(reads=frozenset({"reward"}), is_offline=True),
    "reward-model": Preset(reads=frozenset(), is_scorer=True, is_paired=True, **_SILENT),
    "dpo": Preset(
        reads=frozenset({"preference"}),
        is_paired=True,
        preference_keys=frozenset({"beta", "label_smoothing", "reference_free"}),
        **_SILENT,
    ),
    "ipo": Preset(reads=frozenset({"preference"}), is_paired=True, preference_keys=frozenset({"beta"}), **_SILENT),
    "kto": Preset(reads=frozenset({"preference"}), preference_keys=_WEIGHTS | {"beta"}, **_SILENT),
    "distill": Preset(reads=frozenset({"teacher", "reward"}), needs=("teacher",)),
}
"""Algorithm -> what it is made of. Their graphs are in ``trainer.recipes``, the papers beside them."""

CHOSEN = frozenset().union(*(preset.reads for preset in PRESETS.values()))
"""Sections that some algorithms read and others do not."""
