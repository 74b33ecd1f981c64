"""Qwen3-MoE: Qwen3's attention, and many small experts in every layer."""

from hybridflow.families.family import ATTENTION, COMMON_KEYS, EMBEDDINGS, NO_DROPOUT, NORMS, QK_NORM, Family, experts

_SHARED = {key: setting for key, setting in COMMON_KEYS.items() if key != "intermediate_size"}

QWEN3_MOE = Family(
    name="qwen3_moe",
    causal="Qwen3MoeForCausalLM",
    scorer="Qwen3MoeForSequenceClassification",
    keys={
        **_SHARED,
        "moe_intermediate_size": "ffn_hidden_size",
        "num_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "norm_topk_prob": "normalized_experts",
    },
    aliases={"num_local_experts": "num_experts"},  # what newer transformers write
    defaults={
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    always={"qk_norm": True},
    computed={**NO_DROPOUT, "attention_bias": (False,), "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    window="switched",
    rules=(*EMBEDDINGS, *NORMS, *ATTENTION, *QK_NORM, *experts()),
)
