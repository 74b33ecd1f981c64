"""The ``config.json`` of well-known models reads as their settings, and is written back with the same meaning."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from hybridflow.errors import ConfigError
from hybridflow.families.config_json import (
    Described,
    NotComputedError,
    describe,
    read_config,
    spelled_out,
    update_config,
)
from hybridflow.families.model import ModelConfig, RotaryScaling
from hybridflow.families.other_config import has_no_table
from hybridflow.families.tables import FAMILIES

QWEN_WINDOW = {
    "use_sliding_window": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
LONG, SHORT = [1.0 + index for index in range(48)], [1.0 + 0.02 * index for index in range(48)]


def sizes(layers, hidden, ffn, heads, groups, context, vocab):
    """The keys that all families share, as their files have them."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": context,
        "vocab_size": vocab,
        "initializer_range": 0.02,
        "use_cache": True,
    }


def shape(layers, hidden, ffn, heads, groups, context, vocab, **other):
    """The same as settings; norm_eps and dtype where most files agree."""
    values = dict(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        max_context=context,
        vocab_size=vocab,
        dtype="bf16",
        norm_eps=1e-5,
    )
    return ModelConfig(**{**values, **other})


# What the files on the hub of Hugging Face say, but for token ids and versions, and the settings that they stand for.
SIZES = {
    "Llama-2-7b": (32, 4096, 11008, 32, 32, 4096, 32000),
    "Llama-3.1-8B": (32, 4096, 14336, 32, 8, 131072, 128256),
    "TinyLlama-1.1B": (22, 2048, 5632, 32, 4, 2048, 32000),
    "deepseek-coder-6.7b": (32, 4096, 11008, 32, 32, 16384, 32256),
    "Mistral-7B-v0.1": (32, 4096, 14336, 32, 8, 32768, 32000),
    "Mistral-7B-v0.3": (32, 4096, 14336, 32, 8, 32768, 32768),
    "Qwen1.5-7B": (32, 4096, 11008, 32, 32, 32768, 151936),
    "Qwen2-7B": (28, 3584, 18944, 28, 4, 131072, 152064),
    "Qwen2.5-0.5B": (24, 896, 4864, 14, 2, 32768, 151936),
    "Qwen3-8B": (36, 4096, 12288, 32, 8, 40960, 151936),
    "Phi-3-mini-4k": (32, 3072, 8192, 32, 32, 4096, 32064),
    "Phi-4-mini": (32, 3072, 8192, 24, 8, 131072, 200064),
    "Phi-3-mini-128k": (32, 3072, 8192, 32, 32, 131072, 32064),
    "gemma-2b": (18, 2048, 16384, 8, 1, 8192, 256000),
    "gemma-2-9b": (42, 3584, 14336, 16, 8, 8192, 256000),
    "gemma-3-1b": (26, 1152, 6912, 4, 1, 32768, 262144),
    "gemma-3-27b": (62, 5376, 21504, 32, 16, 131072, 262208),
    "gemma-4-31B": (60, 5376, 21504, 32, 16, 262144, 262144),
    "gemma-4-26B-A4B": (30, 2816, 2112, 16, 8, 262144, 262144),
    "glm-4-9b": (40, 4096, 13696, 32, 2, 131072, 151552),
    "GLM-4-32B-0414": (61, 6144, 23040, 48, 2, 32768, 151552),
    "OLMo-2-7B": (32, 4096, 11008, 32, 32, 4096, 100352),
    "SmolLM3-3B": (36, 2048, 11008, 16, 4, 65536, 128256),
    "Seed-OSS-36B": (64, 5120, 27648, 80, 8, 524288, 155136),
    "Olmo-3-7B": (32, 4096, 11008, 32, 32, 65536, 100278),
    "Mixtral-8x7B": (32, 4096, 14336, 32, 8, 32768, 32000),
    "ERNIE-4.5-0.3B": (18, 1024, 3072, 16, 2, 131072, 103424),
    "dots.llm1": (62, 4096, 10944, 32, 32, 32768, 152064),
    "EXAONE-4.0-32B": (64, 5120, 27392, 40, 8, 131072, 102400),
    "GLM-4.7-Flash": (47, 2048, 10240, 20, 20, 202752, 154880),
    "OLMoE-1B-7B": (16, 2048, 1024, 16, 16, 4096, 50304),
    "gpt-oss-20b": (24, 2880, 2880, 64, 8, 131072, 201088),
    "Qwen3.5-9B": (32, 4096, 12288, 16, 4, 262144, 248320),
    "Qwen3-30B-A3B": (48, 2048, 6144, 32, 4, 40960, 151936),
    "Qwen1.5-MoE-A2.7B": (24, 2048, 5632, 16, 16, 8192, 151936),
    "GLM-4.5-Air": (46, 4096, 10944, 96, 8, 131072, 151552),
    "MiniMax-M2": (62, 3072, 1536, 48, 8, 196608, 200064),
    "DeepSeek-V3": (61, 7168, 18432, 128, 128, 163840, 129280),
}
LLAMA = {"model_type": "llama", "hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False}
MISTRAL = {**LLAMA, "model_type": "mistral", "rms_norm_eps": 1e-5}
QWEN = {**QWEN_WINDOW, "model_type": "qwen2", "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6, "rope_theta": 1e6}
PHI3 = {"model_type": "phi3", "hidden_act": "silu", "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5}
PHI3 |= {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "rope_theta": 10000.0,
}
PHI3 |= {"original_max_position_embeddings": 4096, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}}
GEMMA = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "head_dim": 256,
}
GEMMA_MODEL = dict(zero_centered_norms=True, scaled_embeddings=True, activation="gelu_tanh", tied_embeddings=True)
GEMMA3 = {
    **{
        **GEMMA,
        "model_type": "gemma3_text",
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000,
        "torch_dtype": "bfloat16",
    },
    **{"hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": None, "final_logit_softcapping": None},
}
GEMMA3_MODEL = {**GEMMA_MODEL, "norm_eps": 1e-6, "post_norms": True, "qk_norm": True}
GEMMA4 = {
    **{"model_type": "gemma4_text", "torch_dtype": "bfloat16", "attention_bias": False, "attention_dropout": 0.0},
    **{"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "head_dim": 256, "global_head_dim": 512},
    **{"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False},
    **{"final_logit_softcapping": 30.0, "sliding_window": 1024, "tie_word_embeddings": True},
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}
GEMMA4_MODEL = {
    **{"tied_embeddings": True, "scaled_embeddings": True, "activation": "gelu_tanh", "norm_eps": 1e-6},
    **{"post_norms": True, "qk_norm": True, "value_norm": True, "layer_scalars": True, "attention_scale": 1.0},
    **{"logit_softcap": 30.0, "window": 1024, "head_dim": 256, "global_head_dim": 512},
    **{"rotary_base": 1e6, "local_rotary_base": 1e4},
    "rotary_scaling": RotaryScaling(kind="proportional", rotated_share=0.25),
}
GLM = {
    **{
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "head_dim": 128,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
    },
    **{"partial_rotary_factor": 0.5, "tie_word_embeddings": False},
}
GLM_MODEL = {"head_dim": 128, "rotary_dim": 64, "rotary_interleaved": True}
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
YARN |= {"original_max_position_embeddings": 4096}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
EXAONE4_ROPE = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MOE = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001}
MSCALE = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}
MSCALE["original_max_position_embeddings"] = 4096
OLMO3_YARN = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32, "beta_slow": 1}
OLMO3_YARN |= {"original_max_position_embeddings": 8192, "attention_factor": 1.2079441541679836}
REAL = {
    "Llama-2-7b": ({**LLAMA, "rms_norm_eps": 1e-5, "pretraining_tp": 1, "rope_scaling": None}, {}),
    "Llama-3.1-8B": (
        {
            **{**LLAMA, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "attention_bias": False, "mlp_bias": False},
            "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        },
        {
            "rotary_base": 500000.0,
            "rotary_scaling": RotaryScaling(kind="llama3", original_context=8192, **LLAMA3),
        },
    ),
    "TinyLlama-1.1B": (
        {**LLAMA, "rms_norm_eps": 1e-5, "rope_scaling": None, "torch_dtype": "float32"},
        {"dtype": "fp32"},
    ),
    "deepseek-coder-6.7b": (
        {**LLAMA, "rms_norm_eps": 1e-6, "rope_theta": 100000, "rope_scaling": {"factor": 4.0, "type": "linear"}},
        {
            "norm_eps": 1e-6,
            "rotary_base": 100000.0,
            "rotary_scaling": RotaryScaling(kind="linear", factor=4.0),
        },
    ),
    "Mistral-7B-v0.1": ({**MISTRAL, "rope_theta": 10000.0, "sliding_window": 4096}, {"window": 4096}),
    "Mistral-7B-v0.3": (
        {**MISTRAL, "rope_theta": 1000000.0, "sliding_window": None, "attention_dropout": 0.0},
        {"rotary_base": 1e6},
    ),
    "Qwen1.5-7B": (
        {**QWEN, "max_window_layers": 28, "sliding_window": 32768},
        {"norm_eps": 1e-6, "rotary_base": 1e6, "qkv_bias": True},
    ),
    "Qwen2-7B": (
        {**QWEN, "max_window_layers": 28, "sliding_window": 131072},
        {"norm_eps": 1e-6, "rotary_base": 1e6, "qkv_bias": True},
    ),
    "Qwen2.5-0.5B": (
        {**QWEN, "max_window_layers": 21, "sliding_window": 32768, "tie_word_embeddings": True},
        {"norm_eps": 1e-6, "rotary_base": 1e6, "qkv_bias": True, "tied_embeddings": True},
    ),
    "Qwen3-8B": (
        {
            **{**QWEN, "model_type": "qwen3", "head_dim": 128, "attention_bias": False, "max_window_layers": 36},
            **{"sliding_window": None, "rope_scaling": None},
        },
        {"norm_eps": 1e-6, "rotary_base": 1e6, "qk_norm": True, "head_dim": 128},
    ),
    "Phi-3-mini-4k": ({**PHI3, "rope_scaling": None, "sliding_window": 2047}, {"window": 2047}),
    "Phi-3-mini-128k": (
        {
            **PHI3,
            **{"rope_scaling": {"long_factor": LONG, "short_factor": SHORT, "type": "longrope"}},
            "sliding_window": 262144,
        },
        {
            "window": 262144,
            "rotary_scaling": RotaryScaling(
                kind="longrope",
                factor=32.0,
                original_context=4096,
                short_factor=tuple(SHORT),
                long_factor=tuple(LONG),
            ),
        },
    ),
    "Phi-4-mini": (
        {
            **{**PHI3, "tie_word_embeddings": True, "sliding_window": 262144, "partial_rotary_factor": 0.75},
            "rope_scaling": {"long_factor": LONG, "short_factor": SHORT, "type": "longrope"},
        },
        {
            **{"tied_embeddings": True, "rotary_dim": 96, "window": 262144},
            "rotary_scaling": RotaryScaling(
                kind="longrope",
                factor=32.0,
                original_context=4096,
                short_factor=tuple(SHORT),
                long_factor=tuple(LONG),
            ),
        },
    ),
    "gemma-2b": (
        {**GEMMA, "model_type": "gemma", "hidden_act": "gelu", "torch_dtype": "bfloat16"},
        {**GEMMA_MODEL, "norm_eps": 1e-6, "head_dim": 256},
    ),
    "gemma-2-9b": (
        {
            **{**GEMMA, "model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "torch_dtype": "float32"},
            **{"hidden_activation": "gelu_pytorch_tanh", "cache_implementation": "hybrid", "sliding_window": 4096},
            **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256},
        },
        {
            **{**GEMMA_MODEL, "norm_eps": 1e-6, "head_dim": 256, "dtype": "fp32", "post_norms": True},
            **{"attention_scale": 1 / 16, "attention_softcap": 50.0, "logit_softcap": 30.0, "window": 4096},
            "window_layers": tuple(range(0, 42, 2)),
        },
    ),
    "gemma-3-1b": (
        {
            **{**GEMMA3, "query_pre_attn_scalar": 256, "head_dim": 256, "sliding_window": 512, "rope_scaling": None},
            **{"sliding_window_pattern": 6, "cache_implementation": "hybrid"},
        },
        {
            **{**GEMMA3_MODEL, "rotary_base": 1e6, "local_rotary_base": 1e4, "attention_scale": 1 / 16, "window": 512},
            **{"head_dim": 256, "window_layers": tuple(layer for layer in range(26) if layer % 6 != 5)},
        },
    ),
    "gemma-3-27b": (
        {
            **{**GEMMA3, "query_pre_attn_scalar": 168, "head_dim": 128, "sliding_window": 1024},
            **{"rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        },
        {
            **{**GEMMA3_MODEL, "rotary_base": 1e6, "local_rotary_base": 1e4, "attention_scale": 168**-0.5},
            **{"head_dim": 128, "window": 1024, "window_layers": tuple(layer for layer in range(62) if layer % 6 != 5)},
            "rotary_scaling": RotaryScaling(kind="linear", factor=8.0),
        },
    ),
    "gemma-4-31B": (
        {
            **{**GEMMA4, "num_global_key_value_heads": 4, "attention_k_eq_v": True, "enable_moe_block": False},
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
        },
        {
            **{**GEMMA4_MODEL, "global_query_groups": 4, "keys_as_values": True},
            "window_layers": tuple(layer for layer in range(60) if layer % 6 != 5),
        },
    ),
    "gemma-4-26B-A4B": (
        {
            **{**GEMMA4, "num_global_key_value_heads": 2, "attention_k_eq_v": True, "enable_moe_block": True},
            **{"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
        },
        {
            **{**GEMMA4_MODEL, "global_query_groups": 2, "keys_as_values": True, "num_experts": 128},
            **{"experts_per_token": 8, "ffn_hidden_size": 704, "shared_ffn_hidden_size": 2112, "expert_norms": True},
            "window_layers": tuple(layer for layer in range(30) if layer % 6 != 5),
        },
    ),
    "glm-4-9b": (
        {**GLM, "model_type": "glm", "attention_bias": True, "rms_norm_eps": 1.5625e-07},
        {**GLM_MODEL, "norm_eps": 1.5625e-07, "qkv_bias": True},
    ),
    "GLM-4-32B-0414": (
        {**GLM, "model_type": "glm4", "attention_bias": False, "rms_norm_eps": 1e-5, "rope_scaling": None},
        {**GLM_MODEL, "post_norms": True},
    ),
    "OLMo-2-7B": (
        {
            **{"model_type": "olmo2", "hidden_act": "silu", "torch_dtype": "float32", "tie_word_embeddings": False},
            **{"attention_bias": False, "attention_dropout": 0.0, "rms_norm_eps": 1e-6, "rope_theta": 500000},
            "rope_scaling": None,
        },
        {
            **{"norm_eps": 1e-6, "rotary_base": 5e5, "dtype": "fp32", "pre_norms": False, "post_norms": True},
            **{"qk_norm": True, "qk_norm_over": "projection"},
        },
    ),
    "SmolLM3-3B": (
        {
            **{**LLAMA, "model_type": "smollm3", "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False},
            **{"rms_norm_eps": 1e-6, "rope_theta": 5000000.0, "rope_scaling": None, "tie_word_embeddings": True},
            **{"layer_types": ["full_attention"] * 36, "use_sliding_window": False, "sliding_window": None},
            **{"no_rope_layers": [1, 1, 1, 0] * 9, "no_rope_layer_interval": 4, "max_window_layers": 28},
        },
        {
            **{"norm_eps": 1e-6, "rotary_base": 5e6, "tied_embeddings": True},
            "no_rope_layers": tuple(range(3, 36, 4)),
        },
    ),
    "Seed-OSS-36B": (
        {
            **{**LLAMA, "model_type": "seed_oss", "attention_bias": True, "attention_dropout": 0.1, "head_dim": 128},
            **{"attention_out_bias": False, "mlp_bias": False, "residual_dropout": 0.1, "rms_norm_eps": 1e-6},
            **{"rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0, "pretraining_tp": 1},
        },
        {"norm_eps": 1e-6, "rotary_base": 1e7, "head_dim": 128, "qkv_bias": True},
    ),
    "Olmo-3-7B": (
        {
            **{"model_type": "olmo3", "hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False},
            **{"attention_bias": False, "attention_dropout": 0.0, "rms_norm_eps": 1e-6, "rope_theta": 500000},
            **{"rope_scaling": OLMO3_YARN, "sliding_window": 4096},
            "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
        },
        {
            **{"norm_eps": 1e-6, "rotary_base": 5e5, "pre_norms": False, "post_norms": True, "qk_norm": True},
            **{"qk_norm_over": "projection", "window": 4096, "local_rotary_base": 5e5},
            "window_layers": tuple(layer for layer in range(32) if layer % 4 != 3),
            "rotary_scaling": RotaryScaling(
                kind="yarn", factor=8.0, original_context=8192, attention_factor=1.2079441541679836
            ),
        },
    ),
    "Mixtral-8x7B": (
        {
            **{**MISTRAL, "model_type": "mixtral", "rope_theta": 1000000.0, "sliding_window": None},
            **{"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02},
        },
        {"rotary_base": 1e6, "num_experts": 8, "experts_per_token": 2},
    ),
    "ERNIE-4.5-0.3B": (
        {
            **{**LLAMA, "model_type": "ernie4_5", "head_dim": 128, "use_bias": False, "rms_norm_eps": 1e-5},
            **{"rope_theta": 500000.0, "rope_scaling": None, "tie_word_embeddings": True},
        },
        {"rotary_base": 5e5, "head_dim": 128, "rotary_interleaved": True, "tied_embeddings": True},
    ),
    "dots.llm1": (
        {
            **{"model_type": "dots1", "hidden_act": "silu", "torch_dtype": "bfloat16", "attention_bias": False},
            **{"attention_dropout": 0.0, "rms_norm_eps": 1e-5, "rope_theta": 10000000, "rope_scaling": None},
            **{"moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
            **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
            **{"routed_scaling_factor": 2.5, "tie_word_embeddings": False, "sliding_window": None},
        },
        {
            **{"rotary_base": 1e7, "qk_norm": True, "ffn_hidden_size": 1408, "routed_scaling": 2.5},
            **{"num_experts": 128, "experts_per_token": 6, "num_dense_layers": 1, "dense_ffn_hidden_size": 10944},
            **{"shared_ffn_hidden_size": 2816, "router_score": "sigmoid", "router_bias": True},
        },
    ),
    "EXAONE-4.0-32B": (
        {
            **{**LLAMA, "model_type": "exaone4", "head_dim": 128, "attention_dropout": 0.0, "rms_norm_eps": 1e-5},
            **{"rope_theta": 1000000, "rope_scaling": {**EXAONE4_ROPE, "original_max_position_embeddings": 8192}},
            **{"sliding_window": 4096, "sliding_window_pattern": "LLLG"},
            "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16,
        },
        {
            **{"rotary_base": 1e6, "head_dim": 128, "pre_norms": False, "post_norms": True, "qk_norm": True},
            **{"window": 4096, "window_layers": tuple(layer for layer in range(64) if layer % 4 != 3)},
            "no_rope_layers": tuple(range(3, 64, 4)),
            "rotary_scaling": RotaryScaling(kind="llama3", factor=16.0, original_context=8192),
        },
    ),
    "GLM-4.7-Flash": (
        {
            **{"model_type": "glm4_moe_lite", "hidden_act": "silu", "dtype": "bfloat16", "attention_bias": False},
            **{"attention_dropout": 0.0, "rms_norm_eps": 1e-5, "rope_theta": 1000000, "rope_scaling": None},
            **{"kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64},
            **{"v_head_dim": 256, "moe_intermediate_size": 1536, "n_routed_experts": 64, "n_shared_experts": 1},
            **{"num_experts_per_tok": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
            **{"routed_scaling_factor": 1.8, "norm_topk_prob": True, "num_nextn_predict_layers": 1},
            **{"partial_rotary_factor": 1.0, "tie_word_embeddings": False},
        },
        {
            **{"rotary_base": 1e6, "num_query_groups": 20, "ffn_hidden_size": 1536, "kv_lora_rank": 512},
            **{"q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256},
            **{"num_experts": 64, "experts_per_token": 4, "num_dense_layers": 1, "dense_ffn_hidden_size": 10240},
            **{"shared_ffn_hidden_size": 1536, "routed_scaling": 1.8, "router_score": "sigmoid", "router_bias": True},
        },
    ),
    "OLMoE-1B-7B": (
        {
            **{**LLAMA, "model_type": "olmoe", "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None},
            **{"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "rms_norm_eps": 1e-5},
            **{"rope_theta": 10000.0, "rope_scaling": None, "router_aux_loss_coef": 0.01},
        },
        {
            **{"qk_norm": True, "qk_norm_over": "projection", "num_experts": 64, "experts_per_token": 8},
            "normalized_experts": False,
        },
    ),
    "gpt-oss-20b": (
        {
            **{"model_type": "gpt_oss", "hidden_act": "silu", "attention_bias": True, "attention_dropout": 0.0},
            **{"rms_norm_eps": 1e-5, "rope_theta": 150000, "rope_scaling": YARN, "sliding_window": 128, "head_dim": 64},
            **{"num_local_experts": 32, "num_experts_per_tok": 4, "swiglu_limit": 7.0, "tie_word_embeddings": False},
            **{"torch_dtype": "bfloat16", "layer_types": ["sliding_attention", "full_attention"] * 12},
            **{"experts_per_token": 4, "initial_context_length": 4096, "router_aux_loss_coef": 0.9},
        },
        {
            **{"attention_sinks": True, "linear_bias": True, "qkv_bias": True, "activation": "quick_gelu"},
            **{"glu_clamp": 7.0, "glu_offset": 1.0, "num_experts": 32, "experts_per_token": 4, "head_dim": 64},
            **{"rotary_base": 150000.0, "window": 128, "window_layers": tuple(range(0, 24, 2))},
            "rotary_scaling": RotaryScaling(kind="yarn", factor=32.0, original_context=4096, truncate=False),
        },
    ),
    "Qwen3.5-9B": (
        {
            **{"model_type": "qwen3_5_text", "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0},
            **{"rms_norm_eps": 1e-6, "dtype": "bfloat16", "head_dim": 256, "tie_word_embeddings": False},
            **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
            **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "full_attention_interval": 4},
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8,
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
                **{"mrope_interleaved": True, "mrope_section": [11, 11, 10]},
            },
        },
        {
            **{"norm_eps": 1e-6, "rotary_base": 1e7, "rotary_dim": 64, "qk_norm": True, "head_dim": 256},
            **{"zero_centered_norms": True, "attention_output_gate": True},
            **{"linear_layers": tuple(layer for layer in range(32) if layer % 4 != 3), "linear_conv_kernel": 4},
            **{"linear_key_heads": 16, "linear_value_heads": 32},
            **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
        },
    ),
    "Qwen3-30B-A3B": (
        {
            **{**QWEN, **MOE, "model_type": "qwen3_moe", "head_dim": 128, "attention_bias": False},
            **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "sliding_window": None},
        },
        {
            **{"norm_eps": 1e-6, "rotary_base": 1e6, "qk_norm": True, "head_dim": 128, "ffn_hidden_size": 768},
            **{"num_experts": 128, "experts_per_token": 8},
        },
    ),
    "Qwen1.5-MoE-A2.7B": (
        {
            **{**QWEN, **MOE, "model_type": "qwen2_moe", "norm_topk_prob": False, "tie_word_embeddings": False},
            **{"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
            **{"shared_expert_intermediate_size": 5632, "max_window_layers": 21, "sliding_window": 32768},
        },
        {
            **{"norm_eps": 1e-6, "rotary_base": 1e6, "qkv_bias": True, "ffn_hidden_size": 1408},
            **{"num_experts": 60, "experts_per_token": 4, "normalized_experts": False},
            **{"shared_ffn_hidden_size": 5632, "shared_expert_gate": True},
        },
    ),
    "GLM-4.5-Air": (
        {
            **{"model_type": "glm4_moe", "hidden_act": "silu", "torch_dtype": "bfloat16", "attention_bias": True},
            **{"attention_dropout": 0.0, "rms_norm_eps": 1e-5, "rope_theta": 1000000, "rope_scaling": None},
            **{"head_dim": 128, "partial_rotary_factor": 0.5, "tie_word_embeddings": False, "use_qk_norm": False},
            **{"moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8},
            **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
            **{"routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1},
        },
        {
            **{"rotary_base": 1e6, "rotary_dim": 64, "head_dim": 128, "qkv_bias": True, "ffn_hidden_size": 1408},
            **{"num_experts": 128, "experts_per_token": 8, "num_dense_layers": 1, "dense_ffn_hidden_size": 10944},
            **{"shared_ffn_hidden_size": 1408, "router_score": "sigmoid", "router_bias": True},
        },
    ),
    "MiniMax-M2": (
        {
            **{"model_type": "minimax_m2", "hidden_act": "silu", "torch_dtype": "bfloat16", "head_dim": 128},
            **{"attention_dropout": 0.0, "rms_norm_eps": 1e-6, "rope_theta": 5000000, "rotary_dim": 64},
            **{"num_local_experts": 256, "num_experts_per_tok": 8, "tie_word_embeddings": False},
            **{"use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_routing_bias": True},
            **{"shared_intermediate_size": 0, "router_jitter_noise": 0.0},
        },
        {
            **{"norm_eps": 1e-6, "rotary_base": 5e6, "rotary_dim": 64, "head_dim": 128, "qk_norm": True},
            **{"qk_norm_over": "projection", "num_experts": 256, "experts_per_token": 8},
            **{"router_score": "sigmoid", "router_bias": True},
        },
    ),
    "DeepSeek-V3": (
        {
            **{"model_type": "deepseek_v3", "hidden_act": "silu", "torch_dtype": "bfloat16", "attention_bias": False},
            **{"attention_dropout": 0.0, "rms_norm_eps": 1e-6, "rope_theta": 10000, "tie_word_embeddings": False},
            **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
            **{"v_head_dim": 128, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1},
            **{"num_experts_per_tok": 8, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "ep_size": 1},
            **{"norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "moe_layer_freq": 1},
            **{"topk_method": "noaux_tc", "num_nextn_predict_layers": 1, "rope_scaling": MSCALE},
        },
        {
            **{"norm_eps": 1e-6, "ffn_hidden_size": 2048, "kv_lora_rank": 512, "q_lora_rank": 1536},
            **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 256},
            **{"experts_per_token": 8, "num_dense_layers": 3, "dense_ffn_hidden_size": 18432, "router_groups": 8},
            **{"router_groups_per_token": 4, "routed_scaling": 2.5, "shared_ffn_hidden_size": 2048},
            **{"router_score": "sigmoid", "router_bias": True},
            "rotary_scaling": RotaryScaling(
                **dict(kind="yarn", factor=40.0, original_context=4096, mscale=1.0, mscale_all_dim=1.0)
            ),
        },
    ),
}


def real(name):
    """The file of a well-known model, and its settings."""
    values, expected = REAL[name]
    values = {**sizes(*SIZES[name]), **values}
    values["architectures"] = [FAMILIES[values["model_type"]].causal]
    return values, shape(*SIZES[name], **expected)


@pytest.mark.parametrize("name", REAL)
def test_well_known_models_read_as_what_they_are(name):
    values, expected = real(name)
    described = read_config(values, where="config.json")
    assert described.model == expected
    assert (described.family.name, described.has_value_head) == (values["model_type"], False)


def written_config(described):
    """What is written for a model without a file of its own, as JSON has it."""
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[described.model.dtype]
    return json.loads(json.dumps(update_config(None, described, dtype=dtype)))


def meaning(values):
    """What transformers makes of a file, but for what tells nothing of the computation."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**copy.deepcopy(values)).to_dict()
    nothing = {"bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "cache_implementation"}
    nothing |= {"hidden_act", "auto_map", "router_aux_loss_coef", "max_window_layers", "head_dim", "attention_bias"}
    nothing |= {
        "experts_per_token",
        "initial_context_length",
        "sliding_window_pattern",
        "original_max_position_embeddings",
        "mlp_bias",
        "dtype",
        "num_nextn_predict_layers",
        "ep_size",
        "full_attention_interval",
    }
    # Which no one computes: published files have that of pre-training.
    nothing |= {"attention_dropout", "residual_dropout"} if values["model_type"] == "seed_oss" else set()
    nothing |= {"intermediate_size"} if values["model_type"] in ("qwen2_moe", "qwen3_moe") else set()
    return {key: value for key, value in config.items() if key not in nothing}


@pytest.mark.parametrize("name", REAL)
def test_a_written_file_means_the_same_to_transformers(name):
    values, _ = real(name)
    described = read_config(values, where="config.json")
    written = written_config(described)
    assert spelled_out(read_config(written, where="config.json").model) == spelled_out(described.model)
    ours, theirs = meaning(written), meaning(values)
    for each in (ours, theirs):
        if name.startswith(("gemma-3", "gemma-4", "Olmo-3")):
            each["rope_parameters"] = each["rope_parameters"]["full_attention"] | {
                "local": each["rope_parameters"]["sliding_attention"]
            }
        each["rope_parameters"] = {
            key: value
            for key, value in each["rope_parameters"].items()
            # Of text the three positions of a token are one, whatever pairs of dims have them.
            if key not in ("type", "mrope_section", "mrope_interleaved")
            and (key, value) not in (("partial_rotary_factor", 1.0), ("truncate", True))
        }
        # Some of their classes write it at the top too, as a default.
        each.pop("partial_rotary_factor", None)
        if name.startswith("Olmo-3"):
            # What Gemma 3 calls it, and OLMo's class does not read.
            each.pop("rope_local_base_freq", None)
        if not each.get("use_sliding_window", True):
            each["sliding_window"] = None
    assert ours == theirs


FLOATS = st.floats(1e-3, 1e3).map(lambda number: float(f"{number:.4g}"))
SCALINGS = {
    "linear": st.builds(RotaryScaling, kind=st.just("linear"), factor=FLOATS),
    "llama3": st.builds(
        RotaryScaling,
        kind=st.just("llama3"),
        factor=FLOATS,
        original_context=st.integers(1, 9999),
        low_freq_factor=st.floats(0.5, 1.0),
        high_freq_factor=st.floats(2.0, 8.0),
    ),
    "yarn": st.builds(
        RotaryScaling,
        kind=st.just("yarn"),
        factor=FLOATS,
        original_context=st.integers(1, 9999),
        beta_fast=st.floats(16.0, 64.0),
        beta_slow=st.floats(0.5, 2.0),
        truncate=st.booleans(),
        attention_factor=st.none() | FLOATS,
        mscale=st.none() | FLOATS,
        mscale_all_dim=st.none() | FLOATS,
    ),
    "proportional": st.builds(
        RotaryScaling, kind=st.just("proportional"), factor=FLOATS, rotated_share=st.floats(0.0, 1.0)
    ),
    "longrope": st.builds(
        RotaryScaling,
        kind=st.just("longrope"),
        factor=FLOATS,
        original_context=st.integers(1, 9999),
        attention_factor=st.none() | FLOATS,
        short_factor=st.lists(FLOATS, min_size=4, max_size=4).map(tuple),
        long_factor=st.lists(FLOATS, min_size=4, max_size=4).map(tuple),
    ),
}


@st.composite
def models(draw, family):
    """Settings that a family's files can say."""
    layers, groups = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 4]))
    values = dict(
        num_layers=layers,
        hidden_size=32,
        ffn_hidden_size=draw(st.integers(1, 99)),
        num_attention_heads=4,
        num_query_groups=draw(st.sampled_from([None, groups])),
        head_dim=draw(st.sampled_from([None, 8])),
        max_context=draw(st.integers(1, 9999)),
        vocab_size=draw(st.integers(1, 999)),
        vocab_divisible_by=draw(st.integers(1, 128)),
        rotary_base=draw(FLOATS),
        rotary_scaling=draw(st.none() | st.one_of(*(SCALINGS[kind] for kind in family.scalings))),
        norm_eps=draw(FLOATS),
        tied_embeddings=draw(st.booleans()),
        init_std=draw(FLOATS),
        dtype=draw(st.sampled_from(["fp32", "bf16"])),
        **family.always,
    )
    if family.window != "none" and draw(st.booleans()):
        values["window"] = draw(st.integers(1, 99))
        if family.window in ("upper_layers", "last_layers", "even_layers", "most_layers"):
            values["window_layers"] = draw(st.none() | st.sets(st.integers(0, layers - 1)).map(sorted).map(tuple))
        if family.window == "most_but_last":
            values["window_layers"] = draw(st.sets(st.integers(0, max(0, layers - 2))).map(sorted).map(tuple))
            values["window_layers"] = values["window_layers"] if layers > 1 else ()
        if "global_head_dim" in family.keys and values["window_layers"]:
            values |= {"head_dim": 8, "global_head_dim": draw(st.sampled_from([None, 16]))}
            values["keys_as_values"] = draw(st.booleans())
            values["global_query_groups"] = draw(st.sampled_from([None, 1, 2])) if values["keys_as_values"] else None
    if "num_experts" in family.keys.values():
        values |= {"num_experts": draw(st.integers(2, 8)), "experts_per_token": 2}
        values.setdefault("normalized_experts", draw(st.booleans()))
    if "enable_moe_block" in family.defaults:
        has_experts = draw(st.booleans())
        values["expert_norms"] = has_experts
        values["shared_ffn_hidden_size"] = draw(st.integers(1, 99)) if has_experts else None
        values["num_experts"] = values["num_experts"] if has_experts else None
        values["normalized_experts"] = True
    if "kv_lora_rank" in family.keys.values():
        values |= {"num_query_groups": None, "head_dim": None, "kv_lora_rank": draw(st.integers(1, 9))}
        values |= {"q_lora_rank": draw(st.none() | st.integers(1, 9)), "v_head_dim": draw(st.integers(1, 9))}
        values |= {"qk_nope_head_dim": draw(st.integers(1, 9)), "qk_rope_head_dim": draw(st.sampled_from([2, 4, 6]))}
    if "linear_key_heads" in family.keys.values() and layers > 1 and draw(st.booleans()):
        values["linear_layers"] = draw(st.sets(st.integers(0, layers - 2), min_size=1).map(sorted).map(tuple))
        keys = draw(st.integers(1, 4))
        values |= {"linear_key_heads": keys, "linear_value_heads": keys * draw(st.integers(1, 3))}
        values |= {name: draw(st.integers(1, 9)) for name in ("linear_key_head_dim", "linear_value_head_dim")}
        values["linear_conv_kernel"] = draw(st.integers(2, 5))
    if "num_dense_layers" in family.keys.values():
        # No more dense layers than layers.
        dense = draw(st.integers(0, layers - 1))
        values |= {"num_dense_layers": dense, "dense_ffn_hidden_size": draw(st.integers(1, 99)) if dense else None}
        shared = draw(st.none() | st.integers(1, 3))
        values["shared_ffn_hidden_size"] = shared and shared * values["ffn_hidden_size"]
        if values["num_experts"] % 2 == 0 and values["num_experts"] > 2:
            values |= {"router_groups": 2, "router_groups_per_token": draw(st.integers(1, 2))}
        values["routed_scaling"] = draw(FLOATS)
    if family.always.get("shared_expert_gate"):
        values["shared_ffn_hidden_size"] = draw(st.integers(1, 99))
    if "qk_norm" in family.keys.values():
        values["qk_norm"] = draw(st.booleans())
    caps = {"attention_softcap", "logit_softcap"} & {*family.keys.values()}
    values |= {cap: draw(st.none() | FLOATS) for cap in sorted(caps)}
    has_parts = "partial_rotary_factor" in family.defaults or "rotary_dim" in family.keys
    if has_parts and "longrope" not in family.scalings:
        values["rotary_dim"] = draw(st.sampled_from([None, 2, 4, 6, 8]))
    if "rope_local_base_freq" in family.defaults and "window" in values:
        values["local_rotary_base"] = draw(FLOATS)
    if "no_rope_layer_interval" in family.defaults:
        values["no_rope_layers"] = draw(st.sets(st.integers(0, layers - 1)).map(tuple))
    if not family.global_rope:
        windowed = values.get("window_layers")
        windowed = range(layers) if windowed is None else windowed
        values["no_rope_layers"] = tuple(layer for layer in range(layers) if layer not in windowed)
    if "query_pre_attn_scalar" in family.defaults:
        values["attention_scale"] = draw(st.none() | st.integers(1, 999).map(lambda scalar: scalar**-0.5))
    return ModelConfig(**values)


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data(), has_value_head=st.booleans())
@settings(max_examples=40, deadline=None)
def test_what_is_written_reads_as_it_was(name, data, has_value_head):
    has_value_head = has_value_head and FAMILIES[name].scorer is not None
    described = Described(family=FAMILIES[name], model=data.draw(models(FAMILIES[name])), has_value_head=has_value_head)
    written = written_config(described)
    found = read_config(written, where="config.json")
    assert (found.family, found.has_value_head) == (described.family, has_value_head)
    expected = described.model
    if expected.rotary_scaling is not None and expected.rotary_scaling.kind in ("yarn", "longrope"):
        expected = replace(expected, max_context=found.model.max_context)
    assert spelled_out(found.model) == spelled_out(expected)


PLAIN = ModelConfig(
    num_layers=2, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, max_context=64, vocab_size=37
)


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({}, "llama"),
        ({"window": 8}, "mistral"),
        ({"qkv_bias": True}, "qwen2"),
        ({"qk_norm": True, "head_dim": 12}, "qwen3"),
        ({"qk_norm": True, "window": 4, "window_layers": (0,)}, "qwen3"),
        ({"num_experts": 4}, "mixtral"),
        ({"num_experts": 4, "normalized_experts": False, "qk_norm": True}, "qwen3_moe"),
        ({"num_experts": 4, "shared_ffn_hidden_size": 8, "shared_expert_gate": True}, "qwen2_moe"),
        ({"zero_centered_norms": True, "scaled_embeddings": True, "activation": "gelu_tanh"}, "gemma"),
        ({"rotary_interleaved": True, "head_dim": 8, "rotary_dim": 4}, "glm"),
        ({"rotary_interleaved": True, "post_norms": True, "qkv_bias": True}, "glm4"),
        ({"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_over": "projection"}, "olmo2"),
        ({"no_rope_layers": (1,)}, "smollm3"),
        ({"pre_norms": False, "post_norms": True, "qk_norm": True}, "exaone4"),
    ],
)
def test_the_plainest_family_that_has_the_model(changes, family):
    assert describe(replace(PLAIN, **changes), family=None, has_value_head=False).family.name == family


def test_settings_that_no_family_has_are_named():
    with pytest.raises(ConfigError, match="no family of Hugging Face has models with attention_scale=0.3"):
        describe(replace(PLAIN, qkv_bias=True, attention_scale=0.3), family=None, has_value_head=False)
    with pytest.raises(ConfigError, match="the nearest, qwen2, has not qk_norm=True"):
        describe(replace(PLAIN, qkv_bias=True, qk_norm=True), family=None, has_value_head=False)
    with pytest.raises(ConfigError, match="family llama has no models with qk_norm=True"):
        describe(replace(PLAIN, qk_norm=True), family="llama", has_value_head=False)
    with pytest.raises(ConfigError, match="family glm4_moe: transformers has no such model with a value head"):
        describe(PLAIN, family="glm4_moe", has_value_head=True)
    with pytest.raises(ConfigError, match="family 'gpt2': not known"):
        describe(PLAIN, family="gpt2", has_value_head=False)


def test_the_original_is_kept_and_brought_up_to_date():
    values, _ = real("Phi-3-mini-4k")
    values |= {"eos_token_id": 32000, "something_new": [1], "torch_dtype": "bfloat16"}
    described = read_config(values, where="config.json")
    kept = update_config(values, described, dtype="float16")
    assert kept.pop("torch_dtype") == "float16"
    assert kept == {key: value for key, value in values.items() if key not in ("auto_map", "torch_dtype")}
    scorer = update_config(values, replace(described, has_value_head=True), dtype="float32")
    assert scorer["architectures"] == ["Phi3ForSequenceClassification"] and scorer["id2label"] == {"0": "LABEL_0"}
    longer = replace(described, model=replace(described.model, max_context=8192))
    written = update_config(values, longer, dtype="float32")
    assert (written["max_position_embeddings"], written["eos_token_id"]) == (8192, 32000)
    assert written["something_new"] == [1] and written["torch_dtype"] == "float32"
    shorter = replace(described, model=replace(described.model, max_context=512, init_std=0.5))
    assert update_config(values, shorter, dtype="bfloat16") == {**kept, "torch_dtype": "bfloat16"}
    other = replace(described, model=replace(described.model, norm_eps=0.5))
    written = update_config(values, other, dtype="float32")
    assert (written["rms_norm_eps"], written["eos_token_id"]) == (0.5, 32000)
    assert "something_new" not in written and written["dtype"] == written["torch_dtype"] == "float32"


def yarn_factor_of_transformers_4(config):
    """As ``_compute_yarn_parameters`` of 4.51 to 4.55 has it: the factor that is written does not count."""
    scaling = config["rope_scaling"]
    if "original_max_position_embeddings" in scaling:
        return config["max_position_embeddings"] / scaling["original_max_position_embeddings"]
    return scaling["factor"]


@pytest.mark.parametrize("told", [{"factor": 32.0}, {}])
def test_a_shorter_context_changes_no_factor_of_yarn(told):
    """Older readers take the ratio of the two contexts, also of a model that was trained with a shorter one."""
    yarn = {"rope_type": "yarn", **told, "original_max_position_embeddings": 4096}
    values = {**real("Llama-3.1-8B")[0], "rope_scaling": yarn, "something_new": 1}
    described = read_config(values, where="config.json")
    short = replace(described, model=replace(described.model, max_context=8192))
    for written in (written_config(short), update_config(values, short, dtype="bfloat16")):
        assert yarn_factor_of_transformers_4(written) == 32.0
        assert read_config(written, where="config.json").model.rotary_scaling == short.model.rotary_scaling
    assert written["something_new"] == 1


def test_yarn_whose_factor_is_no_ratio_keeps_the_number_of_the_original():
    """As Qwen is advised to be stretched: the factor added, the longest sequence left as it was."""
    yarn = {"rope_type": "yarn", "factor": 2.3, "original_max_position_embeddings": 4096}
    values = {**real("Llama-3.1-8B")[0], "rope_scaling": yarn}
    described = read_config(values, where="config.json")
    short = replace(described, model=replace(described.model, max_context=8192))
    assert update_config(values, short, dtype="bfloat16")["max_position_embeddings"] == 131072
    assert written_config(short)["max_position_embeddings"] == 8192


@pytest.mark.parametrize("max_context", [131072, 4096, 8192])
def test_phi3_is_written_with_the_three_keys_that_older_readers_allow(max_context):
    """They take the ratio of the two contexts for the factor, also of a model that was trained with a shorter one."""
    values = {**real("Phi-3-mini-128k")[0], "something_new": 1}
    described = read_config(values, where="config.json")
    described = replace(described, model=replace(described.model, max_context=max_context))
    for written in (written_config(described), update_config(values, described, dtype="bfloat16")):
        assert written["rope_scaling"] == {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}
        assert "factor" not in written.get("rope_parameters", {})
        assert (written["original_max_position_embeddings"], written["max_position_embeddings"]) == (4096, 131072)
    assert written["something_new"] == 1


ROTATED = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
LONGROPE = {"rope_type": "longrope", "long_factor": LONG[:12], "short_factor": SHORT[:12]}


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama", {"rope_parameters": {**LONGROPE, "factor": 2.0, "original_max_position_embeddings": 16}}),
        ("gemma2", {"rope_parameters": {**LONGROPE, "factor": 4.0, "original_max_position_embeddings": 64}}),
        ("qwen3", {"rope_parameters": ROTATED, "rope_theta": 77.0}),
        ("mistral", {"rope_parameters": ROTATED, "rope_theta": None}),
        ("minimax_m2", {"rope_parameters": {**ROTATED, "partial_rotary_factor": 0.25}, "rotary_dim": 12}),
        ("glm", {"rope_parameters": {**ROTATED, "partial_rotary_factor": 0.25}, "partial_rotary_factor": 0.5}),
    ],
)
def test_what_is_added_for_older_readers_changes_no_position(name, keys):
    """Of newer files with a factor that is no ratio of contexts, or with two bases of which one is unused."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    values = {**sizes(1, 48, 64, 2, 2, 64, 32), "model_type": name, "head_dim": 24, "torch_dtype": "float32", **keys}
    keys["rope_parameters"].setdefault("rope_theta", 1e4)

    def positions(file):
        config = transformers.AutoConfig.for_model(**copy.deepcopy(file))
        frequencies, scale = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, "cpu", seq_len=99)
        return frequencies.tolist(), scale

    written = update_config(values, read_config(values, where="config.json"), dtype="float32")
    assert positions(written) == positions(values)
    assert written["rope_parameters"] == values["rope_parameters"]


UNSET = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
"""Keys that dots.llm1 needs, and for which transformers has no number."""
NO_PLE = {"hidden_size_per_layer_input": 0, "attention_bias": False, "rope_theta": None, "rope_scaling": None}


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({}, (3, 7)),
        ({"layer_types": ["full_attention", *["sliding_attention"] * 7], "sliding_window_pattern": "GLLL"}, (0,)),
        ({"layer_types": ["full_attention"] * 8}, tuple(range(8))),
        ({"sliding_window": None}, ()),
    ],
)
def test_layers_of_exaone_without_a_window_have_no_rotation_where_there_is_a_window(keys, layers):
    values = {**sizes(8, 64, 96, 4, 2, 64, 37), "model_type": "exaone4", **keys}
    found = read_config(values, where="config.json")
    assert found.model.no_rope_layers == layers
    assert read_config(written_config(found), where="config.json").model.no_rope_layers == layers


@pytest.mark.parametrize(
    ("name", "keys", "layers"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 30}, (30, 31)),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 9}, None),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, tuple(range(32))),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 9}, tuple(range(32))),
        ("qwen3_moe", {"use_sliding_window": False, "sliding_window": 9}, None),
        ("mixtral", {"sliding_window": 9}, tuple(range(32))),
        ("gemma2", {"sliding_window": 9}, tuple(range(0, 32, 2))),
        ("gemma2", {"sliding_window": 9, "layer_types": ["full_attention"] * 31 + ["sliding_attention"]}, (31,)),
        ("gemma3_text", {"sliding_window": 9}, tuple(layer for layer in range(32) if layer % 6 != 5)),
        ("gemma3_text", {"sliding_window": 9, "sliding_window_pattern": 2}, tuple(range(0, 32, 2))),
        ("gemma4_text", {"sliding_window": 9, **NO_PLE}, tuple(each for each in range(31) if each % 6 != 5)),
        (
            "gemma4_text",
            {"sliding_window": 9, **NO_PLE, "layer_types": ["full_attention"] * 30 + ["sliding_attention"] * 2},
            (30,),
        ),
        ("dots1", {"sliding_window": 9, "max_window_layers": 30, **UNSET}, (30, 31)),
        ("exaone4", {"sliding_window": 9}, tuple(layer for layer in range(32) if layer % 4 != 3)),
        ("exaone4", {"sliding_window": None, "sliding_window_pattern": None}, None),
        ("llama", {"sliding_window": 9}, None),
    ],
)
def test_the_layers_of_the_window(name, keys, layers):
    values = {**sizes(*SIZES["Llama-3.1-8B"]), "model_type": name, "moe_intermediate_size": 8, **keys}
    model = spelled_out(read_config(values, where="config.json").model)
    assert (model.window, model.window_layers) == (None if layers is None else 9, layers)


FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
REFUSED = {
    "family": ({"model_type": "gpt2"}, "model_type='gpt2': not a family known here"),
    "family of another type": ({"model_type": ["llama"]}, "model_type=['llama']"),
    "dense layers behind others": (
        {"model_type": "glm4_moe_lite", "mlp_layer_types": ["sparse"] * 31 + ["dense"]},
        "is not computed; only 32 of 'dense' and then 'sparse' are",
    ),
    "embeddings for each layer, by default": (
        {"model_type": "gemma4_text"},
        "hidden_size_per_layer_input=256 is not computed for gemma4_text",
    ),
    "keys that layers share": (
        {"model_type": "gemma4_text", **NO_PLE, "num_kv_shared_layers": 2},
        "num_kv_shared_layers=2 is not computed for gemma4_text",
    ),
    "heads of one layer": (
        {"model_type": "gemma4_text", **NO_PLE, "per_layer_config": {"5": {"head_dim": 64}}},
        "per_layer_config={'5': {'head_dim': 64}} is not computed",
    ),
    "heads that no key says": (
        {
            **{"model_type": "gemma4_text", **NO_PLE, "layer_types": ["sliding_attention"] * 31 + ["full_attention"]},
            "per_layer_config": {"31": {"num_key_value_heads": 4}},
        },
        "with attention_k_eq_v=False is not computed",
    ),
    "no window beside other heads": (
        {"model_type": "gemma4_text", **NO_PLE, "layer_types": ["full_attention"] * 32},
        "is not computed for gemma4_text; only with some of 'sliding_attention' is",
    ),
    "bias": ({"attention_bias": True}, "attention_bias=True is not computed for llama"),
    "embeddings of texts": ({"is_causal": False}, "is_causal=False is not computed for llama; only True"),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout=0.1: nothing random is computed; set it to 0"),
    "dropout of a residual": (
        {"model_type": "seed_oss", "residual_dropout": 0.2},
        "residual_dropout=0.2: nothing random is computed; set it to 0",
    ),
    "quantized by others": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        "quantization_config.quant_method='gptq' is not read; only 'fp8' and 'mxfp4' are: name the model",
    ),
    "quantized, without saying how": ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method=None"),
    "quantized, malformed": (
        {"quantization_config": ["fp8"]},
        "quantization_config=['fp8']: expected an object with quant_method: load the model in transformers",
    ),
    "mxfp4 of another family": (
        {"quantization_config": {"quant_method": "mxfp4"}},
        "quantization_config.quant_method='mxfp4' is not read for llama, only for gpt_oss",
    ),
    "another 8-bit float": (
        {"quantization_config": {**FP8, "fmt": "e5m2"}},
        "quantization_config.fmt='e5m2' is not read; expected 'e4m3'",
    ),
    "a factor for each tensor": (
        {"quantization_config": {**FP8, "weight_block_size": None}},
        "quantization_config.weight_block_size=None: expected the rows and columns of a block",
    ),
    "no block": ({"quantization_config": {**FP8, "weight_block_size": [128, 0]}}, "weight_block_size=[128, 0]"),
    "fp8 with a key of another": (
        {"quantization_config": {**FP8, "modules_to_convert": ["lm_head"]}},
        "quantization_config.modules_to_convert=['lm_head'] is not known for fp8; only fmt,",
    ),
    "bare": ({"architectures": ["LlamaModel"]}, "architectures=['LlamaModel']"),
    "labels": ({"architectures": ["LlamaForSequenceClassification"]}, "with 2 labels"),
    "layers": ({"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000: expected an integer of 1 to"),
    "no layers": ({"num_hidden_layers": None}, "num_hidden_layers: missing"),
    "no vocabulary": ({"vocab_size": None}, "vocab_size: missing"),
    "heads": (
        {"num_attention_heads": 24, "num_key_value_heads": 7, "head_dim": 128},
        "config.json: model.num_query_groups=7 does not divide model.num_attention_heads=24;",
    ),
    "window by layer": ({"layer_types": ["chunked_attention"] * 32}, "layer_types="),
    "pattern of windows in letters": (
        {"model_type": "exaone4", "sliding_window": 5, "sliding_window_pattern": "LLLG"},
        "sliding_window_pattern='LLLG' without layer_types",
    ),
    "window": ({"layer_types": ["sliding_attention"] * 32, "sliding_window": 5}, "is not computed for llama"),
    "rope": ({"rope_scaling": "far"}, "is malformed"),
    "partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not computed"),
    "alias": ({"model_type": "qwen3_moe", "num_experts": 4, "num_local_experts": 8}, "contradicts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_or_malformed_is_refused_by_name(case):
    changes, message = REFUSED[case]
    values = {**real("Llama-3.1-8B")[0], "moe_intermediate_size": 8, **changes}
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_config(values, where="config.json")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("deepseek_v3", FP8),
        ("deepseek_v3", {**FP8, "scale_fmt": "ue8m0"}),  # V3.1, whose factors are fp32 too
        ("qwen3", {**FP8, "modules_to_not_convert": ["lm_head"]}),
        ("minimax_m2", {**FP8, "fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "lm_head"]}),
        ("gpt_oss", {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}),
    ],
)
def test_weights_in_codes_are_those_of_the_same_model_in_bf16(name, how):
    plain = full(name)
    dtypes = {key: None for key in ("dtype", "torch_dtype")}
    found = read_config({**plain, **dtypes, "quantization_config": how}, where="config.json")
    assert found.model == read_config({**plain, "dtype": "bfloat16"}, where="config.json").model
    told = read_config({**plain, "dtype": "float32", "quantization_config": how}, where="config.json")
    assert told.model.dtype == "fp32"
    written = update_config({**plain, "quantization_config": how}, found, dtype="bfloat16")
    assert "quantization_config" not in written and written["dtype"] == "bfloat16"


LEAST = ["num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"]
LEAST += ["vocab_size", "moe_intermediate_size", "hidden_size_per_layer_input"]


def full(name):
    """Every key as the family's class in ``transformers`` writes it."""
    transformers = pytest.importorskip("transformers")
    values = {**transformers.AutoConfig.for_model(name).to_dict(), "architectures": [FAMILIES[name].causal]}
    # Of its defaults the heads do not divide the width.
    if name == "gemma4_text":
        # Of its defaults embeddings for each layer are not computed.
        return {**values, "hidden_size_per_layer_input": 0}
    if name == "dots1":
        return {**values, **UNSET}
    return {**values, "num_attention_heads": 32} if name == "glm4_moe" else values


KIMI_K2 = {
    **{"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 61},
    **{"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_attention_heads": 64},
    **{"num_key_value_heads": 64, "max_position_embeddings": 131072, "vocab_size": 163840, "hidden_act": "silu"},
    **{"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"n_routed_experts": 384, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
    **{"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "norm_topk_prob": True, "moe_layer_freq": 1},
    **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "attention_bias": False, "attention_dropout": 0.0},
    **{"rms_norm_eps": 1e-6, "rope_theta": 50000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    **{"rope_scaling": {**MSCALE, "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0}, "num_nextn_predict_layers": 0},
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
}


def test_kimi_k2_is_read_and_written_as_the_deepseek_v3_that_it_is():
    found = read_config(KIMI_K2, where="config.json")
    assert found == read_config({**KIMI_K2, "model_type": "deepseek_v3"}, where="config.json")
    assert (found.family.name, found.model.rotary_scaling.beta_fast, found.model.num_experts) == ("deepseek_v3", 1, 384)
    written = update_config(KIMI_K2, found, dtype="bfloat16")
    # transformers knows no kimi_k2 without the code of its directory.
    assert (written["model_type"], written["routed_scaling_factor"], "auto_map" in written) == ("deepseek_v3", 2.827, 0)
    assert read_config(written, where="config.json") == found


def test_a_kimi_k2_that_leaves_a_key_to_its_own_code_is_not_taken_for_another():
    for key in ("first_k_dense_replace", "norm_topk_prob", "n_shared_experts"):
        values = {name: value for name, value in KIMI_K2.items() if name != key}
        with pytest.raises(NotComputedError, match=f"{key}: missing; nothing is known of what a kimi_k2 takes"):
            read_config(values, where="config.json")
        assert has_no_table(values)
    with pytest.raises(NotComputedError, match="topk_method='greedy' is not computed"):
        read_config({**KIMI_K2, "topk_method": "greedy"}, where="config.json")


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_left_out_has_the_default_of_transformers(name):
    values = full(name)
    told = [*LEAST, *(UNSET if name == "dots1" else ())]
    least = {"model_type": name, **{key: values[key] for key in told if key in values}}
    written, left_out = (read_config(each, where="config.json").model for each in (values, least))
    assert replace(written, head_dim=written.head_size) == replace(left_out, head_dim=left_out.head_size)


@pytest.mark.parametrize("name", FAMILIES)
def test_padding_that_is_left_out_is_that_of_transformers(name):
    """It decides which token a reward is read from."""
    assert FAMILIES[name].defaults.get("pad_token_id") == full(name).get("pad_token_id")


def test_a_scale_of_scores_counts_in_the_families_that_have_one():
    for name, scale in (("gemma2", 0.5), ("llama", None)):
        values = {**full(name), "query_pre_attn_scalar": 4}
        assert read_config(values, where="config.json").model.attention_scale == scale


def test_null_is_an_answer():
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": None}
    model = read_config({**full("gemma2"), **caps}, where="config.json").model
    assert (model.attention_softcap, model.logit_softcap, model.window, model.window_layers) == (None,) * 4
    assert read_config({**full("mistral"), "sliding_window": None}, where="config.json").model.window is None


def test_a_null_in_the_place_of_rotary_settings_is_none(tmp_path):
    """It is filled in, as is what is left out."""
    transformers = pytest.importorskip("transformers")
    values = {**full("gpt_oss"), "rope_parameters": None}
    (tmp_path / "config.json").write_text(json.dumps(values))
    meant = json.loads(transformers.AutoConfig.from_pretrained(tmp_path).to_json_string(use_diff=False))
    told, meant = (read_config(each, where="config.json").model for each in (values, meant))
    assert told.rotary_scaling == meant.rotary_scaling and told.rotary_scaling.kind == "yarn"


def test_the_published_and_the_written_name_of_the_number_of_experts():
    values = full("qwen3_moe")
    values.pop("num_local_experts")
    for key in ("num_experts", "num_local_experts"):
        assert read_config({**values, key: 96}, where="config.json").model.num_experts == 96


ROTARY = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
REFUSED_ROTARY = {
    "mscale": ({**ROTARY, "rope_type": "llama3", "mscale": 0.7}, "mscale=0.7 is not computed"),
    "nested": ({"full_attention": ROTARY, "rope_type": "yarn"}, "full_attention={"),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, "rope_type='dynamic' is not computed"),
    "partial": ({**ROTARY, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not computed"),
    "betas": ({**ROTARY, "beta_fast": 1.0, "beta_slow": 1.5}, "beta_slow=1.5 is above"),
    "partial of a family that has none": (
        {**ROTARY, "rope_type": "default", "partial_rotary_factor": 0.5},
        "is not computed for llama; only 1 is",
    ),
    "divisors": ({**ROTARY, "rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "1 numbers"),
}


@pytest.mark.parametrize("case", REFUSED_ROTARY)
def test_rotary_embeddings_that_are_not_computed_are_refused_by_name(case):
    parameters, message = REFUSED_ROTARY[case]
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_config({**full("llama"), "rope_parameters": parameters}, where="config.json")


def test_the_docs_name_every_family_and_what_it_refuses():
    page = (Path(__file__).parents[3] / "docs/families.md").read_text()
    for family in FAMILIES.values():
        assert f"| {', '.join(f'`{name}`' for name in (family.name, *family.others))} |" in page
        assert all(f"`{key}`" in page for key in family.computed), family.name


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@given(data=st.data(), name=st.sampled_from(list(REAL)))
@settings(max_examples=300, deadline=None)
def test_junk_in_any_key_is_an_error_of_ours_or_a_model(data, name):
    values, _ = real(name)
    values |= {"layer_types": None, "rope_parameters": None, "num_labels": 1, "dtype": "float32", "id2label": None}
    if data.draw(st.booleans()) and values.get("rope_scaling"):
        inner = dict(values["rope_scaling"])
        inner[data.draw(st.sampled_from(sorted(inner)))] = data.draw(JUNK)
        values["rope_scaling"] = inner
    else:
        values[data.draw(st.sampled_from(sorted(values)))] = data.draw(JUNK)
    try:
        read_config(values, where="config.json")
    except ConfigError as error:
        assert str(error).startswith("config.json: ")
