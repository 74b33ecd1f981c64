"""One step's metrics out of what every rank measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

PHASE_OF = {
    "actor.sample": "rollout",
    "given.solutions": "data",
    "given.pairs": "data",
    "given.completions": "data",
    "given.held_out_pairs": "validation",
    "reference.judge": "validation",
    "actor.judge": "validation",
    "actor.answer": "validation",
    "reward.score": "reward",
    "reward.judge": "validation",
    "cost.score": "reward",
    "teacher.top": "teacher",
    "actor.log_probs": "log_probs",
    "reference.log_probs": "log_probs",
    "reference.mismatched_log_probs": "log_probs",
    "critic.values": "values",
    "groups.keep": "rollout",
    "groups.take": "rollout",
    "cost_critic.values": "values",
    "critic.update": "update",
    "cost_critic.update": "update",
    "actor.update": "update",
    "actor.distill": "update",
    "trainer.save": "save",
}
_ADVANTAGES = (
    *("ppo", "safe", "grpo", "dr_grpo", "rloo", "opo", "remax"),
    *("reinforce_plus_plus", "reinforce_plus_plus_baseline"),
)
PHASE_OF |= {f"advantage.{call}": "advantage" for call in _ADVANTAGES}
"""Call -> the phase under which its time is shown; another one is shown by its own name."""

CONTROL_CALLS = ("trainer.finish_step", "buffer.put", "buffer.take")
"""Calls that compute nothing of the algorithm."""


def merge_metrics(shares: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of several roles or ranks in one: where several have one it is equal, or a cost: the largest counts."""
    merged: dict[str, float] = {}
    for share in shares:
        for name, value in share.items():
            merged[name] = max(merged[name], value) if name in merged else value
    return merged


def step_metrics(shares: list[tuple[dict[str, float], list[Any]]], step_s: float) -> dict[str, float]:
    """What goes into the log for one step.

    Args:
        shares: Of each rank, what its roles measured and the spans of its timeline ``(kind, name, seconds, …)``.
        step_s: Length of the step.

    Returns:
        The roles' metrics; ``time/<phase>_s``, of the rank that took longest; ``throughput/tokens_per_s`` over prompts
        and responses; and ``control/overhead_share``: the part of the step that went into the schedule, decisions,
        metrics and moving columns. Of a move or decision only the time of the quickest participant counts: the others
        waited for computations to end.
    """
    metrics = merge_metrics(share for share, _ in shares)
    phases: dict[str, float] = {}
    waits: dict[str, list[float]] = {}
    idle: list[float] = []
    for _, spans in shares:
        own: dict[str, float] = {}
        collective: dict[str, float] = {}
        for kind, name, seconds, *_ in spans:
            if kind in ("move", "control") or name in CONTROL_CALLS:
                collective[name] = collective.get(name, 0.0) + seconds
            else:
                phase = PHASE_OF.get(name, name) if kind == "call" else "reshard"
                own[phase] = own.get(phase, 0.0) + seconds
        for name, seconds in collective.items():
            waits.setdefault(name, []).append(seconds)
        for phase, seconds in own.items():
            phases[phase] = max(phases.get(phase, 0.0), seconds)
        idle.append(step_s - sum(own.values()) - sum(collective.values()))
    overhead_s = sum(min(seconds) for seconds in waits.values()) + max(0.0, min(idle))
    metrics["time/step_s"] = step_s
    metrics |= {f"time/{phase}_s": seconds for phase, seconds in phases.items()}
    metrics["time/control_s"] = overhead_s
    metrics["control/overhead_share"] = overhead_s / step_s
    metrics["throughput/tokens_per_s"] = metrics["batch/num_tokens"] / step_s
    return metrics
