"""What many numbers are like: quantiles and shares of all of them, never means of those of each rank. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

Ordered = Sequence[float]


def quantile(ordered: Ordered, share: float) -> float:
    """Return the number below which a share of the others lies, interpolated between two of them.

    With ``h = share · (n - 1)``: ``x[floor(h)] + (h - floor(h)) · (x[floor(h) + 1] - x[floor(h)])``, counted from 0.

    Args:
        ordered: Finite numbers from the smallest on, at least one.
        share: From 0 to 1.
    """
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def deviation(ordered: Ordered) -> float:
    """Return the standard deviation, ``sqrt(sum((x - mean)²) / n)``."""
    mean = math.fsum(ordered) / len(ordered)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered))


_MEASURES: Mapping[str, Callable[[Ordered], float]] = {
    "mean": lambda ordered: math.fsum(ordered) / len(ordered),
    "std": deviation,
    "min": lambda ordered: ordered[0],
    "max": lambda ordered: ordered[-1],
    "min_share": lambda ordered: ordered.count(ordered[0]) / len(ordered),
    "max_share": lambda ordered: ordered.count(ordered[-1]) / len(ordered),
    "p10": lambda ordered: quantile(ordered, 0.1),
    "p50": lambda ordered: quantile(ordered, 0.5),
    "p90": lambda ordered: quantile(ordered, 0.9),
    "p99": lambda ordered: quantile(ordered, 0.99),
}


def measure_distributions(
    sample_stats: Mapping[str, Sequence[float]], asked: Mapping[str, tuple[str, str]]
) -> dict[str, float]:
    """Return the metrics of numbers that were given one by one.

    Args:
        sample_stats: What -> the numbers, of all ranks together, in any order; without any there is no metric.
        asked: Metric -> what it is of, and what of that: ``mean``, ``std``, ``min``, ``max``, the share of those that
            are the smallest (``min_share``) or the largest, or a quantile, ``p50`` the median.
    """
    ordered = {what: sorted(values) for what, values in sample_stats.items() if values}
    return {name: _MEASURES[measure](ordered[what]) for name, (what, measure) in asked.items() if what in ordered}
