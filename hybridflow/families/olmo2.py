"""OLMo 2: norms behind the blocks alone, and queries and keys normalized over all heads together."""

from hybridflow.families.family import (
    ATTENTION,
    COMMON_KEYS,
    EMBEDDINGS,
    FEED_FORWARD,
    NO_DROPOUT,
    POST_NORMS,
    QK_NORM,
    Family,
)

OLMO2 = Family(
    name="olmo2",
    causal="Olmo2ForCausalLM",
    scorer="Olmo2ForSequenceClassification",
    keys=COMMON_KEYS,
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "pad_token_id": 1,
    },
    always={"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_over": "projection"},
    computed={**NO_DROPOUT, "attention_bias": (False,)},
    rules=(*EMBEDDINGS, *ATTENTION, *QK_NORM, *FEED_FORWARD, *POST_NORMS),
)
