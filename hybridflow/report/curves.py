"""The metrics of a run with few enough points for a page. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.observe.metrics import RESULTS, phase_seconds

_NUM_PHASES = 6

Rows = Sequence[Mapping[str, float]]


def curves(rows: Rows, summary: Mapping[str, Any], num_points: int) -> dict[str, Any]:
    """Return the metrics of a run: of a long run the means of equally many steps, and both ends as they are.

    Args:
        rows: Its metrics.
        summary: Its ``summary.json``.
        num_points: Most points of a metric.

    Returns:
        ``steps``: the x of each point, the last step of those that it is a mean of; ``together``: of how many steps a
        point is the mean; ``metrics``: metric -> values, None where there is none; ``sparse``: of metrics that few
        steps have, metric -> x and values; ``phases``: phase -> seconds at each point, the longest first.
    """
    stretches = _stretches(len(rows), num_points)
    names = list(dict.fromkeys(name for row in rows for name in row if name != "step"))
    found: dict[str, Any] = {"metrics": {}, "sparse": _ends(rows, summary)}
    for name in names:
        own = [row for row in rows if name in row]
        if name.startswith("validation/") or len(own) <= len(rows) // 3:
            points = [[row["step"], short(row[name])] for row in own]
            kept = [points[stretch[-1]] for stretch in _stretches(len(points), num_points)]
            found["sparse"][name] = sorted(kept + found["sparse"].get(name, []), key=lambda point: float(point[0]))
        else:
            found["metrics"][name] = [_mean(rows, stretch, name) for stretch in stretches]
    return found | {
        "steps": [int(rows[stretch[-1]]["step"]) for stretch in stretches],
        "together": max((len(stretch) for stretch in stretches), default=1),
        "phases": _phases(rows, stretches),
    }


def short(value: float | None, digits: int = 5) -> float | None:
    """Return a number with few digits; None where it is not finite."""
    told = math.nan if value is None else float(f"{value:.{digits}g}")
    return told if math.isfinite(told) else None


def _stretches(count: int, num_points: int) -> list[range]:
    """Split places into at most so many stretches; the first and the last place are alone."""
    if count <= num_points:
        return [range(place, place + 1) for place in range(count)]
    inner = count - 2
    number = max(1, num_points - 2)
    borders = [1 + inner * part // number for part in range(number + 1)]
    between = [range(start, stop) for start, stop in zip(borders, borders[1:], strict=False) if stop > start]
    return [range(0, 1), *between, range(count - 1, count)]


def _mean(rows: Rows, stretch: range, name: str) -> float | None:
    values = [rows[place][name] for place in stretch if name in rows[place] and math.isfinite(rows[place][name])]
    return short(sum(values) / len(values)) if values else None


def _ends(rows: Rows, summary: Mapping[str, Any]) -> dict[str, list[list[float | None]]]:
    """Return the validations before the first step and after the last one, which are in no step's metrics."""
    found: dict[str, list[list[float | None]]] = {}
    for name in RESULTS:
        told = {row["step"] for row in rows if f"validation/{name}" in row}
        # An accuracy is a score: a run that has told the one alone is shown by it.
        if name == "score" and not told and found:
            continue
        ends = ((0, summary.get(f"{name}_before_rl")), (summary.get("steps"), summary.get(f"{name}_after_rl")))
        points = [[step, short(value)] for step, value in ends if step not in told and isinstance(value, int | float)]
        if points:
            found[f"validation/{name}"] = points
    return found


def _phases(rows: Rows, stretches: Sequence[range]) -> dict[str, list[float | None]]:
    of_rows = [phase_seconds(row) for row in rows]
    totals: dict[str, float] = {}
    for phases in of_rows:
        for name, seconds in phases.items():
            totals[name] = totals.get(name, 0.0) + (seconds if math.isfinite(seconds) else 0.0)
    longest = sorted(totals, key=lambda name: -totals[name])
    named, others = longest[:_NUM_PHASES], longest[_NUM_PHASES:]

    def means(names: Sequence[str]) -> list[float | None]:
        return [
            short(sum(of_rows[place].get(name, 0.0) for place in stretch for name in names) / len(stretch))
            for stretch in stretches
        ]

    found = {name: means([name]) for name in named}
    return found | ({"other phases": means(others)} if others else {})
