"""OLMo 2 and 3: norms behind the blocks alone, and queries and keys normalized over all heads together.

The third has windows in three of four layers, where the rotary embedding is not stretched.
"""

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

_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "pad_token_id": 1,
}
_ALWAYS = {"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_over": "projection"}
_COMPUTED = {**NO_DROPOUT, "attention_bias": (False,)}
_RULES = (*EMBEDDINGS, *ATTENTION, *QK_NORM, *FEED_FORWARD, *POST_NORMS)

OLMO2 = Family(
    name="olmo2",
    causal="Olmo2ForCausalLM",
    scorer="Olmo2ForSequenceClassification",
    keys=COMMON_KEYS,
    defaults=_DEFAULTS,
    always=_ALWAYS,
    computed=_COMPUTED,
    rules=_RULES,
)

OLMO3 = Family(
    name="olmo3",
    causal="Olmo3ForCausalLM",
    scorer="Olmo3ForSequenceClassification",
    keys=COMMON_KEYS,
    defaults={
        **_DEFAULTS,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "rope_theta": 500000.0,
        "rope_local_base_freq": 500000.0,
    },
    always=_ALWAYS,
    computed=_COMPUTED,
    window="most_layers",
    rules=_RULES,
)
