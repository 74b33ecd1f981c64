"""Qwen 1.5, 2 and 2.5: biases on query, key and value; a sliding window in the upper layers where it is switched on."""

from hybridflow.families.family import COMMON_KEYS, DENSE, NO_DROPOUT, QKV_BIAS, Family

QWEN2 = Family(
    name="qwen2",
    causal="Qwen2ForCausalLM",
    scorer="Qwen2ForSequenceClassification",
    keys=COMMON_KEYS,
    defaults={
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
    },
    always={"qkv_bias": True},
    computed=NO_DROPOUT,
    window="upper_layers",
    rules=(*DENSE, *QKV_BIAS),
)
