"""A model of each family with the head sizes, groups and settings of a real one, cut to a few layers."""

from __future__ import annotations

from typing import Any

from hybridflow.families.config_json import read_config
from hybridflow.families.model import ModelConfig


def _config(hidden: int, ffn: int, heads: int, groups: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads}
    return {**sizes, "num_key_value_heads": groups, **more}


_CONFIGS = {
    "llama": _config(4096, 14336, 32, 8),
    "mistral": _config(4096, 14336, 32, 8, sliding_window=1024),
    "qwen2": _config(3584, 18944, 28, 4),
    "qwen3": _config(4096, 12288, 32, 8, head_dim=128),
    "phi3": _config(3072, 8192, 32, 32),
    "gemma": _config(3072, 24576, 16, 16, head_dim=256),
    "gemma2": _config(
        3584,
        14336,
        16,
        8,
        head_dim=256,
        sliding_window=1024,
        query_pre_attn_scalar=256,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    ),
    "gemma3_text": _config(
        2560, 10240, 8, 4, head_dim=256, sliding_window=1024, sliding_window_pattern=2, query_pre_attn_scalar=256
    ),
    "gemma4_text": _config(
        5376,
        21504,
        32,
        16,
        head_dim=256,
        global_head_dim=512,
        num_global_key_value_heads=4,
        attention_k_eq_v=True,
        sliding_window=1024,
        layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0,
        final_logit_softcapping=30.0,
    ),
    "glm": _config(4096, 13696, 32, 2),
    "glm4": _config(4096, 13696, 32, 2),
    "olmo2": _config(4096, 11008, 32, 32),
    "olmo3": _config(4096, 11008, 32, 32, sliding_window=1024),
    "smollm3": _config(2048, 11008, 16, 4, no_rope_layer_interval=2),
    "glm4_moe": _config(
        4096,
        10944,
        96,
        8,
        moe_intermediate_size=1408,
        head_dim=128,
        n_routed_experts=128,
        num_experts_per_tok=8,
        first_k_dense_replace=0,
    ),
    "mixtral": _config(4096, 14336, 32, 8, num_local_experts=8, num_experts_per_tok=2),
    "seed_oss": _config(5120, 27648, 80, 8, head_dim=128),
    "olmoe": _config(2048, 1024, 16, 16, num_experts=64),
    "ernie4_5": _config(1024, 3072, 16, 2),
    "dots1": _config(
        4096,
        10944,
        32,
        32,
        moe_intermediate_size=1408,
        n_routed_experts=128,
        n_shared_experts=2,
        num_experts_per_tok=6,
    ),
    "exaone4": _config(5120, 27392, 40, 8, head_dim=128, sliding_window=1024, sliding_window_pattern=2),
    "minimax_m2": _config(3072, 1536, 48, 8, head_dim=128, rotary_dim=64, num_local_experts=256, num_experts_per_tok=8),
    "gpt_oss": _config(2880, 2880, 64, 8, num_local_experts=32),
    "qwen3_moe": _config(
        2048,
        6144,
        32,
        4,
        moe_intermediate_size=768,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    ),
    "qwen3_5_text": _config(4096, 12288, 16, 4, layer_types=["linear_attention", "full_attention"]),
    "qwen2_moe": _config(
        2048,
        5632,
        16,
        16,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        num_experts=60,
        num_experts_per_tok=4,
    ),
}


FAMILIES = tuple(name for name in _CONFIGS if name not in ("qwen3_5_text", "gemma4_text"))
"""Those whose layers are all alike."""


def family_model(name: str) -> ModelConfig:
    """Return a bf16 model of a family, of two layers."""
    values = dict(
        model_type=name,
        num_hidden_layers=2,
        vocab_size=32000,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        torch_dtype="bfloat16",
        **_CONFIGS[name],
    )
    return read_config(values, where="tests").model
