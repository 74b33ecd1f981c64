"""What a person sees of a real run that was killed half-way and gone on with: status, timeline, traces, metrics."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hybridflow import cli
from hybridflow.observe.metrics import read_metrics
from hybridflow.observe.starts import read_starts
from hybridflow.observe.status import RunStatus, read_status
from hybridflow.trainer import trainer
from tests.e2e.commands import fork_ranks, kill_in_step, run_well, write_recipe
from tests.support.report_runs import data_of

RUN = ["train", "tiny.yaml", "trainer.steps=4", "trainer.save_every=2"]
PROFILE = ["profile.steps=[2, 9]", "profile.ranks=[1]"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunStatus, RunStatus, str]:
    """The run's directory; its status after the kill, at once and a minute later; what the ranks told on stderr."""
    folder = tmp_path_factory.mktemp("observe")
    write_recipe(folder)
    run_dir = folder / "run"
    killed = fork_ranks([*RUN, *PROFILE], folder, hook=lambda rank: kill_in_step(3))
    assert killed.codes == (-9, -9), killed.err
    written_s = json.loads((run_dir / "status.json").read_text())["time_s"]
    at_once, later = (read_status(run_dir, written_s + age_s) for age_s in (1, 61))
    done = run_well([*RUN, "--resume"], folder)
    return run_dir, at_once, later, killed.err, killed.out, done.out


def trace_events(path: Path) -> list[dict[str, Any]]:
    content = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_text())
    found: list[dict[str, Any]] = content if isinstance(content, list) else content["traceEvents"]
    return [event for event in found if event["ph"] == "X"]


def test_status_of_a_killed_run_and_of_one_that_is_done(seen: Any):
    run_dir, at_once, later, *_ = seen
    assert (at_once.state, at_once.step, at_once.steps, at_once.restarts) == ("silent", 2, 4, 0)
    assert (later.state, later.sign_age_s) == ("silent", 61)
    assert later.step_s is not None and later.left_s == pytest.approx(2 * later.step_s)
    assert {"rollout", "update", "log_probs"} <= later.phases_s.keys()
    done = read_status(run_dir)
    assert (done.state, done.step, done.restarts, done.ranks) == ("finished", 4, 1, 2)
    # Whether step 2's checkpoint was complete is a matter of luck: it is written in the background.
    assert done.last_end == "killed" and done.start_step in (0, 2) and done.saved_step == 4
    assert done.reward == read_metrics(run_dir)[-1]["reward/mean"]
    assert done.score == json.loads((run_dir / "summary.json").read_text())["score_after_rl"]


def test_the_console_says_what_is_trained_and_what_it_leaves(seen: Any):
    *_, err, first, second = seen
    lines = first.splitlines()
    assert "  data     data/train.jsonl, 200 rows; 8 held out" in lines
    assert "  layouts  actor.update tp2, actor.rollout dp2, reference tp2" in lines
    assert "  steps    4 of 8 samples (4 prompts × 2), a checkpoint every 2 steps" in lines
    (model,) = (line for line in lines if line.startswith("  model"))
    assert model.startswith("  model    new, ") and model.endswith(" k parameters, fp32")
    assert any(line.startswith("step 1/4 | reward ") for line in lines)
    ends = second.splitlines()
    (done,) = (index for index, line in enumerate(ends) if line.startswith("done: 4 steps in "))
    assert "; held-out score " in ends[done] and " → " in ends[done]
    assert ends[done + 1 : done + 3] == [
        "  checkpoint  run/checkpoints/step_000004",
        "  export      hybridflow convert run/checkpoints/step_000004/actor out/run --to hf",
    ]
    assert ends[done + 3] == "  look        run/report.html"
    assert all(len(line) <= 100 for line in lines if line.startswith("step "))
    # What other packages have to say is not for the user.
    others = re.compile(r"warn|unknown|megatron|deprecat|torch", re.IGNORECASE)
    assert not [line for text in (err, first, second) for line in text.splitlines() if others.search(line)]


def test_each_validation_shows_samples(seen: Any):
    run_dir, *_, first, second = seen
    rows = [json.loads(line) for line in (run_dir.parent / "data/held_out.jsonl").read_text().splitlines()[:3]]
    for out, step in ((first, 0), (second, 4)):
        lines = out.splitlines()
        (at,) = (index for index, line in enumerate(lines) if re.fullmatch(rf"held-out .* after step {step}", line))
        shown = lines[at + 1 : at + 7]
        assert shown[::2] == [f"  prompt    {row['prompt']}" for row in rows]
        assert all(re.fullmatch(r"  response  .*  \(score [0-2]\)", line) for line in shown[1::2]), shown
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    (text,) = (event.tensor_proto.string_val[0].decode() for event in events.Tensors("samples") if event.step == 4)
    assert f"**prompt**\n```\n{rows[0]['prompt']}\n```" in text


