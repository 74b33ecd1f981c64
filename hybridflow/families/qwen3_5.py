"""Qwen3.5, Qwen3-Next: linear attention in three of four layers, gates on the output of the others' attention.

Their mixtures have a shared expert behind a gate.
"""

from hybridflow.families.family import (
    ATTENTION,
    COMMON_KEYS,
    EMBEDDINGS,
    FEED_FORWARD,
    GATED_SHARED_EXPERT,
    NO_DROPOUT,
    NORMS,
    QK_NORM,
    Family,
    experts,
    in_layer,
)

_OURS, _THEIRS = "self_attention", "linear_attn"
_IN_PROJ = in_layer(
    f"{_OURS}.in_proj.weight", *(f"{_THEIRS}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")), form="delta"
)
_FUSED_IN_PROJ = in_layer(
    f"{_OURS}.in_proj.weight", *(f"{_THEIRS}.in_proj_{part}.weight" for part in ("qkvz", "ba")), form="fused_delta"
)
_LINEAR = (
    in_layer(f"{_OURS}.conv1d.weight", f"{_THEIRS}.conv1d.weight", form="delta_conv"),
    in_layer(f"{_OURS}.dt_bias", f"{_THEIRS}.dt_bias"),
    in_layer(f"{_OURS}.A_log", f"{_THEIRS}.A_log"),
    in_layer(f"{_OURS}.out_norm.weight", f"{_THEIRS}.norm.weight"),
    in_layer(f"{_OURS}.out_proj.weight", f"{_THEIRS}.out_proj.weight"),
)

QWEN3_5_TEXT = Family(
    name="qwen3_5_text",
    causal="Qwen3_5ForCausalLM",
    scorer="Qwen3_5TextForSequenceClassification",
    keys={
        **COMMON_KEYS,
        "linear_num_key_heads": "linear_key_heads",
        "linear_num_value_heads": "linear_value_heads",
        "linear_key_head_dim": "linear_key_head_dim",
        "linear_value_head_dim": "linear_value_head_dim",
        "linear_conv_kernel_dim": "linear_conv_kernel",
    },
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    always={"qk_norm": True, "zero_centered_norms": True, "attention_output_gate": True},
    computed={**NO_DROPOUT, "attention_bias": (False,)},
    scalings=("linear", "llama3", "yarn"),
    rules=(*EMBEDDINGS, *NORMS, *ATTENTION, *QK_NORM, *FEED_FORWARD, _IN_PROJ, *_LINEAR),
    # Layers that predict further tokens, which transformers skips too.
    ignored=(r".*\.rotary_emb\.inv_freq", r"mtp\..*"),
)

_SHARED_KEYS = {key: setting for key, setting in QWEN3_5_TEXT.keys.items() if key != "intermediate_size"}
_MIXTURE_KEYS = {
    **_SHARED_KEYS,
    "moe_intermediate_size": "ffn_hidden_size",
    "num_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "shared_expert_intermediate_size": "shared_ffn_hidden_size",
}
_MIXTURE_DEFAULTS = {
    **QWEN3_5_TEXT.defaults,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "shared_expert_intermediate_size": 512,
}
_MIXTURE = (
    *(*EMBEDDINGS, *NORMS, *ATTENTION, *QK_NORM, *_LINEAR),
    *(*experts(), *GATED_SHARED_EXPERT),
)

QWEN3_5_MOE_TEXT = Family(
    name="qwen3_5_moe_text",
    causal="Qwen3_5MoeForCausalLM",
    scorer=None,
    keys=_MIXTURE_KEYS,
    aliases={"num_local_experts": "num_experts"},
    defaults=_MIXTURE_DEFAULTS,
    always={**QWEN3_5_TEXT.always, "shared_expert_gate": True, "normalized_experts": True},
    computed=QWEN3_5_TEXT.computed,
    scalings=QWEN3_5_TEXT.scalings,
    rules=(_IN_PROJ, *_MIXTURE),
    ignored=QWEN3_5_TEXT.ignored,
)

QWEN3_NEXT = Family(
    name="qwen3_next",
    causal="Qwen3NextForCausalLM",
    scorer="Qwen3NextForSequenceClassification",
    keys={**_MIXTURE_KEYS, "norm_topk_prob": "normalized_experts"},
    aliases={"num_local_experts": "num_experts"},
    defaults={**_MIXTURE_DEFAULTS, "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True},
    always={**QWEN3_5_TEXT.always, "shared_expert_gate": True},
    computed={**QWEN3_5_TEXT.computed, "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    scalings=QWEN3_5_TEXT.scalings,
    rules=(_FUSED_IN_PROJ, *_MIXTURE),
    ignored=QWEN3_5_TEXT.ignored,
)
