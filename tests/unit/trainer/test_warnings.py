"""What is told once of settings that work and are seldom meant; and nothing where they are."""

from __future__ import annotations

import pytest

from hybridflow import cli
from hybridflow.recipe.load import load_recipe
from hybridflow.trainer.warnings import cpu_warning, duration_warning, epochs_warning, recipe_warnings, reward_warning
from tests.support.recipes import POLICY, SCORER, SMALLEST, write_config


@pytest.fixture
def asked(tmp_path):
    """A recipe's overrides that name a policy of 64 tokens, and its directory."""
    policy = write_config(tmp_path / "policy", POLICY)
    return ["model={path: " + str(policy) + "}", "warm_start=null"], policy


def test_a_context_above_the_models_limit(asked, tmp_path, capsys):
    overrides, policy = asked
    assert recipe_warnings(load_recipe("grpo", overrides)) == ()
    assert recipe_warnings(load_recipe("grpo", ["model.max_context=4096"])) == (), "a model that is made has no limit"
    (warning,) = recipe_warnings(load_recipe("grpo", [*overrides, "model.max_context=65"]))
    assert warning.startswith(f"model.max_context=65: the model of model.path={str(policy)!r} was made for 64 tokens")
    assert warning.endswith("; set model.max_context=64")
    scorer = write_config(tmp_path / "scorer", SCORER)
    scored = [*overrides, "reward={model: {path: " + str(scorer) + ", max_context: 128}}"]
    (warning,) = recipe_warnings(load_recipe("grpo", scored))
    assert warning.startswith("reward.model.max_context=128: ")
    assert cli.main(["plan", "job", "grpo", *overrides, "model.max_context=65"]) == 0
    assert "model.max_context=65: the model of" in capsys.readouterr().err


def test_a_plan_tells_of_old_weights_and_of_no_validation_as_a_job_does(asked, capsys):
    overrides = [*asked[0], "data={train: rows.jsonl}", "actor.reshard_every=4", "trainer.validate_every=0"]
    old, alone = recipe_warnings(load_recipe("grpo", overrides))
    assert old == (
        "actor.reshard_every=4: rollouts come from weights that are up to 3 update(s) old; rollout/staleness_max "
        "tells, and correction.kind=truncate applies"
    )
    assert alone.startswith("data.held_out is missing: there is no validation")
    assert cli.main(["plan", "job", "grpo", *overrides]) == 0
    told = capsys.readouterr().err
    assert f"hybridflow: {old}\nhybridflow: {alone}\n" in told


def test_an_override_that_drops_keys_of_the_file(tmp_path):
    override = "actor.optimizer={lr: 1.0e-3}"
    file = tmp_path / "own.yaml"
    file.write_text(SMALLEST.replace("{lr: 1e-4}", "{lr: 1e-4, schedule: cosine, warmup_steps: 1}"))
    kept = ["actor.optimizer.lr=1e-3", "actor.update={dp: 4}", "rollout.top_k=3"]
    assert recipe_warnings(load_recipe(file, kept)) == ()
    (warning,) = recipe_warnings(load_recipe(file, [*kept, override, "actor.optimizer.warmup_steps=2"]))
    assert warning == (
        "override actor.optimizer={lr: 1.0e-3} drops schedule of the file: it replaces the whole section; to keep "
        "them, give its keys one by one, as in actor.optimizer.lr=…"
    )


def test_a_trace_of_a_step_that_does_not_come():
    asked = "profile.steps=[1, 99]"
    (warning,) = recipe_warnings(load_recipe("grpo", ["trainer.steps=3", asked]))
    assert warning == (
        "profile.steps: 99 is after the last step, and writes no trace; lower it, or raise trainer.steps=3"
    )
    assert recipe_warnings(load_recipe("grpo", ["trainer.steps=99", asked])) == ()


def test_steps_that_go_through_the_data_very_often():
    recipe = load_recipe("grpo", ["trainer.steps=1000000"])
    assert epochs_warning(recipe, 400, 256) == (
        "trainer.steps=1000000: the run goes through the 400 rows of runs/grpo/data/train.jsonl 640,000 times; an "
        "epoch is 2 step(s) of 256: lower trainer.steps, or set trainer.patience, which ends the run once validations "
        "no longer improve"
    )
    assert epochs_warning(recipe, None, 256) is None and epochs_warning(recipe, 256 * 10_000, 256) is None
    assert epochs_warning(load_recipe("grpo"), 4000, 256) is None


def test_steps_without_an_end_in_sight():
    recipe = load_recipe("grpo", ["trainer.steps=1000000"])
    warning = duration_warning(recipe, 3, 1003, 4.0)
    assert warning is not None
    assert warning.startswith("trainer.steps=1000000: at 4 s a step, 998,997 more take 46 days; if that is not meant")
    assert duration_warning(recipe, 2, 1003, 4.0) is None and duration_warning(recipe, 4, 1003, 4.0) is None
    assert duration_warning(recipe, 3, 1003, 0.4) is None


def test_rewards_that_are_all_the_same():
    warning = reward_warning({"reward/min": 0.0, "reward/max": 0.0}, 1, "runs/mine")
    assert warning is not None and warning.startswith(
        "step 1: every sample scored 0, so that the reward teaches nothing"
    )
    assert "rollout.max_new_tokens" in warning
    assert reward_warning({"reward/min": 0.0, "reward/max": 1.0}, 1, "run") is None
    assert reward_warning({}, 1, "run") is None


def test_a_cpu_where_a_gpu_was_meant(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("hybridflow.trainer.warnings.num_gpus", lambda: 0)
    plain, meant = load_recipe("grpo"), load_recipe("grpo", ["model.dtype=bf16"])
    named = load_recipe("grpo", ["cluster.hardware=h100-sxm"])
    assert cpu_warning(plain) is None
    assert cpu_warning(meant) == (
        "the run is on the CPU, though model.dtype=bf16 is for GPUs: torch finds none here; use a machine with GPUs, "
        "or set CUDA_VISIBLE_DEVICES= (empty), which means the CPU"
    )
    assert "though cluster.hardware=h100-sxm is for GPUs" in cpu_warning(named)
    monkeypatch.setattr("hybridflow.trainer.warnings.num_gpus", lambda: 4)
    assert "torch cannot use the 4 GPU(s) of this machine" in cpu_warning(plain)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cpu_warning(plain) is cpu_warning(meant) is cpu_warning(named) is None
