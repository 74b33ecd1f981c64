"""GPT-OSS: attention sinks, a window in every second layer, biases everywhere, and experts with a clamped gate."""

from hybridflow.families.family import ATTENTION, COMMON_KEYS, EMBEDDINGS, NO_DROPOUT, NORMS, QKV_BIAS, Family, in_layer

_EXPERT = "mlp.experts.{expert}"

GPT_OSS = Family(
    name="gpt_oss",
    causal="GptOssForCausalLM",
    scorer="GptOssForSequenceClassification",
    keys={
        **COMMON_KEYS,
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "swiglu_limit": "glu_clamp",
    },
    aliases={"num_experts": "num_local_experts"},
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    always={
        "attention_sinks": True,
        "linear_bias": True,
        "qkv_bias": True,
        "activation": "quick_gelu",
        "glu_offset": 1.0,
        "normalized_experts": True,
    },
    computed={**NO_DROPOUT, "attention_bias": (True,), "swiglu_alpha": (1.702,)},
    window="even_layers",
    rules=(
        *EMBEDDINGS,
        *NORMS,
        *ATTENTION,
        *QKV_BIAS,
        in_layer("self_attention.linear_proj.bias", "self_attn.o_proj.bias"),
        in_layer("self_attention.core_attention.softmax_offset", "self_attn.sinks"),
        in_layer("mlp.router.weight", "mlp.router.weight"),
        in_layer("mlp.router.bias", "mlp.router.bias"),
        in_layer(f"{_EXPERT}.linear_fc1.weight", "mlp.experts.gate_up_proj", form="interleaved"),
        in_layer(f"{_EXPERT}.linear_fc1.bias", "mlp.experts.gate_up_proj_bias", form="interleaved"),
        in_layer(f"{_EXPERT}.linear_fc2.weight", "mlp.experts.down_proj", form="transposed"),
        in_layer(f"{_EXPERT}.linear_fc2.bias", "mlp.experts.down_proj_bias"),
    ),
)
