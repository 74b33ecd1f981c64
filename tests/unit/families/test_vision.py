"""Vision-language models read as their language models, which are what ``transformers`` takes them for."""

import contextlib
import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.families.assets import ends_in
from hybridflow.families.config_json import NotComputedError, read_config, update_config
from hybridflow.families.other_config import has_no_table, read_info
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
    "Qwen3.5 9B": {
        **dict(architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5", tie_word_embeddings=False),
        "text_config": {
            **dict(attn_output_gate=True, dtype="bfloat16", full_attention_interval=4, head_dim=256, hidden_size=4096),
            **dict(intermediate_size=12288, linear_conv_kernel_dim=4, linear_key_head_dim=128, mtp_num_hidden_layers=1),
            **dict(linear_num_key_heads=16, linear_num_value_heads=32, linear_value_head_dim=128),
            **dict(max_position_embeddings=262144, model_type="qwen3_5_text", num_attention_heads=16),
            **dict(num_hidden_layers=32, num_key_value_heads=4, rms_norm_eps=1e-6, vocab_size=248320),
            "rope_parameters": {
                **dict(mrope_interleaved=True, mrope_section=[11, 11, 10], partial_rotary_factor=0.25),
                **dict(rope_theta=10000000, rope_type="default"),
            },
        },
        "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5"},
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
FLAT = {
    **dict(architectures=["Qwen2_5_VLForConditionalGeneration"], attention_dropout=0.0, eos_token_id=151645),
    **dict(hidden_act="silu", hidden_size=3584, image_token_id=151655, intermediate_size=18944),
    **dict(max_position_embeddings=128000, max_window_layers=28, model_type="qwen2_5_vl", num_attention_heads=28),
    **dict(num_hidden_layers=28, num_key_value_heads=4, rms_norm_eps=1e-6, rope_theta=1000000.0, sliding_window=32768),
    **dict(rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}, tie_word_embeddings=False),
    **dict(torch_dtype="bfloat16", use_sliding_window=False, vocab_size=152064, vision_config={"depth": 32}),
}
OTHERS = {
    "Gemma 4 31B": {
        **dict(architectures=["Gemma4ForConditionalGeneration"], model_type="gemma4", dtype="bfloat16"),
        **dict(image_token_id=258880, tie_word_embeddings=True, vision_config={"model_type": "gemma4_vision"}),
        "text_config": {
            **dict(attention_bias=False, attention_dropout=0.0, attention_k_eq_v=True, bos_token_id=2, eos_token_id=1),
            **dict(dtype="bfloat16", enable_moe_block=False, final_logit_softcapping=30.0, global_head_dim=512),
            **dict(head_dim=256, hidden_activation="gelu_pytorch_tanh", hidden_size=5376, intermediate_size=21504),
            **dict(hidden_size_per_layer_input=0, layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 10),
            **dict(max_position_embeddings=262144, model_type="gemma4_text", num_attention_heads=32),
            **dict(num_global_key_value_heads=4, num_hidden_layers=60, num_key_value_heads=16, num_kv_shared_layers=0),
            **dict(pad_token_id=0, rms_norm_eps=1e-6, sliding_window=1024, tie_word_embeddings=True),
            **dict(use_bidirectional_attention="vision", use_double_wide_mlp=False, vocab_size=262144),
            "rope_parameters": {
                "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
        },
    },
    "Qwen2.5-VL 7B": FLAT,
    "Qwen2.5-VL, as of transformers 5": {
        **{key: FLAT[key] for key in ("architectures", "model_type", "vision_config", "torch_dtype")},
        "text_config": {
            **{key: value for key, value in FLAT.items() if key not in ("architectures", "vision_config")},
            **dict(model_type="qwen2_5_vl_text", tie_word_embeddings=True),
        },
    },
    "Mistral Small 3.1": {
        **dict(architectures=["Mistral3ForConditionalGeneration"], model_type="mistral3", torch_dtype="bfloat16"),
        **dict(tie_word_embeddings=False, vision_config={"model_type": "pixtral"}),
        "text_config": {
            **dict(attention_dropout=0.0, head_dim=128, hidden_act="silu", hidden_size=5120, intermediate_size=32768),
            **dict(max_position_embeddings=131072, model_type="mistral", num_attention_heads=32, num_hidden_layers=40),
            **dict(num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e9, sliding_window=None, vocab_size=131072),
        },
    },
    "Qwen3-VL 30B-A3B": {
        **dict(
            architectures=["Qwen3VLMoeForConditionalGeneration"], model_type="qwen3_vl_moe", vision_config={"depth": 27}
        ),
        "text_config": {
            **dict(attention_bias=False, attention_dropout=0.0, decoder_sparse_step=1, dtype="bfloat16", head_dim=128),
            **dict(hidden_act="silu", hidden_size=2048, intermediate_size=6144, max_position_embeddings=262144),
            **dict(mlp_only_layers=[], model_type="qwen3_vl_moe_text", moe_intermediate_size=768, norm_topk_prob=True),
            **dict(num_attention_heads=32, num_experts=128, num_experts_per_tok=8, num_hidden_layers=48),
            **dict(num_key_value_heads=4, rms_norm_eps=1e-6, rope_theta=5000000, vocab_size=151936),
            **dict(rope_scaling={"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}),
        },
        "tie_word_embeddings": False,
    },
    "GLM-4.5V": {
        **dict(architectures=["Glm4vMoeForConditionalGeneration"], model_type="glm4v_moe", vision_config={"depth": 24}),
        "text_config": {
            **dict(attention_bias=True, attention_dropout=0.0, dtype="bfloat16", first_k_dense_replace=1, head_dim=128),
            **dict(hidden_act="silu", hidden_size=4096, intermediate_size=10944, max_position_embeddings=65536),
            **dict(model_type="glm4v_moe_text", moe_intermediate_size=1408, n_group=1, n_routed_experts=128),
            **dict(n_shared_experts=1, norm_topk_prob=True, num_attention_heads=96, num_experts_per_tok=8),
            **dict(num_hidden_layers=46, num_key_value_heads=8, partial_rotary_factor=0.5, rms_norm_eps=1e-5),
            **dict(rope_scaling={"rope_type": "default", "mrope_section": [8, 12, 12]}, rope_theta=10000.0),
            **dict(routed_scaling_factor=1.0, topk_group=1, use_qk_norm=False, vocab_size=151552),
        },
    },
    "GLM-4.1V 9B": {
        **dict(architectures=["Glm4vForConditionalGeneration"], model_type="glm4v", vision_config={"depth": 24}),
        "text_config": {
            **dict(attention_bias=False, attention_dropout=0.0, dtype="bfloat16", hidden_act="silu", hidden_size=4096),
            **dict(intermediate_size=13696, max_position_embeddings=65536, model_type="glm4v_text"),
            **dict(num_attention_heads=32, num_hidden_layers=40, num_key_value_heads=2, partial_rotary_factor=0.5),
            **dict(rope_scaling={"rope_type": "default", "mrope_section": [8, 12, 12]}, rope_theta=10000.0),
            **dict(rms_norm_eps=1e-5, vocab_size=151552),
        },
    },
}
PUBLISHED |= OTHERS
EXPECTED = {
    "Gemma 4 31B": (60, 5376, 32, 16, 256, 262144, 262144, 1e6, True, "bf16"),
    "Qwen2.5-VL 7B": (28, 3584, 28, 4, 128, 152064, 128000, 1e6, False, "bf16"),
    "Qwen2.5-VL, as of transformers 5": (28, 3584, 28, 4, 128, 152064, 128000, 1e6, True, "bf16"),
    "Mistral Small 3.1": (40, 5120, 32, 8, 128, 131072, 131072, 1e9, False, "bf16"),
    "Qwen3-VL 30B-A3B": (48, 2048, 32, 4, 128, 151936, 262144, 5e6, False, "bf16"),
    "GLM-4.5V": (46, 4096, 96, 8, 128, 151552, 65536, 1e4, False, "bf16"),
    "GLM-4.1V 9B": (40, 4096, 32, 2, 128, 151552, 65536, 1e4, False, "bf16"),
    "Gemma 3 4B": (34, 2560, 8, 4, 256, 262208, 131072, 1e6, True, "bf16"),
    "Gemma 3 27B": (62, 5376, 32, 16, 128, 262208, 131072, 1e6, True, "bf16"),
    "Qwen3.5 9B": (32, 4096, 16, 4, 256, 248320, 262144, 1e7, False, "bf16"),
    "Qwen3-VL 4B": (36, 2560, 32, 8, 128, 151936, 262144, 5e6, True, "bf16"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_read_as_what_they_are(name):
    model = read_config(PUBLISHED[name], where="config.json").model
    rotary_dim = 64 if "GLM" in name or "3.5" in name else None
    assert (model.qkv_bias, model.rotary_dim) == ("2.5" in name or "GLM" in name, rotary_dim)
    assert EXPECTED[name] == (
        *(model.num_layers, model.hidden_size, model.num_attention_heads, model.query_groups, model.head_size),
        *(model.vocab_size, model.max_context, model.rotary_base, model.tied_embeddings, model.dtype),
    )
    assert model.implementation == "megatron"
    if "Gemma" in name:
        scaling = model.rotary_scaling
        stretch = ("proportional", 1.0) if "4 31B" in name else ("linear", 8.0)
        assert (model.window, scaling.kind, scaling.factor) == (1024, *stretch)
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
    given["dtype"] = given.pop("torch_dtype", "bfloat16")
    text = given.get("text_config", given)
    rotary = ("rope_theta", "partial_rotary_factor", "rope_scaling")
    for key in (None, "max_position_embeddings", *rotary, "num_key_value_heads", "rms_norm_eps"):
        if (
            key == "num_key_value_heads"
            and "Moe" not in given["architectures"][0]
            and (given["model_type"] != "gemma3")
        ):
            text["num_attention_heads"] = 64  # so that each default divides it
        text.pop(key, None)
        written = json.loads(transformers.AutoConfig.for_model(**copy.deepcopy(given)).to_json_string())
        told, meant = (read_config(each, where=key).model for each in (given, written))
        assert replace(told, head_dim=told.head_size) == replace(meant, head_dim=meant.head_size), key


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


JUNK = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just([3]) | st.just({"a": 1})


@given(data=st.data(), name=st.sampled_from(list(PUBLISHED)))
@settings(max_examples=200, deadline=None)
def test_junk_in_any_key_is_an_error_of_ours_or_a_model(data, name):
    values = copy.deepcopy(PUBLISHED[name])
    part = values.get("text_config", values) if data.draw(st.booleans()) else values
    part[data.draw(st.sampled_from(sorted(part)))] = data.draw(JUNK)
    for read in (read_config, read_info):
        with contextlib.suppress(ConfigError):
            read(values, where="config.json")


def test_ends_of_a_response_are_those_of_the_language_model():
    """As GenerationConfig.from_model_config of ``transformers`` has it; what the whole says goes before."""
    text = json.dumps(PUBLISHED["Qwen3-VL 4B"]).encode()
    assert ends_in({"config.json": text}).eos_ids == (151645,)
    assert ends_in({"config.json": json.dumps(PUBLISHED["Gemma 3 4B"]).encode()}).eos_ids == (1, 106)


def test_files_without_a_language_model_are_refused():
    with pytest.raises(CheckpointError, match="missing: model.language_model.embed_tokens.weight or"):
        text_names({"vision_tower.x": (2,), "model.norm.weight": (8,)}, VISION_MODELS["gemma3"], "models/x")


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
