"""When a job's time is up, by what saving and a step were measured to take; and starts that get nowhere."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hybridflow.api import world as api_world
from hybridflow.api.world import _note_failures
from hybridflow.checkpoint.store import complete_step
from hybridflow.errors import ConfigError, HybridflowError, StopError
from hybridflow.exit_status import REQUEST, REQUEUE, SOURCE, TARGET, exit_status
from hybridflow.observe import starts, status_file
from hybridflow.observe.starts import StartRecord, add_end, add_start, idle_starts, read_starts
from hybridflow.parallel.cause import cause_of
from hybridflow.parallel.coordinator import Coordinator
from hybridflow.recipe.load import load_recipe
from hybridflow.recipe.run_dir import check_new
from hybridflow.trainer import stopping
from hybridflow.trainer.starting import note_failure, note_start
from hybridflow.trainer.stopping import Stopping
from tests.support.waiting import wait_until


class Clock:
    """A time that the test sets, and the job's end as Slurm tells it."""

    def __init__(self, monkeypatch, *, end_s):
        self.now_s, self.end_s, self.num_asked = 0.0, end_s, 0
        monkeypatch.setattr(stopping, "time", SimpleNamespace(time=lambda: self.now_s))
        monkeypatch.setattr(stopping, "find_job_end", self.find)

    def find(self, *, is_fresh=False):
        self.num_asked += is_fresh
        return self.end_s


def start(number, step, outcome=None, save_s=None, job_id="7"):
    return StartRecord(number=number, began_s=0.0, step=step, ranks=2, outcome=outcome, save_s=save_s, job_id=job_id)


WORLD = SimpleNamespace(rank=0, watch=None)


def first_second_that_is_up(clock, stops, work_s=0.0):
    for second in range(int(clock.end_s) + 1):
        clock.now_s = float(second)
        if stops.find_time_up(work_s):
            return second
    return None


def test_time_is_up_when_one_and_a_half_of_the_slowest_save_and_ten_seconds_are_left(monkeypatch):
    clock = Clock(monkeypatch, end_s=1000.0)
    # One start was killed before it could say.
    stops = Stopping(WORLD, [start(1, None, save_s=200.0), start(2, 10), start(3, 10, save_s=100.0)])
    # 1000 - 1.5 * 200 - 10 = 690; at that second exactly it is enough.
    assert first_second_that_is_up(clock, stops) == 691
    assert first_second_that_is_up(clock, stops, work_s=100.0) == 591


def test_saves_of_this_start_count_the_last_three(monkeypatch):
    clock = Clock(monkeypatch, end_s=1000.0)
    stops = Stopping(WORLD, [start(1, None, save_s=400.0)])
    stops.learn({"checkpoint/blocked_s": 20.0, "time/step_s": 50.0, "time/rollout_s": 30.0})
    for write_s in (80.0, 30.0, 30.0):
        stops.learn({"checkpoint/write_s": write_s})
    # The slowest took 20 + 80; the rest of a step takes 50 - 30.
    assert stops.save_s == 100.0
    assert first_second_that_is_up(clock, stops) == 1000 - 150 - 10 + 1
    clock.now_s = 830.0
    assert stops.local_reason() is None and stops.local_reason(before_update=True) is not None
    # A rollout beside the update is no part of what comes before the update.
    ahead = Stopping(WORLD, works_ahead=True)
    ahead.learn({"time/step_s": 50.0, "time/rollout_s": 30.0})
    assert (stops.rest_s, ahead.rest_s) == (20.0, 50.0)


def test_who_asks_to_stop_is_the_watch_or_the_program_where_nobody_watches(monkeypatch):
    Clock(monkeypatch, end_s=None)
    alone, watch = Stopping(WORLD), SimpleNamespace(stop_reason=None)
    watched = Stopping(SimpleNamespace(rank=0, watch=watch))
    alone.asked = watched.asked = "asked for"
    assert (alone.local_reason(), watched.local_reason()) == ("asked for", None)
    watch.stop_reason = "received SIGUSR1"
    assert watched.local_reason() == "received SIGUSR1"
    watched.reason = "another"
    assert watched.local_reason() == "another"


@pytest.mark.parametrize(("end_s", "guess_s"), [(100.0, 20.0), (1000.0, 100.0), (100000.0, 600.0)])
def test_before_any_save_a_share_of_the_time_is_kept(monkeypatch, end_s, guess_s):
    clock = Clock(monkeypatch, end_s=end_s)
    assert first_second_that_is_up(clock, Stopping(WORLD)) == end_s - guess_s - 10 + 1


def test_prolonged_job_goes_on(monkeypatch):
    clock = Clock(monkeypatch, end_s=1000.0)
    stops = Stopping(WORLD, [start(1, None, save_s=100.0)])
    clock.now_s, clock.end_s = 900.0, 5000.0
    assert stops.find_time_up() is None and clock.num_asked == 1
    clock.now_s = 4900.0
    assert "100 s are left" in stops.find_time_up()


def test_a_start_after_the_job_was_prolonged_asks_at_once(monkeypatch):
    """What the batch script's environment says of the end is old."""
    clock = Clock(monkeypatch, end_s=1000.0)
    clock.now_s = 2000.0
    stops = Stopping(WORLD, [start(1, None, save_s=100.0)])
    clock.end_s = 5000.0
    assert stops.find_time_up() is None and clock.num_asked == 1


def test_a_controller_that_does_not_answer_takes_no_limit_away(monkeypatch):
    clock = Clock(monkeypatch, end_s=1000.0)
    stops = Stopping(WORLD, [start(1, None, save_s=100.0)])
    clock.now_s, clock.end_s = 900.0, None
    assert "100 s are left" in stops.find_time_up() and clock.num_asked == 1


def test_without_a_limit_or_on_another_rank_time_is_never_up(monkeypatch):
    Clock(monkeypatch, end_s=None)
    assert Stopping(WORLD).find_time_up(1e9) is None
    clock = Clock(monkeypatch, end_s=10.0)
    clock.now_s = 100.0
    assert Stopping(SimpleNamespace(rank=1, watch=None)).find_time_up() is None


def test_first_reason_that_any_rank_knows_is_everybodys(monkeypatch):
    Clock(monkeypatch, end_s=None)
    stops = Stopping(WORLD)
    assert not stops.settle([None, None]) and stops.reason is None
    assert stops.settle([None, "received SIGUSR1", "another"]) and stops.reason == "received SIGUSR1"
    assert stops.settle([None, None]), "once they have agreed, it stays"


def test_starts_and_ends_are_read_back(tmp_path):
    first = StartRecord(number=1, began_s=5.0, step=None, ranks=4, hosts=("n1", "n2"), job_id="7", restart_count=0)
    add_start(tmp_path, first)
    add_end(tmp_path, 1, "requeue", "received SIGUSR1", 3.5)
    add_start(tmp_path, start(2, 10))
    one, two = read_starts(tmp_path)
    assert (one.hosts, one.outcome, one.detail, one.save_s) == (("n1", "n2"), "requeue", "received SIGUSR1", 3.5)
    assert one.ended_s > one.began_s and (two.number, two.step, two.outcome) == (2, 10, None)


def test_a_start_that_failed_tells_how_long_saving_took(tmp_path):
    add_start(tmp_path, start(1, None))
    note_failure(tmp_path, 1, 0, "rank 3 was lost", 3.5)
    (failed,) = read_starts(tmp_path)
    assert (failed.outcome, failed.detail, failed.save_s) == ("failed", "rank 3 was lost", 3.5)


def test_a_program_that_nobody_watches_notes_its_failure_but_not_after_its_training(tmp_path, monkeypatch):
    told, world = [], SimpleNamespace(rank=0, before_exit=None)
    monkeypatch.setattr("sys.excepthook", lambda *error: told.append(error))
    _note_failures(world)

    def fail(text):
        error = ValueError(text)
        sys.excepthook(ValueError, error, None)
        assert told.pop() == (ValueError, error, None)

    fail("before its training")
    add_start(tmp_path, start(1, None))
    world.before_exit = lambda cause: note_failure(tmp_path, 1, 0, cause, None)
    assert status_of(lambda: fail("bug in a process that the program has forked")) == 0
    assert read_starts(tmp_path)[-1].outcome is None
    fail("bug in reward")
    (failed,) = read_starts(tmp_path)
    assert failed.outcome == "failed" and failed.detail.endswith("ValueError: bug in reward")
    add_start(tmp_path, start(2, 10))
    add_end(tmp_path, 2, "finished")
    fail("behind its training")
    assert read_starts(tmp_path)[-1].outcome == "finished"


