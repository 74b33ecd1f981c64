"""Qwen3: queries and keys normalized head by head."""

from hybridflow.families.family import COMMON_KEYS, DENSE, NO_DROPOUT, QK_NORM, Family

QWEN3 = Family(
    name="qwen3",
    causal="Qwen3ForCausalLM",
    scorer="Qwen3ForSequenceClassification",
    keys=COMMON_KEYS,
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
    },
    always={"qk_norm": True},
    computed={**NO_DROPOUT, "attention_bias": (False,)},
    window="upper_layers",
    rules=(*DENSE, *QK_NORM),
)
