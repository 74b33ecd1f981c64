"""The main jobs as shipped: the warm start stays under 60 %, and reinforcement learning adds at least 30 points."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridflow.observe.metrics import read_metrics
from tests.e2e.commands import run_command


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["quickstart", "grpo"])
def test_reinforcement_learning_adds_thirty_points(recipe: str, tmp_path: Path):
    done = run_command(["train", recipe], tmp_path, within_s=1500)
    assert done.codes == (0,), done.out[-2000:] + done.err[-2000:]
    run = tmp_path / "runs" / recipe
    summary = json.loads((run / "summary.json").read_text())
    assert len((run / "data" / "held_out.jsonl").read_text().splitlines()) >= 200
    assert summary["accuracy_before_rl"] < 0.6, summary
    assert summary["accuracy_after_rl"] >= summary["accuracy_before_rl"] + 0.3, summary
    assert summary["steps"] == len(read_metrics(run)) > 0
    assert summary["tokens_per_s"] > 0
    assert 0 < summary["control_overhead_share"] < 1, summary
    assert (run / "learning_curve.png").stat().st_size > 10_000
    assert list((run / "tensorboard").iterdir())


@pytest.mark.slow
def test_a_policy_learns_to_ask_the_calculator(tmp_path: Path):
    done = run_command(["train", "calculator"], tmp_path, within_s=1500)
    assert done.codes == (0,), done.out[-2000:] + done.err[-2000:]
    run = tmp_path / "runs/calculator"
    summary, steps = json.loads((run / "summary.json").read_text()), read_metrics(run)
    assert summary["accuracy_before_rl"] < 0.4, summary
    assert summary["accuracy_after_rl"] >= summary["accuracy_before_rl"] + 0.5, summary
    # Of the warm start's samples one in four asks, which takes two turns: 1.25 on average.
    assert steps[0]["environment/turns_mean"] < 1.5 < 1.8 < steps[-1]["environment/turns_mean"]
    assert all(step["environment/failed"] == 0 for step in steps)
