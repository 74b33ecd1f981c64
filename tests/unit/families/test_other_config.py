"""Sizes of models without a table: read from ``config.json`` as ``transformers`` has them, under all their names."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from hybridflow.checkpoint.formats.registry import open_source
from hybridflow.checkpoint.model_info import read_model_info
from hybridflow.errors import ConfigError
from hybridflow.families.other_config import has_no_table, read_other_config
from tests.support.complaints import complains
from tests.support.conversions import convert

TYPES = ("stablelm", "falcon", "granite", "gpt2", "gpt_neox", "gpt_bigcode", "opt", "olmo", "starcoder2", "gptj")
SIZES: dict[str, Any] = {
    "model_type": "stablelm",
    "architectures": ["StableLmForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "max_position_embeddings": 64,
    "vocab_size": 45,
}


@pytest.mark.parametrize("name", TYPES)
def test_sizes_are_those_of_transformers(name, tmp_path):
    config = transformers.AutoConfig.for_model(name)
    config.save_pretrained(tmp_path)
    found = read_model_info(tmp_path)
    assert (found.family, found.has_value_head, found.assets) == (name, False, tmp_path)
    model = found.model
    assert (model.num_layers, model.hidden_size) == (config.num_hidden_layers, config.hidden_size)
    assert (model.vocab_size, model.max_context) == (config.vocab_size, config.max_position_embeddings)
    assert (model.num_attention_heads, model.implementation) == (config.num_attention_heads, "transformers")
    assert not model.trust_remote_code


def test_what_is_left_out_is_estimated_and_experts_are_counted():
    model = read_other_config(SIZES, where="config.json").model
    assert (model.num_attention_heads, model.ffn_hidden_size, model.tied_embeddings, model.dtype) == (
        1,
        128,
        False,
        "fp32",
    )
    mixture = read_other_config(
        {**SIZES, "intermediate_size": 48, "num_local_experts": 4, "dtype": "bfloat16"}, where="config.json"
    ).model
    assert (mixture.ffn_hidden_size, mixture.dtype) == (192, "bf16")


def test_a_scorer_has_one_label():
    scorer = {**SIZES, "architectures": ["StableLmForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    assert read_other_config(scorer, where="config.json").has_value_head


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": None}, ["c: num_hidden_layers: missing", "model_type='stablelm'", "add the key"]),
        ({"vocab_size": 0}, ["c: vocab_size: missing"]),
        ({"max_position_embeddings": "long"}, ["c: max_position_embeddings: missing"]),
        ({"architectures": ["StableLmForTokenClassification"]}, ["architectures=", "*ForCausalLM", "one label"]),
        ({"architectures": ["XForSequenceClassification"], "num_labels": 3}, ["architectures=", "one label"]),
        ({"architectures": ["AForCausalLM", "BForCausalLM"]}, ["architectures="]),
        ({"id2label": 3}, ["c: is malformed", "restore it"]),
        ({"architectures": "StableLmForCausalLM"}, ["architectures="]),
        ({"hidden_size": 1 << 40}, ["hidden_size"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config", "choose another model"]),
    ],
)
def test_what_cannot_be_trained_is_refused(changes, words):
    complains(lambda: read_other_config({**SIZES, **changes}, where="c"), words, ConfigError)


def test_a_manifest_cannot_ask_to_trust_code(tmp_path):
    """Whose Python files run is said in the recipe alone."""
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "trust_remote_code": True}))
    assert not read_model_info(tmp_path).model.trust_remote_code


def test_families_with_a_table_are_read_by_it():
    assert not has_no_table({"model_type": "llama"}) and not has_no_table({"model_type": ["falcon"]})
    assert not has_no_table({}) and has_no_table({"model_type": "falcon"})


def test_code_and_tokenizer_of_a_directory_travel_along(tmp_path):
    """Its ``config.json`` names the code, so that the copy could not be loaded without."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**SIZES, "auto_map": {"AutoModelForCausalLM": "own.Own"}}))
    save_file({"w": torch.ones(2, 2)}, model / "model.safetensors")
    for name in ("own.py", "tokenization_own.py", "tiktoken.model", "vocab.txt"):
        (model / name).write_text(name)
    again = convert(model, "hf", tmp_path / "again")
    assert sorted(file.name for file in again.iterdir()) == sorted(file.name for file in model.iterdir())
    assert (again / "own.py").read_text() == "own.py"


@pytest.mark.parametrize("has_index", [False, True])
def test_masks_of_older_files_are_left_out(has_index, tmp_path):
    """``transformers`` 4 saved those of GPT-NeoX as booleans, and those of GPT-J as bytes."""
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    masks = {"a.bias": torch.ones(3, 3, dtype=torch.bool), "b.bias": torch.ones(5, dtype=torch.uint8)}
    tensors = {**masks, "c.weight": torch.arange(4.0)}
    save_file(tensors, tmp_path / "model.safetensors")
    if has_index:
        places = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(places))
    source = open_source(tmp_path)
    assert [*source.tensors] == ["c.weight"] and torch.equal(source.read("c.weight"), tensors["c.weight"])
