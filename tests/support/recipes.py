"""The smallest recipe, and the settings of the smallest models that lie in directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SMALLEST = """
name: small
algorithm: ppo
cluster: {ranks: 4}
model: {num_layers: 2, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 4, max_context: 32}
data: {train: train.jsonl, held_out: held_out.jsonl}
actor:
  update: {tp: 2, dp: 2}
  rollout: {dp: 4}
  optimizer: {lr: 1e-4}
critic:
  layout: {pp: 2, dp: 2}
  optimizer: {lr: 0.001}
rollout: {max_new_tokens: 8}
trainer: {steps: 10, global_batch_size: 16}
"""
POLICY: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "vocab_size": 45,
}
SCORER: dict[str, Any] = {**POLICY, "architectures": ["LlamaForSequenceClassification"], "num_labels": 1}


SEES: dict[str, Any] = {
    **dict(model_type="qwen3_vl", image_token_id=9, vision_config={"deepstack_visual_indexes": [0]}),
    "text_config": {
        **{key: value for key, value in POLICY.items() if key != "architectures"},
        **dict(model_type="qwen3_vl_text", head_dim=12, num_key_value_heads=2),
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e3, "mrope_section": [2, 2, 2]},
    },
}
"""``config.json`` of a small Qwen3-VL."""


def write_config(folder: Path, config: dict[str, Any] = POLICY, **changes: Any) -> Path:
    """Put a ``config.json`` into a folder, which is made if absent; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder
