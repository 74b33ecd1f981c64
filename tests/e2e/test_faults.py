"""A job meets faults at any moment: each ends as documented, the cause first, and the run goes on as if it had not.

``HYBRIDFLOW_FAULTS=30 python -m pytest tests/e2e/test_faults.py -k any_moment -s`` tries more of them, and prints each.
"""

import os
import random
import resource
import signal
import time

import pytest

from hybridflow.exit_status import DONE, FAILURE, REQUEUE, TARGET
from hybridflow.roles.actor import Actor
from hybridflow.rollout.log_file import LogWriter
from hybridflow.trainer import trainer
from hybridflow.trainer.record import Record
from hybridflow.trainer.trainer import Trainer
from tests.e2e.commands import fork_ranks, lasting_metrics, run_well, write_recipe
from tests.support.disks import fill, make_read_only, mounted

NUM_FAULTS = int(os.environ.get("HYBRIDFLOW_FAULTS", "6"))
RUN = ["train", "tiny.yaml", "trainer.steps=4", "trainer.save_every=1", "trainer.validate_every=3", "--resume"]
# Where a rank is to be missed soon. Elsewhere a busy machine has time.
SOON = ["cluster.dead_after_s=2", "cluster.start_deadline_s=5"]
KILLED = -signal.SIGKILL


@pytest.fixture
def folder(tmp_path):
    write_recipe(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A run in one go, and how long it took in seconds."""
    folder = tmp_path_factory.mktemp("unbroken")
    write_recipe(folder)
    return folder, run_well(RUN, folder).seconds


def learned(folder):
    """What the run learned: weights bit for bit, metrics without what depends on where it was broken off."""
    # The sampler's own log-probabilities are rounded otherwise when others are sampled together.
    varies = ("reshard/", "rollout/logprob_abs_diff", "rollout/kl")
    rows = [{name: row[name] for name in row if not name.startswith(varies)} for row in lasting_metrics(folder / "run")]
    last = folder / "run/checkpoints/step_000004"
    return rows, {path.name: path.read_bytes() for path in last.rglob("*.safetensors")}


def is_told_first(done):
    """Whether the first line says what cannot be written, and no line is of a traceback."""
    first, *_ = done.err.splitlines()
    return first.startswith("hybridflow: rank ") and "cannot be written" in first and "Traceback" not in done.err


def test_a_disk_that_is_full_at_the_start(folder):
    with mounted(folder / "run", 1 << 20) as disk:
        fill(disk)
        done = fork_ranks(RUN, folder)
        done.complains_once("run/starts.jsonl: cannot be written: No space left on device; make room there")
        assert done.codes == (TARGET, TARGET)


@pytest.mark.slow
def test_a_place_that_takes_nothing_at_the_start_or_on_resume(folder):
    (folder / "file").write_text("")
    done = fork_ranks([*RUN, "run_dir=file"], folder)
    done.complains_once("file: cannot be written: File exists; set another run_dir")
    assert done.codes == (TARGET, TARGET)
    with mounted(folder / "run", 32 << 20) as disk:
        for _ in range(2):
            make_read_only(disk)
            done = fork_ranks(RUN, folder)
            done.complains_once("run/starts.jsonl: cannot be written: Read-only file system")
            assert done.codes == (TARGET, TARGET)
            make_read_only(disk, is_over=True)
            assert fork_ranks([*RUN, "trainer.steps=1"], folder).codes == (DONE, DONE)


def before(where, name, act):
    """A hook: before the first call of a method or function, ``act`` is called with the rank."""

    def hook(rank):
        inner, is_due = getattr(where, name), True

        def wrapped(*args, **named):
            nonlocal is_due
            if is_due:
                is_due = False
                act(rank)
            return inner(*args, **named)

        setattr(where, name, wrapped)

    return hook


def limit(rank, pid=0):
    """No file can grow beyond it, as under ``ulimit -f 1``. A message on stderr has room."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1024, 1024))


@pytest.mark.slow
def test_no_room_in_any_phase(folder, unbroken):
    for hook in (
        limit,
        before(Record, "open", limit),
        before(LogWriter, "add", limit),
        before(Record, "end_step", limit),
        before(Trainer, "_save", limit),
        before(Record, "finish", limit),
    ):
        done = fork_ranks(RUN, folder, hook=hook)
        # At the end the other may have left.
        assert done.codes[0] == TARGET and set(done.codes) <= {TARGET, DONE} and is_told_first(done), (
            done.codes,
            done.err,
        )
    run_well(RUN, folder)
    assert learned(folder) == learned(unbroken[0])


def terminate(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_asked_to_stop_in_any_phase(folder, unbroken):
    for hook in (
        before(trainer, "open_rank_log", terminate),
        before(trainer, "make_roles", terminate),
        before(Actor, "sample_validation", terminate),
        before(Trainer, "_save", terminate),
        before(Actor, "update", terminate),
    ):
        done = fork_ranks(RUN, folder, hook=hook)
        assert done.codes == (REQUEUE, REQUEUE) and done.err == "", (done.codes, done.err)
    done = fork_ranks(RUN, folder, hook=before(Record, "finish", terminate))
    assert done.codes == (DONE, DONE) and done.err == "", (done.codes, done.err)
    assert learned(folder) == learned(unbroken[0])


def later(delay_s, act):
    """Another process acts on this one after a while, if it is still there."""
    rank = os.getpid()
    if os.fork() == 0:
        time.sleep(delay_s)
        if os.getppid() == rank:
            act(rank)
        os._exit(0)


FAULTS = {
    "kill one": (lambda pid: os.kill(pid, signal.SIGKILL), {KILLED, FAILURE}),
    "kill both": (lambda pid: os.kill(pid, signal.SIGKILL), {KILLED}),
    "stop one": (lambda pid: os.kill(pid, signal.SIGSTOP), {KILLED, FAILURE}),
    "terminate one": (lambda pid: os.kill(pid, signal.SIGTERM), {REQUEUE}),
    "no room for one": (lambda pid: limit(0, pid), {TARGET}),
}
"""Name -> what is done to a rank, and how the ranks may end. The run may also be over before."""


@pytest.mark.slow
def test_faults_at_any_moment(folder, unbroken, tmp_path_factory):
    whole, seconds = unbroken
    expected, moments, num_runs = learned(whole), random.Random(18), 1
    for turn in range(NUM_FAULTS):
        name = ("kill one", *FAULTS)[turn % (1 + len(FAULTS))]
        delay_s, victim = moments.uniform(0.1, 0.7 * seconds), moments.randrange(2)
        act, codes = FAULTS[name]

        def hook(rank, name=name, delay_s=delay_s, victim=victim, act=act):
            if rank == victim or name == "kill both":
                later(delay_s, act)

        done = fork_ranks([*RUN, *SOON] if KILLED in codes else RUN, folder, hook=hook)
        print(
            f"{turn}: {name} {victim} after {delay_s:.2f} s: {done.codes} in {done.seconds:.1f} s: {done.err[:200]!r}"
        )
        is_over = set(done.codes) == {DONE}
        assert set(done.codes) <= codes | {DONE}, (name, delay_s, done.codes, done.err)
        assert "Traceback" not in done.err and (codes != {TARGET} or is_over or is_told_first(done)), done.err
        if is_over:
            assert learned(folder) == expected
            folder, num_runs = tmp_path_factory.mktemp("another"), num_runs + 1
            write_recipe(folder)
    run_well(RUN, folder)
    assert learned(folder) == expected
    print(f"{NUM_FAULTS} faults in {num_runs} runs")
