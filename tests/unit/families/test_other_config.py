"""Sizes of models without a table: read from ``config.json`` as ``transformers`` has them, under all their names."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from hybridflow.checkpoint.formats.registry import open_source
from hybridflow.checkpoint.model_info import read_model_info
from hybridflow.errors import ConfigError
from hybridflow.families.other_config import has_no_table, read_other_config
from hybridflow.models.shapes import model_spec
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
    assert (mixture.ffn_hidden_size, mixture.num_experts, mixture.dtype) == (48, 4, "bf16")


def test_newer_spellings_are_known(tmp_path):
    """Kimi Linear and Bailing tell the longest sequence, and Nemotron-H the layers, in a way of their own."""
    transformers.KimiLinearConfig(max_position_embeddings=96).save_pretrained(tmp_path / "kimi")
    assert read_model_info(tmp_path / "kimi").model.max_context == 96
    kinds = ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"]
    transformers.NemotronHConfig(layers_block_type=kinds).save_pretrained(tmp_path / "nemotron")
    assert read_model_info(tmp_path / "nemotron").model.num_layers == 5


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Olmoe", {"num_experts": 8}),
        ("Qwen2Moe", {"num_experts": 8, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 320}),
        ("Glm4Moe", {"n_routed_experts": 8, "moe_intermediate_size": 96, "n_shared_experts": 2, "head_dim": 64}),
        ("Ernie4_5_Moe", {"moe_num_experts": 8, "moe_intermediate_size": 96, "moe_num_shared_experts": 2}),
        ("Gemma3", {}),
    ],
)
def test_plans_count_the_parameters_of_mixtures_and_of_models_with_a_part_for_text(name, changes):
    """The sizes say how many there are, but for small ones and a vision tower."""
    sizes = {"num_hidden_layers": 3, "hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 64, **changes}
    if name == "Gemma3":
        config = transformers.Gemma3Config(text_config={**sizes, "head_dim": 64}, vision_config={"hidden_size": 24})
    else:
        config = getattr(transformers, f"{name}Config")(**sizes, tie_word_embeddings=False)
    kind = "Gemma3ForConditionalGeneration" if name == "Gemma3" else f"{name}ForCausalLM"
    with torch.device("meta"):
        module = getattr(transformers, kind)(config)
    values = {**json.loads(config.to_json_string()), "architectures": [kind]}
    spec = model_spec(read_other_config(values, where="config.json").model)
    text = sum(
        each.numel() for key, each in module.named_parameters() if "vision" not in key and "projector" not in key
    )
    assert sum(math.prod(tensor.shape) for tensor in spec.tensors) == pytest.approx(text, rel=0.02)


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
        ({"quantization_config": {"bits": 4}}, ["quantization_config", "as it was before"]),
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


@pytest.mark.parametrize(
    ("changes", "is_other"),
    [
        ({}, False),
        ({"attention_bias": True}, True),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, True),
        ({"partial_rotary_factor": 0.75}, True),
        ({"attention_dropout": 0.1}, False),
        ({"quantization_config": {"quant_method": "gptq"}, "attention_bias": True}, False),
    ],
)
def test_what_a_table_does_not_compute_runs_in_transformers(changes, is_other, tmp_path):
    values = {**transformers.LlamaConfig().to_dict(), "architectures": ["LlamaForCausalLM"], **changes}
    assert has_no_table(values) == is_other
    (tmp_path / "config.json").write_text(json.dumps(values))
    if is_other:
        info = read_model_info(tmp_path)
        assert info.model.implementation == "transformers" and info.family == "llama"


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
