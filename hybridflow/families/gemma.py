"""Gemma 1, 2 and 3: norms around 1, scaled embeddings; from the second on windows and norms behind the blocks.

The second has soft-caps. The third has normalized queries and keys, and another rotary base in layers with a window.
"""

from hybridflow.families.family import (
    ATTENTION,
    COMMON_KEYS,
    DENSE,
    EMBEDDINGS,
    FEED_FORWARD,
    POST_NORMS,
    QK_NORM,
    Family,
    Rule,
)

_ALWAYS = {"zero_centered_norms": True, "scaled_embeddings": True, "activation": "gelu_tanh"}
_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "head_dim": 256,
    "pad_token_id": 0,
}
_COMPUTED = {"attention_dropout": (0.0,), "attention_bias": (False,), "use_bidirectional_attention": (None, False)}
_LAYER, _HF_LAYER = "decoder.layers.{layer}", "model.layers.{layer}"

_SANDWICHED = (
    *EMBEDDINGS,
    *ATTENTION,
    *FEED_FORWARD,
    *POST_NORMS,
    Rule(logical=f"{_LAYER}.input_layernorm.weight", hf=(f"{_HF_LAYER}.input_layernorm.weight",)),
    Rule(logical=f"{_LAYER}.pre_mlp_layernorm.weight", hf=(f"{_HF_LAYER}.pre_feedforward_layernorm.weight",)),
)

GEMMA = Family(
    name="gemma",
    causal="GemmaForCausalLM",
    scorer="GemmaForSequenceClassification",
    keys=COMMON_KEYS,
    defaults={**_DEFAULTS, "num_key_value_heads": 16},
    always=_ALWAYS,
    # ``transformers`` computes the tanh form of GELU for both names, and prefers hidden_activation.
    computed={
        **_COMPUTED,
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),
        "hidden_activation": (None, "gelu_pytorch_tanh"),
    },
    rules=DENSE,
)

GEMMA2 = Family(
    name="gemma2",
    causal="Gemma2ForCausalLM",
    scorer="Gemma2ForSequenceClassification",
    keys={
        **COMMON_KEYS,
        "attn_logit_softcapping": "attention_softcap",
        "final_logit_softcapping": "logit_softcap",
    },
    defaults={
        **_DEFAULTS,
        "num_key_value_heads": 4,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    always={**_ALWAYS, "post_norms": True},
    computed={**_COMPUTED, "hidden_activation": ("gelu_pytorch_tanh",)},
    window="even_layers",
    rules=_SANDWICHED,
)

GEMMA3_TEXT = Family(
    name="gemma3_text",
    causal="Gemma3ForCausalLM",
    scorer="Gemma3TextForSequenceClassification",
    keys={**COMMON_KEYS, "final_logit_softcapping": "logit_softcap"},
    defaults={
        **_DEFAULTS,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
    },
    always={**_ALWAYS, "post_norms": True, "qk_norm": True},
    # ``transformers`` reads a cap on the scores, and does not compute it.
    computed={**_COMPUTED, "hidden_activation": ("gelu_pytorch_tanh",), "attn_logit_softcapping": (None,)},
    window="most_layers",
    rules=(*_SANDWICHED, *QK_NORM),
)
