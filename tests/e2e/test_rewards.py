"""Whole runs with rewards that fail: what is dropped changes nothing for the others, in any layout."""

from __future__ import annotations

import pytest

from hybridflow.observe.metrics import read_metrics
from tests.e2e.commands import fork_ranks, write_recipe

REWARDS = """
import sys
from hybridflow.rewards import batched

def weight(prompt, response):
    return sum(map(ord, prompt + response))

def fails(prompt, response, answer):
    if weight(prompt, response) % 4 == 0:
        sys.exit(3)
    return float(weight(prompt, response) % 3)

async def fails_async(prompt, response, answer):
    return fails(prompt, response, answer)

@batched
def fails_batched(prompts, responses, answers):
    return [None if weight(*each) % 4 == 0 else float(weight(*each) % 3) for each in zip(prompts, responses)]

def nothing(prompt, response, answer):
    raise OSError("the table is gone")
"""
RUN = ["train", "tiny.yaml", "trainer.steps=2", "reward.on_failure=drop"]
ALONE = ["cluster.ranks=1", "actor.update={}", "actor.rollout={}"]
APART = ["actor.ranks=[0]", "actor.update={}", "actor.rollout={}", "reward.ranks=[1]"]


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path)


def write(folder):
    folder.mkdir(exist_ok=True)
    write_recipe(folder)
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def metrics(done, folder, codes):
    assert done.codes == codes, done.err
    found = read_metrics(folder / "run")
    assert len(found) == 2
    keys = ("reward/mean", "reward/failed", "batch/dropped", "response/length_mean", "actor/loss", "actor/grad_norm")
    return [{key: step[key] for key in (*keys, "validation/score") if key in step} for step in found]


@pytest.mark.slow
def test_what_is_dropped_is_dropped_alike_everywhere(tmp_path):
    cases = {
        "alone": (ALONE, 1, "fails"),
        "two": ([], 2, "fails"),
        "apart": (APART, 2, "fails_async"),
        "batched": ([], 2, "fails_batched"),
    }
    found = {}
    for name, (overrides, ranks, function) in cases.items():
        argv = [*RUN, *overrides, f"reward.function=rewards:{function}"]
        done = fork_ranks(argv, write(tmp_path / name), num_ranks=ranks)
        found[name] = metrics(done, tmp_path / name, (0,) * ranks)
        assert "reward: failed in" in done.out and "data/train.jsonl:" in done.out
    assert sum(step["batch/dropped"] for step in found["alone"]) > 0
    for name in cases:
        for step, expected in zip(found[name], found["alone"], strict=True):
            assert step == pytest.approx(expected, rel=1e-3, abs=1e-5), name
            assert step["reward/failed"] == step["batch/dropped"]


@pytest.mark.parametrize("algorithm", ["dapo", pytest.param("remax", marks=pytest.mark.slow)])
def test_steps_of_several_rollouts_leave_out_what_has_no_score(folder, algorithm):
    more = ["rollout.group_size=4", "trainer.mini_batch_size=null", "dynamic_sampling.max_tries=50"]
    argv = [*RUN, f"algorithm={algorithm}", "reward.function=rewards:fails", *(more if algorithm == "dapo" else [])]
    found = metrics(fork_ranks(argv, folder), folder, (0, 0))
    assert sum(step["batch/dropped"] for step in found) > 0
    assert all(step["actor/loss"] is not None for step in found)


def test_samples_made_ahead_are_dropped_too(folder):
    ahead = [
        "actor.ranks=[0]",
        "actor.update={}",
        "actor.rollout={}",
        "actor.rollout_ranks=[1]",
        "trainer.max_staleness=1",
    ]
    argv = [*RUN, *ahead, "reward.function=rewards:fails"]
    found = metrics(fork_ranks(argv, folder), folder, (0, 0))
    assert sum(step["batch/dropped"] for step in found) > 0


@pytest.mark.parametrize("policy", ["score", "drop"])
def test_where_nothing_can_be_scored_the_run_ends(folder, policy):
    done = fork_ranks([*RUN, f"reward.on_failure={policy}", "reward.function=rewards:nothing"], folder)
    assert "has a score" in done.err and set(done.codes) == {2}
