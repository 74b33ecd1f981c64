"""A job that is asked to stop saves, says that it wants another turn, and goes on as if it had not been asked."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from hybridflow.checkpoint.store import latest_step
from hybridflow.errors import DataError
from hybridflow.exit_status import REQUEUE
from hybridflow.observe.metrics import read_metrics
from hybridflow.observe.starts import read_starts
from hybridflow.parallel import rendezvous
from hybridflow.roles.actor import Actor
from hybridflow.rollout.engine import MegatronEngine
from hybridflow.rollout.session import Session
from hybridflow.trainer import stopping
from hybridflow.trainer.stopping import Stopping
from hybridflow.trainer.trainer import Trainer
from tests.e2e.commands import RECIPE, fork_ranks, lasting_metrics, run_command, run_well, write_recipe
from tests.support.waiting import wait_until

RUN = ["train", "tiny.yaml", "trainer.steps=4"]


def ask(job, signum):
    """Send this process a signal, and wait until the watch has heard of it."""
    os.kill(os.getpid(), signum)
    wait_until(lambda: job.world.watch.stop_reason is not None, what="the watch hears of the signal")


def asking(call, at, signum, *, on_rank=1):
    """A hook: before its ``at``-th turn of a call of the actor's, a rank is sent a signal."""

    def hook(rank):
        method, turns = getattr(Actor, call), 0

        def wrapped(self, batch, decided):
            nonlocal turns
            turns += 1
            if rank == on_rank and turns == at:
                ask(self._job, signum)
            return method(self, batch, decided)

        setattr(Actor, call, wrapped)

    return hook


def learned(run_dir):
    """The metrics without what was moved: weights read from a checkpoint are resharded once more."""
    rows = lasting_metrics(run_dir)
    return [{name: value for name, value in row.items() if not name.startswith("reshard/")} for row in rows]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    write_recipe(folder)
    run_well(RUN, folder)
    return folder


# Two mini-batches a step: the third update is in step 2.
@pytest.mark.parametrize(
    ("call", "at", "signum", "on_rank", "saved"),
    [
        pytest.param("sample", 3, signal.SIGUSR1, 1, 2, marks=pytest.mark.slow),
        pytest.param("log_probs", 2, signal.SIGUSR2, 0, 1, marks=pytest.mark.slow),
        ("update", 3, signal.SIGTERM, 1, 2),
        ("sample", 1, signal.SIGUSR1, 0, 0),
    ],
)
def test_asked_in_a_step_it_saves_and_goes_on_unchanged(tmp_path, unbroken, call, at, signum, on_rank, saved):
    write_recipe(tmp_path)
    stopped = fork_ranks(RUN, tmp_path, hook=asking(call, at, signum, on_rank=on_rank))
    assert stopped.codes == (REQUEUE, REQUEUE), stopped.err
    assert latest_step(tmp_path / "run") == saved
    assert f"received {signal.Signals(signum).name}; saved after step {saved}" in stopped.out
    (start,) = read_starts(tmp_path / "run")
    assert (start.outcome, start.step, start.ranks) == ("requeue", None, 2) and start.save_s > 0
    again = run_well([*RUN, "--resume"], tmp_path)
    assert learned(tmp_path / "run") == learned(unbroken / "run")
    second = read_starts(tmp_path / "run")[1]
    assert (second.outcome, second.step) == ("finished", saved) and f"from step {saved}" in again.out


@pytest.mark.slow
@pytest.mark.parametrize(("at", "saved"), [(1, 0), (2, 2)])
def test_asked_in_a_validation_it_saves_first_and_validates_when_it_goes_on(tmp_path, unbroken, at, saved):
    write_recipe(tmp_path)
    command = [*RUN, "trainer.validate_every=2"]
    stopped = fork_ranks(command, tmp_path, hook=asking("sample_validation", at, signal.SIGTERM))
    assert stopped.codes == (REQUEUE, REQUEUE), stopped.err
    assert latest_step(tmp_path / "run") == saved and f"score after step {saved}\n" not in stopped.out
    again = run_well([*command, "--resume"], tmp_path)
    told = [int(step) for step in re.findall(r"held-out score .* after step (\d)\n", again.out)]
    assert told == ([0, 2, 4] if saved == 0 else [2, 4]), again.out
    rows = lasting_metrics(tmp_path / "run")
    assert ["validation/score" in row for row in rows] == [False, True, False, True]
    before, after = (json.loads((folder / "run/summary.json").read_text()) for folder in (unbroken, tmp_path))
    assert all(before[name] == after[name] for name in ("score_before_rl", "score_after_rl"))


