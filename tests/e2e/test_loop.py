"""What the loop does beside the updates: rates, a critic that learns alone, the best checkpoint, an early end."""

import json

import pytest

from hybridflow.checkpoint.store import best_step, latest_step
from hybridflow.exit_status import REQUEUE
from hybridflow.observe.status import read_status
from hybridflow.roles.actor import Actor
from hybridflow.trainer.decisions import Decisions
from hybridflow.trainer.stopping import Stopping
from tests.e2e.commands import RECIPE, fork_ranks, lasting_metrics, run_well, write_recipe

# What each validation of a process gives; what is learned from scores as in the other tests.
JUDGING = """
import json
HELD_OUT = {json.loads(line)["prompt"] for line in open("data/held_out.jsonl")}
ACCURACIES = [0.125, 0.5, 0.25, 0.5, 0.75]
seen = {}
def score(prompt, response, answer):
    if prompt not in HELD_OUT:
        return float(sum(map(ord, prompt + response)) % 3)
    seen[prompt] = seen.get(prompt, -1) + 1
    return ACCURACIES[seen[prompt]]
"""


def steps_of(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step_*"))


def noting_weights(rank):
    """A hook: rank 0 notes of each validation after how many updates its weights are."""
    sample = Actor.sample_validation

    def noted(self, batch, decided):
        if rank == 0:
            with open("validated", "a") as file:
                file.write(f"{self._rollout_version} ")
        return sample(self, batch, decided)

    Actor.sample_validation = noted


@pytest.mark.slow
def test_a_validation_samples_with_the_weights_of_its_step_where_rollouts_stay_behind(tmp_path):
    write_recipe(tmp_path)
    run = ["train", "tiny.yaml", "trainer.steps=3", "trainer.validate_every=2", "actor.reshard_every=9"]
    done = fork_ranks(run, tmp_path, hook=noting_weights)
    assert done.codes == (0, 0), done.err
    assert (tmp_path / "validated").read_text().split() == ["0", "2", "3"]


@pytest.mark.slow
def test_training_ends_when_validations_do_not_become_better_and_the_best_stays(tmp_path):
    write_recipe(tmp_path, RECIPE.replace("rewards:score", "judging:score"))
    (tmp_path / "judging.py").write_text(JUDGING)
    run, run_dir = ["train", "tiny.yaml", "trainer.steps=9", "trainer.validate_every=1"], tmp_path / "run"
    run += ["trainer.keep_best=true", "trainer.keep_last=1", "trainer.save_every=2"]

    done = fork_ranks([*run, "trainer.patience=2"], tmp_path)

    # 0.125 before, 0.5 after step 1, and then 0.25 and 0.5, which is no better.
    assert done.codes == (0, 0) and done.err == "", done.err
    assert "the training ends after step 3: 2 validations in a row were not better than that of step 1" in done.out
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["best_step"], summary["best_score"]) == (3, 1, 0.5)
    assert (summary["score_before_rl"], summary["score_after_rl"]) == (0.125, 0.5)
    assert "trainer.patience=2" in summary["ended"]
    assert "; best 0.500 after step 1\n" in done.out and "convert run/checkpoints/step_000001/actor" in done.out
    assert (latest_step(run_dir), best_step(run_dir)) == (3, 1) and steps_of(run_dir) == ["step_000001", "step_000003"]
    status = read_status(run_dir)
    assert (status.state, status.step, status.saved_step, status.best_step) == ("finished", 3, 3, 1)

    again = run_well([*run, "trainer.patience=2", "--resume"], tmp_path)
    assert "the training ends after step 3" in again.out, again.out
    assert len(lasting_metrics(run_dir)) == 3 and json.loads((run_dir / "summary.json").read_text()) == summary

    # A process of its own counts from the first accuracy: 0.125 after step 4, 0.5 after step 5, both no better.
    run_well([*run[:2], "trainer.steps=5", *run[3:], "--resume"], tmp_path)
    rows = lasting_metrics(run_dir)
    assert [row["validation/score"] for row in rows] == [0.5, 0.25, 0.5, 0.125, 0.5]
    assert (latest_step(run_dir), best_step(run_dir)) == (5, 1) and steps_of(run_dir) == ["step_000001", "step_000005"]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["best_step"], summary["score_after_rl"]) == (1, 0.5) and "ended" not in summary


def stopping_at_the_validation(rank):
    """A hook: the job is told to stop when the first step's validation is due."""
    is_due, local_reason, asked = Decisions._is_validation_due, Stopping.local_reason, []

    def is_due_and_asked(self):
        asked.append(True)
        return is_due(self)

    Decisions._is_validation_due = is_due_and_asked
    Stopping.local_reason = lambda self, **more: "asked to" if asked else local_reason(self, **more)


