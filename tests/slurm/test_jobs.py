"""Each batch script, as a user submits it: many nodes, MPI, an array, two kinds of nodes, dependent jobs."""

import json
import shutil
from pathlib import Path

import pytest

from hybridflow.observe.starts import read_starts
from tests.e2e.commands import lasting_metrics
from tests.slurm.jobs import SCRIPTS, output, steps, write_job
from tests.support.programs import put_program

pytestmark = pytest.mark.slurm

ONE_RANK = ["cluster.ranks=1", "actor.update={}", "actor.rollout={}", "trainer.steps=1"]


def finish(cluster, job, within_s=300):
    """Wait for a job, or for all of several, to end as it should."""
    cluster.wait_for_end(job, within_s=within_s)
    for each in cluster.jobs(job):
        assert each["JobState"] == "COMPLETED", output(cluster, each["JobId"])


# Scores, and notes what MPI says of this rank, and through what it speaks to the others.
NOTING = """
import gc, json, os, sys
def score(prompt, response, answer):
    if not os.path.exists(name := f"mpi-{os.environ['SLURM_PROCID']}"):
        world = sys.modules["mpi4py.MPI"].COMM_WORLD
        kinds = {type(each).__name__ for each in gc.get_objects()} & {"MpiMessenger", "GlooMessenger"}
        with open(name, "w") as file:
            json.dump([world.rank, world.size, sorted(kinds)], file)
    return float(sum(map(ord, prompt + response)) % 3)
"""


# Now and then pmi2 of Slurm misreads how MPICH 5.0.2 exchanges addresses ("value not properly terminated in client
# request"). Ranks then wait for one another in MPI_Init until their deadline, again and again: not for every run.
@pytest.mark.long
def test_srun_with_mpi_speaks_over_mpi(cluster, folder):
    (folder / "rewards.py").write_text(NOTING)
    options = ["--nodes=2", "--ntasks-per-node=2", str(SCRIPTS / "train.sbatch")]
    job = cluster.sbatch(*options, "tiny.yaml", cwd=folder, env={"SLURM_MPI_TYPE": "pmi2"})
    # MPI's ranks wait with their cores busy, so that other programs beside them make this many times slower.
    finish(cluster, job, within_s=900)
    assert steps(folder) == [1, 2, 3]
    for rank in range(4):
        assert json.loads((folder / f"mpi-{rank}").read_text()) == [rank, 4, ["MpiMessenger"]]


def test_ranks_run_in_the_image_that_the_environment_names(cluster, folder):
    """A stand-in for Apptainer: it notes its words, and runs the command that follows the image."""
    noted, image = folder / "apptainer.seen", folder / "flow.sif"
    noting = f'printf "%s\\n" "$@" > {noted}.$SLURM_PROCID; while [ "$1" != {image} ]; do shift; done; shift; exec "$@"'
    put_program(folder / "bin/apptainer", noting)
    env = {"CONTAINER": str(image), "PATH": f"{folder / 'bin'}:{cluster.env['PATH']}", "HF_HOME": str(folder / "cache")}
    env["PYTHONPATH"] = str(SCRIPTS.parent)
    argv = ["--ntasks-per-node=2", str(SCRIPTS / "train.sbatch"), "tiny.yaml", "trainer.steps=2"]
    finish(cluster, cluster.sbatch(*argv, cwd=folder, env=env))
    assert steps(folder) == [1, 2]
    binds = [f"--bind={path}" for path in sorted({str(folder), str(folder / "cache"), str(SCRIPTS.parent)})]
    words = ["exec", "--nv", *binds, "--pwd", str(folder), str(image), "hybridflow", "train", "tiny.yaml"]
    for rank in range(2):
        assert Path(f"{noted}.{rank}").read_text().splitlines() == [*words, "trainer.steps=2", "--resume"]


def test_array_runs_each_line_of_a_file(cluster, tmp_path):
    write_job(tmp_path)
    (tmp_path / "lr.txt").write_text("actor.optimizer.lr=1e-3\n'actor.optimizer={lr: 3e-3}' trainer.steps=2\n")
    script = str(SCRIPTS / "sweep.sbatch")
    job = cluster.sbatch("--array=1-2", script, "tiny.yaml", "lr.txt", *ONE_RANK, cwd=tmp_path)
    finish(cluster, job)
    runs = [tmp_path / "runs/lr" / line for line in ("1", "2")]
    assert [len(read_starts(run)) for run in runs] == [1, 1]
    summaries = [json.loads((run / "summary.json").read_text()) for run in runs]
    assert [summary["steps"] for summary in summaries] == [1, 2]
    # The first rollout is the same, and what was learned from it is not.
    first, second = (lasting_metrics(run)[0] for run in runs)
    assert first["reward/mean"] == second["reward/mean"] and first["actor/loss"] != second["actor/loss"]


