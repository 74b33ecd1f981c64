"""Algorithm, model, data and reward are enough: what the other keys become, and who decides the number of ranks."""

import gzip

import pytest
import yaml

from hybridflow import cli
from hybridflow.config.recipe import Recipe
from hybridflow.errors import ConfigError, LayoutError
from hybridflow.flows.registry import ALGORITHMS
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.recipe.load import load_recipe, recipe_for_ranks, recipe_from_dict
from hybridflow.recipe.meshes import role_meshes
from hybridflow.sections import resume_rules, to_dict
from tests.support.complaints import complains
from tests.support.recipes import SCORER, write_config

OWN = ("model=model", "data=train.jsonl", "data.held_out=train.jsonl")
SCORED = (*OWN, "reward=mine:score")
EXTRA = {
    "distill": [*OWN, "teacher.model.path=model"],
    "safe-rlhf": [*SCORED, "cost.function=mine:cost"],
}
"""Algorithms that need more than a model and data, beside those that need a reward."""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    write_config(tmp_path / "model", max_position_embeddings=2048)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n' * 800)
    return tmp_path


def own(algorithm):
    scored = SCORED if "reward" in ALGORITHMS[algorithm].traits.reads else OWN
    return EXTRA.get(algorithm, list(scored))


def test_four_keys_of_a_file_are_enough(folder):
    given = {"algorithm": "grpo", "model": "model", "data": "train.jsonl", "reward": "mine:score"}
    (folder / "short.yaml").write_text(yaml.safe_dump(given))
    recipe = load_recipe("short.yaml", ["data.held_out=train.jsonl"])
    assert (recipe.name, recipe.run_dir, recipe.cluster.ranks) == ("short", "runs/short", 1)
    assert (recipe.model.path, recipe.data.train, recipe.reward.function) == ("model", "train.jsonl", "mine:score")
    assert recipe.actor.update == ParallelLayout(dp=1) and recipe.actor.optimizer.lr == 1e-6
    assert (recipe.rollout.group_size, recipe.rollout.max_new_tokens) == (8, 256)
    # One epoch: 800 prompts, 16 a step.
    assert (recipe.trainer.global_batch_size, recipe.trainer.steps) == (128, 50)
    assert load_recipe("short.yaml", ["data.held_out=train.jsonl", "model.max_context=64"]).rollout.max_new_tokens == 32


def test_a_key_that_is_given_stays_and_decides_others():
    recipe = load_recipe("grpo", [*SCORED, "rollout.group_size=6", "trainer.mini_batch_size=9", "actor.optimizer.lr=1"])
    # The least number from 128 on that holds whole groups and whole mini-batches.
    assert recipe.trainer.global_batch_size == 144 and recipe.actor.optimizer.lr == 1.0
    assert "rollout.group_size" not in recipe.defaults and recipe.defaults["trainer.global_batch_size"] == 144
    assert load_recipe("grpo", [*SCORED, "trainer.global_batch_size=64"]).rollout.group_size == 8
    lora = load_recipe("grpo", [*SCORED, "actor.lora.rank=4"])
    assert lora.actor.optimizer.lr == pytest.approx(1e-5)


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_every_algorithm_runs_on_any_number_of_ranks(algorithm, ranks):
    recipe = load_recipe(algorithm, own(algorithm), num_ranks=ranks)
    assert recipe.cluster.ranks == recipe.defaults["cluster.ranks"] == ranks
    assert {mesh.layout.world_size for mesh in role_meshes(recipe).values()} == {ranks}
    assert set(recipe.defaults) <= set(resume_rules(Recipe))
    assert recipe_from_dict(to_dict(recipe)) == recipe and not recipe_from_dict(to_dict(recipe)).defaults


def test_memory_is_planned_for_sequences_of_usual_length(folder):
    write_config(folder / "long", max_position_embeddings=131072)
    long = ["model=long", *SCORED[1:]]
    recipe = load_recipe("grpo", long)
    assert recipe.model.max_context == recipe.defaults["model.max_context"] == 4096
    assert load_recipe("grpo", [*long, "model.max_context=8192"]).model.max_context == 8192
    sized = ["actor.update={}", "actor.optimizer.lr=1", "rollout.max_new_tokens=8", "trainer.steps=1"]
    recipe = load_recipe("grpo", [*long, *sized, "trainer.global_batch_size=8"])
    assert (recipe.model.max_context, recipe.rollout.group_size) == (4096, 8)


def test_critics_learn_beside_the_actor_or_on_their_own_ranks():
    beside = load_recipe("ppo", [*SCORED, "actor.update={tp: 2, dp: 2}"])
    assert beside.cluster.ranks == 4 and beside.critic.layout == beside.actor.update
    assert beside.critic.optimizer.lr == 1e-5
    apart = load_recipe("ppo", [*SCORED, "cluster.ranks=6", "actor.ranks=[0, 1, 2, 3]", "critic.ranks=[4, 5]"])
    assert (apart.actor.update.dp, apart.critic.layout.dp) == (4, 2)
    ahead = load_recipe("ppo", [*SCORED, "cluster.ranks=6", "actor.rollout_ranks=[4, 5]"])
    assert (ahead.actor.update.dp, ahead.actor.rollout.dp, ahead.critic.layout.dp) == (4, 2, 4)


