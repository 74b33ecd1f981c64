"""A model section without a path lists only what differs from the actor's model."""

import json
import re
from dataclasses import replace

import pytest
import yaml

from hybridflow.errors import ConfigError
from hybridflow.families.model import RotaryScaling
from hybridflow.recipe.load import recipe_from_dict
from hybridflow.sections import to_dict
from tests.support.recipes import SCORER, SMALLEST, write_config

RECIPE = yaml.safe_load(SMALLEST) | yaml.safe_load("""
algorithm: safe-rlhf
cluster: {ranks: 1}
actor: {update: {}, optimizer: {lr: 1e-3}}
critic: {layout: {}, optimizer: {lr: 1e-3}}
cost_critic: {layout: {}, optimizer: {lr: 1e-3}}
cost: {function: length}
""")
RECIPE["model"]["qkv_bias"] = True
OTHERWISE = {"num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 48, "num_attention_heads": 2}


def load(*overrides):
    return recipe_from_dict(RECIPE, overrides=overrides)


@pytest.fixture
def scorer(tmp_path):
    return write_config(tmp_path, SCORER, **OTHERWISE)


@pytest.mark.parametrize("role", ["critic", "cost_critic"])
def test_what_a_section_leaves_out_is_as_in_the_actors(role):
    recipe = load(f"{role}.model={{num_layers: 4, hidden_size: 64}}", "model.rotary_base=5e5")
    assert recipe.model_of(role) == replace(recipe.model, num_layers=4, hidden_size=64)
    assert recipe.model_of(role).rotary_base == 5e5 and recipe.model_of(role).qkv_bias


def test_an_empty_section_is_a_model_of_the_actors_shape_and_null_is_a_copy_of_the_actor():
    assert load("critic.model={}").critic.model == load().model
    assert load().critic.model is None


def test_a_null_is_a_value_and_not_left_out():
    recipe = load("model.num_query_groups=2", "critic.model.num_query_groups=null")
    assert recipe.model_of("critic").query_groups == 4 and recipe.model.query_groups == 2


def test_a_section_within_a_model_is_inherited_whole_or_given_whole():
    given = "model.rotary_scaling={kind: yarn, factor: 2, original_context: 8}"
    assert load(given, "critic.model={}").critic.model.rotary_scaling == RotaryScaling(
        kind="yarn", factor=2.0, original_context=8
    )
    changed = load(given, "critic.model.rotary_scaling={kind: linear, factor: 4}").critic.model
    assert changed.rotary_scaling == RotaryScaling(kind="linear", factor=4.0)
    with pytest.raises(ConfigError, match=r"critic\.model\.rotary_scaling\.kind: missing"):
        load(given, "critic.model.rotary_scaling.factor=4")


def test_a_section_with_a_path_inherits_nothing(scorer):
    recipe = load(f"critic.model.path={scorer}", "model.init_std=0.5", "reward.model.path=" + str(scorer))
    for role in ("critic", "reward"):
        model = recipe.model_of(role)
        assert (model.num_layers, model.hidden_size, model.max_context, model.qkv_bias) == (3, 16, 64, False)
        assert model.init_std == 0.02 and model.path == str(scorer)


def test_the_shape_of_an_actor_that_comes_from_a_directory_is_inherited_without_its_weights(tmp_path):
    values = {**RECIPE, "model": {"path": str(write_config(tmp_path)), "dtype": "bf16"}}
    recipe = recipe_from_dict(values, overrides=["critic.model.hidden_size=64"])
    assert recipe.model_of("critic") == replace(recipe.model, hidden_size=64)
    assert recipe.model_of("critic").path is None and recipe.model_of("critic").dtype == "bf16"


def test_a_recipe_with_inherited_keys_is_kept_whole_and_loads_again():
    recipe = load("critic.model.num_layers=4")
    kept = json.loads(json.dumps(to_dict(recipe)))
    assert kept["critic"]["model"].keys() == kept["model"].keys()
    assert recipe_from_dict(kept) == recipe
    # What is kept is no longer inherited.
    assert recipe_from_dict(kept, overrides=["model.num_layers=1"]).model_of("critic").num_layers == 4


def test_what_a_fallback_changes_is_inherited_too():
    fallback = {"ranks": 1, "overrides": ["model.max_context=64"]}
    values = {**RECIPE, "cluster": {"ranks": 1}, "fallbacks": [fallback]}
    assert recipe_from_dict(values, overrides=["critic.model.num_layers=4"]).fallbacks


def test_a_fallback_has_the_context_that_the_recipe_has(tmp_path):
    """Left out, it is cut to what most data has."""
    config = write_config(tmp_path / "long", max_position_embeddings=131072)
    critic = write_config(tmp_path / "short", max_position_embeddings=8192)
    values = {
        "algorithm": "ppo",
        "cluster": {"ranks": 2},
        "model": {"path": str(config)},
        "critic": {"model": {"path": str(critic)}},
        "data": {"train": "rows.jsonl"},
        "fallbacks": [{"ranks": 1}],
    }
    assert recipe_from_dict(values).model.max_context == 4096


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("critic.model.hiden_size=64", "critic.model.hiden_size: unknown key; did you mean critic.model.hidden_size?"),
        (
            "critic.model.num_layers=many",
            "critic.model.num_layers: expected an integer of at least 1 and at most 16384, found 'many'",
        ),
        ("critic.model.hidden_size=30", "critic.model.hidden_size=30 over critic.model.num_attention_heads=4"),
        ("critic.model.max_context=16", "critic.model.max_context=16 is shorter than model.max_context=32"),
        ("critic.model=3", "critic.model: expected a section with keys path, num_layers"),
        ("reward.model={}", "reward.model.path: missing; a model that was not trained scores nothing"),
        ("cost={model: {num_layers: 1}}", "cost.model.path: missing"),
    ],
)
def test_a_complaint_names_the_section_that_was_given(override, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        load(override)


def test_what_is_wrong_with_the_actors_model_is_said_of_that():
    with pytest.raises(ConfigError, match=r"recipe: model\.hidden_size: expected an integer"):
        recipe_from_dict({**RECIPE, "model": {**RECIPE["model"], "hidden_size": "wide"}}, overrides=["critic.model={}"])
