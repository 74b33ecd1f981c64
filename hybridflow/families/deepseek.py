"""DeepSeek-V3 and R1, Kimi-K2: latent attention, groups of experts with a shared one, and dense first layers."""

from hybridflow.families.family import (
    COMMON_KEYS,
    EMBEDDINGS,
    MIXTURE,
    MIXTURE_KEYS,
    NO_DROPOUT,
    NORMS,
    Family,
    in_layer,
)

_ATTENTION = {
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "q_layernorm": "q_a_layernorm",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "kv_layernorm": "kv_a_layernorm",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "o_proj",
}

DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    causal="DeepseekV3ForCausalLM",
    scorer="DeepseekV3ForSequenceClassification",
    keys={
        **{key: setting for key, setting in COMMON_KEYS.items() if key != "head_dim"},
        **MIXTURE_KEYS,
        "kv_lora_rank": "kv_lora_rank",
        "q_lora_rank": "q_lora_rank",
        "qk_nope_head_dim": "qk_nope_head_dim",
        "qk_rope_head_dim": "qk_rope_head_dim",
        "v_head_dim": "v_head_dim",
    },
    aliases={"num_local_experts": "n_routed_experts"},
    defaults={
        "num_key_value_heads": 128,
        "moe_intermediate_size": 2048,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    always={"router_score": "sigmoid", "router_bias": True},
    computed={
        **NO_DROPOUT,
        "attention_bias": (False,),
        "rope_interleave": (True,),
        "moe_layer_freq": (1,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    scalings=("yarn",),
    further_layers=("eh_proj.weight", "num_nextn_predict_layers"),
    others=("kimi_k2",),
    rules=(
        *EMBEDDINGS,
        *NORMS,
        *(
            in_layer(f"self_attention.{ours}.weight", f"self_attn.{theirs}.weight")
            for ours, theirs in _ATTENTION.items()
        ),
        *MIXTURE,
    ),
)
