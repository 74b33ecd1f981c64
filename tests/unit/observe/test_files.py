"""Where a file system takes nothing more, each writer says so in one error; what only tells of a run is left out."""

import errno
import os
import sys
from pathlib import Path

import pytest

from hybridflow.config.data import ArithmeticConfig
from hybridflow.data.arithmetic import ensure_files
from hybridflow.data.pieces import train_tokenizer
from hybridflow.errors import WriteError
from hybridflow.exit_status import FAILURE, TARGET
from hybridflow.observe import rank_log
from hybridflow.observe.files import replace_by_pieces, replace_file
from hybridflow.observe.metrics import MetricsLog
from hybridflow.observe.rank_log import note, open_rank_log, tell
from hybridflow.observe.starts import StartRecord, add_start, keep_recipe, read_starts
from hybridflow.observe.status_file import StatusFile
from hybridflow.observe.summary import write_summary
from hybridflow.observe.timeline_file import TimelineFile
from hybridflow.parallel.cause import cause_of
from hybridflow.trainer.starting import note_failure
from tests.support.disks import no_room

START = StartRecord(number=1, began_s=1.0, step=None, ranks=1)


@pytest.fixture(autouse=True)
def no_log(monkeypatch):
    """The log of a rank is one for the process."""
    monkeypatch.setattr(rank_log, "_log_fd", None)
    monkeypatch.setattr(rank_log, "_early_notes", ["began\n"])


def problems(run_dir):
    spec = ArithmeticConfig(num_train=20, num_held_out=8, max_operand=99)
    return lambda: ensure_files(spec, train=run_dir / "train.jsonl", held_out=run_dir / "held_out.jsonl")


def step_of_metrics(run_dir):
    log = MetricsLog(run_dir, num_steps=1)
    return lambda: log.write(1, {"reward/mean": 1.0})


def step_of_tensorboard(run_dir):
    log = MetricsLog(run_dir, num_steps=1)
    return lambda: log._tensorboard.add_step(1, {"reward/mean": 1.0})


def step_of_timeline(run_dir):
    timeline = TimelineFile(run_dir, num_ranks=1, ranks_per_node=1)
    return lambda: timeline.add(1, 0.0, 1.0, [[]])


WRITERS = {
    "starts.jsonl": lambda run_dir: lambda: add_start(run_dir, START),
    "rank-00000.log": lambda run_dir: lambda: open_rank_log(run_dir, 1, 0),
    "train.jsonl": problems,
    "tokenizer.model": lambda run_dir: (
        lambda: train_tokenizer(["1+1=2"] * 9, path=run_dir / "tokenizer.model", vocab_size=32)
    ),
    "tfevents": lambda run_dir: lambda: MetricsLog(run_dir, num_steps=1),
    "metrics.jsonl": step_of_metrics,
    "tensorboard/events": step_of_tensorboard,
    "trace/timeline.json": lambda run_dir: lambda: TimelineFile(run_dir, num_ranks=1, ranks_per_node=1),
    "timeline.json": step_of_timeline,
    "recipe.yaml": lambda run_dir: lambda: keep_recipe(run_dir, 1, {"name": "x"}),
    "summary.json": lambda run_dir: lambda: write_summary(run_dir, {}),
}


def test_two_writers_of_a_file_do_not_meet(tmp_path):
    path = tmp_path / "rows"

    def pieces():
        yield b"fir"
        replace_file(path, b"second")
        assert path.read_bytes() == b"second"
        yield b"st"

    replace_by_pieces(path, pieces())
    assert path.read_bytes() == b"first" and list(tmp_path.iterdir()) == [path]


def test_a_refusal_names_the_file_that_was_asked_for(tmp_path):
    for path in (tmp_path / "gone/page.html", tmp_path):
        with pytest.raises(OSError) as caught:
            replace_file(path, b"text")
        assert caught.value.filename == str(path)


@pytest.mark.parametrize("file", WRITERS)
def test_a_full_disk_is_told_with_the_file(tmp_path, file):
    write = WRITERS[file](tmp_path)
    with no_room(), pytest.raises(WriteError) as caught:
        write()
    assert file in str(caught.value) and "cannot be written: File too large; make room there" in str(caught.value)
    assert cause_of(caught.value, 0, "n1").status == TARGET


def test_a_place_that_cannot_be_is_told_with_its_name(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(WriteError, match=r"run: cannot be written: File exists; set another run_dir"):
        add_start(tmp_path / "run", START)


def test_what_only_tells_of_a_run_ends_none(tmp_path, monkeypatch):
    add_start(tmp_path, START)
    # Other tests of this process have no log.
    for name in ("_log_fd", "_log_path"):
        monkeypatch.setattr(rank_log, name, getattr(rank_log, name))
    open_rank_log(tmp_path, 1, 0)
    with no_room():
        status = StatusFile(tmp_path / "other", facts={})
        note("failed")
        note_failure(tmp_path, 1, 0, "failed", None)
        with open(tmp_path / "console", "wb") as console:
            monkeypatch.setattr(rank_log, "_console_fds", (console.fileno(), console.fileno()))
            tell("cause")
        status.close()
    assert [each.outcome for each in read_starts(tmp_path)] == [None]


def test_a_console_that_is_gone_ends_no_job():
    reader, writer = os.pipe()
    os.close(reader)
    before = os.dup(1)
    sys.stdout.flush()
    try:
        os.dup2(writer, 1)
        stream, sys.stdout = sys.stdout, os.fdopen(1, "w", closefd=False)
        rank_log.say("nobody reads this")
        print("nor this", flush=True)
    finally:
        os.dup2(before, 1)
        sys.stdout = stream


@pytest.mark.parametrize(
    ("number", "status"),
    [(errno.ENOSPC, TARGET), (errno.EDQUOT, TARGET), (errno.EROFS, TARGET), (errno.EIO, FAILURE)],
)
def test_an_error_of_the_system_is_told_without_a_traceback(number, status):
    cause = cause_of(OSError(number, os.strerror(number), str(Path("data/train.jsonl"))), 1, "n1")
    assert (cause.status, cause.kind) == (status, "explained") and "data/train.jsonl" in cause.text
