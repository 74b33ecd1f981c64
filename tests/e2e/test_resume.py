"""A job that was killed goes on as if nothing had happened: the same numbers, the same weights, the same prompts."""

import json
import os
import shutil
import signal

import matplotlib.backends.backend_agg  # noqa: F401  # what ranks import, imported once, before they are forked
import pytest
import torch.utils.tensorboard  # noqa: F401

from hybridflow.checkpoint.store import latest_step
from hybridflow.trainer import checkpoints
from hybridflow.trainer.trainer import Trainer
from tests.e2e.commands import fork_ranks, lasting_metrics, write_recipe

RUN = ["train", "tiny.yaml", "trainer.steps=4", "trainer.save_every=2", "trainer.validate_every=3"]
GRPO = RUN
PPO = [
    *RUN,
    *("algorithm=ppo", "cluster.ranks=4", "actor.update={tp: 2, dp: 2}", "actor.rollout={dp: 4}"),
    *("critic.layout={pp: 2, dp: 2}", "critic.optimizer.lr=1e-2", "ppo.epochs=2"),
    *("ppo.kl_coef=0.1", "ppo.kl_target=0.01", "ppo.kl_horizon=20"),
]

# Notes each problem that is scored, per rank.
NOTING = """
import os
def score(prompt, response, answer):
    with open(f"prompts-{os.environ['RANK']}", "a") as file:
        file.write(prompt + "\\n")
    return float(sum(map(ord, prompt + response)) % 3)
"""


def write(folder):
    write_recipe(folder)
    (folder / "rewards.py").write_text(NOTING)


def prompts(folder, num_ranks):
    """What each rank scored in training, in order."""
    held_out = {json.loads(line)["prompt"] for line in (folder / "data/held_out.jsonl").read_text().splitlines()}
    noted = [(folder / f"prompts-{rank}").read_text().splitlines() for rank in range(num_ranks)]
    return [[prompt for prompt in prompts if prompt not in held_out] for prompts in noted]


def kill_in_step_4(rank):
    """Rank 1 dies after step 3 was recorded, before step 4 is."""
    finish_step = Trainer.finish_step

    def finish(self, batch, decided):
        if rank == 1 and decided["train_step"]["step"] == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        finish_step(self, batch, decided)

    Trainer.finish_step = finish


def kill_while_writing_step_4(rank):
    """Rank 1 dies when it has written some of its files of the last checkpoint."""
    write_shard = checkpoints.write_shard

    def write(run_dir, step, name, *rest):
        if rank == 1 and step == 4 and name == "actor-optimizer":
            os.kill(os.getpid(), signal.SIGKILL)
        return write_shard(run_dir, step, name, *rest)

    checkpoints.write_shard = write


def weights(folder):
    return {path.name: path.read_bytes() for path in (folder / "run/checkpoints/step_000004").glob("*.safetensors")}


@pytest.fixture(
    scope="module",
    params=[("ppo", PPO, 4, kill_in_step_4), ("grpo", GRPO, 2, kill_while_writing_step_4)],
    ids=["ppo", "grpo"],
)
def runs(request, tmp_path_factory):
    """A run in one go and one that was killed in step 4, both in folders of their own; command and number of ranks."""
    name, argv, num_ranks, hook = request.param
    whole, killed = tmp_path_factory.mktemp(f"{name}-whole"), tmp_path_factory.mktemp(f"{name}-killed")
    write(whole)
    write(killed)
    done = fork_ranks(argv, whole, num_ranks=num_ranks)
    assert set(done.codes) == {0} and done.err == "", done.err
    done = fork_ranks(argv, killed, num_ranks=num_ranks, hook=hook)
    assert done.codes[1] == -signal.SIGKILL and 0 not in done.codes, done.err
    return whole, killed, argv, num_ranks