def test_some_samples_are_archived_by_default(seen: Any, capsys: pytest.CaptureFixture[str]):
    run_dir = seen[0]
    assert cli.main(["rollouts", str(run_dir), "--steps", "1-4", "--number", "99", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    # Two prompts of each step of four, and two samples of each.
    expected = [(step, 4 * (step - 1) + prompt, index) for step in range(1, 5) for prompt in (0, 1) for index in (0, 1)]
    assert [(row["step"], row["prompt_index"], row["index"]) for row in rows] == expected
    assert all(row["score"] in (0, 1, 2) for row in rows if row["step"] > read_status(run_dir).start_step)


@pytest.mark.slow
def test_without_an_interval_a_checkpoint_is_made_when_the_last_one_is_old(tmp_path: Path):
    def hook(rank: int) -> None:
        trainer.SAVE_AFTER_S = 0.0 if rank == 0 else 1e9

    write_recipe(tmp_path)
    run = ["train", "tiny.yaml", "trainer.steps=3", "trainer.keep_last=9"]
    assert fork_ranks(run, tmp_path, hook=hook).codes == (0, 0)
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step_*"))
    assert saved == ["step_000000", "step_000001", "step_000002", "step_000003"]
    run = ["train", "tiny.yaml", "trainer.steps=3", "trainer.keep_last=9", "run_dir=other"]
    run_well(run, tmp_path)
    saved = sorted(path.name for path in (tmp_path / "other/checkpoints").glob("step_*"))
    assert saved == ["step_000000", "step_000003"]


def test_metrics_count_restarts(seen: Any):
    run_dir = seen[0]
    rows = read_metrics(run_dir)
    resumed = read_status(run_dir).start_step
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["run/restarts"] for row in rows] == [0 if row["step"] <= resumed else 1 for row in rows]


def test_metrics_tell_how_long_responses_took_and_what_was_computed(seen: Any):
    # What the killed start had sampled was not sampled again: all but the last step, if none was saved.
    rows = [row for row in read_metrics(seen[0]) if "rollout/reused" not in row]
    assert rows
    for row in rows:
        for what in ("latency", "first_token"):
            times = [row[f"rollout/{what}_{name}_s"] for name in ("p50", "p90", "p99")]
            assert 0 < times[0] <= times[1] <= times[2] <= row["time/rollout_s"]
        assert row["rollout/first_token_p50_s"] <= row["rollout/latency_p50_s"]
        # Each of 8 samples is of 4 tokens at most, and every sequence is learned from once.
        assert row["throughput/rollout_tokens_per_s"] * row["time/rollout_s"] == pytest.approx(
            8 * row["response/length_mean"]
        )
        assert row["throughput/update_tokens_per_s"] * row["time/update_s"] == pytest.approx(row["batch/num_tokens"])
        assert all(0 < row[f"mfu/{phase}"] < 1 for phase in ("step", "rollout", "log_probs", "update"))
        # Every phase runs on both ranks: what they computed is what the step computed.
        phases = ("rollout", "log_probs", "update", *(["validation"] if row["step"] == 4 else []))
        computed = sum(row[f"mfu/{phase}"] * row[f"time/{phase}_s"] for phase in phases)
        assert row["mfu/step"] * row["time/step_s"] == pytest.approx(computed)
        memory = {row[f"memory/{phase}_bytes"] for phase in ("rollout", "reward", "log_probs", "update", "reshard")}
        assert min(memory) > 50 << 20 and max(memory) < 8 << 30


def test_the_timeline_has_both_starts_and_the_times_of_the_metrics(seen: Any):
    run_dir = seen[0]
    events = trace_events(run_dir / "trace" / "timeline.json")
    firsts = [index for index, event in enumerate(events) if event["cat"] == "step"]
    resumed = read_status(run_dir).start_step
    assert [events[first]["args"]["step"] for first in firsts] == [1, 2, *range(resumed + 1, 5)]
    # Of a step that was made twice the metrics, too, are those of the second time.
    steps = {events[at]["args"]["step"]: events[at:end] for at, end in zip(firsts, [*firsts[1:], None], strict=True)}
    for row in read_metrics(run_dir):
        step, *spans = steps[row["step"]]
        assert step["dur"] / 1e6 == pytest.approx(row["time/step_s"], abs=1e-5)
        assert {event["cat"] for event in spans} == {"call", "move", "phase", "control"}
        assert all(event["args"] == step["args"] and event["pid"] == 2 for event in spans)
        ranks = [[event for event in spans if event["tid"] == tid] for tid in (1, 2)]
        assert sum(map(len, ranks)) == len(spans)
        for name, phase in (("actor.sample", "rollout"), ("actor.update", "update"), ("reward.score", "reward")):
            taken_s = [sum(event["dur"] for event in own if event["name"] == name) / 1e6 for own in ranks]
            assert max(taken_s) == pytest.approx(row[f"time/{phase}_s"], abs=1e-5)
        for own in ranks:
            # A schedule is run one after the other.
            ends = [event["ts"] + event["dur"] for event in own]
            assert all(end <= event["ts"] + 2 for end, event in zip(ends, own[1:], strict=False))
    starts = read_starts(run_dir)
    began_s, ended_s = starts[0].began_s, starts[-1].ended_s
    assert ended_s is not None
    assert all(began_s * 1e6 < event["ts"] <= event["ts"] + event["dur"] < ended_s * 1e6 for event in events)


def test_the_report_tells_of_both_starts_and_the_steps(seen: Any):
    run_dir = seen[0]
    (run,) = data_of(run_dir / "report.html")["runs"]
    assert (run["facts"]["state"], run["algorithm"]) == ("finished", "grpo")
    assert [start["outcome"] for start in run["starts"]] == ["killed", "finished"]
    assert run["curves"]["steps"] == [1, 2, 3, 4] and list(run["steps"]) == ["1", "2", "3", "4"]
    (held_out,) = [points for name, points in run["curves"]["sparse"].items() if name.startswith("validation/")]
    assert [step for step, _ in held_out] == [0, 4]
    for number, row in enumerate(read_metrics(run_dir), start=1):
        timeline = run["steps"][str(number)]["timeline"]
        assert timeline["seconds"] == pytest.approx(row["time/step_s"], rel=1e-3) and len(timeline["ranks"]) == 2
        assert {"rollout", "update", "control"} <= {phase for *_, phase in timeline["names"]}
    assert "  num_layers: 2\n" in run["recipe"]


def test_the_chosen_step_of_the_chosen_rank_is_traced(seen: Any):
    run_dir, err = seen[0], seen[3]
    traces = sorted(path.name for path in (run_dir / "trace").iterdir())
    assert traces == ["step-000002-rank-00001.json.gz", "timeline.json"]
    events = trace_events(run_dir / "trace" / traces[0])
    spans = [event for event in events if event.get("cat") == "user_annotation"]
    assert {"actor.sample", "actor.log_probs", "actor.update", "trainer.finish_step"} <= {e["name"] for e in spans}
    # Operations lie inside the ranges of what called them.
    update = next(event for event in spans if event["name"] == "actor.update")
    begin, end = update["ts"], update["ts"] + update["dur"]
    inside = [event["name"] for event in events if begin <= event["ts"] <= end]
    assert any("backward" in name.lower() for name in inside) and any(name.startswith("aten::") for name in inside)
    assert "profiler_start" not in err


@pytest.mark.slow
def test_the_load_of_each_expert_is_written_down_once_for_each_step(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    run, run_dir = [*RUN, "model.num_experts=4", "model.experts_per_token=2"], tmp_path / "run"
    # In one mini-batch: the file has the loads of the last, the metrics are means.
    run += ["actor.update={dp: 2, ep: 2}", "actor.rollout={dp: 2}", "trainer.mini_batch_size=8"]
    assert fork_ranks(run, tmp_path, hook=lambda rank: kill_in_step(4)).codes == (-9, -9)
    with (run_dir / "expert_loads.jsonl").open("a") as file:
        file.write('{"step":4,"lo')
    run_well([*run, "--resume"], tmp_path)
    written = [json.loads(line) for line in (run_dir / "expert_loads.jsonl").read_text().splitlines()]
    assert [row["step"] for row in written] == [1, 2, 3, 4]
    for row, metrics in zip(written, read_metrics(run_dir), strict=True):
        loads = row["loads"].values()
        assert row["loads"].keys() == {"0", "1"} and all(sum(shares) == pytest.approx(4, abs=1e-3) for shares in loads)
        assert max(map(max, loads)) == pytest.approx(metrics["actor/expert_load_max"], abs=1e-4)
        assert min(map(min, loads)) == pytest.approx(metrics["actor/expert_load_min"], abs=1e-4)
