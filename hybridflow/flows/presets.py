"""What each algorithm is made of: the sections of a recipe that it reads, and its own defaults. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.config.algorithm import AlgorithmTraits

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

PRESETS: Mapping[str, AlgorithmTraits] = {
    "ppo": AlgorithmTraits(reads=_ONLINE | _CRITIC, needs=("critic",)),
    "grpo": AlgorithmTraits(
        reads=_ONLINE, defaults={"kl": {**_KL_LOSS, "coef": 0.04}, "loss": {"aggregation": "seq-mean-token-mean"}}
    ),
    "dr-grpo": AlgorithmTraits(
        reads=_ONLINE, defaults={"kl": _KL_LOSS, "loss": {"aggregation": "seq-mean-token-sum-norm"}}
    ),
    "dapo": AlgorithmTraits(
        reads=_ONLINE | {"dynamic_sampling"}, defaults={"kl": _KL_LOSS, "loss": {"clip_high": 0.28}}
    ),
    "gspo": AlgorithmTraits(
        reads=_ONLINE,
        defaults={
            "kl": _KL_LOSS,
            "loss": {"kind": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-mean"},
        },
    ),
    "cispo": AlgorithmTraits(reads=_ONLINE, defaults={"kl": _KL_LOSS, "loss": {"kind": "cispo", "clip_low": 1.0}}),
    "rloo": AlgorithmTraits(reads=_ONLINE),
    "reinforce++": AlgorithmTraits(reads=_ONLINE | {"advantage"}),
    "reinforce++-baseline": AlgorithmTraits(reads=_ONLINE, defaults={"kl": {**_KL_LOSS, "estimator": "k2"}}),
    "remax": AlgorithmTraits(reads=_ONLINE),
    "opo": AlgorithmTraits(reads=_ONLINE, defaults={"kl": _KL_LOSS}),
    "safe-rlhf": AlgorithmTraits(reads=_ONLINE | _CRITIC | _SAFE, needs=("critic", "cost", "cost_critic")),
    "sft": AlgorithmTraits(reads=frozenset({"reward"}), is_offline=True),
    "reward-model": AlgorithmTraits(reads=frozenset(), is_scorer=True, is_paired=True, **_SILENT),
    "dpo": AlgorithmTraits(
        reads=frozenset({"preference"}),
        is_paired=True,
        preference_keys=frozenset({"beta", "label_smoothing", "reference_free"}),
        **_SILENT,
    ),
    "ipo": AlgorithmTraits(
        reads=frozenset({"preference"}), is_paired=True, preference_keys=frozenset({"beta"}), **_SILENT
    ),
    "kto": AlgorithmTraits(reads=frozenset({"preference"}), preference_keys=_WEIGHTS | {"beta"}, **_SILENT),
    "distill": AlgorithmTraits(reads=frozenset({"teacher", "reward"}), needs=("teacher",)),
}
"""Algorithm -> what it is made of. Their graphs are in ``flows``, the papers beside them."""

CHOSEN = frozenset().union(*(preset.reads for preset in PRESETS.values()))
"""Sections that some algorithms read and others do not."""
