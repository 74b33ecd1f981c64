"""Models that see read as their language models, which are what ``transformers`` takes them for."""

import copy
import json
from pathlib import Path

import pytest

from hybridflow.errors import CheckpointError
from hybridflow.families.assets import ends_in
from hybridflow.families.config_json import NotComputedError, read_config, update_config
from hybridflow.families.other_config import has_no_table, read_info
from hybridflow.families.tables import FAMILIES
from hybridflow.families.vision import VISION_MODELS, text_names

GEMMA3 = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "model_type": "siglip_vision_model"},
}
PUBLISHED = {
    "Gemma 3 4B": {
        **GEMMA3,
        "text_config": {
            **dict(hidden_size=2560, intermediate_size=10240, model_type="gemma3_text", num_hidden_layers=34),
            **dict(rope_scaling={"factor": 8.0, "rope_type": "linear"}, sliding_window=1024),
        },
    },
    "Gemma 3 27B": {
        **GEMMA3,
        "text_config": {
            **dict(head_dim=128, hidden_size=5376, intermediate_size=21504, model_type="gemma3_text"),
            **dict(num_attention_heads=32, num_hidden_layers=62, num_key_value_heads=16, query_pre_attn_scalar=168),
            **dict(rope_scaling={"factor": 8.0, "rope_type": "linear"}, sliding_window=1024),
        },
    },
    "Qwen3-VL 4B": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": 151655,
        "model_type": "qwen3_vl",
        "text_config": {
            **dict(attention_bias=False, attention_dropout=0.0, bos_token_id=151643, eos_token_id=151645),
            **dict(dtype="bfloat16", head_dim=128, hidden_act="silu", hidden_size=2560, intermediate_size=9728),
            **dict(max_position_embeddings=262144, model_type="qwen3_vl_text", num_attention_heads=32),
            **dict(num_hidden_layers=36, num_key_value_heads=8, rms_norm_eps=1e-6, rope_theta=5000000),
            **dict(rope_scaling={"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}),
            **dict(tie_word_embeddings=True, vocab_size=151936),
        },
        "tie_word_embeddings": True,
        "vision_config": {"depth": 24, "hidden_size": 1024, "model_type": "qwen3_vl"},
    },
}
EXPECTED = {
    "Gemma 3 4B": (34, 2560, 8, 4, 256, 262208, 131072, 1e6, True, "bf16"),
    "Gemma 3 27B": (62, 5376, 32, 16, 128, 262208, 131072, 1e6, True, "bf16"),
    "Qwen3-VL 4B": (36, 2560, 32, 8, 128, 151936, 262144, 5e6, True, "bf16"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_read_as_what_they_are(name):
    model = read_config(PUBLISHED[name], where="config.json").model
    assert EXPECTED[name] == (
        *(model.num_layers, model.hidden_size, model.num_attention_heads, model.query_groups, model.head_size),
        *(model.vocab_size, model.max_context, model.rotary_base, model.tied_embeddings, model.dtype),
    )
    assert model.implementation == "megatron"
    if name != "Qwen3-VL 4B":
        scaling = model.rotary_scaling
        assert (model.window, scaling.kind, scaling.factor) == (1024, "linear", 8.0)
        assert {*range(model.num_layers)} - {*model.window_layers} == {*range(5, model.num_layers, 6)}


def test_one_in_memory_runs_in_transformers():
    """It has no directory from which an export could copy the rest."""
    whole = {**PUBLISHED["Qwen3-VL 4B"]}
    assert read_info(whole, where="config").model.implementation == "transformers"
    assert read_info(whole, where="config", assets=Path("models/qwen3-vl")).model.implementation == "megatron"


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_a_published_file_leaves_out_has_the_default_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    given = copy.deepcopy(PUBLISHED[name])
    kind = {"gemma3": transformers.Gemma3Config, "qwen3_vl": transformers.Qwen3VLConfig}[given["model_type"]]
    written = {**json.loads(kind(**copy.deepcopy(given)).to_json_string()), "architectures": given["architectures"]}
    assert read_config(written, where="w").model == read_config({**given, "dtype": "bfloat16"}, where="g").model
    for key in ("max_position_embeddings", "rope_theta", "rope_scaling"):
        given["text_config"].pop(key, None)
    written = json.loads(kind(**copy.deepcopy(given)).to_json_string())
    assert read_config(written, where="w").model == read_config({**given, "dtype": "bfloat16"}, where="g").model


def test_a_stretched_rotary_embedding_of_qwen3_vl_is_computed():
    """As for a million tokens: the dims that tell pictures from text are no part of it."""
    values = copy.deepcopy(PUBLISHED["Qwen3-VL 4B"])
    values["text_config"]["rope_scaling"] |= dict(rope_type="yarn", factor=3.0, original_max_position_embeddings=262144)
    scaling = read_config(values, where="config.json").model.rotary_scaling
    assert (scaling.kind, scaling.factor, scaling.original_context) == ("yarn", 3.0, 262144)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["Gemma3ForSequenceClassification"]},
        {"quantization_config": {"quant_method": "fp8"}},
        {"text_config": {**PUBLISHED["Gemma 3 4B"]["text_config"], "model_type": "gemma2"}},
        {"text_config": {**PUBLISHED["Gemma 3 4B"]["text_config"], "attn_logit_softcapping": 50.0}},
        {"text_config": None},
        {"text_config": 3},
    ],
)
def test_others_have_no_table(changes):
    values = {**PUBLISHED["Gemma 3 4B"], **changes}
    assert has_no_table(values)


def test_what_is_not_computed_is_named():
    values = copy.deepcopy(PUBLISHED["Gemma 3 4B"])
    values["text_config"]["use_bidirectional_attention"] = True
    with pytest.raises(NotComputedError, match="use_bidirectional_attention=True is not computed for gemma3_text"):
        read_config(values, where="config.json")


def test_ends_of_a_response_are_those_of_the_language_model():
    """As GenerationConfig.from_model_config of ``transformers`` has it; what the whole says goes before."""
    text = json.dumps(PUBLISHED["Qwen3-VL 4B"]).encode()
    assert ends_in({"config.json": text}).eos_ids == (151645,)
    assert ends_in({"config.json": json.dumps(PUBLISHED["Gemma 3 4B"]).encode()}).eos_ids == (1, 106)


def test_files_without_a_language_model_are_refused():
    with pytest.raises(CheckpointError, match="missing: model.language_model.embed_tokens.weight or"):
        text_names({"vision_tower.x", "model.embed_tokens.weight"}, FAMILIES["gemma3_text"], "models/x")


def test_the_docs_name_every_model_that_sees():
    page = (Path(__file__).parents[3] / "docs/families.md").read_text()
    for model in VISION_MODELS.values():
        assert f"| `{model.name}` | `{model.family}` |" in page


def test_vllm_gets_the_language_model_alone():
    """Its settings and names are those of a model of text, which vLLM knows."""
    described = read_config(PUBLISHED["Gemma 3 4B"], where="config.json")
    config = update_config(None, described, dtype="bfloat16")
    assert (config["model_type"], config["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])


@pytest.mark.parametrize("name", VISION_MODELS)
def test_the_class_of_the_language_model_is_what_the_table_says(name):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(name)
    assert config.get_text_config().model_type == VISION_MODELS[name].text
    assert type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    found = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)].__name__
    assert found == VISION_MODELS[name].causal
