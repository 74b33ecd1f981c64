"""Seed-OSS: Llama's shape with a head size of its own, and biases on query, key and value."""

from hybridflow.families.family import COMMON_KEYS, DENSE, NO_DROPOUT, QKV_BIAS, Family

SEED_OSS = Family(
    name="seed_oss",
    causal="SeedOssForCausalLM",
    scorer="SeedOssForSequenceClassification",
    keys={**COMMON_KEYS, "attention_bias": "qkv_bias"},
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 524288,
        "tie_word_embeddings": False,
        "pad_token_id": 1,
        "attention_bias": True,
    },
    computed={
        **NO_DROPOUT,
        # Its files have those of pre-training, which are off here as they are in ``transformers``.
        "attention_dropout": (0.0, 0.1),
        "residual_dropout": (0.0, 0.1),
        "attention_out_bias": (False,),
        "mlp_bias": (False,),
    },
    rules=(*DENSE, *QKV_BIAS),
)
