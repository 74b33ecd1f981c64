"""The page: data of the runs in a template with its style and its program, all in one file. No torch."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridflow import __version__
from hybridflow.errors import ConfigError
from hybridflow.observe.files import replace_file, writing
from hybridflow.observe.rank_log import say
from hybridflow.observe.summary import REPORT_FILE
from hybridflow.report.panels import choose_panels
from hybridflow.report.run import Budget, describe_run, flat

LARGEST_BYTES = 5_000_000
"""No page is larger."""

_ASSETS = Path(__file__).parent / "assets"
_CHARTS = next(_ASSETS.glob("uplot-*"))
_POINT_BYTES, _NUM_METRICS = 9, 100
_CURVE_BYTES, _SAMPLE_BYTES, _TIMELINE_BYTES = 1_400_000, 2_200_000, 900_000
_LEAST_POINTS, _MOST_POINTS = 40, 500
_LEAST_SHARE = 2.0**-20
"""With a smaller one no run has room for a sample."""


PlannedOf = Callable[[Path], Any]
"""Returns the estimate of a run's step as a dataclass, with ``hardware``, ``step_s`` and ``phases_s``; or None."""


def write_report(run_dirs: Sequence[Path], path: Path, planned_of: PlannedOf) -> Path:
    """Write the page of one or several runs.

    Args:
        run_dirs: Their directories.
        path: Of the page.
        planned_of: Returns the estimates that stand beside measured times.

    Returns:
        Its path.

    Raises:
        ConfigError: There are too many runs for a page.
        DataError: A directory holds no run.
        CheckpointError: A file of a run is damaged.
        WriteError: The file system refuses.
        OSError: A file cannot be read.
    """
    share = 1.0
    plans = [planned_of(run_dir) for run_dir in run_dirs]
    while len(page := _fill(data := _data(run_dirs, plans, share))) > LARGEST_BYTES:
        _check_room(data, share)
        share /= 2
    with writing(path, "give another file with --out"):
        replace_file(path, page)
    return path


def try_report(run_dir: Path, planned_of: PlannedOf) -> None:
    """Write the page of a run that ends, or say why it is not there: the run is done all the same."""
    try:
        write_report([run_dir], run_dir / REPORT_FILE, planned_of)
    except Exception as error:  # Whatever it is, it must not make a failure of a run that has succeeded.
        say(f"{run_dir / REPORT_FILE} was not written: {type(error).__name__}: {error}")


def _num_points(part: float) -> int:
    """Return the most points of a curve, with this part of what there is room for."""
    return max(_LEAST_POINTS, min(_MOST_POINTS, int(_CURVE_BYTES * part / _POINT_BYTES / _NUM_METRICS)))


def _check_room(data: dict[str, Any], share: float) -> None:
    """Refuse runs that are too many for a page, with the fewest points and without samples and timelines.

    Args:
        data: Of the page with this share, from which samples and timelines are taken out.
        share: Of what there is room for.
    """
    runs = data["runs"]
    if _num_points(share / len(runs)) > _LEAST_POINTS:
        return
    for step in (step for run in runs for step in run["steps"].values()):
        step |= {"samples": None, "timeline": None}
    if (size := len(_fill(data))) > LARGEST_BYTES or share < _LEAST_SHARE:
        raise ConfigError(
            f"{len(runs)} runs do not fit on one page of {LARGEST_BYTES / 10**6:g} MB; give fewer of them, about "
            f"{max(1, len(runs) * LARGEST_BYTES // size)}"
        )


def _data(run_dirs: Sequence[Path], plans: Sequence[Any], share: float) -> dict[str, Any]:
    """Return the data of the page, with this share of what there is room for."""
    part = share / len(run_dirs)
    budget = Budget(
        points=_num_points(part),
        sample_bytes=int(_SAMPLE_BYTES * part),
        timeline_bytes=int(_TIMELINE_BYTES * part),
    )
    runs = [describe_run(run_dir, budget) for run_dir in run_dirs]
    for run, label, plan in zip(runs, _labels(run_dirs), plans, strict=True):
        run |= {"label": label, "planned": plan and asdict(plan)}
    metrics = {name for run in runs for kind in ("metrics", "sparse") for name in run["curves"][kind]}
    return {
        "runs": runs,
        "panels": choose_panels(metrics),
        "differences": _differences(runs),
        "written": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "version": __version__,
    }


def _fill(data: dict[str, Any]) -> bytes:
    """Return the template with everything in it. Nothing of a run is markup: its texts are in JSON alone."""
    # No text can end the element that holds it, or begin a comment.
    told = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "title": html.escape("hybridflow report: " + ", ".join(run["label"] for run in data["runs"])),
        "style": _asset(_CHARTS / "uPlot.min.css") + _asset(_ASSETS / "page.css"),
        "charts": _asset(_CHARTS / "uPlot.iife.min.js"),
        "program": _asset(_ASSETS / "page.js"),
        "data": told,
    }
    pieces = _asset(_ASSETS / "page.html").split("{{")
    page = pieces[0]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        page += parts[name] + rest
    return page.encode(errors="replace")


def _asset(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _labels(run_dirs: Sequence[Path]) -> list[str]:
    """Return a name for each run that no other one has: that of its directory, or the whole path."""
    names = [run_dir.resolve().name for run_dir in run_dirs]
    return names if len(set(names)) == len(names) else [str(run_dir) for run_dir in run_dirs]


def _differences(runs: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Return the keys of the recipes that differ, each with its value in every run; None: it is not set there."""
    recipes = [flat(run.pop("settings")) for run in runs]
    if not all(recipes):
        return []
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    return [
        [key, *(recipe.get(key) for recipe in recipes)]
        for key in keys
        if len({recipe.get(key) for recipe in recipes}) > 1 and key != "run_dir"
    ]