def test_a_pair_is_two_examples_of_kto(folder):
    pair = '{"prompt": "1+2=", "chosen": "3", "rejected": "4"}\n'
    (folder / "pairs.jsonl").write_text(pair * 800)
    (folder / "named.jsonl").write_text(pair.replace("chosen", "better") * 800)
    (folder / "single.jsonl").write_text('{"prompt": "1+2=", "completion": "3", "wanted": true}\n' * 800)
    steps = {
        name: load_recipe("kto", [*own("kto"), f"data.train={name}.jsonl", *more]).trainer.steps
        for name, more in (("pairs", []), ("named", ["data.chosen_field=better"]), ("single", []))
    }
    # 32 examples a step.
    assert steps == {"pairs": 50, "named": 50, "single": 25}


def test_rows_that_cannot_be_counted_give_a_fixed_number_of_steps(folder):
    assert load_recipe("sft", own("sft")).trainer.steps == 25
    assert load_recipe("dpo", own("dpo")).trainer.steps == 25
    (folder / "few.jsonl").write_text("{}\n" * 3)
    assert load_recipe("sft", [*OWN, "data.train=few.jsonl"]).trainer.steps == 20
    (folder / "many.jsonl.gz").write_bytes(gzip.compress(b"{}\n" * 3200))
    assert load_recipe("sft", [*OWN, "data.train=many.jsonl.gz"]).trainer.steps == 100
    (folder / "rows.PQ").write_bytes(b"\n" * 3200)
    assert load_recipe("sft", [*OWN, "data.train=rows.PQ"]).trainer.steps == 200
    assert load_recipe("sft", [*OWN, "data.train=absent.jsonl"]).trainer.steps == 200
    assert load_recipe("sft", [*OWN, "data.train=rows.parquet"]).trainer.steps == 200


def test_the_launcher_decides_the_ranks_or_else_the_gpus(monkeypatch):
    recipe = load_recipe("grpo", SCORED)
    assert recipe_for_ranks(recipe, "grpo", SCORED, 4).actor.update.dp == 4
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3,5")
    assert load_recipe("grpo", SCORED).cluster.ranks == 3
    fixed = load_recipe("grpo", [*SCORED, "cluster.ranks=2"])
    with pytest.raises(LayoutError, match="4 ranks, but grpo's layouts need 2; these fit: cluster.ranks=4"):
        recipe_for_ranks(fixed, "grpo", SCORED, 4)
    cut = [*SCORED, "actor.update={tp: 2}"]
    with pytest.raises(LayoutError, match="4 ranks, but grpo's layouts need 2; these fit: cluster.ranks=4"):
        recipe_for_ranks(load_recipe("grpo", cut), "grpo", cut, 4)


def test_a_shipped_recipe_is_itself_until_model_and_data_are_named():
    assert load_recipe("grpo").cluster.ranks == 4 and load_recipe("grpo", OWN[1:]).model.num_layers == 2
    assert load_recipe("ppo").name == "quickstart" and load_recipe("ppo", OWN).name == "ppo"
    assert load_recipe("grpo", OWN).warm_start is None


@pytest.mark.parametrize(
    ("name", "overrides", "says"),
    [
        ("safe-rlhf", OWN, ["cost: missing; algorithm=safe-rlhf needs this section"]),
        ("distill", OWN, ["teacher: missing; algorithm=distill needs this section"]),
        ("grpo", [*OWN, "actor=null"], ["actor: expected a section with keys"]),
        ("grpo", [*OWN, "cluster.ranks=many"], ["cluster.ranks: expected an integer of at least 1"]),
        ("grpo", [*OWN, "actor.update=tp2"], ["actor.update: expected a section with keys tp"]),
        ("grpo", [*OWN, "model.max_context=long"], ["model.max_context: expected an integer"]),
        ("grpo", [*OWN, "actor.ranks=3"], ["actor.ranks: expected a list of integers"]),
        (
            "grpo",
            [*OWN, "fallbacks=[{ranks: 1}]", "cluster.ranks=2", "actor.update.tp=2"],
            ["fallbacks[0]", "≠ 1 ranks"],
        ),
    ],
)
def test_what_is_wrong_is_told_in_spite_of_defaults(name, overrides, says):
    complains(lambda: load_recipe(name, overrides), says, (ConfigError, LayoutError))


def test_a_critic_or_a_scorer_of_its_own_has_its_own_sizes(folder):
    write_config(folder / "scorer", SCORER, hidden_size=16, max_position_embeddings=2048)
    recipe = load_recipe("ppo", [*SCORED, "critic.model.path=scorer"])
    assert recipe.model_of("critic").hidden_size == 16 and recipe.critic.layout == ParallelLayout(dp=1)


def test_a_plan_shows_what_was_left_out(capsys):
    assert cli.main(["plan", "job", "grpo", *SCORED]) == 0
    out = capsys.readouterr().out
    assert out.startswith("left out of the recipe, and set to\n  name ")
    for line in (
        "actor.update                {dp: 1}",
        "actor.optimizer.lr          1.0e-06",
        "rollout.group_size          8",
    ):
        assert f"  {line}\n" in out
    assert cli.main(["plan", "job", "grpo"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("left out of the recipe, and set to\n  trainer.micro_batch_tokens  4096\n\n")
    assert cli.main(["plan", "job", "grpo", "trainer.micro_batch_tokens=4096"]) == 0
    assert "left out" not in capsys.readouterr().out
