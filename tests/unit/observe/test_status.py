"""A status says what the files of a run say, in every state of the run, and of damaged files what is left of them."""

from __future__ import annotations

import functools
import json
import os
import socket
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow import cli
from hybridflow.errors import DataError
from hybridflow.observe.starts import StartRecord, add_end, add_start
from hybridflow.observe.status import read_status
from hybridflow.observe.status_file import StatusFile
from hybridflow.observe.status_text import as_table, as_text, duration
from hybridflow.observe.summary import write_summary

BEGAN_S = 10_000.0
"""When the last start began."""


def write_run(run_dir: Path, *, num_steps: int = 3) -> None:
    """A run of 10 steps, killed once and begun again from step 1, that has made some steps since."""
    first = StartRecord(number=1, began_s=BEGAN_S - 500, step=None, ranks=4, hosts=("a", "b"), job_id="17")
    add_start(run_dir, first)
    add_start(
        run_dir,
        StartRecord(number=2, began_s=BEGAN_S, step=1, ranks=2, hosts=("a",), layouts={}, job_id="17", restart_count=1),
    )
    lines = []
    for step in range(1, num_steps + 1):
        times = {"time/step_s": 2.0 * step, "time/rollout_s": 1.0 * step, "batch/num_tokens": 200.0 * step**2}
        accuracy = {"validation/accuracy": 0.25} if step == 2 else {}
        lines.append(json.dumps({"step": step, "reward/mean": step / 10, **times, **accuracy}) + "\n")
    (run_dir / "metrics.jsonl").write_text("".join(lines))
    file = StatusFile(run_dir, facts={"steps": 10})
    file.note(step=num_steps, job_end_s=BEGAN_S + 100)
    file.close()
    put_status(run_dir, time_s=BEGAN_S + 38, activity="actor.sample", activity_since_s=BEGAN_S + 30)
    (run_dir / "checkpoints").mkdir()
    (run_dir / "checkpoints" / "latest").write_text("step_000002\n")
    (run_dir / "checkpoints" / "best").write_text("step_000001\n")
    os.utime(run_dir / "checkpoints" / "latest", (BEGAN_S + 20, BEGAN_S + 20))


def put_status(run_dir: Path, **values: object) -> None:
    path = run_dir / "status.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "x"
    path.mkdir(parents=True)
    write_run(path)
    return path


def test_a_running_job(run_dir: Path):
    status = read_status(run_dir, BEGAN_S + 40)
    assert asdict(status) == {
        **{"run": str(run_dir), "state": "running", "activity": "actor.sample", "activity_age_s": 8, "sign_age_s": 2},
        **{"step": 3, "steps": 10, "reward": 0.3, "score": 0.25, "result": "accuracy"},
        # Means of 2, 4, 6 s; of 1, 2, 3 s; 200 + 800 + 1800 tokens in 12 s. Seven steps are left.
        **{"step_s": 4, "phases_s": {"rollout": 2}, "tokens_per_s": 2800 / 12, "left_s": 28, "job_left_s": 60},
        **{"starts": 2, "restarts": 1, "slurm_restarts": 1, "start_age_s": 40, "end_age_s": None, "start_step": 1},
        **{"last_end": "killed", "ranks": 2, "hosts": ("a",), "job_id": "17"},
        **{"saved_step": 2, "saved_age_s": 20, "best_step": 1, "cause": None, "logs": None},
    }
    assert as_text(status).splitlines() == [
        f"{run_dir}: running: actor.sample, for 8 s",
        "  step    3 of 10",
        "  reward  0.300, held-out accuracy 25.0%",
        "  speed   233 tokens/s, 4.00 s a step: rollout 2.00",
        "  left    28 s at this pace, 1 min 0 s of the job's time",
        "  saved   step 2, 20 s ago; the best is step 1",
        "  starts  2, the last 40 s ago from step 1 on 2 ranks of a; job 17, Slurm's restart 1",
        "  before  killed",
    ]


