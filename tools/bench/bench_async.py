#!/usr/bin/env python3
"""Measure double buffering: is a step as long as the longer of rollout and update, which go on side by side?

A run of a recipe with split meshes, `async` unless another is named, and the same without working ahead. Responses
have one length, and no validation or checkpoint comes between. Of each run, medians over its steps but the first two
and those at the end in which nothing is generated any more. Rollout: sampling and scoring; update: log-probabilities,
values, advantages and updates; each on the rank that was busy longest. Ranks should have a core each: where they share
one, rollout and update slow each other down, which the ratio does not show.

Examples:
  python tools/bench/bench_async.py
  python tools/bench/bench_async.py --steps 20 --override rollout.max_new_tokens=64 model.max_context=80 --check
  python tools/bench/bench_async.py --recipe my.yaml --json async.json

Exit status: 0 done, 1 with --check the bound was missed, 2 a run failed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hybridflow.errors import HybridflowError
from hybridflow.observe.table import format_table
from hybridflow.recipe.load import load_recipe

BOUND = 1.1
"""Most that a step with double buffering may take, over the longer of its two parts."""

SKIPPED = 2
"""Steps in which memory is first touched."""

ROLLOUT = ("actor.sample", "reward.score", "cost.score")
"""Calls that make samples."""

NEITHER = ("buffer.", "trainer.")
"""Beginnings of calls that compute nothing."""

SHAPE = (
    *("model.max_context=48", "rollout.max_new_tokens=32", "rollout.min_new_tokens=32"),
    *("trainer.global_batch_size=256", "trainer.mini_batch_size=64"),
)
"""Long enough steps of the shipped recipe; given overrides come after."""

ALONE = ("warm_start=null", "trainer.validate_every=0", "trainer.save_every=0", "trainer.num_validation=1")
"""Nothing but training steps."""


class Times(NamedTuple):
    """Of a step, in seconds; medians.

    Attributes:
        step_s: All of it.
        rollout_s: Sampling and scoring.
        update_s: All that learning takes.
    """

    step_s: float
    rollout_s: float
    update_s: float

    @property
    def ratio(self) -> float:
        """The step over the longer of its two parts."""
        return self.step_s / max(self.rollout_s, self.update_s)


def times_of(events: Sequence[Mapping[str, Any]], steps: Collection[int]) -> Times:
    """Medians over steps, from the events of ``trace/timeline.json``."""
    whole: dict[int, float] = {}
    parts: dict[tuple[bool, int, int], float] = {}
    for event in events:
        kind, step, seconds = event.get("cat"), event["args"].get("step"), event.get("dur", 0) / 1e6
        if step not in steps:
            continue
        if kind == "step":
            whole[step] = seconds
        elif kind == "call" and not event["name"].startswith(NEITHER):
            key = event["name"] in ROLLOUT, step, event["tid"]
            parts[key] = parts.get(key, 0.0) + seconds

    def longest(is_rollout: bool, step: int) -> float:
        return max(seconds for (side, at, _), seconds in parts.items() if (side, at) == (is_rollout, step))

    return Times(
        statistics.median(whole[step] for step in steps),
        statistics.median(longest(True, step) for step in steps),
        statistics.median(longest(False, step) for step in steps),
    )


def table(found: Mapping[str, Times]) -> str:
    """A row for each run."""
    lines: list[tuple[str, ...]] = [("run", "step s", "rollout s", "update s", "step / longer")]
    for name, times in found.items():
        lines.append((name, *(f"{each:.3f}" for each in times), f"{times.ratio:.2f}"))
    return "\n".join(format_table(lines, num_left=1))


def measure(recipe: str, overrides: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """Run a recipe and return what its ranks did when.

    Raises:
        HybridflowError: The run failed.
    """
    command = [sys.executable, "-m", "hybridflow", "train", recipe, *overrides, f"run_dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HybridflowError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    events: list[dict[str, Any]] = json.loads((folder / "trace/timeline.json").read_text(encoding="utf-8"))
    return events


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line, measure, print."""
    summary, _, rest = str(__doc__).partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="async", help="with actor.rollout_ranks and trainer.max_staleness")
    parser.add_argument("--steps", type=int, default=12, help="training steps of each run (default: %(default)s)")
    parser.add_argument("--override", nargs="*", default=[], metavar="KEY=VALUE", help="of the recipe")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--check", action="store_true", help=f"fail where a step takes over {BOUND} of its longer part")
    arguments = parser.parse_args(argv)
    shape = SHAPE if arguments.recipe == "async" else ()
    try:
        with tempfile.TemporaryDirectory() as name:
            data = (f"data.train={name}/train.jsonl", f"data.held_out={name}/held_out.jsonl")
            data = data if arguments.recipe == "async" else ()
            overrides = [*shape, *ALONE, *data, *arguments.override, f"trainer.steps={arguments.steps}"]
            ahead = load_recipe(arguments.recipe, overrides).trainer.max_staleness
            if ahead == 0 or arguments.steps <= SKIPPED + ahead:
                raise HybridflowError(
                    f"trainer.max_staleness={ahead} and --steps {arguments.steps}: expected a recipe that works ahead, "
                    f"and more than {SKIPPED} steps beside; see async.yaml"
                )
            found = {}
            for run, staleness in (("one after the other", 0), (f"{ahead} ahead", ahead)):
                changed = [*overrides, f"trainer.max_staleness={staleness}"]
                events = measure(arguments.recipe, changed, Path(name) / f"run-{staleness}")
                found[run] = times_of(events, range(1 + SKIPPED, 1 + arguments.steps - ahead))
    except HybridflowError as error:
        print(f"bench_async: {error}", file=sys.stderr)
        return 2
    print(table(found))
    if arguments.json is not None:
        figures = {run: {**times._asdict(), "ratio": times.ratio} for run, times in found.items()}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    is_missed = found[f"{ahead} ahead"].ratio > BOUND
    print(f"bound: {BOUND} · the longer of rollout and update: {'missed' if is_missed else 'kept'}")
    return int(arguments.check and is_missed)


if __name__ == "__main__":
    sys.exit(main())
