"""A tiny job for a real Slurm: four ranks that go on from a checkpoint, since starting torch takes most of the time."""

from __future__ import annotations

import contextlib
from pathlib import Path

import yaml

from hybridflow.observe.metrics import read_metrics
from hybridflow.parallel.process import Process, find_process, is_running
from tests.e2e.commands import RECIPE as TWO_RANKS
from tests.e2e.commands import run_well
from tests.support.slurm_cluster import SlurmCluster

SCRIPTS = Path(__file__).parents[2] / "slurm"

RECIPE = yaml.safe_dump(
    {
        **yaml.safe_load(TWO_RANKS),
        "cluster": {"ranks": 4, "deadline_s": 60, "start_deadline_s": 120},
        "actor": {"update": {"tp": 2, "dp": 2}, "rollout": {"dp": 4}, "optimizer": {"lr": 1e-2}},
        "trainer": {"steps": 3, "global_batch_size": 8, "mini_batch_size": 4, "save_every": 1},
        "fallbacks": [{"ranks": 2, "overrides": ["actor.update={tp: 2}", "actor.rollout={dp: 2}"]}],
    }
)

# Scores differ within every group. Each takes REWARD_S seconds, for a test that needs steps to last.
REWARDS = """
import os, time
def score(prompt, response, answer):
    time.sleep(float(os.environ.get("REWARD_S", "0")))
    return float(sum(map(ord, prompt + response)) % 3)
"""


def write_job(folder: Path) -> None:
    """Put ``tiny.yaml`` and its rewards into a folder."""
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "tiny.yaml").write_text(RECIPE)


def train_first_step(folder: Path) -> None:
    """Make ``run/`` there, with the warm start behind it and the checkpoint of step 1."""
    write_job(folder)
    run_well(["train", "tiny.yaml", "trainer.steps=1"], folder, num_ranks=4)


def output(cluster: SlurmCluster, job: str) -> str:
    """What a job has written to stdout and stderr."""
    path = Path(cluster.job(job)["StdOut"])
    return path.read_text(errors="replace") if path.exists() else ""


def steps(folder: Path) -> list[int]:
    """Numbers of the training steps whose metrics are there."""
    if not (folder / "run/metrics.jsonl").exists():
        return []
    return [int(row["step"]) for row in read_metrics(folder / "run") if "actor/loss" in row]


def rank_processes(cluster: SlurmCluster, job: str) -> dict[int, Process]:
    """The job's ranks that run now, all nodes being on this machine: rank -> process."""
    wanted = {f"SLURM_CONF={cluster.env['SLURM_CONF']}", f"SLURM_JOB_ID={job}"}
    found = {}
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            # srun has the same arguments behind another program.
            argv = (path / "cmdline").read_bytes().decode(errors="replace").split("\0") if path.name.isdigit() else []
            if "train" not in argv or not Path(argv[0]).name.startswith("python"):
                continue
            environ = (path / "environ").read_bytes().decode(errors="replace").split("\0")
            process = find_process(int(path.name))
            if process is not None and is_running(process) and wanted <= set(environ):
                rank = next(int(each.partition("=")[2]) for each in environ if each.startswith("SLURM_PROCID="))
                found[rank] = process
    return found