@pytest.mark.parametrize("placement", [[], ["actor.rollout_ranks=[0]", "actor.update={}", "actor.rollout={}"]])
def test_asked_in_the_warm_start_it_ends_with_nothing_saved(tmp_path, placement):
    write_recipe(tmp_path)
    run = [*RUN, "warm_start.steps=100000", *placement]
    stopped = fork_ranks(run, tmp_path, hook=asking("imitate", 3, signal.SIGTERM))
    assert stopped.codes == (REQUEUE, REQUEUE), stopped.err
    assert latest_step(tmp_path / "run") is None and "nothing was saved" in stopped.out
    assert [start.outcome for start in read_starts(tmp_path / "run")] == ["requeue"]


@pytest.mark.slow
def test_ctrl_c_under_torchrun_saves_and_stops(tmp_path):
    write_recipe(tmp_path)
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program += ["-m", "hybridflow", "train", "tiny.yaml", "trainer.steps=100000"]
    err = tmp_path / "err"
    with (tmp_path / "out").open("w") as out, err.open("w") as told:
        launcher = subprocess.Popen(program, cwd=tmp_path, stdout=out, stderr=told, start_new_session=True)
    ranks = []
    try:
        metrics = tmp_path / "run/metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n"), what="a step", within_s=300.0)
        ranks = [child for child in psutil.Process(launcher.pid).children() if "hybridflow" in child.cmdline()]
        assert len(ranks) == 2
        # As releases of torchrun have it whose ranks share its process group, so that each gets Ctrl-C twice.
        for rank in ranks:
            rank.send_signal(signal.SIGINT)
        os.killpg(launcher.pid, signal.SIGINT)
        assert launcher.wait(300) != 0
    finally:
        launcher.kill()
        for rank in ranks:
            if rank.is_running():
                rank.kill()
    assert err.read_text().count("Ctrl-C: the job saves and stops") == 1, err.read_text()
    saved = latest_step(tmp_path / "run")
    assert saved is not None and f"saved after step {saved}" in (tmp_path / "out").read_text()
    (start,) = read_starts(tmp_path / "run")
    assert start.outcome == "requeue"
    assert "saved and stopped" in run_command(["status", "run"], tmp_path).out
    run_well(["train", "tiny.yaml", f"trainer.steps={saved + 1}", "--resume"], tmp_path)
    assert len(read_metrics(tmp_path / "run")) == saved + 1


def test_out_of_time_it_stops_by_itself(tmp_path):
    def hook(rank):
        init, sample, made = Stopping.__init__, Actor.sample, []

        def kept(self, *rest, **named):
            init(self, *rest, **named)
            made.append(self)

        def shortened(self, batch, decided):
            if decided["train_step"]["step"] == 2 and rank == 0:
                # Less than what processes take to leave.
                made[0].job_end_s = time.time() + 5
            return sample(self, batch, decided)

        Stopping.__init__, Actor.sample = kept, shortened
        # Slurm answers no second time.
        stopping.find_job_end = lambda is_fresh=False: None if is_fresh else time.time() + 1e6

    write_recipe(tmp_path)
    stopped = fork_ranks(RUN, tmp_path, hook=hook)
    assert stopped.codes == (REQUEUE, REQUEUE), stopped.err
    assert latest_step(tmp_path / "run") == 1 and "s are left of the job's time" in stopped.out


