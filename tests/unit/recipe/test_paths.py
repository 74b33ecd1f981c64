"""Recipes whose models lie in directories: what is read, what may stand beside it, what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hybridflow.checkpoint.manifest import Manifest, to_json
from hybridflow.errors import CheckpointError, ConfigError, LayoutError
from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.recipe.load import find_recipe, load_recipe, recipe_from_dict
from hybridflow.recipe.meshes import role_meshes
from hybridflow.sections import to_dict
from tests.support.complaints import complains
from tests.support.recipes import POLICY, SCORER, SMALLEST, write_config

RECIPE = re.sub("model: .*", "model: {path: MODEL}", SMALLEST)
OTHERWISE = {"num_key_value_heads": 2, "rope_theta": 50000.0, "torch_dtype": "bfloat16"}
LLAMA, LLAMA_SCORER = {**POLICY, **OTHERWISE}, {**SCORER, **OTHERWISE}


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE.replace("MODEL", str(write_config(tmp_path / "model", LLAMA))))
    return path


def test_a_run_is_the_actor_of_its_latest_checkpoint(recipe_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = load_recipe(recipe_file).model
    for step, context in (("step_000002", 32), ("step_000003", 48)):
        actor = tmp_path / "run/checkpoints" / step / "actor"
        actor.mkdir(parents=True)
        held = Manifest(model=replace(settings, max_context=context), tensors={}, pieces=(), file_bytes={})
        (actor / "manifest.json").write_text(to_json(held))
    for given, step, context in (
        ("run", "step_000003", 48),
        ("run/checkpoints/step_000002", "step_000002", 32),
        ("run/checkpoints/step_000002/actor", "step_000002", 32),
    ):
        model = load_recipe(recipe_file, [f"model={given}"]).model
        assert (model.path, model.max_context) == (f"run/checkpoints/{step}/actor", context)
    (tmp_path / "run/checkpoints/latest").write_text("step_000002\n")
    assert load_recipe(recipe_file, ["model=run"]).model.path == "run/checkpoints/step_000002/actor"


def test_settings_are_read_and_need_not_be_written(recipe_file, tmp_path):
    model = load_recipe(recipe_file).model
    assert model == ModelConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        max_context=64,
        vocab_size=45,
        rotary_base=50000.0,
        norm_eps=1e-6,
        dtype="bf16",
    )
    assert model.path == str(tmp_path / "model")


def test_settings_of_a_model_directory_are_those_of_its_manifest(recipe_file, tmp_path):
    settings = replace(load_recipe(recipe_file).model, vocab_divisible_by=8)
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "manifest.json").write_text(to_json(Manifest(model=settings, tensors={}, pieces=(), file_bytes={})))
    assert str(tmp_path / "model") not in (ours / "manifest.json").read_text()
    model = load_recipe(recipe_file, [f"model.path={ours}"]).model
    assert model == settings and model.path == str(ours)
    (ours / "manifest.json").write_text((ours / "manifest.json").read_text().replace("45", "46"))
    with pytest.raises(CheckpointError, match=r"model\.path='.*ours'.*manifest\.json: found sha256"):
        load_recipe(recipe_file, [f"model.path={ours}"])


def test_what_does_not_touch_the_weights_may_stand_beside_the_path(recipe_file):
    model = load_recipe(recipe_file, ["model.max_context=32", "model.dtype=fp32", "model.vocab_divisible_by=16"]).model
    assert (model.max_context, model.dtype, model.vocab_divisible_by, model.num_layers) == (32, "fp32", 16, 2)


def test_a_whole_section_in_an_override_is_completed_too(recipe_file, tmp_path):
    recipe = load_recipe(recipe_file, [f"model={{path: {tmp_path / 'model'}, max_context: 48}}"])
    assert recipe.model.num_layers == 2 and recipe.model.max_context == 48


def test_a_saved_recipe_loads_again(recipe_file, tmp_path):
    own = [f"critic.model.path={write_config(tmp_path / 'critic', LLAMA_SCORER, hidden_size=16)}"]
    own += [f"reward.model.path={tmp_path / 'critic'}", "reward.layout={pp: 2, dp: 2}"]
    recipe = load_recipe(recipe_file, own)
    assert recipe.model_of("critic").hidden_size == 16 and recipe.model_of("actor.update").hidden_size == 32
    again = recipe_from_dict(json.loads(json.dumps(to_dict(recipe))))
    assert again == recipe and to_dict(again) == to_dict(recipe)


def test_critic_and_reward_are_cut_as_what_they_are(recipe_file, tmp_path):
    """Four layers and eight heads, where the actor has two and four."""
    wide = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8}
    path = write_config(tmp_path / "wide", LLAMA_SCORER, **wide)
    own = [f"critic.model.path={path}", "critic.layout={pp: 4}", f"reward.model.path={path}"]
    meshes = role_meshes(load_recipe(recipe_file, own))
    assert meshes["critic"].layout == ParallelLayout(pp=4)
    assert meshes["reward"].layout == ParallelLayout(tp=2, dp=2) and meshes["reward"].ranks == (0, 1, 2, 3)
    eight = ["cluster.ranks=8", "actor.ranks=[0, 1, 2, 3]", "critic.ranks=[4, 5, 6, 7]"]
    apart = ["reward.layout={tp: 8}", "reward.ranks=[0, 1, 2, 3, 4, 5, 6, 7]"]
    assert role_meshes(load_recipe(recipe_file, [*own, *eight, *apart]))["reward"].layout == ParallelLayout(tp=8)
    with pytest.raises(LayoutError, match=r"critic: pp=4 is above model\.num_layers=2"):
        load_recipe(recipe_file, own[1:])
    with pytest.raises(LayoutError, match=r"reward\.ranks=\[2, 9\]: \[9\] not among"):
        load_recipe(recipe_file, [*own, "reward.ranks=[2, 9]"])


@pytest.mark.parametrize(
    ("changes", "overrides", "says"),
    [
        ({}, ["model.num_layers=4"], ["model.num_layers=4", "/model' has 2", "leave the key out", "max_context"]),
        ({}, ["model.rotary_base=10000.0"], ["model.rotary_base=10000.0", "has 50000.0"]),
        ({}, ["model.vocab_size=null"], ["model.vocab_size=None", "has 45"]),
        ({}, ["model.path=nowhere"], ["model.path='nowhere'", "config.json", "manifest.json", "nothing there"]),
        ({}, ["model.path=."], ["model.path='.'", "a directory without either"]),
        (
            {},
            ["critic.model.path=run"],
            ["a directory without either", "of a run name a model: run/checkpoints/step_000003/"],
        ),
        (
            {},
            ["critic.model.path=run/checkpoints/step_000003"],
            ["of a checkpoint name a model: run/checkpoints/step_000003/a"],
        ),
        ({}, ["model.path=run/checkpoints/step_000002/actor"], ["run has step_000003: name one of them"]),
        ({}, ["model.path=other/checkpoints/step_000000/actor"], ["nothing there; train the run other first"]),
        ({}, ["model.path=[3]"], ["model.path: expected text or null, found [3]"]),
        ({}, ["model=3"], ["model: expected a section"]),
        ({"model_type": None}, [], ["model.path=", "config.json: model_type=None", "llama"]),
        ({"model_type": "bloom", "hidden_size": None}, [], ["config.json: hidden_size: missing", "'bloom'"]),
        ({"attention_dropout": 0.1}, [], ["attention_dropout=0.1", "set it to 0"]),
        (SCORER, [], ["model.path=", "is a scorer, which gives no text", "critic.model.path"]),
        ({**SCORER, "num_labels": 2}, [], ["2 labels", "with one label"]),
        ({}, ["model.max_context=8"], ["rollout.max_new_tokens=8", "model.max_context=8"]),
        ({}, ["reward.model.path=MODEL"], ["reward.model.path=", "is a language model, which gives no score"]),
        ({}, ["reward.layout={dp: 4}"], ["reward.layout: a function has no weights", "reward.model.path"]),
        ({}, ["critic.model={path: MODEL, max_context: 16}"], ["critic.model.max_context=16 is shorter", "=64"]),
        ({}, ["reward.model={path: nowhere}"], ["reward.model.path='nowhere'"]),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(recipe_file, tmp_path, monkeypatch, changes, overrides, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run/checkpoints/step_000003/actor").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step_000003/actor/manifest.json").touch()
    write_config(tmp_path / "model", LLAMA, **changes)
    given = [text.replace("MODEL", str(tmp_path / "model")) for text in overrides]
    complains(lambda: load_recipe(recipe_file, given), says, ConfigError)


def test_a_reward_is_a_function_or_a_model(recipe_file, tmp_path):
    write_config(tmp_path / "scorer", LLAMA_SCORER)
    own = f"reward.model.path={tmp_path / 'scorer'}"
    with pytest.raises(ConfigError, match=r"reward\.function='mine:close': would not be called"):
        load_recipe(recipe_file, [own, "reward.function=mine:close"])
    shape = yaml.safe_dump({**to_dict(load_recipe(recipe_file).model), "path": None}, default_flow_style=True)
    with pytest.raises(ConfigError, match=r"reward\.model\.path: missing"):
        load_recipe(recipe_file, [f"reward.model={shape}"])


@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_settings_are_a_damaged_checkpoint(recipe_file, tmp_path, content):
    (tmp_path / "model/config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.path=.*config\.json: found .*expected"):
        load_recipe(recipe_file)


def test_recipe_of_the_documentation(tmp_path, monkeypatch):
    """Its parts, put over the quickstart, with such directories there."""
    page = (Path(__file__).parents[3] / "docs/pretrained.md").read_text(encoding="utf-8")
    parts = re.findall(r"^```yaml\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    *parts, distillation = parts
    values = yaml.safe_load(find_recipe("quickstart").read_text(encoding="utf-8")) | yaml.safe_load("".join(parts))
    monkeypatch.chdir(tmp_path)
    for name, config in (("policy", LLAMA), ("value", LLAMA_SCORER), ("score", LLAMA_SCORER)):
        write_config(tmp_path / "models" / name, config)
    recipe = recipe_from_dict(values, source="docs/pretrained.md")
    write_config(tmp_path / "runs/sft/checkpoints/step_000600/actor", LLAMA)
    values = yaml.safe_load(find_recipe("distill").read_text(encoding="utf-8")) | yaml.safe_load(distillation)
    assert recipe_from_dict(values, source="docs/pretrained.md").teacher.model.num_layers == LLAMA["num_hidden_layers"]
    assert len(parts) == 3 and recipe.model_of("reward").path == "models/score" and recipe.model.max_context == 512
