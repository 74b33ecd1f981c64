"""Weights that compute in FP8: which, and how they are blocked. No torch."""

from __future__ import annotations

from hybridflow.families.model import ModelConfig

LAYERS = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")
"""Ends of the names of these weights."""

BLOCK = 128
"""Rows and columns of a block with one scale, with ``blockwise``. A rank has whole blocks."""


def linear_widths(model: ModelConfig, tp: int) -> dict[str, int]:
    """Return the widths of a rank's linear layers, by what they are made of."""
    queries, keys = model.num_attention_heads * model.head_size, model.query_groups * model.head_size
    return {
        "model.hidden_size": model.hidden_size,
        "query, key and value": (model.query_rows + 2 * keys) // tp,
        "the attention's output": queries // tp,
        "model.ffn_hidden_size": model.ffn_hidden_size // tp,
    }