def test_one_that_gives_no_sign(run_dir: Path):
    # Its last one came at 38 s, every 5 s one is due.
    assert read_status(run_dir, BEGAN_S + 38 + 29).state == "running"
    status = read_status(run_dir, BEGAN_S + 38 + 31)
    assert (status.state, status.sign_age_s, status.activity, status.job_left_s) == ("silent", 31, "actor.sample", None)
    (run_dir / "logs" / "0002").mkdir(parents=True)
    lines = as_text(read_status(run_dir, BEGAN_S + 38 + 120)).splitlines()
    cause = "killed or suspended, or its node is down; it was at actor.sample"
    assert lines[0] == f"{run_dir}: no sign of life for 2 min 0 s: {cause}"
    assert lines[-1] == f"  logs    {run_dir}/logs/0002"


def test_one_whose_process_on_this_host_is_gone_does_not_run(run_dir: Path):
    put_status(run_dir, pid=1 << 30)
    assert read_status(run_dir, BEGAN_S + 40).state == "silent"
    # Of another host's processes nothing is known.
    put_status(run_dir, host="elsewhere")
    assert read_status(run_dir, BEGAN_S + 40).state == "running"


def test_one_that_begins_is_not_taken_for_the_one_before(run_dir: Path):
    add_start(run_dir, StartRecord(number=3, began_s=BEGAN_S + 100, step=2, ranks=4))
    status = read_status(run_dir, BEGAN_S + 120)
    assert (status.state, status.activity, status.sign_age_s, status.job_left_s) == ("starting", None, 20, None)
    assert read_status(run_dir, BEGAN_S + 131).state == "silent"
    put_status(run_dir, time_s=BEGAN_S + 150)
    assert read_status(run_dir, BEGAN_S + 160).state == "running"


@pytest.mark.parametrize(
    "outcome, detail, told",
    [
        ("requeue", "received SIGUSR1", "saved and stopped, to be begun again"),
        ("failed", "rank 3: lost\x1b[31m", "failed"),
        ("finished", "", "finished"),
    ],
)
def test_one_that_has_ended(run_dir: Path, outcome: str, detail: str, told: str):
    add_end(run_dir, 2, outcome, detail)
    status = read_status(run_dir)
    assert (status.state, status.cause, status.activity) == (outcome, detail or None, None)
    assert as_table([status]).splitlines()[1].split()[1] == ("stopped" if outcome == "requeue" else outcome)
    text = as_text(status)
    assert text.splitlines()[0].startswith(f"{run_dir}: {told}, ") and "\x1b" not in text
    assert (status.left_s is None) == (outcome == "finished")
    # The next start tells of it.
    add_start(run_dir, StartRecord(number=3, began_s=BEGAN_S + 100, step=2, ranks=4))
    status = read_status(run_dir, BEGAN_S + 110)
    assert status.state == "starting" and status.last_end == (f"{outcome}: {detail}" if detail else outcome)


def test_one_that_was_stopped_before_it_saved_does_not_claim_to_have(tmp_path: Path):
    add_start(tmp_path, StartRecord(number=1, began_s=BEGAN_S, step=None, ranks=1))
    add_end(tmp_path, 1, "requeue", "received SIGINT")
    told = as_text(read_status(tmp_path))
    assert "stopped before anything was saved, to be begun again" in told and "saved   nothing yet" in told


def test_a_loss_is_no_reward_and_steps_are_not_of_fewer(run_dir: Path):
    status = replace(read_status(run_dir), reward=None, score=1.5, result="loss", step=12)
    assert as_text(status).splitlines()[1:3] == ["  step    12", "  result  held-out loss 1.5000"]


def test_one_that_is_done_shows_the_last_accuracy(run_dir: Path):
    write_summary(run_dir, {"steps": 10, "accuracy_after_rl": 0.75})
    assert read_status(run_dir, BEGAN_S + 40).score == 0.25  # of an earlier start, which was asked for less
    add_end(run_dir, 2, "finished")
    assert read_status(run_dir).score == 0.75


def test_a_run_from_before_starts_were_noted(run_dir: Path):
    for name in ("starts.jsonl", "status.json"):
        (run_dir / name).unlink()
    assert read_status(run_dir).state == "silent" and read_status(run_dir).steps is None
    write_summary(run_dir, {"steps": 3, "accuracy_after_rl": 0.75})
    status = read_status(run_dir)
    assert (status.state, status.step, status.steps) == ("finished", 3, 3)


