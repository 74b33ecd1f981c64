"""Gemma 1 to 4: scaled embeddings, in all but the last norms around 1; from the second on windows and more norms.

From the second on there are norms behind the blocks too. The second has soft-caps. From the third on queries and keys
are normalized, and layers with a window have another rotary base. In the fourth they have other heads too.
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

_MLP, _HF_MLP, _HF_NORM = f"{_LAYER}.mlp", f"{_HF_LAYER}.mlp", "feedforward_layernorm"
_EXPERTS = (
    Rule(logical=f"{_MLP}.router.weight", hf=(f"{_HF_LAYER}.router.proj.weight",)),
    Rule(logical=f"{_MLP}.router.scale", hf=(f"{_HF_LAYER}.router.scale",)),
    Rule(logical=f"{_MLP}.router.expert_scale", hf=(f"{_HF_LAYER}.router.per_expert_scale",)),
    Rule(
        logical=f"{_MLP}.experts.{{expert}}.linear_fc1.weight",
        hf=(f"{_HF_LAYER}.experts.gate_up_proj",),
        form="halves",
    ),
    Rule(logical=f"{_MLP}.experts.{{expert}}.linear_fc2.weight", hf=(f"{_HF_LAYER}.experts.down_proj",)),
    Rule(
        logical=f"{_MLP}.shared_experts.linear_fc1.weight",
        hf=(f"{_HF_MLP}.gate_proj.weight", f"{_HF_MLP}.up_proj.weight"),
        form="stack",
    ),
    Rule(logical=f"{_MLP}.shared_experts.linear_fc2.weight", hf=(f"{_HF_MLP}.down_proj.weight",)),
    Rule(logical=f"{_MLP}.shared_input_layernorm.weight", hf=(f"{_HF_LAYER}.pre_{_HF_NORM}.weight",)),
    Rule(logical=f"{_MLP}.shared_output_layernorm.weight", hf=(f"{_HF_LAYER}.post_{_HF_NORM}_1.weight",)),
    Rule(logical=f"{_MLP}.routed_input_layernorm.weight", hf=(f"{_HF_LAYER}.pre_{_HF_NORM}_2.weight",)),
    Rule(logical=f"{_MLP}.routed_output_layernorm.weight", hf=(f"{_HF_LAYER}.post_{_HF_NORM}_2.weight",)),
)

GEMMA4_TEXT = Family(
    name="gemma4_text",
    causal="Gemma4ForCausalLM",
    scorer=None,
    keys={
        **COMMON_KEYS,
        "final_logit_softcapping": "logit_softcap",
        "global_head_dim": "global_head_dim",
        "num_global_key_value_heads": "global_query_groups",
        "attention_k_eq_v": "keys_as_values",
        "num_experts": "num_experts",
        "top_k_experts": "experts_per_token",
    },
    defaults={
        **_DEFAULTS,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 256,
        "enable_moe_block": False,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    always={
        **{"scaled_embeddings": True, "activation": "gelu_tanh", "post_norms": True, "attention_scale": 1.0},
        **{"qk_norm": True, "value_norm": True, "layer_scalars": True},
    },
    computed={
        **{"attention_dropout": (0.0,), "attention_bias": (False,), "hidden_activation": ("gelu_pytorch_tanh",)},
        # Of text alone these two are the same.
        "use_bidirectional_attention": (None, "vision"),
        "hidden_size_per_layer_input": (0, None),
        "num_kv_shared_layers": (0,),
    },
    window="most_but_last",
    scalings=("proportional",),
    rules=(
        *_SANDWICHED,
        *QK_NORM,
        *_EXPERTS,
        Rule(logical=f"{_LAYER}.layer_scalar", hf=(f"{_HF_LAYER}.layer_scalar",)),
    ),
)
