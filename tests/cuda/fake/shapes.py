"""A model of each family with the head sizes, groups and settings of a real one, cut to a few layers."""

from __future__ import annotations

from hybridflow.families.config_json import read_config
from hybridflow.families.model import ModelConfig

_CONFIGS = {
    "llama": dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8),
    "mistral": dict(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, sliding_window=1024
    ),
    "qwen2": dict(hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4),
    "qwen3": dict(
        hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128
    ),
    "phi3": dict(hidden_size=3072, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=32),
    "gemma": dict(
        hidden_size=3072, intermediate_size=24576, num_attention_heads=16, num_key_value_heads=16, head_dim=256
    ),
    "gemma2": dict(
        hidden_size=3584,
        intermediate_size=14336,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        sliding_window=1024,
        query_pre_attn_scalar=256,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    ),
    "gemma3_text": dict(
        hidden_size=2560,
        intermediate_size=10240,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        sliding_window=1024,
        sliding_window_pattern=2,
        query_pre_attn_scalar=256,
    ),
    "gemma4_text": dict(
        hidden_size=5376,
        intermediate_size=21504,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=256,
        global_head_dim=512,
        num_global_key_value_heads=4,
        attention_k_eq_v=True,
        sliding_window=1024,
        layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0,
        final_logit_softcapping=30.0,
    ),
    "glm": dict(hidden_size=4096, intermediate_size=13696, num_attention_heads=32, num_key_value_heads=2),
    "glm4": dict(hidden_size=4096, intermediate_size=13696, num_attention_heads=32, num_key_value_heads=2),
    "olmo2": dict(hidden_size=4096, intermediate_size=11008, num_attention_heads=32, num_key_value_heads=32),
    "olmo3": dict(
        hidden_size=4096, intermediate_size=11008, num_attention_heads=32, num_key_value_heads=32, sliding_window=1024
    ),
    "smollm3": dict(
        hidden_size=2048,
        intermediate_size=11008,
        num_attention_heads=16,
        num_key_value_heads=4,
        no_rope_layer_interval=2,
    ),
    "glm4_moe": dict(
        hidden_size=4096,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_attention_heads=96,
        num_key_value_heads=8,
        head_dim=128,
        n_routed_experts=128,
        num_experts_per_tok=8,
        first_k_dense_replace=0,
    ),
    "mixtral": dict(
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "seed_oss": dict(
        hidden_size=5120, intermediate_size=27648, num_attention_heads=80, num_key_value_heads=8, head_dim=128
    ),
    "olmoe": dict(
        hidden_size=2048, intermediate_size=1024, num_attention_heads=16, num_key_value_heads=16, num_experts=64
    ),
    "ernie4_5": dict(hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=2),
    "minimax_m2": dict(
        hidden_size=3072,
        intermediate_size=1536,
        num_attention_heads=48,
        num_key_value_heads=8,
        head_dim=128,
        rotary_dim=64,
        num_local_experts=256,
        num_experts_per_tok=8,
    ),
    "gpt_oss": dict(
        hidden_size=2880, intermediate_size=2880, num_attention_heads=64, num_key_value_heads=8, num_local_experts=32
    ),
    "qwen3_moe": dict(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    ),
    "qwen3_5_text": dict(
        hidden_size=4096,
        intermediate_size=12288,
        num_attention_heads=16,
        num_key_value_heads=4,
        layer_types=["linear_attention", "full_attention"],
    ),
    "qwen2_moe": dict(
        hidden_size=2048,
        intermediate_size=5632,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        num_attention_heads=16,
        num_key_value_heads=16,
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
