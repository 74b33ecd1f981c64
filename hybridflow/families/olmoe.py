"""OLMoE: queries and keys normalized over all heads together, and many small experts in every layer."""

from hybridflow.families.family import (
    ATTENTION,
    COMMON_KEYS,
    EMBEDDINGS,
    NO_DROPOUT,
    NORMS,
    QK_NORM,
    Family,
    experts,
)

OLMOE = Family(
    name="olmoe",
    causal="OlmoeForCausalLM",
    scorer=None,
    keys={
        **{key: setting for key, setting in COMMON_KEYS.items() if key != "head_dim"},
        "num_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "norm_topk_prob": "normalized_experts",
    },
    aliases={"num_local_experts": "num_experts"},
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "pad_token_id": 1,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    always={"qk_norm": True, "qk_norm_over": "projection"},
    computed={**NO_DROPOUT, "attention_bias": (False,), "clip_qkv": (None,)},
    rules=(*EMBEDDINGS, *NORMS, *ATTENTION, *QK_NORM, *experts()),
)
