"""The summary is whole or the one before; the learning curve is a picture of the metrics."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hybridflow.errors import DataError, WriteError
from hybridflow.observe.report import draw_learning_curve, try_learning_curve, write_summary


def test_summary_round_trip(tmp_path: Path):
    summary = {"accuracy_before_rl": 0.4, "steps": 60, "phases": {"rollout_s": 1.5}, "note": None}
    assert write_summary(tmp_path, summary) == tmp_path / "summary.json"
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize("broken", ["os.fsync", "os.replace"])
def test_a_failed_write_leaves_the_old_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str):
    write_summary(tmp_path, {"steps": 1})

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(broken, fail)
    with pytest.raises(WriteError, match="disk full"):
        write_summary(tmp_path, {"steps": 2})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_killed_write_leaves_the_old_summary_and_the_next_one_succeeds(tmp_path: Path):
    write_summary(tmp_path, {"steps": 1})
    script = (
        "import os, pathlib\nfrom hybridflow.observe.report import write_summary\n"
        f"os.replace = lambda *_: os._exit(9)\nwrite_summary(pathlib.Path({str(tmp_path)!r}), {{'steps': 2}})"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 1}
    write_summary(tmp_path, {"steps": 3})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 3}
    left, summary = sorted(path.name for path in tmp_path.iterdir())
    assert left.startswith(".summary.json.") and summary == "summary.json"


def test_content_is_synced_before_the_rename_and_the_directory_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        calls.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        real_fsync(descriptor)

    def replace(source: Path, target: Path) -> None:
        calls.append(("rename", target.name))
        real_replace(source, target)

    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr("os.replace", replace)
    write_summary(tmp_path, {"steps": 1})
    (_, aside), *others = calls
    assert re.fullmatch(r"\.summary\.json\.[0-9a-f]{8}\.tmp", aside)
    assert others == [("rename", "summary.json"), ("sync", tmp_path.name)]


def test_what_json_cannot_hold_is_refused_before_the_disk_is_touched(tmp_path: Path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_summary(tmp_path, {"accuracy_after_rl": float("nan")})
    assert list(tmp_path.iterdir()) == []


def rows(num_steps: int) -> list[dict]:
    """A run that learns, with eight phases (two at step 1), a null, and an accuracy at every tenth step."""
    table: list[dict] = [{"step": 0, "validation/accuracy": 0.4}]
    for step in range(1, num_steps + 1):
        row = {"step": step, "reward/mean": step / num_steps, "kl/ref": step / 1000, "response/length_mean": 5.0}
        row |= {f"time/phase{i}_s": 0.1 * i for i in range(2 if step == 1 else 8)} | {"time/step_s": 4.0}
        table.append(row | ({"validation/accuracy": 0.5} if step % 10 == 0 else {}))
    table[-1]["kl/ref"] = None
    return table


@pytest.mark.parametrize("table", [rows(60), rows(3), [{"step": 0, "validation/accuracy": 0.4}], [{"step": 5}]])
def test_the_curve_is_a_picture(tmp_path: Path, table: list[dict]):
    from matplotlib.image import imread

    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    path = draw_learning_curve(tmp_path)
    picture = imread(path)
    assert path == tmp_path / "learning_curve.png" and picture.shape[0] > 500 and picture.shape[1] > 800
    assert picture.std() > 0.01  # not blank
    assert sorted(file.name for file in tmp_path.iterdir()) == ["learning_curve.png", "metrics.jsonl"]


@pytest.fixture
def figure_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[dict]], Figure]:
    """Draw a table of metrics, and return the figure."""
    figures: list[Figure] = []
    real_savefig = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **kwargs: (figures.append(self), real_savefig(self, *args, **kwargs))
    )
    run_dir = tmp_path / "my-run"
    run_dir.mkdir()

    def draw(table: list[dict], **summary: object) -> Figure:
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
        write_summary(run_dir, summary)
        draw_learning_curve(run_dir)
        return figures[-1]

    return draw


def curves_of(axes: Axes) -> dict[str, list]:
    return {str(line.get_label()): line.get_xydata().tolist() for line in axes.lines}


def test_the_curve_shows_the_metrics_from_step_0_to_the_last(figure_of):
    figure = figure_of(rows(10)[1:], accuracy_before_rl=0.25)
    assert "my-run" in figure.get_suptitle()
    reward, kl, length, time = figure.axes
    assert [axes.get_ylabel() for axes in (kl, length, time)] == [
        "KL (nats per token)",
        "length (tokens)",
        "time (s)",
    ]
    assert length.get_xlabel() == time.get_xlabel() == "step"
    assert curves_of(reward) == {
        "mean reward": [[step, step / 10] for step in range(1, 11)],
        "held-out accuracy": [[0, 0.25], [10, 0.5]],
    }
    low, high = reward.get_xlim()
    assert low <= 0 and high >= 10
    # The longest first; the three shortest as one.
    stacked = [text.get_text() for text in time.get_legend().get_texts()]
    assert stacked == ["phase7", "phase6", "phase5", "phase4", "phase3", "other phases", "whole step"]


def test_a_flat_line_is_not_made_a_mountain(figure_of):
    table = [{"step": step, "response/length_mean": 100 + 0.01 * (step % 2), "reward/mean": 0.5} for step in (1, 2, 3)]
    _, length, *_ = figure_of(table).axes
    low, high = length.get_ylim()
    assert high - low >= 10 and low < 100 < high


@pytest.mark.parametrize(
    ("metrics", "titles"),
    [
        ({"actor/loss": 2.0, "actor/grad_norm": 1.0}, ["Loss", "Gradient norm"]),
        (
            {"actor/loss": 0.69, "preference/accuracy": 0.5, "preference/margin": 0.1, "kl/ref": 0.0},
            ["Loss", "Accuracy", "Margin between the responses of a pair"],
        ),
        ({"actor/loss": 2.0, "validation/score": -3.2}, ["Loss", "Score"]),
        ({"actor/loss": 0.1, "reward/mean": 0.5, "actor/grad_norm": 1.0}, ["Reward", "Gradient norm"]),
    ],
)
def test_the_curve_shows_what_the_algorithm_optimizes_first(figure_of, metrics: dict, titles: list[str]):
    if "preference/accuracy" in metrics:
        metrics = {**metrics, "validation/accuracy": 0.5}
    figure = figure_of([{"step": step, "time/step_s": 1.0, **metrics} for step in (1, 2)])
    shown = [axes.get_title(loc="left") for axes in figure.axes if axes.get_visible()]
    assert shown == [*titles, "Time per step"]


def test_nothing_to_draw_is_an_error(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="holds no step"):
        draw_learning_curve(tmp_path)


def test_no_setting_of_the_user_keeps_the_curve_from_being_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_dir = tmp_path / "$x^"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5, "time/step_s": 1.0}\n')
    with matplotlib.rc_context({"text.usetex": True, "axes.prop_cycle": matplotlib.cycler(color=["red"])}):
        try_learning_curve(run_dir)
        assert matplotlib.rcParams["text.usetex"]
    assert (run_dir / "learning_curve.png").stat().st_size > 1000 and capsys.readouterr().out == ""
    (run_dir / "metrics.jsonl").unlink()
    try_learning_curve(run_dir)
    assert "learning_curve.png was not drawn: DataError: " in capsys.readouterr().out