@pytest.mark.slow
def test_a_last_step_that_is_validated_after_a_resume_can_be_the_best(tmp_path):
    write_recipe(tmp_path, RECIPE.replace("rewards:score", "judging:score"))
    (tmp_path / "judging.py").write_text(JUDGING)
    run, run_dir = ["train", "tiny.yaml", "trainer.steps=1", "trainer.validate_every=1"], tmp_path / "run"
    run += ["trainer.keep_best=true"]

    stopped = fork_ranks(run, tmp_path, hook=stopping_at_the_validation)

    assert set(stopped.codes) == {REQUEUE}, stopped.err
    assert (latest_step(run_dir), best_step(run_dir)) == (1, 0)

    (tmp_path / "judging.py").write_text(JUDGING.replace("[0.125", "[0.25"))
    run_well([*run, "--resume"], tmp_path)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["best_step"], summary["best_score"], best_step(run_dir)) == (1, 0.25, 1)


@pytest.mark.slow
def test_a_resume_does_not_compare_with_a_best_that_means_something_else(tmp_path):
    write_recipe(tmp_path, RECIPE.replace("rewards:score", "judging:score"))
    (tmp_path / "judging.py").write_text(JUDGING)
    run, run_dir = ["train", "tiny.yaml", "trainer.validate_every=1", "trainer.keep_last=1"], tmp_path / "run"
    # 0.125 before, then 0.5 and 0.25: the checkpoint of the best one, that of step 1, is gone.
    run_well([*run, "trainer.steps=2", "trainer.save_every=1"], tmp_path)
    assert steps_of(run_dir) == ["step_000002"]

    # Each process begins with 0.125: step 3 is no better than step 2, whose checkpoint is there.
    keeping = [*run, "trainer.keep_best=true", "trainer.save_every=9"]
    run_well([*keeping, "trainer.steps=3", "--resume"], tmp_path)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["best_step"], summary["best_score"], best_step(run_dir)) == (2, 0.25, 2)

    # Of other problems 0.125 is the best: step 3 is validated anew, and step 4 has 0.1875.
    (tmp_path / "judging.py").write_text(JUDGING.replace("0.5", "0.1875"))
    run_well([*keeping, "trainer.steps=4", "trainer.num_validation=4", "--resume"], tmp_path)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["best_step"], summary["best_score"], best_step(run_dir)) == (4, 0.1875, 4)


@pytest.mark.slow
def test_a_run_that_goes_back_has_its_best_among_the_checkpoints_that_are_there(tmp_path):
    write_recipe(tmp_path, RECIPE.replace("rewards:score", "judging:score"))
    (tmp_path / "judging.py").write_text(JUDGING.replace("[0.125, 0.5, 0.25, 0.5", "[0.125, 0.25, 0.1875, 0.5"))
    run, run_dir = ["train", "tiny.yaml", "trainer.validate_every=1", "trainer.keep_last=2"], tmp_path / "run"
    run += ["trainer.keep_best=true", "trainer.save_every=1", "trainer.steps=3"]
    run_well(run, tmp_path)
    # Step 1 was the best until step 3, and is gone.
    assert steps_of(run_dir) == ["step_000002", "step_000003"] and best_step(run_dir) == 3

    (run_dir / "checkpoints/latest").write_text("step_000002\n")
    # The process begins with 0.125 again: step 3 is no better than step 2.
    run_well([*run, "--resume"], tmp_path)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["best_step"], summary["best_score"], best_step(run_dir)) == (2, 0.1875, 2)


@pytest.mark.slow
def test_the_critic_learns_alone_at_first_and_rates_follow_the_step(tmp_path):
    write_recipe(tmp_path)
    run, run_dir = ["train", "tiny.yaml", "algorithm=ppo", "trainer.steps=4", "trainer.save_every=1"], tmp_path / "run"
    run += ["critic.layout={dp: 2}", "critic.optimizer={lr: 4.0e-2, schedule: linear}", "critic.warmup_steps=2"]
    run += ["actor.optimizer.warmup_steps=4", "trainer.keep_last=9", "loss.epochs=2", "kl.coef=0.1", "kl.target=1"]

    run_well(run, tmp_path)
    rows = lasting_metrics(run_dir)
    assert [row["actor/lr"] for row in rows] == pytest.approx([0.0025, 0.0025, 0.0025, 0.005])
    # From 0.04 at step 1 as a line to 0 at step 4.
    assert [row["critic/lr"] for row in rows] == pytest.approx([0.04, 0.08 / 3, 0.04 / 3, 0.0])
    assert [("actor/loss" in row, "critic/loss" in row) for row in rows] == [(False, True)] * 2 + [(True, True)] * 2
    weights = {
        role: [
            [
                path.read_bytes()
                for path in sorted((run_dir / f"checkpoints/step_00000{step}/{role}").glob("*.safetensors"))
            ]
            for step in range(5)
        ]
        for role in ("actor", "critic")
    }
    actor, critic = weights["actor"], weights["critic"]
    assert actor[0] == actor[1] == actor[2] != actor[3] and actor[3] != actor[4]
    assert critic[0] != critic[1] != critic[2] != critic[3]
    states = [
        json.loads((run_dir / f"checkpoints/step_00000{step}/job.json").read_text())["state"] for step in range(5)
    ]
    # The adaptive coefficient waits for a policy that moves.
    assert states[0]["kl_coef"] == states[1]["kl_coef"] == states[2]["kl_coef"] != states[3]["kl_coef"]
