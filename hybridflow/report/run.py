"""What the page shows of one run, from the files of its directory, while it runs and after any end. No torch."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hybridflow.data.tokenizer import Tokenizer, open_tokenizer
from hybridflow.errors import ConfigError, HybridflowError
from hybridflow.foreign import read_small
from hybridflow.observe.files import json_objects
from hybridflow.observe.metrics import METRICS_FILE, phase_seconds, read_metrics
from hybridflow.observe.phases import phase_of
from hybridflow.observe.rank_log import LOGS_DIR
from hybridflow.observe.starts import RECIPE_FILE, StartRecord, read_starts
from hybridflow.observe.status import RunStatus, read_status
from hybridflow.observe.summary import SUMMARY_FILE
from hybridflow.observe.timeline_file import StepTimeline, read_timeline
from hybridflow.report.curves import curves, short
from hybridflow.report.samples import Archive, has_archive, size_of
from hybridflow.rollout.learned import LearnedIndex
from hybridflow.rollout.rollouts_command import find_tokenizer
from hybridflow.sections import read_yaml

_NUM_STEPS = 60
"""Most steps that are shown one by one."""

_NUM_LONG_STEPS = 30
"""There is room for the samples of so many steps with long responses."""

_NUM_RANKS, _NUM_SPANS = 32, 4000
"""Most ranks and spans in the timeline of a step."""

_NUM_RANK_STEPS, _LEAST_TIMELINES = 3000, 5
"""Timelines are read of so many steps times ranks, but of a few steps whatever the number of ranks."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much of one run goes into the page.

    Attributes:
        points: Most points of a curve.
        sample_bytes: For samples.
        timeline_bytes: For timelines.
    """

    points: int
    sample_bytes: int
    timeline_bytes: int


def describe_run(run_dir: Path, budget: Budget) -> dict[str, Any]:
    """Return what the page shows of a run, as a JSON object.

    Raises:
        DataError: There is no run.
        CheckpointError: A file of it is damaged.
        OSError: A file cannot be read.
    """
    status = read_status(run_dir)
    summary = _object(run_dir / SUMMARY_FILE)
    told = _object(run_dir / "status.json")
    rows = read_metrics(run_dir) if (run_dir / METRICS_FILE).exists() else []
    starts = read_starts(run_dir)
    recipe = _recipe(run_dir, starts)
    left_out: list[str] = []
    drawn = curves(rows, summary, budget.points)
    if drawn["together"] > 1:
        left_out.append(f"A point of a curve is the mean of up to {drawn['together']} of the {len(rows)} steps.")
    return {
        "name": str(told.get("name") or summary.get("name") or recipe.get("name") or run_dir.resolve().name),
        "folder": str(run_dir),
        "algorithm": str(told.get("algorithm") or summary.get("algorithm") or recipe.get("algorithm") or ""),
        "model": _model(recipe),
        "facts": _facts(status, rows),
        "starts": [_start(start, starts[place + 1 :]) for place, start in enumerate(starts)],
        "settings": recipe,
        "recipe": yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True) if recipe else "",
        "curves": drawn,
        **_of_steps(run_dir, rows, recipe, status.ranks or 1, budget, left_out),
        "left_out": left_out,
    }


def flat(recipe: Any, prefix: str = "") -> dict[str, str]:
    """Return the keys of a recipe with dotted names, and their values as text."""
    if isinstance(recipe, dict):
        return {name: value for key, part in recipe.items() for name, value in flat(part, f"{prefix}.{key}").items()}
    return {prefix.removeprefix("."): recipe if isinstance(recipe, str) else json.dumps(recipe, default=str)}


def spread_steps(steps: Sequence[int], first: Collection[int], number: int) -> list[int]:
    """Return at most so many steps in the order of their worth: those named, both ends, and then ever finer between."""
    found = [step for step in first if step in steps]
    if steps:
        found += [steps[0], steps[-1]]
    parts = 2
    while len(dict.fromkeys(found)) < min(number, len(steps)):
        found += [steps[(len(steps) - 1) * part // parts] for part in range(1, parts, 2)]
        parts *= 2
    return list(dict.fromkeys(found))[:number]


def _of_steps(
    run_dir: Path,
    rows: Sequence[Mapping[str, float]],
    recipe: Mapping[str, Any],
    num_ranks: int,
    budget: Budget,
    left_out: list[str],
) -> dict[str, Any]:
    """Return what is shown of single steps; adds to ``left_out`` what is not."""
    archive = None
    if has_archive(run_dir):
        archive = Archive(
            run_dir, _tokenizer(run_dir, recipe), budget.sample_bytes // min(_NUM_LONG_STEPS, max(1, len(rows)))
        )
    by_step = {int(row["step"]): row for row in rows}
    rewards = {
        step: row["reward/mean"] for step, row in by_step.items() if math.isfinite(row.get("reward/mean", math.nan))
    }
    extremes = [find(rewards, key=rewards.__getitem__) for find in (max, min) if rewards]
    sampled = [step for step in ([] if archive is None else archive.steps()) if step in by_step]
    chosen = spread_steps(sampled, extremes, _NUM_STEPS)
    chosen += [step for step in spread_steps(sorted(by_step), extremes, _NUM_STEPS) if step not in chosen][
        : _NUM_STEPS - len(chosen)
    ]
    if len(chosen) < len(by_step):
        left_out.append(f"{len(chosen)} of {len(by_step)} steps can be shown one by one.")
    samples: dict[int, Any] = {}
    used = 0
    learned = LearnedIndex(run_dir / "rollouts", chosen)
    for step in chosen:
        found = None if archive is None else archive.groups(step, learned)
        if found is None:
            continue
        size = size_of(found)
        if used + size > budget.sample_bytes:
            left_out.append(f"Samples of {len(samples)} of {len(sampled)} steps are on this page.")
            break
        samples[step], used = found, used + size
    if any(found["num_groups"] > len(found["groups"]) for found in samples.values()):
        left_out.append(
            "Of a step with many groups, the best, the worst, those whose rewards differ most, and some others are "
            "here; hybridflow rollouts prints all."
        )
    groups = [group for found in samples.values() for group in found["groups"]]
    if any(group["num_samples"] > len(group["responses"]) for group in groups):
        left_out.append("Of a large group, the best and the worst responses are here; hybridflow rollouts prints all.")
    timelines = _timelines(run_dir, chosen, num_ranks, budget.timeline_bytes, left_out)
    return {
        "archive": archive is not None,
        "steps": {
            str(step): {
                "step_s": short(by_step[step].get("time/step_s")),
                "phases": {name: short(seconds) for name, seconds in phase_seconds(by_step[step]).items()},
                "samples": samples.get(step),
                "timeline": timelines.get(step),
            }
            for step in sorted(chosen)
        },
    }


def _timelines(
    run_dir: Path, steps: Sequence[int], num_ranks: int, most_bytes: int, left_out: list[str]
) -> dict[int, Any]:
    """Return timelines as JSON objects, of the steps that come first as far as there is room."""
    found = read_timeline(run_dir, steps[: max(_LEAST_TIMELINES, _NUM_RANK_STEPS // num_ranks)])
    drawn: dict[int, Any] = {}
    used, has_some_ranks = 0, False
    for step in (step for step in steps if step in found):
        one = _timeline(found[step])
        size = size_of(one)
        if used + size > most_bytes:
            break
        drawn[step], used = one, used + size
        has_some_ranks |= one["num_ranks"] > len(one["ranks"])
    if 0 < len(drawn) < len(steps):
        left_out.append(f"Timelines of {len(drawn)} steps are on this page; trace/timeline.json has those of all.")
    if has_some_ranks:
        left_out.append("A timeline shows some of the ranks, the busiest and the idlest among them.")
    return drawn


def _timeline(timeline: StepTimeline) -> dict[str, Any]:
    """Return a step's timeline: of each rank the place of a span's name, its start and length in milliseconds."""
    names: dict[tuple[str, str], int] = {}
    ranks: dict[int, list[list[float]]] = {}
    busy_s: dict[int, float] = {}
    for span in timeline.spans:
        place = names.setdefault((span.kind, span.name), len(names))
        row = [place, round(span.start_s * 1e3, 2), round(span.seconds * 1e3, 2)]
        ranks.setdefault(span.rank, []).append(row)
        # Moves and decisions are waits for others.
        works = span.kind not in ("move", "control")
        busy_s[span.rank] = busy_s.get(span.rank, 0.0) + (span.seconds if works else 0.0)
    number = min(_NUM_RANKS, max(1, _NUM_SPANS * len(ranks) // max(1, len(timeline.spans))))
    extremes = [find(busy_s, key=busy_s.__getitem__) for find in (max, min)] if busy_s else []
    return {
        "seconds": short(timeline.seconds),
        "num_ranks": len(ranks),
        "names": [[kind, name, _shown_phase(kind, name)] for kind, name in names],
        "ranks": {str(rank): ranks[rank] for rank in sorted(spread_steps(sorted(ranks), extremes, number))},
    }


def _shown_phase(kind: str, name: str) -> str:
    return kind if kind in ("move", "control") else phase_of(kind, name)


def _facts(status: RunStatus, rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    made_s = sum(row["time/step_s"] for row in rows if row.get("time/step_s", math.nan) > 0)
    return {
        "state": status.state,
        "activity": status.activity,
        "cause": status.cause,
        "step": status.step,
        "steps": status.steps,
        "ranks": status.ranks,
        "hosts": len(status.hosts),
        "starts": status.starts,
        "steps_s": short(made_s),
        "step_s": short(status.step_s),
        "tokens_per_s": short(status.tokens_per_s),
        "left_s": short(status.left_s),
        "saved_step": status.saved_step,
        "job_id": status.job_id,
    }


def _start(start: StartRecord, later: Sequence[StartRecord]) -> dict[str, Any]:
    outcome = start.outcome or ("killed" if later else None)
    return {
        "number": start.number,
        "began": _utc(start.began_s),
        "ended": None if start.ended_s is None else _utc(start.ended_s),
        "seconds": None if start.ended_s is None else round(start.ended_s - start.began_s, 1),
        "step": start.step,
        "ranks": start.ranks,
        "hosts": list(start.hosts[:8]),
        "layouts": dict(start.layouts or {}),
        "job_id": start.job_id,
        "outcome": outcome,
        "detail": start.detail or "",
        "save_s": short(start.save_s),
    }


def _utc(moment_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(moment_s))


def _recipe(run_dir: Path, starts: Sequence[StartRecord]) -> dict[str, Any]:
    """Return the recipe of the last start that kept one, without keys that are not set; empty where none did."""
    for start in reversed(starts):
        try:
            found = read_yaml(run_dir / LOGS_DIR / f"{start.number:04d}" / RECIPE_FILE)
        except ConfigError:
            continue
        if isinstance(found, dict):
            return _without_nulls(found)
    return {}


def _without_nulls(section: dict[str, Any]) -> dict[str, Any]:
    kept = {key: _without_nulls(part) if isinstance(part, dict) else part for key, part in section.items()}
    return {key: part for key, part in kept.items() if part not in (None, {}, [])}


def _model(recipe: Mapping[str, Any]) -> str:
    model = recipe.get("model")
    if not isinstance(model, dict):
        return ""
    if model.get("path"):
        return str(model["path"])
    sizes = [
        f"{model[key]} {what}" for key, what in (("num_layers", "layers"), ("hidden_size", "wide")) if key in model
    ]
    return ", ".join(sizes)


def _tokenizer(run_dir: Path, recipe: Mapping[str, Any]) -> Tokenizer | None:
    """Open the run's tokenizer, or that of its recipe; None: there is none that can be read."""
    for section in (None, "tokenizer", "model"):
        part = {} if section is None else recipe.get(section)
        path = part.get("path") if isinstance(part, dict) else None
        try:
            if section is None:
                return open_tokenizer(find_tokenizer(run_dir))
            if path is not None:
                return open_tokenizer(str(path))
        except (HybridflowError, OSError):
            continue
    return None


def _object(path: Path) -> dict[str, Any]:
    try:
        return next(json_objects([read_small(path).decode(errors="replace")]), {})
    except OSError:
        return {}
