#!/usr/bin/env python3
"""Measure how long a rank plans a resharding, for models and jobs of real size. No torch, one process.

Times are of the processor: planning waits for nothing, so on a free machine the clock shows the same.

Every plan is made from nothing: no rank's part, and nothing derived from the model, is kept from one to the next.

Examples:
  python tools/bench/bench_plan.py --json plan.json
  python tools/bench/bench_plan.py --ranks 8 512 --repeats 3 --check

Exit status: 0 done, 1 with --check a bound was missed, 2 an error that was explained.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from hybridflow.errors import HybridflowError
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.shapes import known_models, model_spec
from hybridflow.reshard.holdings import WeightHoldings
from hybridflow.reshard.plan import plan
from hybridflow.reshard.spec import ModelSpec

RANKS_PER_NODE = 8


class Subject(NamedTuple):
    """A model, where it is planned, and how long that may take.

    Attributes:
        name: Of the model.
        bound_ms: At 512 ranks.
        pairs: Layout before and after; each set of ranks has at least one.
    """

    name: str
    bound_ms: float
    pairs: tuple[tuple[str, str], ...]


SUBJECTS = (
    Subject(
        "llama3-70b",
        10.0,
        (
            ("tp4.pp2", "tp8"),
            ("tp8.pp4.dp2", "tp8.dp8"),
            ("tp8.pp8.dp8", "tp8.dp64"),
            ("tp8.pp8.dp8", "tp4.pp4.dp32"),
            ("tp8.pp8.dp64", "tp8.dp512"),
        ),
    ),
    Subject(
        "qwen3-235b-a22b",
        250.0,
        (
            ("tp4.pp2", "tp8.ep8.etp1"),
            ("tp4.pp2.dp8.ep8.etp1", "tp8.dp8.ep8.etp1"),
            ("tp4.pp2.dp64.ep8.etp1", "tp8.dp64.ep8.etp1"),
            ("tp8.pp2.dp32.ep8", "tp8.dp64.ep64.etp1"),
            ("tp8.pp2.dp256.ep8", "tp8.dp512.ep64.etp1"),
        ),
    ),
)
BOUND_AT = 512
GROWTH_FROM, MAX_GROWTH = 8, 5.0


def main() -> int:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", help="only jobs of so many ranks (default: 8 64 512 4096)")
    parser.add_argument("--repeats", type=int, default=5, help="plans for each rank looked at (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bound is missed")
    options = parser.parse_args()
    try:
        rows = [
            row
            for subject in SUBJECTS
            for row in measure(subject, None if options.ranks is None else set(options.ranks), options.repeats)
        ]
    except HybridflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    verdicts = [verdict for subject in SUBJECTS for verdict in judge(subject, rows)]
    print("| model | ranks | from | to | ms a rank, median | worst | copies of a rank, most |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        cells = (row["model"], row["ranks"], row["source"], row["target"])
        print(f"| {' | '.join(map(str, cells))} | {row['median_ms']:.2f} | {row['worst_ms']:.2f} | {row['copies']} |")
    print("\n| what | must | measured | pass |\n|---|---|---|---|")
    for what, bound, value in verdicts:
        print(f"| {what} | ≤ {bound:g} | {value:.3g} | {'yes' if value <= bound else '**NO**'} |")
    return int(options.check and any(value > bound for _, bound, value in verdicts))


def measure(subject: Subject, counts: set[int] | None, repeats: int) -> list[dict[str, Any]]:
    """Plan every pair of a model for the first, the last and four ranks between."""
    tensors = model_spec(known_models()[subject.name])
    rows = []
    for pair in subject.pairs:
        layouts = [ParallelLayout.parse(text) for text in pair]
        count = layouts[0].world_size
        if counts is not None and count not in counts:
            continue
        print(f"{subject.name}: {' to '.join(pair)} on {count} ranks", file=sys.stderr, flush=True)
        meshes = [
            DeviceMesh(name=str(layout), layout=layout, ranks=tuple(range(count)), ranks_per_node=RANKS_PER_NODE)
            for layout in layouts
        ]
        times, copies = [], []
        for rank in sorted({part * (count - 1) // 5 for part in range(6)}):
            runs = []
            for _ in range(repeats):
                model = ModelSpec(tensors=tensors.tensors, num_layers=tensors.num_layers)
                start_s = time.process_time()
                mine = plan(model, *(WeightHoldings(model, mesh) for mesh in meshes), rank)
                runs.append((time.process_time() - start_s) * 1e3)
            times.append(median(runs))
            copies.append(len(mine.local) + sum(len(wave.sends) + len(wave.receives) for wave in mine.waves))
        rows.append(
            {
                "model": subject.name,
                "ranks": count,
                "source": pair[0],
                "target": pair[1],
                "median_ms": median(times),
                "worst_ms": max(times),
                "copies": max(copies),
            }
        )
    return rows


def judge(subject: Subject, rows: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """What was measured beside what it must be: what, bound, value."""
    worst: dict[int, float] = {}
    for row in rows:
        if row["model"] == subject.name:
            worst[row["ranks"]] = max(worst.get(row["ranks"], 0.0), row["worst_ms"])
    found = []
    if BOUND_AT in worst:
        found.append((f"{subject.name}: ms a rank at {BOUND_AT} ranks, worst", subject.bound_ms, worst[BOUND_AT]))
        if GROWTH_FROM in worst:
            growth = worst[BOUND_AT] / worst[GROWTH_FROM]
            found.append((f"{subject.name}: growth from {GROWTH_FROM} to {BOUND_AT} ranks", MAX_GROWTH, growth))
    return found


if __name__ == "__main__":
    sys.exit(main())
