"""Layouts of two ranks on one GPU train as one rank does."""

from __future__ import annotations

from typing import Any

from gpu_checks.common import compare_jobs, result, run, shown, train


def main(argument: str, is_dry: bool) -> dict[str, Any]:
    """Train alone, at tp2 and at dp2."""
    alone = train("alone")
    jobs = {layout: train(layout, f"actor.update={{{layout[:2]}: 2}}", ranks=2) for layout in ("tp2", "dp2")}
    bounds = {
        f"{layout}: {name}": bound for layout, job in jobs.items() for name, bound in compare_jobs(job, alone).items()
    }
    text = "; ".join(f"{name} {shown(job)}" for name, job in {"alone": alone, **jobs}.items())
    return result(f"losses of 3 steps: {text}", bounds, bounds)


if __name__ == "__main__":
    run(main)
