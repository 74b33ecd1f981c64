"""GLM-4: neighboring dims of half of each head are rotated; in the second table also norms behind the blocks.

The mixtures from GLM-4.5 on rotate a dim of each half together, and have DeepSeek-V3's experts; GLM-4.7-Flash has its
attention too.
"""

from hybridflow.families.deepseek import DEEPSEEK_V3
from hybridflow.families.family import (
    ATTENTION,
    COMMON_KEYS,
    EMBEDDINGS,
    FUSED_FEED_FORWARD,
    MIXTURE,
    MIXTURE_KEYS,
    NO_DROPOUT,
    NORMS,
    QK_NORM,
    QKV_BIAS,
    Family,
    in_layer,
)

_KEYS = {**COMMON_KEYS, "attention_bias": "qkv_bias"}
_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "pad_token_id": 151329,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}

GLM = Family(
    name="glm",
    causal="GlmForCausalLM",
    scorer="GlmForSequenceClassification",
    keys=_KEYS,
    defaults=_DEFAULTS,
    always={"rotary_interleaved": True},
    computed=NO_DROPOUT,
    scalings=("linear", "llama3", "yarn"),
    rules=(*EMBEDDINGS, *NORMS, *ATTENTION, *QKV_BIAS, *FUSED_FEED_FORWARD),
)

GLM4 = Family(
    name="glm4",
    causal="Glm4ForCausalLM",
    scorer="Glm4ForSequenceClassification",
    keys=_KEYS,
    defaults=_DEFAULTS,
    always={"rotary_interleaved": True, "post_norms": True},
    computed=NO_DROPOUT,
    scalings=("linear", "llama3", "yarn"),
    rules=(
        *GLM.rules,
        in_layer("self_attention.post_layernorm.weight", "post_self_attn_layernorm.weight"),
        in_layer("mlp.post_layernorm.weight", "post_mlp_layernorm.weight"),
    ),
)

GLM4_MOE = Family(
    name="glm4_moe",
    causal="Glm4MoeForCausalLM",
    scorer=None,
    keys={**_KEYS, **MIXTURE_KEYS, "use_qk_norm": "qk_norm"},
    aliases={"num_local_experts": "n_routed_experts"},
    defaults={
        "num_key_value_heads": 8,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "use_qk_norm": False,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "partial_rotary_factor": 0.5,
    },
    always={"router_score": "sigmoid", "router_bias": True},
    computed=NO_DROPOUT,
    scalings=("linear", "llama3", "yarn"),
    further_layers=("eh_proj.weight", "num_nextn_predict_layers"),
    rules=(*EMBEDDINGS, *NORMS, *ATTENTION, *QKV_BIAS, *QK_NORM, *MIXTURE),
)

GLM4_MOE_LITE = Family(
    name="glm4_moe_lite",
    causal="Glm4MoeLiteForCausalLM",
    scorer=None,
    keys=DEEPSEEK_V3.keys,
    aliases=DEEPSEEK_V3.aliases,
    defaults={
        "num_key_value_heads": 20,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "mlp_layer_types": None,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
        "tie_word_embeddings": False,
    },
    always=DEEPSEEK_V3.always,
    computed={**NO_DROPOUT, "attention_bias": (False,), "rope_interleave": (True,)},
    scalings=DEEPSEEK_V3.scalings,
    further_layers=DEEPSEEK_V3.further_layers,
    rules=DEEPSEEK_V3.rules,
)
