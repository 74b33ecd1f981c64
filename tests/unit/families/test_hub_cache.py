"""A model's name of Hugging Face's hub means its copy in the cache, in recipes and commands."""

import json

import pytest

from hybridflow import cli
from hybridflow.api.roles import split_model
from hybridflow.checkpoint.formats.peft_dir import base_of
from hybridflow.errors import ConfigError, MissingFileError
from hybridflow.families.hub_cache import data_set_hint, download_hint, find_model, hub_name, model_name
from hybridflow.recipe.load import load_recipe
from tests.support.recipes import write_config

NAME, REVISION = "Org/Model-1.5B_x", "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def snapshot(tmp_path, monkeypatch):
    """A cache as huggingface_hub lays it: files are links to blobs. In a working directory without the model."""
    folder = tmp_path / "hf/hub/models--Org--Model-1.5B_x"
    blobs = write_config(folder / "blobs")
    (blobs / "config.json").rename(blobs / "aaaa")
    found = folder / "snapshots" / REVISION
    found.mkdir(parents=True)
    (found / "config.json").symlink_to("../../blobs/aaaa")
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(REVISION)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return found


def test_a_name_means_the_copy_in_the_cache_and_a_directory_comes_first(snapshot, tmp_path, monkeypatch):
    assert find_model(NAME) == snapshot and model_name(snapshot) == NAME
    own = write_config(tmp_path / "here" / NAME)
    assert find_model(NAME).resolve() == own and model_name(own) == "Model-1.5B_x"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "other"))
    assert str(find_model(NAME)) == NAME
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".cache").mkdir()
    (tmp_path / "hf").rename(tmp_path / ".cache/huggingface")
    assert find_model(NAME).name == REVISION


@pytest.mark.parametrize("broken", ["no revision", "a path as the revision", "no settings", "no text"])
def test_a_damaged_cache_has_no_copy(snapshot, broken):
    reference = snapshot.parents[1] / "refs/main"
    if broken == "no revision":
        reference.unlink()
    elif broken == "no settings":
        (snapshot / "config.json").unlink()
    else:
        reference.write_bytes(b"../../../elsewhere" if broken.startswith("a path") else b"\xff")
    assert str(find_model(NAME)) == NAME


def test_other_paths_are_no_names(snapshot):
    for path in ("", "Model", "../Org/Model", "/Org/Model", "a/b/c", "./Model", "Org/..", "-"):
        assert str(find_model(path)) in (path, ".", "Model") and download_hint(path) == ""


def test_a_path_of_this_machine_is_not_to_be_downloaded(snapshot, tmp_path):
    assert "hf download Org/Other" in download_hint("Org/Other")
    (tmp_path / "here/Org").mkdir()
    assert download_hint("Org/Other") == download_hint("models/llama") == ""
    # What a shipped recipe names is fetched by the command at its head.
    model, data = "models/Qwen2.5-0.5B-Instruct", "data/gsm8k/main/train-*.parquet"
    assert download_hint(model) == f"; `hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir {model}` fetches it"
    says = "; `hf download openai/gsm8k --repo-type dataset --local-dir data/gsm8k` fetches it"
    assert data_set_hint(data) == says and data_set_hint("data/train.jsonl") == ""


def test_a_recipe_takes_the_name(snapshot):
    recipe = load_recipe("grpo", [f"model={NAME}", "data=rows.jsonl", "reward=exact_match"])
    assert recipe.model.path == str(snapshot)
    words = r"model\.path='Org/Other': is not in .*; `hf download Org/Other` puts a model of that name into the cache"
    with pytest.raises(MissingFileError, match=words):
        load_recipe("grpo", ["model=Org/Other", "data=rows.jsonl", "reward=exact_match"])


def test_an_adapter_names_its_base(snapshot, tmp_path):
    settings = tmp_path / "adapter_config.json"
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}
    settings.write_text(json.dumps({**values, "base_model_name_or_path": NAME}))
    assert base_of(tmp_path) == snapshot and hub_name(snapshot) == NAME and hub_name(tmp_path) is None
    settings.write_text(json.dumps({**values, "base_model_name_or_path": "Org/Other"}))
    with pytest.raises(ConfigError, match="base_model_name_or_path=.*--base DIR; `hf download Org/Other`"):
        base_of(tmp_path)


def test_a_program_gives_the_name(snapshot):
    assert split_model(NAME, "actor") == ({"path": str(snapshot)}, {})
    assert split_model("Org/Other", "actor") == ({"path": "Org/Other"}, {})


def test_init_takes_the_name(snapshot, tmp_path, capsys):
    (tmp_path / "here/rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    given = ["init", "--algorithm", "grpo", "--data", "rows.jsonl", "--reward", "exact_match", "--model"]
    assert cli.main([*given, NAME]) == 0
    assert f"model: {NAME}  # in Hugging Face's cache\n" in (tmp_path / "here/recipe.yaml").read_text()
    assert cli.main([*given, "Org/Other", "--force"]) == 2
    assert "--model 'Org/Other': no such directory; name one that is there; `hf download" in capsys.readouterr().err
