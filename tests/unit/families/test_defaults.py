"""What a ``config.json`` leaves out, or sets to null, is read as ``transformers`` reads it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hybridflow.errors import ConfigError
from hybridflow.families.config_json import read_config
from hybridflow.families.tables import FAMILIES

transformers = pytest.importorskip("transformers")

SIZES = ["num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"]
SIZES += ["vocab_size", "moe_intermediate_size"]


def full(name):
    """Every key as the family's class in ``transformers`` writes it."""
    make = getattr(transformers, FAMILIES[name].causal.replace("ForCausalLM", "Config"))
    return {**make().to_dict(), "architectures": [FAMILIES[name].causal]}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_left_out_has_the_default_of_transformers(name):
    values = full(name)
    least = {"model_type": name, **{key: values[key] for key in SIZES if key in values}}
    written, left_out = (read_config(each, where="config.json").model for each in (values, least))
    assert replace(written, head_dim=written.head_size) == replace(left_out, head_dim=left_out.head_size)


@pytest.mark.parametrize("name", FAMILIES)
def test_padding_that_is_left_out_is_that_of_transformers(name):
    """It decides which token a reward is read from."""
    assert FAMILIES[name].defaults.get("pad_token_id") == full(name).get("pad_token_id")


def test_null_is_an_answer():
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": None}
    model = read_config({**full("gemma2"), **caps}, where="config.json").model
    assert (model.attention_softcap, model.logit_softcap, model.window, model.window_layers) == (None,) * 4
    assert read_config({**full("mistral"), "sliding_window": None}, where="config.json").model.window is None


def test_the_published_and_the_written_name_of_the_number_of_experts():
    values = full("qwen3_moe")
    values.pop("num_local_experts")
    for key in ("num_experts", "num_local_experts"):
        assert read_config({**values, key: 96}, where="config.json").model.num_experts == 96


ROTARY = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
REFUSED = {
    "mscale": ({**ROTARY, "mscale": 0.7}, "mscale=0.7 is not computed"),
    "truncate": ({**ROTARY, "truncate": False}, "truncate=False is not computed"),
    "nested": ({"full_attention": ROTARY, "rope_type": "yarn"}, "full_attention={"),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, "rope_type='dynamic' is not computed"),
    "partial": ({**ROTARY, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not computed"),
    "betas": ({**ROTARY, "beta_fast": 1.0, "beta_slow": 1.0}, "beta_slow=1.0 is not below"),
    "divisors": ({**ROTARY, "rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "1 numbers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rotary_embeddings_that_are_not_computed_are_refused_by_name(case):
    parameters, message = REFUSED[case]
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_config({**full("llama"), "rope_parameters": parameters}, where="config.json")
