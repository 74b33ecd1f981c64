"""Settings of well-known models and the files that shipped recipes and documentation name, without their weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.recipes import write_config

_COMMON: dict[str, Any] = {"hidden_act": "silu", "attention_dropout": 0.0, "torch_dtype": "bfloat16"}
_LLAMA = {
    **_COMMON,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_QWEN = {**_COMMON, "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True}


def _sizes(layers: int, hidden: int, ffn: int, heads: int) -> dict[str, int]:
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    return dict(zip(names, (layers, hidden, ffn, heads), strict=True))


CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B-Instruct": {
        **_QWEN,
        **_sizes(24, 896, 4864, 14),
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
    },
    "Qwen3-4B": {
        **_QWEN,
        **_sizes(36, 2560, 9728, 32),
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    },
    "qwen3-235b-a22b": {
        **_QWEN,
        **_sizes(94, 4096, 12288, 64),
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "moe_intermediate_size": 1536,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    "Llama-3.1-8B-Instruct": {**_LLAMA, **_sizes(32, 4096, 14336, 32)},
    "llama3-70b": {**_LLAMA, **_sizes(80, 8192, 28672, 64)},
}
"""Directory that a shipped recipe names -> its ``config.json`` at Hugging Face."""

GSM8K = {"question": "How much is 24 + 48?", "answer": "24+48 = <<24+48=72>>72 in all.\n#### 72"}
"""A row in the form of that data set."""


def write_models(folder: Path) -> None:
    """Put the directories of these models, and data of a few rows, where shipped recipes and the docs look for them."""
    others = {"llama": CONFIGS["Llama-3.1-8B-Instruct"], "sums": CONFIGS["Qwen2.5-0.5B-Instruct"]}
    for name, config in {**CONFIGS, **others}.items():
        write_config(folder / "models" / name, config)
    (folder / "data").mkdir()
    for name in ("train", "held_out"):
        row = {"prompt": GSM8K["question"], "answer": "72"}
        (folder / "data" / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
