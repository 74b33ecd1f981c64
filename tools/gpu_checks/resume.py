"""Offload, save, resume: a job that goes on has the losses of one that was not interrupted."""

from __future__ import annotations

from typing import Any

from gpu_checks.common import compare_jobs, result, run, shown, train


def main(argument: str, is_dry: bool) -> dict[str, Any]:
    """Train 4 steps in one go, and in two."""
    offload = "actor.offload=true", "reference.offload=true", "trainer.save_every=2"
    whole = train("whole", *offload, "trainer.steps=4")
    train("parts", *offload, "trainer.steps=2")
    parts = train("parts", *offload, "trainer.steps=4", resume=True)
    bounds = compare_jobs(parts[-2:], whole[-2:])
    return result(f"losses after 2 steps: {shown(parts[-2:])} resumed, {shown(whole[-2:])} whole", bounds, bounds)


if __name__ == "__main__":
    run(main)