def test_before_the_first_step(tmp_path: Path):
    add_start(tmp_path, StartRecord(number=1, began_s=BEGAN_S, step=None, ranks=4, hosts=("a",)))
    status = read_status(tmp_path, BEGAN_S + 3)
    assert (status.state, status.step, status.saved_step) == ("starting", None, None)
    lines = as_text(status).splitlines()[1:]
    assert lines == ["  saved   nothing yet", "  starts  1, the last 3 s ago from the beginning on 4 ranks of a"]


def test_of_a_long_run_only_the_end_is_read(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hybridflow.observe.status._TAIL_BYTES", 150)
    status = read_status(run_dir, BEGAN_S + 40)
    assert (status.step, status.step_s) == (3, 6)  # the last line alone is whole
    assert (status.score, status.result) == (0.25, "accuracy")  # looked for further back
    monkeypatch.setattr("hybridflow.observe.status._SEARCHED_BYTES", 150)
    assert read_status(run_dir, BEGAN_S + 40).score is None


def test_no_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "notes.txt").write_text("no run")
    for path in (tmp_path, tmp_path / "notes.txt", tmp_path / "absent"):
        with pytest.raises(DataError, match="holds no run"):
            read_status(path)
        assert cli.main(["status", str(path)]) == 2
        assert capsys.readouterr().err.startswith(f"hybridflow: {path}: holds no run")


def test_a_job_that_waits_in_the_queue_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for number, job_id in enumerate(("4710", "4711", "not a number")):
        (tmp_path / f"launch/000{number}").mkdir(parents=True)
        (tmp_path / f"launch/000{number}/job_id").write_text(f"{job_id}\n")
    assert cli.main(["status", str(tmp_path)]) == 2
    assert f"{tmp_path}: job 4711 was submitted and has not started; see `squeue -j 4711`" in capsys.readouterr().err


