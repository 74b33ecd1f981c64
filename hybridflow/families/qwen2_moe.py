"""Qwen2-MoE, Qwen 1.5's too: Qwen2's attention, and many small experts beside a shared one behind a gate."""

from hybridflow.families.family import (
    ATTENTION,
    COMMON_KEYS,
    EMBEDDINGS,
    GATED_SHARED_EXPERT,
    NO_DROPOUT,
    NORMS,
    QKV_BIAS,
    Family,
    experts,
)

_SHARED = {key: setting for key, setting in COMMON_KEYS.items() if key != "intermediate_size"}

QWEN2_MOE = Family(
    name="qwen2_moe",
    causal="Qwen2MoeForCausalLM",
    scorer="Qwen2MoeForSequenceClassification",
    keys={
        **_SHARED,
        "moe_intermediate_size": "ffn_hidden_size",
        "num_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "norm_topk_prob": "normalized_experts",
        "shared_expert_intermediate_size": "shared_ffn_hidden_size",
        "qkv_bias": "qkv_bias",
    },
    aliases={"num_local_experts": "num_experts"},
    defaults={
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "moe_intermediate_size": 1408,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 5632,
        "qkv_bias": True,
    },
    always={"shared_expert_gate": True},
    # Which layers have the window ``transformers`` has decided in several ways.
    computed={
        **NO_DROPOUT,
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([], None),
        "use_sliding_window": (False,),
    },
    rules=(
        *EMBEDDINGS,
        *NORMS,
        *ATTENTION,
        *QKV_BIAS,
        *experts(),
        *GATED_SHARED_EXPERT,
    ),
)
