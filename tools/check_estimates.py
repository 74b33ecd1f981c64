#!/usr/bin/env python3
"""Compare what `hybridflow plan` estimates with what steps take on this machine, for twelve configurations.

The recipe is the quickstart, in other layouts, placements and memory settings. The figures of the machine come from
`hybridflow doctor --measure`. Run both on a machine that does nothing else. Every configuration runs once in each
round, and its fastest round counts, by the median of its steps: machines that are shared change their speed.

Examples:
  hybridflow doctor --measure --ranks 4 && python tools/check_estimates.py
  python tools/check_estimates.py --hardware mine.yaml --steps 6 --rounds 1 --only tp4 split

Exit status: 0 the order agrees (Kendall's tau of 0.8 or more) and the chosen one is within 5 % of the fastest, 1 not.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hybridflow.mapping.fit import Observed, observed_run
from hybridflow.mapping.hardware import MEASURED, Hardware, hardware
from hybridflow.mapping.rl_step import step_calls, steps_ahead, total_seconds
from hybridflow.observe.table import format_table
from hybridflow.recipe.meshes import role_meshes
from hybridflow.trainer.plan import training_step

DP, TP, TP4, PP, BOTH = "{dp: 4}", "{tp: 2, dp: 2}", "{tp: 4}", "{pp: 2, dp: 2}", "{tp: 2, pp: 2}"
TAU, NEAR = 0.8, 1.05


def _of(actor: str, rollout: str, critic: str, reference: str, *overrides: str) -> tuple[str, ...]:
    layouts = {"actor.update": actor, "actor.rollout": rollout, "critic.layout": critic, "reference.layout": reference}
    return (*(f"{mesh}={layout}" for mesh, layout in layouts.items()), *overrides)


CONFIGURATIONS = {
    "quickstart": _of(TP, DP, PP, TP),
    "dp4": _of(DP, DP, DP, DP),
    "tp4": _of(TP4, TP4, TP4, TP4),
    "tp2": _of(TP, TP, TP, TP),
    "pp2": _of(PP, DP, PP, PP),
    "tp2.pp2": _of(BOTH, TP, BOTH, BOTH),
    "rollout tp4": _of(DP, TP4, DP, DP),
    "actor tp4": _of(TP4, DP, DP, DP),
    "small micro-batches": _of(DP, DP, DP, DP, "trainer.micro_batch_tokens=256"),
    "recompute": _of(DP, DP, DP, DP, "actor.recompute=full", "critic.recompute=full"),
    "16 samples decoded together": _of(DP, DP, DP, DP, "rollout.max_concurrent=16"),
    "split": _of(
        *("{dp: 2}",) * 4,
        *("actor.ranks=[0, 1]", "reward.ranks=[0, 1]", "critic.ranks=[2, 3]", "reference.ranks=[2, 3]"),
    ),
}


@dataclass(frozen=True)
class Pair:
    """The seconds of a step of one configuration."""

    name: str
    measured: float
    estimated: float


def measured_step(overrides: tuple[str, ...], steps: int, folder: Path) -> Observed:
    """Run the quickstart for some steps without its warm start, and return what a step took."""
    settings = ["warm_start=null", "trainer.validate_every=0", f"trainer.steps={steps}", f"run_dir={folder}"]
    command = [sys.executable, "-m", "hybridflow", "train", "quickstart", *settings, *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return observed_run(folder)


def estimated_step(one: Observed, machine: Hardware) -> float:
    """Return the seconds that a step of it is estimated to take."""
    flow, meshes = training_step(one.recipe).flow, role_meshes(one.recipe)
    calls = step_calls(one.recipe, flow, meshes, machine, one.texts)
    return total_seconds(calls, max_staleness=steps_ahead(one.recipe.trainer.max_staleness, machine))


def kendall_tau(pairs: list[Pair]) -> float:
    """Return Kendall's tau-a: pairs in the same order, less those in the other one, of all."""
    signs = [
        (one.measured - other.measured) * (one.estimated - other.estimated)
        for one, other in itertools.combinations(pairs, 2)
    ]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(signs)


def main() -> int:
    """Run the tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default=MEASURED, metavar="NAME", help="default: what doctor --measure wrote")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="steps of each in a round (default: 8)")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--only", nargs="+", choices=CONFIGURATIONS, help="of the configurations, these")
    arguments = parser.parse_args()
    machine = hardware(arguments.hardware)
    observed: dict[str, Observed] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, name in itertools.product(range(arguments.rounds), arguments.only or CONFIGURATIONS):
            one = measured_step(CONFIGURATIONS[name], arguments.steps, Path(folder) / f"{number} {name}")
            observed[name] = min(one, observed.get(name, one), key=lambda each: each.step_s)
            print(f"{number + 1}/{arguments.rounds} {name}: {one.step_s:.3g} s", file=sys.stderr, flush=True)
    pairs = [Pair(name, one.step_s, estimated_step(one, machine)) for name, one in observed.items()]
    rows = [("configuration", "measured", "estimated", "difference")]
    for pair in sorted(pairs, key=lambda pair: pair.measured):
        difference = f"{pair.estimated / pair.measured - 1:+.0%}"
        rows.append((pair.name, f"{pair.measured:.3f} s", f"{pair.estimated:.3f} s", difference))
    print("\n".join(format_table(rows, num_left=1)))
    chosen, best = min(pairs, key=lambda pair: pair.estimated), min(pair.measured for pair in pairs)
    tau = kendall_tau(pairs)
    print(f"Kendall's tau {tau:.2f}; the estimates choose {chosen.name}: {chosen.measured / best:.2f} times the least")
    return 0 if tau >= TAU and chosen.measured <= NEAR * best else 1


if __name__ == "__main__":
    sys.exit(main())
