"""The main jobs as shipped, by PPO and by GRPO: reinforcement learning adds many points to what the warm start knew.

PPO's takes minutes: the first steps are tried always, all of them as a long test.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridflow.observe.metrics import read_metrics
from hybridflow.report.page import LARGEST_BYTES
from tests.e2e.commands import run_command
from tests.support.browser import loading_ms, opened, press_until, running_browser, text, walk_to_a_token

pytestmark = pytest.mark.slow


def train_quickstart(folder: Path, *settings: str) -> Path:
    """The directory of the run."""
    done = run_command(["train", "quickstart", *settings], folder, within_s=1500)
    assert done.codes == (0,), done.out[-2000:] + done.err[-2000:]
    return folder / "runs/quickstart"


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's first steps, after less of a warm start."""
    settings = ["warm_start.steps=40", "trainer.steps=3", "trainer.global_batch_size=256"]
    return train_quickstart(tmp_path_factory.mktemp("quickstart"), *settings)


@pytest.mark.long
def test_the_quickstart_adds_thirty_points(tmp_path: Path):
    run = train_quickstart(tmp_path)
    summary = json.loads((run / "summary.json").read_text())
    assert 0.3 < summary["accuracy_before_rl"] < 0.6, summary
    assert summary["accuracy_after_rl"] >= summary["accuracy_before_rl"] + 0.3, summary
    assert summary["steps"] == len(read_metrics(run)) == 30


def test_the_quickstart_begins_with_what_a_user_looks_at(begun: Path):
    run = begun
    summary = json.loads((run / "summary.json").read_text())
    assert len((run / "data" / "held_out.jsonl").read_text().splitlines()) >= 200
    assert {"accuracy_before_rl", "accuracy_after_rl"} <= summary.keys()
    assert summary["steps"] == len(read_metrics(run)) == 3
    assert summary["tokens_per_s"] > 0
    assert 0 < summary["control_overhead_share"] < 1, summary
    assert list((run / "tensorboard").iterdir())


def test_its_report_opens_at_once_and_is_walked_through_by_keyboard(begun: Path):
    path, last = begun / "report.html", len(read_metrics(begun))
    assert path.stat().st_size < LARGEST_BYTES
    with running_browser() as browser, opened(browser, path) as page:
        assert loading_ms(page) < 2000 and page.locator(".chart canvas").count() >= 6
        assert text(page, "#step-note").startswith(f"Step {last}:")
        walk_to_a_token(page)
        press_until(page, "Tab", ".lanes")
        page.keyboard.press("ArrowRight")
        assert text(page, ".span-told").startswith("rank 0 · ")


# Less of the warm start and half the steps suffice: four steps that learn nothing leave accuracy and turns as they are.
SHORTER = ["warm_start.steps=240", "trainer.steps=4"]


@pytest.mark.parametrize("settings", [SHORTER, pytest.param([], marks=pytest.mark.long)], ids=["shorter", "whole"])
def test_by_grpo_a_policy_learns_to_ask_the_calculator(settings: list[str], tmp_path: Path):
    done = run_command(["train", "calculator", *settings], tmp_path, within_s=1500)
    assert done.codes == (0,), done.out[-2000:] + done.err[-2000:]
    run = tmp_path / "runs/calculator"
    summary, steps = json.loads((run / "summary.json").read_text()), read_metrics(run)
    assert summary["accuracy_before_rl"] < 0.4, summary
    assert summary["accuracy_after_rl"] >= summary["accuracy_before_rl"] + 0.5, summary
    # Of the warm start's samples one in four asks, which takes two turns: 1.25 on average.
    assert steps[0]["environment/turns_mean"] < 1.5 < 1.8 < steps[-1]["environment/turns_mean"]
    assert all(step["environment/failed"] == 0 for step in steps)
