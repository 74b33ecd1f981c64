"""Mistral: Llama's shape with a sliding window."""

from hybridflow.families.family import COMMON_KEYS, DENSE, NO_DROPOUT, Family

MISTRAL = Family(
    name="mistral",
    causal="MistralForCausalLM",
    scorer="MistralForSequenceClassification",
    keys=COMMON_KEYS,
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
    },
    computed=NO_DROPOUT,
    window="all",
    rules=DENSE,
)