SPLIT = [
    *("algorithm=ppo", "cluster.ranks=3", "actor.ranks=[0, 1]", "actor.update={tp: 2}", "actor.rollout={dp: 2}"),
    *("critic.ranks=[2]", "critic.layout={}", "critic.optimizer.lr=1e-2", "trainer.steps=2"),
    "fallbacks=[]",
]


def test_two_kinds_of_nodes_are_one_world(cluster, tmp_path):
    write_job(tmp_path)
    sizes = ["--ntasks-per-node=2", ":", "--ntasks-per-node=1"]
    job = cluster.sbatch(*sizes, str(SCRIPTS / "hetjob.sbatch"), "tiny.yaml", *SPLIT, cwd=tmp_path)
    finish(cluster, job)
    actor, critic = cluster.jobs(job)
    assert actor["NodeList"] != critic["NodeList"]
    # A node has two ranks, the other one: the actor's two, of one tensor-parallel group, are on the first.
    assert "reach across nodes" not in output(cluster, job)
    (start,) = read_starts(tmp_path / "run")
    assert start.ranks == 3 and start.hosts == (actor["NodeList"], critic["NodeList"])
    assert steps(tmp_path) == [1, 2]


@pytest.fixture
def site(tmp_path):
    """The scripts as somebody has edited them for a site and a tiny model."""
    folder = Path(shutil.copytree(SCRIPTS, tmp_path / "slurm"))
    script = folder / "pipeline.sh"
    text = script.read_text()
    for old, new in (("--ntasks-per-node=4", "--ntasks-per-node=1"), ("steps=40", "steps=2")):
        assert old in text
        text = text.replace(old, new)
    script.write_text(text)
    return folder


def test_pipeline_goes_from_a_model_to_a_trained_one(cluster, tmp_path, site):
    pytest.importorskip("transformers")
    from tests.support.hf_models import write_model, write_tokenizer

    write_job(tmp_path)
    write_model(tmp_path / "policy", "Llama")
    write_tokenizer(tmp_path / "policy")
    changes = [*ONE_RANK, "fallbacks=[]", "model={max_context: 24}"]
    said = cluster.run(str(site / "pipeline.sh"), "tiny.yaml", "policy", "out", *changes, cwd=tmp_path)
    jobs = dict(line.split(": job ") for line in said.splitlines())
    assert list(jobs) == ["convert", "sft", "rl", "export", "evaluate"]
    for job in jobs.values():
        finish(cluster, job)
    ends = [cluster.job(job) for job in jobs.values()]
    assert all(before["EndTime"] <= after["StartTime"] for before, after in zip(ends, ends[1:], strict=False))
    sft, rl, judged = (
        json.loads((tmp_path / "out" / name / "summary.json").read_text()) for name in ("sft", "rl", "evaluation")
    )
    assert (sft["steps"], rl["steps"], judged["steps"]) == (0, 2, 0)
    assert rl["score_before_rl"] == sft["score_before_rl"]
    assert judged["score_before_rl"] == rl["score_after_rl"]


def test_pipeline_ends_where_a_job_fails(cluster, tmp_path):
    write_job(tmp_path)
    said = cluster.run(str(SCRIPTS / "pipeline.sh"), "tiny.yaml", "nowhere", "out", cwd=tmp_path)
    first, *others = [line.split(": job ")[1] for line in said.splitlines()]
    assert cluster.wait_for_end(first, within_s=300)["JobState"] == "FAILED"
    for job in others:
        assert cluster.wait_for_end(job, within_s=300)["JobState"] == "CANCELLED"
    assert "nowhere" in output(cluster, first)


def test_conversion_on_many_ranks(cluster, folder):
    source = "run/checkpoints/step_000001/actor"
    words = [source, "out", "--to", "megatron", "--layout", "tp2.pp2"]
    job = cluster.sbatch("--nodes=2", "--ntasks=4", str(SCRIPTS / "convert.sbatch"), *words, cwd=folder)
    finish(cluster, job)
    assert len(list((folder / "out").glob("tp*-pp*.safetensors"))) == 4
