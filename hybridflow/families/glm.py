"""GLM-4: neighboring dims of half of each head are rotated; in the second table also norms behind the blocks."""

from hybridflow.families.family import (
    ATTENTION,
    COMMON_KEYS,
    EMBEDDINGS,
    FUSED_FEED_FORWARD,
    NO_DROPOUT,
    NORMS,
    QKV_BIAS,
    Family,
    Rule,
)

_KEYS = {**COMMON_KEYS, "attention_bias": "qkv_bias"}
_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "pad_token_id": 151329,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
_LAYER, _HF_LAYER = "decoder.layers.{layer}", "model.layers.{layer}"

GLM = Family(
    name="glm",
    causal="GlmForCausalLM",
    scorer="GlmForSequenceClassification",
    keys=_KEYS,
    defaults=_DEFAULTS,
    always={"rotary_interleaved": True},
    computed=NO_DROPOUT,
    scalings=("linear", "llama3"),
    rules=(*EMBEDDINGS, *NORMS, *ATTENTION, *QKV_BIAS, *FUSED_FEED_FORWARD),
)

GLM4 = Family(
    name="glm4",
    causal="Glm4ForCausalLM",
    scorer="Glm4ForSequenceClassification",
    keys=_KEYS,
    defaults=_DEFAULTS,
    always={"rotary_interleaved": True, "post_norms": True},
    computed=NO_DROPOUT,
    scalings=("linear", "llama3"),
    rules=(
        *GLM.rules,
        Rule(
            logical=f"{_LAYER}.self_attention.post_layernorm.weight",
            hf=(f"{_HF_LAYER}.post_self_attn_layernorm.weight",),
        ),
        Rule(logical=f"{_LAYER}.mlp.post_layernorm.weight", hf=(f"{_HF_LAYER}.post_mlp_layernorm.weight",)),
    ),
)
