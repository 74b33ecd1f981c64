"""ERNIE 4.5, its dense models: Llama's shape, in which neighboring dims are rotated together."""

from hybridflow.families.family import COMMON_KEYS, DENSE, Family

ERNIE4_5 = Family(
    name="ernie4_5",
    causal="Ernie4_5ForCausalLM",
    scorer=None,
    keys=COMMON_KEYS,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "rope_theta": 500000.0,
    },
    always={"rotary_interleaved": True},
    computed={"hidden_act": ("silu",), "use_bias": (False,)},
    rules=DENSE,
)