def status_of(work):
    """Exit status of a forked process."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_an_error_of_a_process_that_a_rank_has_forked_ends_that_process_alone(monkeypatch):
    monkeypatch.setattr(api_world, "_worlds", [SimpleNamespace(watch=SimpleNamespace(fail=lambda error: os._exit(9)))])
    rank, error = os.getpid(), ValueError("bug")
    assert status_of(lambda: api_world._fail(rank, ValueError, error, None)) == 1
    assert status_of(lambda: api_world._fail(os.getpid(), ValueError, error, None)) == 9


@pytest.mark.parametrize("tail", [b'{"number": 3, "beg', b"\xff\xfe\n", b"[1]\n", b'{"number": 9}\n', b"\n\n"])
def test_torn_lines_lose_nothing_else(tmp_path, tail):
    add_start(tmp_path, start(1, None))
    with (tmp_path / "starts.jsonl").open("ab") as file:
        file.write(tail)
    add_start(tmp_path, start(2, 10))
    assert [record.number for record in read_starts(tmp_path)] == [1, 2]
    assert all(json.loads(line) for line in (tmp_path / "starts.jsonl").read_bytes().split(b"\n")[-2:-1])


def test_starts_of_the_same_job_from_the_same_step_are_idle():
    records = [start(1, None), start(2, 10, "failed"), start(3, 10), start(4, 10, "requeue")]

    def numbers(records, job_id="7", step=10, restart_count=None):
        found = idle_starts(records, job_id=job_id, step=step, restart_count=restart_count)
        return [record.number for record in found]

    assert numbers(records) == [2, 3, 4]
    assert numbers(records, step=20) == numbers(records, job_id="8") == []
    assert numbers([*records, start(5, 10, "finished")]) == []
    # Start 2 fell silent, and Slurm itself began the job again; start 3 was killed, and the script went on.
    counted = zip(
        [start(1, 10, "failed"), start(2, 10), start(3, 10), start(4, 10, "failed")], (0, 0, 1, 1), strict=True
    )
    assert numbers([replace(record, restart_count=count) for record, count in counted], restart_count=1) == [1, 3, 4]


def test_what_keeps_a_start_from_being_noted_has_its_own_status(tmp_path, monkeypatch):
    alone, recipe = Coordinator(0, (0,), None), load_recipe("quickstart", [f"run_dir={tmp_path / 'run'}"])
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/checkpoints/latest").write_text("../elsewhere")
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    def status():
        with pytest.raises(HybridflowError) as caught:
            note_start(recipe, {}, alone)
        return cause_of(caught.value, 0, "n").status

    assert status() == SOURCE
    (tmp_path / "run/checkpoints/latest").unlink()
    (tmp_path / "run/starts.jsonl").mkdir()
    assert status() == TARGET
    (tmp_path / "run/starts.jsonl").rmdir()
    (tmp_path / "run/logs/0001").rmdir()
    monkeypatch.setattr(status_file, "WRITE_EVERY_S", 0.01)
    for number in (1, 2, 3):
        assert note_start(recipe, {}, alone).number == number
    assert status() == REQUEST


WRITER = """
import sys, time
from pathlib import Path
from hybridflow.observe import starts, status_file
from hybridflow.observe.starts import StartRecord, add_start
run_dir = Path(sys.argv[1])
right = time.time
time.time = lambda: right() - 300
add_start(run_dir, StartRecord(number=1, began_s=time.time(), step=None, ranks=1))
status_file.WRITE_EVERY_S = 0.1
time.sleep(float(sys.argv[2]))
status_file.StatusFile(run_dir, facts={})
time.sleep(60)
"""


@pytest.mark.parametrize("is_told", [True, False], ids=["at work", "has just begun"])
def test_a_run_that_another_job_writes_is_left_to_it(is_told, tmp_path, monkeypatch):
    alone, run_dir = Coordinator(0, (0,), None), tmp_path / "run"
    recipe = load_recipe("quickstart", [f"run_dir={run_dir}"])
    environ, late_s = {**os.environ, "SLURM_JOB_ID": "12"}, "0" if is_told else "0.5"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, run_dir, late_s], env=environ)
    try:
        # The file of starts is there, empty, a moment before its line is.
        wait_until((run_dir / "status.json").is_file if is_told else lambda: bool(read_starts(run_dir)))
        with pytest.raises(ConfigError, match=f"start 1 .*process {writer.pid} on .* of Slurm's job 12; .*scancel"):
            note_start(recipe, {}, alone)
        complete_step(run_dir, 3, {}, {}, keep_last=1)
        # Nobody is advised to remove the checkpoints of a run that lives.
        with pytest.raises(ConfigError, match=f"start 1 .*process {writer.pid} on .*; wait for its end or end it"):
            check_new(run_dir)
        monkeypatch.setenv("SLURM_JOB_ID", "12")
        with pytest.raises(StopError, match=f"process {writer.pid} on .*, which is this job; .* end it, or") as caught:
            note_start(recipe, {}, alone)
        assert exit_status(caught.value) == REQUEUE
    finally:
        writer.kill()
        writer.wait()
    assert len(read_starts(run_dir)) == 1
    with pytest.raises(ConfigError, match="remove .*checkpoints to begin anew"):
        check_new(run_dir)

    monkeypatch.setattr(status_file, "WRITE_EVERY_S", 0.5)
    began_s = time.monotonic()
    kept = json.loads((run_dir / "status.json").read_text())
    (run_dir / "status.json").write_text(json.dumps({**kept, "host": "another"}))
    assert note_start(recipe, {}, alone).number == 2
    assert time.monotonic() - began_s >= 1.0, "of another host silence is the only proof"


def test_one_that_gets_no_time_on_a_core_still_sees_that_another_writes(tmp_path, monkeypatch):
    clock = [0.0]

    def write(time_s):
        (tmp_path / "status.json").write_text(json.dumps({"time_s": time_s, "host": "n2", "pid": 8}))

    def sleep(_):
        clock[0] += 100.0
        write(2.0)

    write(1.0)
    monkeypatch.setattr(
        status_file, "time", SimpleNamespace(monotonic=lambda: clock[0], time=lambda: clock[0], sleep=sleep)
    )
    assert status_file.living_writer(tmp_path, 0.0) == ("process 8 on n2", None)


def test_of_two_jobs_in_the_same_moment_one_begins(tmp_path):
    alone, recipe = Coordinator(0, (0,), None), load_recipe("quickstart", [f"run_dir={tmp_path}"])
    (tmp_path / "logs/0001").mkdir(parents=True)
    other = threading.Timer(0.2, add_start, (tmp_path, start(1, None)))
    other.start()
    with pytest.raises(ConfigError, match="another job began start 1 of this run just now"):
        note_start(recipe, {}, alone)
    other.join()


def test_a_start_that_was_killed_before_it_was_added_holds_up_the_next_one_for_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(starts, "_CLAIM_S", 1.0)
    alone, recipe = Coordinator(0, (0,), None), load_recipe("quickstart", [f"run_dir={tmp_path}"])
    (tmp_path / "logs/0001").mkdir(parents=True)
    began_s = time.monotonic()
    assert note_start(recipe, {}, alone).number == 1
    assert time.monotonic() - began_s >= 0.5


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"time_s": "now"}', b"\xff", b'{"time_s": 1e300, "pid": -1}'])
def test_a_status_that_says_nothing_stops_no_start(content, tmp_path, monkeypatch):
    monkeypatch.setattr(status_file, "WRITE_EVERY_S", 0.05)
    recipe = load_recipe("quickstart", [f"run_dir={tmp_path}"])
    (tmp_path / "status.json").write_bytes(content)
    for number in (1, 2):
        assert note_start(recipe, {}, Coordinator(0, (0,), None)).number == number