def test_the_command(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    other = run_dir.parent / "y"
    other.mkdir()
    write_run(other, num_steps=0)
    add_end(other, 2, "failed", "rank 0 on n1, in reading data and making models: " + "a" * 100)
    assert cli.main(["status", str(run_dir)]) == 0
    assert capsys.readouterr().out.startswith(f"{run_dir}: no sign of life for ")
    assert cli.main(["status", str(run_dir), str(other), str(run_dir.parent.parent)]) == 2
    printed = capsys.readouterr()
    head, first, second = printed.out.splitlines()
    assert head.split()[:5] == ["run", "state", "step", "reward", "held-out"] and "holds no run" in printed.err
    # Step 3 of 10, reward 0.3, and the accuracy that the last validation found.
    assert first.split()[2:7] == ["3", "of", "10", "0.300", "25.0%"]
    assert [line.split()[:2] for line in (first, second)] == [[str(run_dir), "silent"], [str(other), "failed"]]
    # The data of a recipe whose run went elsewhere is no run.
    (run_dir.parent / "z/data").mkdir(parents=True)
    assert cli.main(["status", str(run_dir), str(other), str(run_dir.parent / "z")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert second.endswith(" " + 47 * "a" + "…") and "0 of 10" in second and len(second) < len(str(other)) + 140
    # As of a Python program, whose runs are in a directory of theirs.
    assert cli.main(["status", str(run_dir.parent)]) == 0
    assert capsys.readouterr().out == printed.out
    assert cli.main(["status", str(run_dir), str(other), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["run"], row["state"], row["step"]) for row in rows] == [
        (str(run_dir), "silent", 3),
        (str(other), "failed", 0),
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_said(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    (run_dir / "status.json").chmod(0)
    assert cli.main(["status", str(run_dir)]) == 3
    assert "status.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "seconds, text",
    [
        *((0, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (154, "2 min 34 s"), (3599.9, "1 h 0 min")),
        *((3 * 3600 + 720, "3 h 12 min"), (2 * 86400 + 3 * 3600, "2 d 3 h")),
    ],
)
def test_durations(seconds: float, text: str):
    assert duration(seconds) == text


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**400) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
FILES = ("metrics.jsonl", "status.json", "starts.jsonl", "summary.json", "checkpoints/latest")


@functools.cache
def files() -> dict[str, bytes]:
    """Those of the run, once it has a summary."""
    with TemporaryDirectory() as folder:
        write_run(Path(folder))
        write_summary(Path(folder), {"steps": 10, "accuracy_after_rl": 0.5})
        return {name: (Path(folder) / name).read_bytes() for name in FILES}


def put_files(run_dir: Path) -> None:
    (run_dir / "checkpoints").mkdir()
    for name, content in files().items():
        (run_dir / name).write_bytes(content)


def hold_status(run_dir: Path) -> None:
    """It can be read and shown, whatever the files hold."""
    for now_s in (0.0, BEGAN_S + 40, None):
        try:
            status = read_status(run_dir, now_s)
        except DataError:
            continue
        json.loads(json.dumps(asdict(status)))
        assert "\n" not in as_table([status]).split("\n", 1)[1]
        assert all(line.isprintable() for line in as_text(status).splitlines())
        as_text(status).encode(errors="backslashreplace")


@given(data=st.data())
def test_whatever_bytes_the_files_hold_a_status_is_shown(data: st.DataObject):
    with TemporaryDirectory() as folder:
        run_dir = Path(folder)
        put_files(run_dir)
        for name in data.draw(st.lists(st.sampled_from(FILES), min_size=1, max_size=3, unique=True)):
            path = run_dir / name
            content = path.read_bytes()
            first, last = sorted(data.draw(st.integers(0, len(content))) for _ in range(2))
            path.write_bytes(content[:first] + data.draw(st.binary(max_size=8)) + content[last:])
        hold_status(run_dir)


@given(data=st.data())
def test_whatever_values_the_files_hold_a_status_is_shown(data: st.DataObject):
    with TemporaryDirectory() as folder:
        run_dir = Path(folder)
        put_files(run_dir)
        for name in data.draw(st.lists(st.sampled_from(FILES[:4]), min_size=1, unique=True)):
            path = run_dir / name
            text = path.read_text()
            lines = [text] if name.endswith(".json") else text.splitlines()
            row = json.loads(lines[-1])
            for key in data.draw(st.lists(st.sampled_from(sorted(row)), max_size=4, unique=True)):
                row[key] = data.draw(JUNK)
            lines[-1] = json.dumps(data.draw(st.sampled_from([row, row, row, [row], 3, "text", None])))
            path.write_text("".join(f"{line}\n" for line in lines))
        hold_status(run_dir)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "content", [b"", b"\n", b"{", b"[" * 100_000, b"\xff\xfe\x00", b"null\n", b"NaN\n", b"9" * 9999]
)
def test_a_file_without_sense_is_as_good_as_absent(run_dir: Path, name: str, content: bytes):
    (run_dir / name).write_bytes(content)
    hold_status(run_dir)


@pytest.mark.parametrize("key", ["number", "began_s", "ranks", "step", "restart_count", "ended_s", "outcome", "hosts"])
@pytest.mark.parametrize(
    "value", ["NaN", "-Infinity", "1e999", "-1", "1" + "0" * 400, "true", "null", '"x"', "[[]]", "{}"]
)
def test_a_start_that_cannot_be_reckoned_with_is_left_out(run_dir: Path, key: str, value: str):
    row = {"number": 2, "began_s": BEGAN_S, "step": 1, "ranks": 2}
    values = {**{each: json.dumps(known) for each, known in row.items()}, key: value}
    line = "{" + ", ".join(f'"{each}": {known}' for each, known in values.items()) + "}\n"
    (run_dir / "starts.jsonl").write_text(line)
    hold_status(run_dir)


@pytest.mark.parametrize("name", FILES)
def test_a_directory_in_place_of_a_file(run_dir: Path, name: str):
    (run_dir / name).unlink(missing_ok=True)
    (run_dir / name).mkdir()
    hold_status(run_dir)


def test_the_host_is_told(run_dir: Path):
    assert json.loads((run_dir / "status.json").read_text())["host"] == socket.gethostname()
