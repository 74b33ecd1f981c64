"""The quickstart on one rank learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu_checks.common import result, run, train

CPU_ACCURACY = 0.852
"""Held-out accuracy after the quickstart on one CPU rank in fp32. It began at 0.383."""

LEAST_ACCURACY = 0.75
"""Of 256 held-out sums; rounding alone moves the accuracy by some of them."""

_TOY = [
    *("warm_start.steps=5", "warm_start.batch_size=16", "data.arithmetic.num_held_out=16"),
    *("trainer.steps=2", "trainer.global_batch_size=64", "trainer.mini_batch_size=32"),
]


def main(argument: str, is_dry: bool) -> dict[str, Any]:
    """Run it in a number format, ``fp32`` or ``bf16``."""
    alone = ["actor.update={tp: 1}", "actor.rollout={tp: 1}", "critic.layout={tp: 1}"]
    data = ["data.train=data/train.jsonl", "data.held_out=data/held_out.jsonl"]
    rows = train(argument, *alone, *data, f"model.dtype={argument}", *(_TOY if is_dry else []), recipe="quickstart")
    summary = json.loads(Path(argument, "run/summary.json").read_text(encoding="utf-8"))
    before, after = (float(summary[f"accuracy_{when}_rl"]) for when in ("before", "after"))
    gap = max(row["rollout/logprob_abs_diff"] for row in rows)
    text = (
        f"held-out accuracy {before:.1%} before and {after:.1%} after {len(rows)} steps of {summary['step_s']:.2f} s "
        f"(a CPU in fp32: {CPU_ACCURACY:.1%}); log-probabilities of rollout and training differ by {gap:.2g}"
    )
    bounds = {"difference of log-probabilities": (gap, "<=", 1e-4 if argument == "fp32" else 0.05)}
    if not is_dry:
        bounds["accuracy"] = (after, ">=", LEAST_ACCURACY)
    return result(text, bounds, {**summary, "logprob_abs_diff": gap})


if __name__ == "__main__":
    run(main)
