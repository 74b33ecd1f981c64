"""Two ranks on one GPU: weights read through CUDA IPC train as those sent by torch.distributed."""

from __future__ import annotations

from typing import Any

from gpu_checks.common import compare_jobs, result, run, shown, train


def main(argument: str, is_dry: bool) -> dict[str, Any]:
    """Train at tp2, generate at dp2, with both ways of resharding."""
    layouts = "actor.update={tp: 2}", "actor.rollout={dp: 2}"
    theirs, ours = (train(way, *layouts, f"actor.reshard={way}", ranks=2) for way in ("torch", "shared"))
    bounds = compare_jobs(ours, theirs)
    return result(f"losses of 3 steps: {shown(ours)} shared, {shown(theirs)} torch", bounds, bounds)


if __name__ == "__main__":
    run(main)
