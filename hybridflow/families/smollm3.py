"""SmolLM3: Llama's shape, and every fourth layer without rotary position embedding."""

from hybridflow.families.family import COMMON_KEYS, DENSE, NO_DROPOUT, Family

SMOLLM3 = Family(
    name="smollm3",
    causal="SmolLM3ForCausalLM",
    scorer="SmolLM3ForSequenceClassification",
    keys=COMMON_KEYS,
    defaults={
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "pad_token_id": 128004,
        "rope_theta": 2000000.0,
        "no_rope_layer_interval": 4,
    },
    computed={**NO_DROPOUT, "attention_bias": (False,), "mlp_bias": (False,), "use_sliding_window": (False,)},
    rules=DENSE,
)
