"""GPT-OSS: attention sinks, a window in every second layer, biases everywhere, and experts with a clamped gate."""

from hybridflow.families.family import ATTENTION, COMMON_KEYS, EMBEDDINGS, NO_DROPOUT, NORMS, QKV_BIAS, Family, Rule

_LAYER, _HF_LAYER = "decoder.layers.{layer}", "model.layers.{layer}"
_EXPERT, _HF_EXPERTS = f"{_LAYER}.mlp.experts.{{expert}}", f"{_HF_LAYER}.mlp.experts"

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
        Rule(logical=f"{_LAYER}.self_attention.linear_proj.bias", hf=(f"{_HF_LAYER}.self_attn.o_proj.bias",)),
        Rule(logical=f"{_LAYER}.self_attention.core_attention.softmax_offset", hf=(f"{_HF_LAYER}.self_attn.sinks",)),
        Rule(logical=f"{_LAYER}.mlp.router.weight", hf=(f"{_HF_LAYER}.mlp.router.weight",)),
        Rule(logical=f"{_LAYER}.mlp.router.bias", hf=(f"{_HF_LAYER}.mlp.router.bias",)),
        Rule(logical=f"{_EXPERT}.linear_fc1.weight", hf=(f"{_HF_EXPERTS}.gate_up_proj",), form="interleaved"),
        Rule(logical=f"{_EXPERT}.linear_fc1.bias", hf=(f"{_HF_EXPERTS}.gate_up_proj_bias",), form="interleaved"),
        Rule(logical=f"{_EXPERT}.linear_fc2.weight", hf=(f"{_HF_EXPERTS}.down_proj",), form="transposed"),
        Rule(logical=f"{_EXPERT}.linear_fc2.bias", hf=(f"{_HF_EXPERTS}.down_proj_bias",)),
    ),
)
