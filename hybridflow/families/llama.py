"""Llama 2, 3, 3.1 to 3.3, and what has their shape: TinyLlama, DeepSeek-Coder."""

from hybridflow.families.family import COMMON_KEYS, DENSE, NO_DROPOUT, Family

LLAMA = Family(
    name="llama",
    causal="LlamaForCausalLM",
    scorer="LlamaForSequenceClassification",
    keys=COMMON_KEYS,
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "tie_word_embeddings": False},
    computed={**NO_DROPOUT, "attention_bias": (False,), "mlp_bias": (False,)},
    rules=DENSE,
)
