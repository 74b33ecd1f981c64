"""Rotary frequencies and factors are those of ``transformers``, for every way to stretch them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from transformers import modeling_rope_utils as rope

from hybridflow.families.model import ModelConfig, RotaryScaling
from hybridflow.models.rotary import rotary_factor, rotary_frequencies

MODEL = ModelConfig(
    num_layers=1,
    hidden_size=64,
    ffn_hidden_size=8,
    num_attention_heads=2,
    max_context=128,
    rotary_base=5000.0,
)
SHORT = tuple(1.0 + 0.05 * pair for pair in range(16))
LONG = tuple(1.3 + 0.4 * pair for pair in range(16))
SCALINGS = {
    "linear": RotaryScaling(kind="linear", factor=3.0),
    "llama3": RotaryScaling(kind="llama3", factor=8.0, original_context=40),
    "llama3, other bands": RotaryScaling(
        kind="llama3", factor=4.0, original_context=64, low_freq_factor=2.0, high_freq_factor=3.0
    ),
    "yarn": RotaryScaling(kind="yarn", factor=4.0, original_context=64),
    "yarn, factor": RotaryScaling(
        kind="yarn", factor=2.0, original_context=64, beta_fast=8.0, beta_slow=0.25, attention_factor=0.7
    ),
    "yarn, mscale": RotaryScaling(kind="yarn", factor=4.0, original_context=64, mscale=0.7, mscale_all_dim=1.3),
    "yarn, mscale alone": RotaryScaling(kind="yarn", factor=4.0, original_context=64, mscale=0.7),
    "yarn, band of one": RotaryScaling(kind="yarn", factor=2.0, original_context=64, beta_fast=3.01, beta_slow=3.0),
    "yarn, no band": RotaryScaling(kind="yarn", factor=32.0, original_context=64, beta_fast=1.0, beta_slow=1.0),
    "longrope": RotaryScaling(kind="longrope", factor=4.0, original_context=32, short_factor=SHORT, long_factor=LONG),
    "longrope, factor": RotaryScaling(
        kind="longrope",
        factor=4.0,
        original_context=32,
        short_factor=SHORT,
        long_factor=LONG,
        attention_factor=1.7,
    ),
}


def theirs(model: ModelConfig, seq_len: int) -> tuple[torch.Tensor, float]:
    scaling = model.rotary_scaling
    given = {key: value for key, value in vars(scaling).items() if key not in ("kind", "original_context")}
    config = transformers.LlamaConfig(
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        max_position_embeddings=model.max_context,
        rope_parameters={
            "rope_type": scaling.kind,
            "rope_theta": model.rotary_base,
            "original_max_position_embeddings": scaling.original_context,
            **{key: list(value) if isinstance(value, tuple) else value for key, value in given.items()},
        },
    )
    return rope.ROPE_INIT_FUNCTIONS[scaling.kind](config, seq_len=seq_len)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("max_context", [32, 33, 128])
def test_frequencies_and_factor_are_those_of_transformers(name, max_context):
    model = replace(MODEL, max_context=max_context, rotary_scaling=SCALINGS[name])
    frequencies, factor = theirs(model, max_context)
    torch.testing.assert_close(rotary_frequencies(model), frequencies, atol=0, rtol=2e-6)
    assert rotary_factor(model) == pytest.approx(factor, rel=1e-12)


def test_longrope_is_long_where_the_context_is_longer_than_that_of_pre_training():
    short, long = (
        rotary_frequencies(replace(MODEL, max_context=max_context, rotary_scaling=SCALINGS["longrope"]))
        for max_context in (32, 33)
    )
    torch.testing.assert_close(short * torch.tensor(SHORT), long * torch.tensor(LONG))
    assert float((short - long).abs().min()) > 0


def test_plain_frequencies():
    # 5000 ** (-2 i / 32) for pair i: the first turns by 1 a token, the ninth by 5000 ** -0.5.
    frequencies = rotary_frequencies(MODEL)
    assert len(frequencies) == 16 and float(frequencies[0]) == 1.0
    assert float(frequencies[8]) == pytest.approx(5000.0**-0.5, rel=1e-6)
    assert rotary_factor(MODEL) == 1.0
