"""What a run survives on a real Slurm: signals, time limits, preemption, the death of a rank or a node, scancel.

All go on from the checkpoint of step 1, a rank on each of two nodes, and end with the curve of a run that nothing has
interrupted.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from hybridflow.observe.starts import StartRecord, read_starts
from hybridflow.parallel.process import is_running, kill
from tests.e2e.commands import fork_ranks, lasting_metrics
from tests.slurm.jobs import SCRIPTS, output, rank_processes, steps
from tests.support.slurm_cluster import SlurmCluster

STEPS = 6
ARGUMENTS = ("tiny.yaml", f"trainer.steps={STEPS}")

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def curve(first_step: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """What the run's metrics are if nothing happens to it."""
    return uninterrupted(first_step, tmp_path_factory.mktemp("uninterrupted"), ARGUMENTS)


def uninterrupted(first_step: Path, empty: Path, arguments: Sequence[str]) -> list[dict[str, float]]:
    """The metrics of a run that goes on from the checkpoint of step 1, to its end."""
    folder = Path(shutil.copytree(first_step, empty / "job"))
    go_on(folder, arguments)
    return lasting_metrics(folder / "run")


def go_on(folder: Path, arguments: Sequence[str]) -> None:
    """Run the job to its end without Slurm, with the nodes of the jobs here: the way of resharding depends on these."""

    def be_alone_on_a_node(rank: int) -> None:
        os.environ.update({"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"})

    done = fork_ranks(["train", *arguments, "--resume"], folder, num_ranks=2, hook=be_alone_on_a_node)
    assert set(done.codes) == {0}, done.err


def test_a_signal_saves_and_requeues(cluster, folder, curve):
    # The script holds the signal back while ranks start, for up to 15 s.
    job = begin(cluster, folder, reward_s=1)
    cluster.run("scancel", "--signal=USR1", "--batch", job)
    finish(cluster, folder, job, restarts=1)
    same_curve(cluster, folder, job, curve)
    stopped, last = starts(folder)
    assert (stopped.outcome, last.outcome) == ("requeue", "finished") and "USR1" in (stopped.detail or "")
    assert last.step is not None and last.step >= 2 and last.restart_count == 1


@pytest.mark.slow
def test_the_time_limit_saves_and_requeues(cluster, folder, first_step, tmp_path):
    # 19 steps of 6 s, and two minutes. Steps are short, so that also on a slow machine each turn makes some.
    arguments = ("tiny.yaml", "trainer.steps=20")
    options = ("--nodes=2", "--ntasks-per-node=1", "--time=2", "--signal=B:USR1@20", str(SCRIPTS / "train.sbatch"))
    job = cluster.sbatch(*options, *arguments, cwd=folder, env={"REWARD_S": "1.5"})
    ended = cluster.wait_for_end(job, within_s=900)
    assert ended["JobState"] == "COMPLETED" and int(ended["Restarts"]) >= 1, output(cluster, job)
    *stopped, last = [start.outcome for start in starts(folder)]
    assert set(stopped) == {"requeue"} and last == "finished"
    assert lasting_metrics(folder / "run") == uninterrupted(first_step, tmp_path / "uninterrupted", arguments)


@pytest.mark.parametrize("grace_s", [0, 40])
def test_preemption_requeues(cluster, folder, curve, grace_s):
    cluster.run("scontrol", "update", "PartitionName=low", f"GraceTime={grace_s}")
    job = begin(cluster, folder, "--partition=low")
    urgent = cluster.sbatch("--partition=high", "--nodes=4", "--exclusive", "--wrap=true", cwd=folder)
    cluster.wait_for_end(urgent, within_s=600)
    finish(cluster, folder, job, restarts=1)
    same_curve(cluster, folder, job, curve)
    preempted, last = starts(folder)
    # Without a grace time there is Slurm's KillWait, which may be too short to save.
    assert preempted.outcome == "requeue" or not grace_s
    assert last.outcome == "finished" and last.step is not None and last.step >= 2


def test_a_killed_rank_begins_again_in_the_allocation(cluster, folder, curve):
    job = begin(cluster, folder)
    first = rank_processes(cluster, job)
    kill(first[1])
    cluster.wait_for(lambda: not any(map(is_running, first.values())), within_s=120, what="the ranks' end")
    finish(cluster, folder, job, restarts=0)
    same_curve(cluster, folder, job, curve)
    assert [start.outcome for start in starts(folder)] == ["failed", "finished"]


def test_a_dead_node_leaves_a_smaller_job(cluster, folder):
    # A job that is left with a single task goes back into the queue.
    job = begin(cluster, folder, ranks_per_node=2)
    first, last = cluster.run("scontrol", "show", "hostnames", cluster.job(job)["NodeList"]).split()
    cluster.kill_node(last)
    finish(cluster, folder, job, restarts=0)
    whole, smaller = starts(folder)
    assert (whole.ranks, smaller.ranks, smaller.outcome) == (4, 2, "finished")
    assert whole.layouts is not None and smaller.layouts is not None
    assert (whole.layouts["actor.update"], smaller.layouts["actor.update"]) == ("tp2.pp1.dp2", "tp2.pp1.dp1")
    assert steps(folder) == list(range(1, STEPS + 1)), output(cluster, job)


def test_without_its_first_node_a_job_begins_anew(cluster, folder, curve):
    job = begin(cluster, folder)
    cluster.kill_node(cluster.job(job)["BatchHost"])
    finish(cluster, folder, job, restarts=1)
    same_curve(cluster, folder, job, curve)


def test_scancel_leaves_a_checkpoint_and_no_job(cluster, folder, curve):
    job = begin(cluster, folder)
    cluster.run("scancel", job)
    ended = cluster.wait_for_end(job, within_s=300)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0"), output(cluster, job)
    assert starts(folder)[0].outcome == "requeue"
    go_on(folder, ARGUMENTS)
    assert lasting_metrics(folder / "run") == curve
    assert cluster.job(job)["JobState"] == "CANCELLED"


def begin(cluster: SlurmCluster, folder: Path, *options: str, ranks_per_node: int = 1, reward_s: float = 0.125) -> str:
    """Submit the job on two nodes; it has done step 2, and is within another, when this returns."""
    size = ("--nodes=2", f"--ntasks-per-node={ranks_per_node}")
    environ = {"REWARD_S": str(reward_s)}
    job = cluster.sbatch(*size, *options, str(SCRIPTS / "train.sbatch"), *ARGUMENTS, cwd=folder, env=environ)
    cluster.wait_for(lambda: steps(folder)[1:], within_s=600, what="step 2")
    return job


def finish(cluster: SlurmCluster, folder: Path, job: str, *, restarts: int, within_s: float = 600) -> None:
    """Wait for the job's end, which must be a good one after so many of Slurm's restarts."""
    ended = cluster.wait_for_end(job, within_s=within_s)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", str(restarts)), output(cluster, job)


def same_curve(cluster: SlurmCluster, folder: Path, job: str, curve: list[dict[str, float]]) -> None:
    """See that the job has learned as if nothing had happened, on two ranks each time."""
    assert {start.ranks for start in starts(folder)} == {2}, output(cluster, job)
    assert lasting_metrics(folder / "run") == curve


def starts(folder: Path) -> list[StartRecord]:
    """The starts of the job, without the one that made the checkpoint of step 1."""
    return read_starts(folder / "run")[1:]