@pytest.mark.slow
def test_job_that_gets_nowhere_is_not_begun_for_ever(tmp_path):
    def hook(rank):
        os.environ |= {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "SLURM_JOB_END_TIME": str(2**31)}
        Actor.imitate = fail

    def fail(self, batch, decided):
        raise DataError("as in every start")

    write_recipe(tmp_path)
    again = [*RUN, "trainer.max_idle_starts=2", "--resume"]
    for _ in range(2):
        assert 0 not in fork_ranks(again, tmp_path, hook=hook).codes
    last = fork_ranks(again, tmp_path, hook=hook)
    assert last.codes == (2, 2)
    last.complains_once("the last 2 starts of job 7 all began without a checkpoint", "trainer.max_idle_starts")
    assert [start.restart_count for start in read_starts(tmp_path / "run")] == [2, 2]


def test_without_steps_there_is_the_warm_start_a_checkpoint_and_a_judgement(tmp_path):
    write_recipe(tmp_path)
    run_well([*RUN, "trainer.steps=0"], tmp_path)
    assert latest_step(tmp_path / "run") == 0
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["steps"] == 0 and "score_before_rl" in summary and "score_after_rl" not in summary
    actor = tmp_path / "run/checkpoints/step_000000/actor"
    sizes = ["model={path: " + str(actor) + "}", "warm_start=null", "tokenizer.path=run/tokenizer.model"]
    run_well([*RUN, *sizes, "trainer.steps=0", "run_dir=judged"], tmp_path)
    again = json.loads((tmp_path / "judged/summary.json").read_text())
    assert again["score_before_rl"] == summary["score_before_rl"]
    assert latest_step(tmp_path / "judged") is None


FALLBACK = """
fallbacks:
  - {ranks: 1, overrides: ["actor.update={}", "actor.rollout={}"]}
"""


@pytest.mark.slow
def test_with_fewer_ranks_the_fallback_goes_on(tmp_path, unbroken):
    write_recipe(tmp_path, RECIPE + FALLBACK)
    stopped = fork_ranks(RUN, tmp_path, hook=asking("sample", 3, signal.SIGUSR1))
    assert stopped.codes == (REQUEUE, REQUEUE), stopped.err
    run_well([*RUN, "--resume"], tmp_path, num_ranks=1)
    rows, expected = (lasting_metrics(folder / "run") for folder in (tmp_path, unbroken))
    assert [row["reward/mean"] for row in rows] == [row["reward/mean"] for row in expected]
    assert [row["actor/loss"] for row in rows] == pytest.approx([row["actor/loss"] for row in expected], abs=1e-5)
    assert read_starts(tmp_path / "run")[1].layouts["actor.update"] == "tp1.pp1.dp1"


def meeting_the_last(num_ranks):
    """A hook: so short a job would be over before a rank without work finds it; the others train when it has."""
    open_store, run = rendezvous.open_store, Trainer.run

    def opened(start, **deadline):
        store = open_store(start, **deadline)
        if start.rank == num_ranks - 1:
            Path("came").touch()
        return store

    def run_later(trainer):
        wait_until(Path("came").exists, within_s=300)
        return run(trainer)

    def hook(rank):
        rendezvous.open_store, Trainer.run = opened, run_later

    return hook


def test_ranks_that_no_layout_uses_leave_when_the_job_is_over(tmp_path):
    write_recipe(tmp_path, RECIPE + FALLBACK)
    run_well([*RUN, "trainer.steps=1"], tmp_path, num_ranks=3, hook=meeting_the_last(3))
    assert read_starts(tmp_path / "run")[0].ranks == 2


def test_of_two_ranks_one_stands_by_while_the_other_trains(tmp_path):
    write_recipe(tmp_path, RECIPE + FALLBACK)
    one = ["cluster.ranks=1", "actor.update={}", "actor.rollout={}"]
    run_well([*RUN, *one, "trainer.steps=1"], tmp_path, hook=meeting_the_last(2))
    assert read_starts(tmp_path / "run")[0].ranks == 1


LONG = [*RUN, "model.max_context=120", "rollout.max_new_tokens=100", "trainer.steps=3", "trainer.global_batch_size=32"]


