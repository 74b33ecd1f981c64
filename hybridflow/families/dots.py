"""dots.llm1: Qwen3's attention, the experts of DeepSeek-V3, and windows in the last layers, if anywhere."""

from hybridflow.families.family import (
    ATTENTION,
    COMMON_KEYS,
    EMBEDDINGS,
    MIXTURE,
    MIXTURE_KEYS,
    NO_DROPOUT,
    NORMS,
    QK_NORM,
    Family,
)

DOTS1 = Family(
    name="dots1",
    causal="Dots1ForCausalLM",
    scorer=None,
    keys={**COMMON_KEYS, **MIXTURE_KEYS},
    aliases={"num_local_experts": "n_routed_experts"},
    defaults={
        "num_key_value_heads": 32,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_shared_experts": None,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
        "max_window_layers": 62,
    },
    always={"router_score": "sigmoid", "router_bias": True, "qk_norm": True},
    computed={**NO_DROPOUT, "attention_bias": (False,)},
    window="last_layers",
    rules=(*EMBEDDINGS, *NORMS, *ATTENTION, *QK_NORM, *MIXTURE),
)
