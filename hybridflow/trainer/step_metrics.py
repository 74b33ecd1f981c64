"""One step's metrics out of what every rank measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hybridflow.observe.distribution import measure_distributions
from hybridflow.observe.phases import CONTROL_CALLS, phase_of


def merge_metrics(shares: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Merge metrics of several roles or ranks.

    A metric that several have is equal on all, or a cost: the largest counts, and what is no number above all.
    """
    merged: dict[str, float] = {}
    for share in shares:
        for name, value in share.items():
            merged[name] = max(merged.get(name, value), value, key=lambda each: (math.isnan(each), each))
    return merged


DISTRIBUTIONS = {
    **{
        f"reward/{how}": ("reward", how) for how in ("std", "min", "p10", "p50", "p90", "max", "min_share", "max_share")
    },
    **{f"response/length_{how}": ("length", how) for how in ("std", "min", "p50", "p90", "p99", "max")},
    "response/cut_share": ("is_cut", "mean"),
    **{
        f"rollout/{what}_{how}_s": (f"{what}_s", how)
        for what in ("latency", "first_token")
        for how in ("p50", "p90", "p99")
    },
}
"""Metric -> the sample statistic that it summarizes, and how."""


COMPUTING = ("rollout", "reward", "log_probs", "teacher", "values", "update", "validation")
"""Phases in which models compute."""


class Share(NamedTuple):
    """What one rank has to say of a step.

    Attributes:
        metrics: What its roles measured.
        spans: Of its timeline: ``(kind, name, seconds, …)``.
        sample_stats: Numbers of single samples, see ``DISTRIBUTIONS``.
        costs: Of its timeline: ``(kind, name, flops, tokens, peak_bytes)``.
        peak_flops: Operations per second that its device could do; 0: not known.
    """

    metrics: Mapping[str, float]
    spans: Sequence[Sequence[Any]] = ()
    sample_stats: Mapping[str, Sequence[float]] = {}
    costs: Sequence[Sequence[Any]] = ()
    peak_flops: float = 0.0


def step_metrics(shares: Sequence[Share], step_s: float) -> dict[str, float]:
    """Return the log entry of one step.

    Args:
        shares: Of each rank.
        step_s: Length of the step.

    Returns:
        The roles' metrics; what single samples tell together; ``time/<phase>_s``, of the rank that took longest; what
        each phase computed; ``throughput/tokens_per_s`` over prompts and responses; and ``control/overhead_share``: the
        part of the step that went into the schedule, decisions, metrics and moving columns.
    """
    metrics = merge_metrics(share.metrics for share in shares)
    sample_stats: dict[str, list[float]] = {}
    for share in shares:
        for what, numbers in share.sample_stats.items():
            sample_stats.setdefault(what, []).extend(numbers)
    metrics |= measure_distributions(sample_stats, DISTRIBUTIONS)
    # Dynamic sampling tells it of all groups that it sampled: of those that stay it is always 1.
    if sample_stats.get("prompt"):
        metrics.setdefault("groups/kept_share", _kept_share(sample_stats["prompt"], sample_stats["reward"]))
    phases, overhead_s = _times(shares, step_s)
    metrics["time/step_s"] = step_s
    metrics |= {f"time/{phase}_s": seconds for phase, seconds in phases.items()}
    metrics["time/control_s"] = overhead_s
    metrics["control/overhead_share"] = overhead_s / step_s
    metrics["throughput/tokens_per_s"] = metrics["batch/num_tokens"] / step_s
    return metrics | _costs(shares, phases, step_s)


def _kept_share(prompts: Sequence[float], scores: Sequence[float]) -> float:
    """Return the share of groups whose scores differ, from the prompt index and the score of each sample."""
    groups: dict[float, set[float]] = {}
    for prompt_index, score in zip(prompts, scores, strict=True):
        groups.setdefault(prompt_index, set()).add(score)
    return sum(len(each) > 1 for each in groups.values()) / len(groups)


def _times(shares: Sequence[Share], step_s: float) -> tuple[dict[str, float], float]:
    """Return seconds of each phase, and of the parts that compute nothing.

    A move or decision counts with the time of its quickest participant: the others waited for computations to end.
    """
    phases: dict[str, float] = {}
    waits: dict[str, list[float]] = {}
    idle: list[float] = []
    for share in shares:
        own: dict[str, float] = {}
        collective: dict[str, float] = {}
        for kind, name, seconds, *_ in share.spans:
            if kind in ("move", "control") or name in CONTROL_CALLS:
                collective[name] = collective.get(name, 0.0) + seconds
            else:
                phase = phase_of(kind, name)
                own[phase] = own.get(phase, 0.0) + seconds
        for name, seconds in collective.items():
            waits.setdefault(name, []).append(seconds)
        for phase, seconds in own.items():
            phases[phase] = max(phases.get(phase, 0.0), seconds)
        idle.append(step_s - sum(own.values()) - sum(collective.values()))
    return phases, sum(min(seconds) for seconds in waits.values()) + max(0.0, min(idle))


def _costs(shares: Sequence[Share], phases: Mapping[str, float], step_s: float) -> dict[str, float]:
    """Return memory of each phase, tokens per second, operations per second, and their shares of the peak."""
    metrics: dict[str, float] = {}
    tokens: dict[str, float] = {}
    flops: dict[str, float] = {}
    peaks: dict[str, list[float]] = {}
    for share in shares:
        own: dict[str, float] = {}
        for kind, name, num_flops, num_tokens, peak_bytes in share.costs:
            if name in CONTROL_CALLS:
                continue
            phase = phase_of(kind, name)
            own[phase] = own.get(phase, 0.0) + num_flops
            tokens[phase] = tokens.get(phase, 0.0) + num_tokens
            memory = f"memory/{phase}_bytes"
            metrics[memory] = max(metrics.get(memory, 0), peak_bytes)
        for phase, num_flops in own.items():
            if num_flops:
                flops[phase] = flops.get(phase, 0.0) + num_flops
                peaks.setdefault(phase, []).append(share.peak_flops)
    metrics = {name: most for name, most in metrics.items() if most}
    for phase, num_flops in flops.items():
        if phase not in COMPUTING:
            continue
        metrics[f"throughput/{phase}_tokens_per_s"] = tokens[phase] / phases[phase]
        if all(peaks[phase]):
            metrics[f"mfu/{phase}"] = num_flops / (phases[phase] * sum(peaks[phase]))
    if flops:
        metrics["throughput/flop_per_s"] = sum(flops.values()) / step_s
        if all(share.peak_flops for share in shares):
            metrics["mfu/step"] = metrics["throughput/flop_per_s"] / sum(share.peak_flops for share in shares)
    return metrics
