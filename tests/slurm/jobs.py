"""A tiny job for a real Slurm: four ranks that go on from a checkpoint, since starting torch takes most of the time."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.commands import fork_ranks
from tests.slurm_cluster import SlurmCluster

SCRIPTS = Path(__file__).parents[2] / "slurm"

RECIPE = """
name: tiny
algorithm: grpo
cluster: {ranks: 4, deadline_s: 60, start_deadline_s: 120}
model: {num_layers: 2, hidden_size: 16, ffn_hidden_size: 32, num_attention_heads: 2, max_context: 24}
data:
  train: data/train.jsonl
  held_out: data/held_out.jsonl
  arithmetic: {num_train: 200, num_held_out: 8, max_operand: 99, mistake_share: 0.5}
run_dir: run
warm_start: {steps: 2, batch_size: 8, lr: 1.0e-2}
actor:
  update: {tp: 2, dp: 2}
  rollout: {dp: 4}
  optimizer: {lr: 1.0e-2}
reward: {function: "rewards:score"}
rollout: {max_new_tokens: 4, group_size: 2}
trainer: {steps: 3, global_batch_size: 8, mini_batch_size: 4, save_every: 1}
fallbacks:
  - {ranks: 2, overrides: ["actor.update={tp: 2}", "actor.rollout={dp: 2}"]}
"""

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
    # What the ranks import, imported once, before they are forked.
    import matplotlib.backends.backend_agg  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401

    import hybridflow.trainer.trainer  # noqa: F401

    write_job(folder)
    done = fork_ranks(["train", "tiny.yaml", "trainer.steps=1"], folder, num_ranks=4)
    assert done.codes == (0,) * 4, done.err


def output(cluster: SlurmCluster, job: str) -> str:
    """What a job has written to stdout and stderr."""
    path = Path(cluster.job(job)["StdOut"])
    return path.read_text(errors="replace") if path.exists() else ""


def metrics(folder: Path) -> list[dict[str, float]]:
    """The rows of a job's ``metrics.jsonl``, also of a row that is being written: without it."""
    path = folder / "run/metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def steps(folder: Path) -> list[int]:
    """Numbers of the training steps whose metrics are there."""
    return [int(row["step"]) for row in metrics(folder) if "actor/loss" in row]