def asking_while_decoding(rank):
    """A hook: in the second step's rollout rank 1 is sent a signal when it has decoded 10 tokens of each response."""
    drive, one_token, init = MegatronEngine.drive, Session.step, Stopping.__init__
    rollouts, tokens, watches = 0, 0, []

    def kept(self, world, *rest, **named):
        init(self, world, *rest, **named)
        watches.append(world.watch)

    def counted(self, requests, purpose="rollout", progress=None, **rest):
        nonlocal rollouts
        rollouts += purpose == "rollout"
        return drive(self, requests, purpose, progress, **rest)

    def step(self, most=1):
        # Token by token, while the run that is not stopped takes several at once.
        nonlocal tokens
        tokens += rollouts == 2
        assert tokens < 20, "it went on decoding though it was asked to stop"
        if tokens == 10:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
                Path("asked").touch()
            # The other has something left to be stopped in.
            wait_until(Path("asked").exists, within_s=300)
            wait_until(lambda: watches[0].stop_reason is not None, what="the watch tells both ranks")
        return one_token(self)

    MegatronEngine.drive, Session.step, Stopping.__init__ = counted, step, kept


def noting_what_was_begun(rank):
    """A hook: each rank notes the lengths of what it goes on from, and of what comes of it."""
    drive = MegatronEngine.drive

    def noted(self, *args, **rest):
        pairs = drive(self, *args, **rest)
        with open(f"begun-{rank}", "a") as file:
            for ask, got in pairs:
                if ask.begun is not None:
                    before = len(ask.begun.tokens)
                    assert torch.equal(got.log_probs[:before], ask.begun.log_probs), (
                        "what was sampled is kept as it was"
                    )
                    file.write(f"{before} {len(got.tokens)} {sorted(set(got.versions.tolist()))}\n")
        return pairs

    MegatronEngine.drive = noted


@pytest.fixture(scope="module")
def long_runs(tmp_path_factory):
    """A run in one go, and one that was stopped in the midst of the second step's rollout."""
    whole, stopped = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("stopped")
    for folder in (whole, stopped):
        write_recipe(folder)
    assert fork_ranks(LONG, whole).codes == (0, 0)
    done = fork_ranks(LONG, stopped, hook=asking_while_decoding)
    assert done.codes == (REQUEUE, REQUEUE), done.err
    assert latest_step(stopped / "run") == 1
    return whole, stopped


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        None,
        "actor.rollout={tp: 2}",
        "actor.rollout={pp: 2}",
    ],
)
def test_asked_inside_a_long_rollout_it_ends_there_and_goes_on_there(tmp_path, long_runs, layout):
    whole, stopped = long_runs
    folder = tmp_path / "again"
    shutil.copytree(stopped, folder)
    argv = [*LONG, "--resume"] if layout is None else [*LONG, "--resume", layout]
    run_well(argv, folder, hook=noting_what_was_begun)
    begun = [line.split(maxsplit=2) for rank in (0, 1) for line in (folder / f"begun-{rank}").read_text().splitlines()]
    # The second step's tokens are of the weights after one step.
    assert begun and all(4 < int(before) < int(after) and versions == "[1]" for before, after, versions in begun)
    rows, expected = learned(folder / "run"), learned(whole / "run")
    if layout is None:
        # The sampler's own log-probabilities are rounded otherwise when others are sampled together.
        names = ("rollout/logprob_abs_diff", "rollout/logprob_abs_diff_max", "rollout/kl")
        diffs = [[row.pop(name) for row in each for name in names] for each in (rows, expected)]
        assert diffs[0] == pytest.approx(diffs[1], abs=1e-5) and rows == expected
    else:
        names = ("reward/mean", "batch/num_tokens")
        assert [[row[name] for name in names] for row in rows] == [[row[name] for name in names] for row in expected]
    for name in ("rollout/reused", "rollout/continued"):
        first, second, third = (row.get(name, 0.0) for row in read_metrics(folder / "run"))
        assert first == third == 0.0 and 0.0 < second < 1.0
