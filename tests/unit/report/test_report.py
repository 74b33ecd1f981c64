"""The page has what the files of a run tell, however long the run, and nothing of a run is markup in it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow import cli
from hybridflow.data.tokenizer import open_tokenizer
from hybridflow.errors import ConfigError
from hybridflow.observe.starts import StartRecord, add_start
from hybridflow.report.curves import curves
from hybridflow.report.page import LARGEST_BYTES, try_report, write_report
from hybridflow.report.panels import choose_panels
from hybridflow.report.run import Budget, describe_run, spread_steps
from hybridflow.report.samples import Archive, size_of
from hybridflow.rollout.learned import LearnedIndex
from tests.support.report_runs import HOSTILE, data_of, metrics_of, write_archive, write_run, write_timeline

PLENTY = Budget(points=500, sample_bytes=10**6, timeline_bytes=10**6)


def no_plan(run_dir):
    return None


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("report") / "first")


@pytest.fixture(scope="module")
def data(run_dir: Path) -> dict:
    return data_of(write_report([run_dir], run_dir / "report.html", no_plan))


def test_the_page_tells_how_the_run_stands_and_why_it_stopped(data: dict):
    (run,) = data["runs"]
    assert (run["label"], run["algorithm"], run["model"]) == ("first", "grpo", "2 layers")
    assert run["facts"]["state"] == "finished" and (run["facts"]["step"], run["facts"]["steps"]) == (6, 6)
    first, second = run["starts"]
    assert (first["outcome"], first["step"]) == ("requeue", None) and first["detail"].startswith("rank 0 received SIG")
    assert (second["outcome"], second["step"]) == ("finished", 3)
    assert "num_layers: 2" in run["recipe"] and "path" not in run["recipe"]


def test_curves_have_both_ends_and_held_out_points(data: dict):
    drawn = data["runs"][0]["curves"]
    assert drawn["steps"] == [1, 2, 3, 4, 5, 6] and drawn["together"] == 1
    assert drawn["metrics"]["kl/ref"][-2:] == [0.0083333, None]
    # Before the first step, after steps 2, 4 and 6.
    assert drawn["sparse"]["validation/accuracy"] == [[0, 0.25], [2, 0.33333], [4, 0.66667], [6, 1.0]]
    assert drawn["phases"] == {"rollout": [0.5] * 6, "update": [0.25] * 6}
    reward = data["panels"][0]
    assert reward["metric"] == "reward/mean" and reward["is_objective"] and "validation/accuracy" in reward["held_out"]


def test_a_step_has_its_groups_with_what_was_learned_of_each_token(data: dict):
    step = data["runs"][0]["steps"]["5"]
    assert step["step_s"] == 1.0 and step["phases"] == {"rollout": 0.5, "update": 0.25}
    samples = step["samples"]
    assert (samples["num_groups"], samples["num_samples"], samples["ranks"]) == (3, 12, [1, 1])
    first, _, last = samples["groups"]
    assert (first["prompt_index"], first["mean"], last["mean"]) == (15, 0.25, 0.0)
    assert HOSTILE in "".join(token if isinstance(token, str) else token[0] for token in first["prompt"])
    right = first["responses"][0]
    assert right["score"] == 1.0 and right["advantages"] == 1.5 and right["ages"] == 1 and right["apart"] == 0.25
    assert right["tokens"][-1] == ["</s>"] and "".join(right["tokens"][:-1]).strip() == "15"
    assert right["log_probs"] == [0.0, -0.1, -0.2]
    assert first["responses"][1]["advantages"] == -0.5


def test_a_step_has_the_timeline_of_all_ranks(data: dict):
    timeline = data["runs"][0]["steps"]["5"]["timeline"]
    assert timeline["seconds"] == 1.0 and timeline["num_ranks"] == 2 and list(timeline["ranks"]) == ["0", "1"]
    named = [(timeline["names"][place], start, length) for place, start, length in timeline["ranks"]["1"]]
    assert named[1] == (["call", "reward.score", "reward"], 150.0, 101.0)
    assert named[-1] == (["control", "save", "control"], 900.0, 10.0)


def test_no_text_of_a_run_is_markup(run_dir: Path):
    page = (run_dir / "report.html").read_text()
    assert HOSTILE not in page and "\\u003c/script>\\u003cimg" in page
    # The page's own: one of data, one of charts, one of its program.
    assert page.count("<script") == page.count("</script>") == 3
    assert "http" not in page.split("<script")[0].replace("http-equiv", "")


def test_several_runs_share_the_page_and_show_which_keys_differ(run_dir: Path, tmp_path: Path):
    other = write_run(tmp_path / "second", num_steps=2, has_archive=False, recipe={"seed": 2, "kl": {"coef": 0.5}})
    out = tmp_path / "both.html"
    assert cli.main(["report", str(run_dir), str(other), "--out", str(out)]) == 0
    data = data_of(out)
    assert [run["label"] for run in data["runs"]] == ["first", "second"]
    assert data["differences"] == [["name", "first", "second"], ["seed", "1", "2"], ["kl.coef", None, "0.5"]]
    assert not data["runs"][1]["archive"] and data["runs"][1]["steps"]["1"]["samples"] is None


def test_a_running_job_and_one_without_a_step_have_a_page(tmp_path: Path):
    run = write_run(tmp_path / "running", num_steps=2, is_done=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    with (run / "trace/timeline.json").open("a") as file:
        file.write('{"name":"actor.sample","args":{"step":2}},\n')
    assert cli.main(["report", str(run)]) == 0
    (found,) = data_of(run / "report.html")["runs"]
    assert found["curves"]["steps"] == [1, 2] and found["starts"][-1]["outcome"] is None
    assert len(found["steps"]["2"]["timeline"]["ranks"]["0"]) == 6
    begun = tmp_path / "begun"
    add_start(begun, StartRecord(number=1, began_s=0.0, step=None, ranks=1))
    assert data_of(write_report([begun], tmp_path / "begun.html", no_plan))["runs"][0]["steps"] == {}


@pytest.mark.slow
def test_a_long_run_of_many_ranks_fits(tmp_path: Path):
    run = write_run(tmp_path / "long", num_steps=80, num_ranks=96, num_groups=9, group_size=12, num_tokens=700)
    path = write_report([run], tmp_path / "page.html", no_plan)
    assert 1_000_000 < path.stat().st_size <= LARGEST_BYTES
    (found,) = data_of(path)["runs"]
    assert len(found["steps"]) == 60 and {"1", "80"} <= found["steps"].keys()
    samples = found["steps"]["80"]["samples"]
    assert (samples["num_groups"], samples["num_samples"], len(samples["groups"])) == (9, 108, 2)
    assert [[each["score"] for each in group["responses"]] for group in samples["groups"]] == [[1, 0, 0], [0, 0, 0]]
    response = samples["groups"][0]["responses"][0]
    assert len(response["tokens"]) == 601 and response["tokens"][400] == 100 and len(response["log_probs"]) == 601
    assert len(found["steps"]["80"]["timeline"]["ranks"]) == 32
    assert sum(step["samples"] is not None for step in found["steps"].values()) >= 25
    told = " ".join(found["left_out"])
    assert all(word in told for word in ("60 of 80 steps", "Timelines of 31", "some of the ranks"))


def test_without_room_both_ends_and_the_extremes_come_first(run_dir: Path):
    # With so little room a step has as few samples as it may have.
    archive = Archive(run_dir, open_tokenizer(run_dir), step_bytes=0)
    samples = size_of(archive.groups(6, LearnedIndex(run_dir / "rollouts", [6])))
    timeline = size_of(describe_run(run_dir, PLENTY)["steps"]["6"]["timeline"])
    room = Budget(points=3, sample_bytes=samples * 5 // 2, timeline_bytes=timeline * 5 // 2)
    found = describe_run(run_dir, room)
    # The last step has the highest reward, the first the lowest.
    for kind in ("samples", "timeline"):
        assert [step for step, shown in found["steps"].items() if shown[kind] is not None] == ["1", "6"], kind
    assert found["curves"]["steps"] == [1, 5, 6]
    told = " ".join(found["left_out"])
    assert all(word in told for word in ("up to 4 of the 6", "Samples of 2 of 6 steps", "Timelines of 2 steps"))


def test_too_many_runs_for_a_page_are_refused(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    size = write_report([run_dir], tmp_path / "page.html", no_plan).stat().st_size
    # Samples and timelines are left out for it, and the rest of the page is there.
    monkeypatch.setattr("hybridflow.report.page.LARGEST_BYTES", size - 5000)
    assert write_report([run_dir], tmp_path / "page.html", no_plan).stat().st_size <= size - 5000
    monkeypatch.setattr("hybridflow.report.page.LARGEST_BYTES", 1000)
    with pytest.raises(ConfigError, match="2 runs do not fit on one page of 0.001 MB; give fewer of them, about 1"):
        write_report([run_dir, run_dir], tmp_path / "page.html", no_plan)


def test_a_long_curve_keeps_both_ends_and_means_between():
    rows = [{"step": step} | metrics_of(step, 1000) for step in range(1, 1001)]
    drawn = curves(rows, {}, 102)
    assert len(drawn["steps"]) == 102 and drawn["steps"][:2] + drawn["steps"][-2:] == [1, 10, 999, 1000]
    reward = drawn["metrics"]["reward/mean"]
    assert (reward[0], reward[-1]) == (0.001, 1.0) and reward[1] == pytest.approx(sum(range(2, 11)) / 9 / 1000)
    assert len(drawn["sparse"]["validation/accuracy"]) == 102


@pytest.mark.parametrize(
    "metrics, first",
    [
        (["actor/loss", "reward/mean", "kl/ref", "validation/accuracy"], ["reward/mean"]),
        (["actor/loss", "validation/score"], ["actor/loss", "validation/score"]),
        (
            ["actor/loss", "preference/margin", "preference/accuracy", "validation/accuracy"],
            ["actor/loss", "preference/margin", "preference/accuracy"],
        ),
        (["actor/loss", "distill/kl"], ["distill/kl", "actor/loss"]),
    ],
)
def test_what_the_algorithm_optimizes_comes_first(metrics: list, first: list):
    assert [panel["metric"] for panel in choose_panels(metrics)][: len(first)] == first


@pytest.mark.parametrize(
    "names, told, points",
    [
        (("score",), "score", {"validation/score": [[0, 0.1], [3, 0.5], [6, 0.9]]}),
        (("accuracy", "score"), "accuracy", {"validation/accuracy": [[0, 0.1], [3, 0.5], [6, 0.9]]}),
        (("accuracy", "score"), None, {"validation/accuracy": [[0, 0.1], [6, 0.9]]}),
        ((), None, {}),
    ],
)
def test_validations_before_and_after_come_from_the_summary(names: tuple, told: str | None, points: dict):
    rows = [{"step": step} | ({f"validation/{told}": 0.5} if told and step == 3 else {}) for step in range(1, 7)]
    summary = {f"{name}_{when}": value for name in names for when, value in (("before_rl", 0.1), ("after_rl", 0.9))}
    assert curves(rows, summary | {"steps": 6}, 100)["sparse"] == points


def test_steps_without_samples_are_not_taken_for_archived_ones(tmp_path: Path):
    run = write_run(tmp_path / "run", num_steps=90, has_archive=False)
    write_archive(run, range(1, 91, 30), 2, 2, 3)
    (found,) = data_of(write_report([run], tmp_path / "page.html", no_plan))["runs"]
    shown = [int(step) for step, each in found["steps"].items() if each["samples"] is not None]
    assert shown == [1, 31, 61] and len(found["steps"]) == 60


@pytest.mark.parametrize("count, number", [(0, 5), (1, 5), (3, 5), (7, 5), (1000, 60)])
def test_steps_are_spread(count: int, number: int):
    steps = list(range(10, 10 + count))
    found = spread_steps(steps, [12, 99_999], number)
    assert len(found) == len(set(found)) == min(count, number) and set(found) <= set(steps)
    assert count == 0 or {steps[0], steps[-1]} <= set(found)
    gaps = [after - before for before, after in zip(sorted(found), sorted(found)[1:], strict=False)]
    assert count < 1000 or max(gaps) <= 2 * 1000 / 60 + 2


def test_complaints(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert cli.main(["report", str(run_dir), "--out", str(tmp_path / "no/page.html")]) == 4
    assert "--out" in capsys.readouterr().err
    damaged = write_run(tmp_path / "damaged", num_steps=2)
    (damaged / "rollouts/segments/step-000001-000002-rank-00000.h5").write_bytes(b"no HDF5")
    assert cli.main(["report", str(damaged)]) == 3
    assert "step-000001-000002" in capsys.readouterr().err
    # At the end of a run it is told, and the run is done all the same.
    try_report(damaged, no_plan)
    assert "report.html was not written: CheckpointError" in capsys.readouterr().out


def test_the_command_imports_no_torch(run_dir: Path, tmp_path: Path):
    code = (
        "import sys\nfrom hybridflow import cli\nassert cli.main(sys.argv[1:]) == 0\nassert 'torch' not in sys.modules"
    )
    argv = [sys.executable, "-c", code, "report", str(run_dir), "--out", str(tmp_path / "page.html")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_data_is_json_that_no_number_breaks(run_dir: Path):
    # A browser reads neither NaN nor Infinity.
    page = (run_dir / "report.html").read_text().partition('id="data">')[2].partition("</script>")[0]
    json.loads(page, parse_constant=lambda name: pytest.fail(name))


NUMBERS = st.floats() | st.integers(-(10**400), 10**400) | st.sampled_from([10**308, -1.7976931e308, 5e-324])


@given(st.dictionaries(st.sampled_from(["ts", "dur", "pid", "tid", "name", "cat"]), NUMBERS | st.text(max_size=5)))
def test_whatever_an_event_holds_the_page_is_written(event: dict):
    with TemporaryDirectory() as folder:
        run_dir = Path(folder)
        (run_dir / "metrics.jsonl").write_text('{"step": 1, "time/step_s": 1.0}\n')
        write_timeline(run_dir, [1], num_ranks=1)
        with (run_dir / "trace/timeline.json").open("a") as file:
            file.write(json.dumps(event | {"args": {"step": 1}}) + "\n")
        assert data_of(write_report([run_dir], run_dir / "page.html", no_plan))["runs"][0]["steps"]["1"]["timeline"]


@given(st.lists(st.floats(), min_size=1, max_size=9))
def test_whatever_a_metric_is_the_page_is_written(values: list):
    with TemporaryDirectory() as folder:
        run_dir = Path(folder)
        rows = [{"step": step, "reward/mean": value, "time/step_s": value} for step, value in enumerate(values, 1)]
        rows = [{name: value if value == value else None for name, value in row.items()} for row in rows]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        drawn = describe_run(run_dir, Budget(points=3, sample_bytes=0, timeline_bytes=10**6))["curves"]
        told = [value for each in (drawn["metrics"], drawn["phases"]) for column in each.values() for value in column]
        assert all(value is None or math.isfinite(value) for value in told)
