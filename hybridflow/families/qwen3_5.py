"""Qwen3.5: linear attention (Gated DeltaNet) in three of four layers, gates on the output of the others' attention."""

from hybridflow.families.family import (
    ATTENTION,
    COMMON_KEYS,
    EMBEDDINGS,
    FEED_FORWARD,
    NO_DROPOUT,
    NORMS,
    QK_NORM,
    Family,
    Rule,
)

_OURS, _THEIRS = "decoder.layers.{layer}.self_attention", "model.layers.{layer}.linear_attn"
_LINEAR = (
    Rule(
        logical=f"{_OURS}.in_proj.weight",
        hf=tuple(f"{_THEIRS}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
        form="delta",
    ),
    Rule(logical=f"{_OURS}.conv1d.weight", hf=(f"{_THEIRS}.conv1d.weight",), form="delta_conv"),
    Rule(logical=f"{_OURS}.dt_bias", hf=(f"{_THEIRS}.dt_bias",)),
    Rule(logical=f"{_OURS}.A_log", hf=(f"{_THEIRS}.A_log",)),
    Rule(logical=f"{_OURS}.out_norm.weight", hf=(f"{_THEIRS}.norm.weight",)),
    Rule(logical=f"{_OURS}.out_proj.weight", hf=(f"{_THEIRS}.out_proj.weight",)),
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
    rules=(*EMBEDDINGS, *NORMS, *ATTENTION, *QK_NORM, *FEED_FORWARD, *_LINEAR),
    # Layers that predict further tokens, which transformers skips too.
    ignored=(r".*\.rotary_emb\.inv_freq", r"mtp\..*"),
)
