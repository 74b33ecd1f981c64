"""Mixtral: Mistral's attention, and eight experts."""

from hybridflow.families.family import ATTENTION, COMMON_KEYS, EMBEDDINGS, NO_DROPOUT, NORMS, Family, experts

MIXTRAL = Family(
    name="mixtral",
    causal="MixtralForCausalLM",
    scorer="MixtralForSequenceClassification",
    keys={**COMMON_KEYS, "num_local_experts": "num_experts", "num_experts_per_tok": "experts_per_token"},
    aliases={"num_experts": "num_local_experts"},
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    always={"normalized_experts": True},
    computed={**NO_DROPOUT, "router_jitter_noise": (0.0,)},
    window="all",
    rules=(*EMBEDDINGS, *NORMS, *ATTENTION, *experts("block_sparse_moe", "w1", "w3", "w2")),
)
