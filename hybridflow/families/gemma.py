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
    gated_block,
    in_layer,
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

_SANDWICHED = (
    *EMBEDDINGS,
    *ATTENTION,
    *FEED_FORWARD,
    *POST_NORMS,
    in_layer("input_layernorm.weight", "input_layernorm.weight"),
    in_layer("pre_mlp_layernorm.weight", "pre_feedforward_layernorm.weight"),
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

_EXPERTS = (
    in_layer("mlp.router.weight", "router.proj.weight"),
    in_layer("mlp.router.scale", "router.scale"),
    in_layer("mlp.router.expert_scale", "router.per_expert_scale"),
    in_layer("mlp.experts.{expert}.linear_fc1.weight", "experts.gate_up_proj", form="halves"),
    in_layer("mlp.experts.{expert}.linear_fc2.weight", "experts.down_proj"),
    *gated_block("mlp.shared_experts", "mlp"),
    in_layer("mlp.shared_input_layernorm.weight", "pre_feedforward_layernorm.weight"),
    in_layer("mlp.shared_output_layernorm.weight", "post_feedforward_layernorm_1.weight"),
    in_layer("mlp.routed_input_layernorm.weight", "pre_feedforward_layernorm_2.weight"),
    in_layer("mlp.routed_output_layernorm.weight", "post_feedforward_layernorm_2.weight"),
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
        in_layer("layer_scalar", "layer_scalar"),
    ),
)
