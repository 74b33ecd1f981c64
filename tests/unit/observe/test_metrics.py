"""The metrics log: what is written can be read, a resume forgets exactly the steps to come, the console says it all."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.errors import CheckpointError, DataError, WriteError
from hybridflow.observe.metrics import MetricsLog, held_out_text, progress_line, read_metrics

STEP = {
    "reward/mean": 0.53149,
    "kl/ref": 0.01234,
    "response/length_mean": 5.25,
    "throughput/tokens_per_s": 12345.6,
    "time/step_s": 3.214,
    "time/rollout_s": 1.2,
    "time/update_s": 1.996,
    "control/overhead_share": 0.011,
}


def write_steps(run_dir: Path, steps: range, resumed_step: int | None = None, shift: float = 0.0) -> None:
    with MetricsLog(run_dir, num_steps=9, resumed_step=resumed_step) as log:
        for step in steps:
            log.write(step, {"reward/mean": step / 10 + shift})


def tensorboard_scalars(run_dir: Path, name: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    return {event.step: event.value for event in events.Scalars(name)}


def test_what_is_written_can_be_read(tmp_path: Path):
    run_dir = tmp_path / "runs" / "first"
    with MetricsLog(run_dir, num_steps=9) as log:
        log.write(1, STEP)
        assert read_metrics(run_dir) == [{"step": 1} | STEP]  # at once, not only when the log is closed
        log.write(2, STEP | {"reward/mean": 1})
    assert [row["reward/mean"] for row in read_metrics(run_dir)] == [0.53149, 1]
    assert tensorboard_scalars(run_dir, "reward/mean") == pytest.approx({1: 0.53149, 2: 1.0})


def test_not_finite_is_null_in_the_file_and_nan_to_a_reader(tmp_path: Path):
    with MetricsLog(tmp_path, num_steps=9) as log:
        log.write(1, {"reward/mean": math.nan, "kl/ref": math.inf})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "reward/mean": null, "kl/ref": null}\n'
    (row,) = read_metrics(tmp_path)
    assert math.isnan(row["reward/mean"]) and math.isnan(row["kl/ref"])
    write_steps(tmp_path, range(2, 3), resumed_step=1)
    assert (tmp_path / "metrics.jsonl").read_text().startswith('{"step": 1, "reward/mean": null, "kl/ref": null}\n')


def test_resume_drops_the_steps_after_its_checkpoint(tmp_path: Path):
    write_steps(tmp_path, range(6))
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()
    with MetricsLog(tmp_path, num_steps=9, resumed_step=3):
        assert (tmp_path / "metrics.jsonl").read_text().splitlines() == before[:4]  # steps 0 to 3, unchanged
    assert sorted(tensorboard_scalars(tmp_path, "reward/mean")) == [0, 1, 2, 3]
    write_steps(tmp_path, range(4, 8), resumed_step=3, shift=0.01)
    expected = {0: 0.0, 1: 0.1, 2: 0.2, 3: 0.3, 4: 0.41, 5: 0.51, 6: 0.61, 7: 0.71}
    assert {row["step"]: row["reward/mean"] for row in read_metrics(tmp_path)} == pytest.approx(expected)
    assert tensorboard_scalars(tmp_path, "reward/mean") == pytest.approx(expected)


def test_resuming_a_long_run_holds_few_of_its_lines_at_a_time(tmp_path: Path):
    line = json.dumps({"step": 0, **{f"rollout/metric_{number:03d}": 1 / 7 for number in range(60)}})
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line.replace('"step": 0', f'"step": {step}') + "\n" for step in range(4000)))
    tracemalloc.start()
    try:
        with MetricsLog(tmp_path, num_steps=9000, resumed_step=3998) as log:
            log.amend(3998, {"validation/score": 0.5})
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    kept = path.read_text().splitlines()
    assert len(kept) == 3999 and json.loads(kept[-1])["validation/score"] == 0.5
    assert most < path.stat().st_size // 2


def test_a_new_run_starts_anew(tmp_path: Path):
    write_steps(tmp_path, range(6))
    write_steps(tmp_path, range(2), shift=0.5)
    assert [(row["step"], row["reward/mean"]) for row in read_metrics(tmp_path)] == [(0, 0.5), (1, 0.6)]
    assert tensorboard_scalars(tmp_path, "reward/mean") == pytest.approx({0: 0.5, 1: 0.6})


def test_a_line_cut_short_is_not_a_step(tmp_path: Path):
    write_steps(tmp_path, range(1, 3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    write_steps(tmp_path, range(3, 4), resumed_step=2)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]


def test_a_crash_while_resuming_loses_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_steps(tmp_path, range(6))
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(WriteError, match="disk full"):
        MetricsLog(tmp_path, num_steps=9, resumed_step=3)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "line",
    [
        *(b"not json", b"[1]", b'{"reward/mean": 1}', b'{"step": "1"}', b'{"step": true}', b"[" * 100_000),
        *(b'{"step": 1, "a\xff": 1}', b"\xff\xfe", b'{"step": 1, "a": "b"}', b'{"step": 1, "a": 1%0400d}' % 0),
    ],
)
def test_a_line_that_is_no_step_is_named(tmp_path: Path, line: bytes):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n')
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl, line 2: .*not a JSON object with an integer \"step\""):
        MetricsLog(tmp_path, num_steps=9, resumed_step=1)


def test_a_run_without_metrics_is_an_error(tmp_path: Path):
    with pytest.raises(DataError, match=r"metrics\.jsonl does not exist"):
        read_metrics(tmp_path)


def test_progress_line():
    assert progress_line(7, 120, STEP, left_s=363) == (
        "step   7/120 | reward 0.531 | KL 0.0123 | length 5.2 | 3.21 s | 12,346 tokens/s | 6 min left"
    )
    assert progress_line(1, 9, {"reward/mean": math.nan, "time/step_s": 2}) == "step 1/9 | reward nan | 2.00 s"
    # Of a program that runs its own loop.
    assert progress_line(1, None, {"reward/mean": 0.5}) == "step 1 | reward 0.500"
    assert progress_line(1, None, {"reward/mean": -0.25, "kl/ref": -1e-9}) == "step 1 | reward -0.250 | KL 0.0000"
    assert progress_line(1, None, {"reward/mean": -0.0001, "kl/ref": -0.0042}) == "step 1 | reward 0.000 | KL -0.0042"


def test_the_progress_line_shows_what_is_optimized():
    sft = {"actor/loss": 1.25, "actor/grad_norm": 2.0, "time/step_s": 0.5, "throughput/tokens_per_s": 900.0}
    assert progress_line(1, 9, sft, left_s=4) == "step 1/9 | loss 1.2500 | 0.50 s | 900 tokens/s | 4 s left"
    dpo = sft | {"preference/accuracy": 0.625, "preference/margin": 0.031, "kl/ref": 0.5}
    assert progress_line(1, 9, dpo).startswith("step 1/9 | loss 1.2500 | accuracy 62.5% | margin 0.031 | KL 0.5")
    # The loss of a policy says nothing of what it has learned.
    assert "loss" not in progress_line(1, 9, STEP | {"actor/loss": 0.1})


def test_the_progress_line_has_at_most_100_characters():
    long = STEP | {"cost/mean": 1234.567, "response/length_mean": 31234.5, "time/step_s": 1234.5}
    line = progress_line(123456, 999999, long | {"throughput/tokens_per_s": 1e9}, left_s=1e7)
    assert len(line) <= 100 and "tokens/s" not in line and line.endswith("115.7 days left")


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"validation/score": 0.461, "validation/accuracy": 0.461}, "held-out accuracy 46.1%"),
        ({"validation/score": -3.2}, "held-out score -3.200"),
        ({"validation/score": 12.0}, "held-out score 12.000"),
        ({"validation/accuracy": 0.5}, "held-out accuracy 50.0%"),
        ({"validation/loss": 1.25}, "held-out loss 1.2500"),
        ({"validation/loss": 1.25, "validation/score": 0.5}, "held-out score 0.500, loss 1.2500"),
    ],
)
def test_only_an_accuracy_is_shown_in_percent(metrics: dict, words: str):
    assert held_out_text(metrics) == words


def test_a_json_log_has_an_object_for_each_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HYBRIDFLOW_LOG", "json")
    with MetricsLog(tmp_path, num_steps=120) as log:
        log.write(7, STEP | {"kl/ref": math.nan})
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert (told["event"], told["step"]) == ("step", 7) and told["message"].startswith("step   7/120 | reward 0.531")
    assert told["metrics"] == STEP | {"kl/ref": None}


def test_texts_are_in_tensorboard(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsLog(tmp_path, num_steps=9) as log:
        log.write_texts(3, {"samples": "**prompt** 1+1"})
    (event,) = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tensors("samples")
    assert event.step == 3 and event.tensor_proto.string_val == [b"**prompt** 1+1"]


def test_a_step_prints_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with MetricsLog(tmp_path, num_steps=120) as log:
        log.write(7, STEP)
    assert capsys.readouterr().out == progress_line(7, 120, STEP, left_s=113 * 3.214) + "\n"


@given(st.dictionaries(st.text(), st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))))
def test_any_finite_metric_survives_the_round_trip(tmp_path_factory: pytest.TempPathFactory, metrics: dict):
    from hybridflow.observe.metrics import _line

    run_dir = tmp_path_factory.mktemp("run")
    (run_dir / "metrics.jsonl").write_text(_line(metrics | {"step": 1}), encoding="utf-8")
    assert read_metrics(run_dir) == [metrics | {"step": 1}]
    assert json.loads(_line(metrics)) == metrics


def test_importing_is_light():
    heavy = "import hybridflow.observe.metrics, hybridflow.observe.summary, hybridflow.observe.timeline, sys\n"
    heavy += "sys.exit(' '.join({'torch', 'matplotlib', 'numpy', 'tensorboard'} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_validation_that_is_made_up_for_is_in_the_line_of_its_step(tmp_path):
    with MetricsLog(tmp_path, num_steps=4) as log:
        log.write(1, {"reward/mean": 0.5})
        log.amend(1, {"validation/score": 0.25})
        log.amend(2, {"validation/score": 0.75})
        log.write(2, {"reward/mean": 1.0})
    first, second = read_metrics(tmp_path)
    assert first == {"step": 1, "reward/mean": 0.5, "validation/score": 0.25}
    assert second == {"step": 2, "reward/mean": 1.0}
