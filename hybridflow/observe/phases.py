"""The phase of a step under which the time of each call is shown. No torch."""

from __future__ import annotations

_PHASES = {
    "rollout": ("actor.sample", "groups.keep", "groups.take"),
    "data": ("offline.solutions", "offline.pairs", "offline.completions"),
    "validation": (
        *("offline.held_out_pairs", "reference.validation_log_probs", "actor.validate_pairs"),
        *("offline.held_out_solutions", "actor.validate_solutions"),
        *("actor.sample_validation", "reward.score_validation"),
    ),
    "reward": ("reward.score", "cost.score"),
    "teacher": ("teacher.top",),
    "log_probs": ("actor.log_probs", "reference.log_probs", "reference.mismatched_log_probs"),
    "values": ("critic.values", "cost_critic.values"),
    "advantage": ("advantage",),
    "update": ("critic.update", "cost_critic.update", "actor.update", "actor.distill"),
    "save": ("trainer.save",),
}
PHASE_OF = {call: phase for phase, calls in _PHASES.items() for call in calls}
"""Call, or role -> the phase under which its time is shown; another call is shown by its own name."""

CONTROL_CALLS = ("trainer.finish_step", "buffer.put", "buffer.take")
"""Calls that compute nothing of the algorithm."""


def phase_of(kind: str, name: str) -> str:
    """Return the phase of a span that is neither a move nor a decision, by its kind and name."""
    return PHASE_OF.get(name, PHASE_OF.get(name.split(".")[0], name)) if kind == "call" else "reshard"