def test_resumed_run_is_the_same_bit_for_bit(runs, tmp_path):
    whole, killed, argv, num_ranks = runs
    folder = tmp_path / "resumed"
    shutil.copytree(killed, folder)
    assert latest_step(folder / "run") == 2
    assert len(lasting_metrics(folder / "run")) >= 3  # the killed job had gone on
    for path in folder.glob("prompts-*"):
        path.unlink()

    done = fork_ranks([*argv, "--resume"], folder, num_ranks=num_ranks)

    assert set(done.codes) == {0} and done.err == "", done.err
    assert "resumed from run/checkpoints/step_000002" in done.out and "warm start" not in done.out
    assert lasting_metrics(folder / "run") == lasting_metrics(whole / "run")
    assert all(row["actor/grad_norm"] > 0 for row in lasting_metrics(whole / "run"))
    assert len(weights(whole)) == num_ranks * (5 if num_ranks == 4 else 3)
    assert weights(folder) == weights(whole)
    summaries = [json.loads((place / "run/summary.json").read_text()) for place in (folder, whole)]
    lasting = ("steps", "accuracy_before_rl", "accuracy_after_rl")
    assert [[summary[name] for name in lasting] for summary in summaries] == [
        [summaries[1][name] for name in lasting]
    ] * 2
    assert summaries[0].keys() == summaries[1].keys() >= {"tokens_per_s", "control_overhead_share"}

    in_one_go, resumed = prompts(whole, num_ranks), prompts(folder, num_ranks)
    assert resumed == [noted[len(noted) // 2 :] for noted in in_one_go]
    drawn = [prompt for noted in in_one_go for prompt in noted]
    group_size = 2
    assert len(drawn) == 4 * 8 and len(set(drawn)) * group_size == len(drawn)


def test_kl_coefficient_moved(runs):
    whole, _, argv, _ = runs
    if argv is PPO:
        coefficients = [row["kl/coef"] for row in lasting_metrics(whole / "run")]
        assert len(set(coefficients)) == 4, coefficients


def test_run_that_is_done_stays_as_it_is(runs, tmp_path):
    whole, _, argv, num_ranks = runs
    folder = tmp_path / "again"
    shutil.copytree(whole, folder)
    before = json.loads((folder / "run/summary.json").read_text())
    done = fork_ranks([*argv, "trainer.steps=3", "--resume"], folder, num_ranks=num_ranks)
    assert set(done.codes) == {0}, done.err
    assert "step 5" not in done.out
    assert json.loads((folder / "run/summary.json").read_text()) == before
    assert lasting_metrics(folder / "run") == lasting_metrics(whole / "run")
    assert weights(folder) == weights(whole)


def test_new_run_in_a_used_place_is_refused(runs):
    whole, _, argv, num_ranks = runs
    done = fork_ranks(argv, whole, num_ranks=num_ranks)
    done.complains_once("run: holds a run with a checkpoint of step 4; add --resume", "set run_dir to another")
    assert len(lasting_metrics(whole / "run")) == 4


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("actor.optimizer.lr=1", "written with actor={"),
        ("trainer.global_batch_size=16", "written with trainer.global_batch_size=8, the recipe now has 16"),
        ("reward.function=exact_match", "the recipe now has {'function': 'exact_match'}"),
    ],
)
def test_another_recipe_is_refused(runs, override, says):
    whole, _, argv, num_ranks = runs
    done = fork_ranks([*argv, override, "--resume"], whole, num_ranks=num_ranks)
    done.complains_once("run: the checkpoint was written with", says, "another run_dir")
    assert set(done.codes) == {2}


def test_nothing_to_resume_from_is_a_new_run(tmp_path):
    write(tmp_path)
    # What a run of other settings has left that was killed before its first checkpoint.
    (tmp_path / "run/checkpoints/step_000001.tmp").mkdir(parents=True)
    (tmp_path / "run/tokenizer.model").write_bytes(b"stale")
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    done = fork_ranks([*GRPO, "trainer.steps=1", "--resume"], tmp_path)
    assert set(done.codes) == {0}, done.err
    assert "warm start" in done.out and "step 1/1" in done.out
    assert len(lasting_metrics(tmp_path / "run")) == 1 and latest_step(tmp_path / "run") == 1
