"""Gemma 1 and 2: norms around 1, scaled embeddings; in the second also soft-caps, a window and norms behind blocks."""

from hybridflow.families.family import ATTENTION, COMMON_KEYS, DENSE, EMBEDDINGS, FEED_FORWARD, POST_NORMS, Family, Rule

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
    rules=(
        *EMBEDDINGS,
        *ATTENTION,
        *FEED_FORWARD,
        *POST_NORMS,
        Rule(logical=f"{_LAYER}.input_layernorm.weight", hf=(f"{_HF_LAYER}.input_layernorm.weight",)),
        Rule(logical=f"{_LAYER}.pre_mlp_layernorm.weight", hf=(f"{_HF_LAYER}.pre_feedforward_layernorm.weight",)),
    ),
)
