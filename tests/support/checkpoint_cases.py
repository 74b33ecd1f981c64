"""Small models of transformers, and what their directories hold, for tests of formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from hybridflow.families.tables import FAMILIES
from tests.support.hf_models import SIZES, randomize

TOKENS = {"vocab_size": 37, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LINEAR = {
    **dict(head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4),
    **dict(linear_key_head_dim=6, linear_value_head_dim=10, layer_types=["linear_attention", "full_attention"]),
}
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=16)
OTHER: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **dict(kv_lora_rank=12, q_lora_rank=20, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8),
        **dict(n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=24),
        **dict(num_key_value_heads=4, first_k_dense_replace=1),
    },
    "gemma": {"head_dim": 12},
    "gemma2": {"head_dim": 12, "query_pre_attn_scalar": 24, "sliding_window": 5},
    "dots1": {
        **dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, first_k_dense_replace=1),
        **dict(n_shared_experts=1, head_dim=12),
    },
    "ernie4_5": {"head_dim": 12},
    "exaone4": {"head_dim": 12, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "glm4_moe_lite": {
        **dict(kv_lora_rank=12, q_lora_rank=20, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8),
        **dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, num_key_value_heads=4),
    },
    "gpt_oss": {"head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    "minimax_m2": dict(num_local_experts=4, num_experts_per_tok=2, head_dim=12, rotary_dim=8),
    "mistral": {"sliding_window": 5},
    "mixtral": {"num_local_experts": 4},
    "gemma3_text": {"head_dim": 12, "query_pre_attn_scalar": 24, "sliding_window": 5, "sliding_window_pattern": 2},
    "gemma4_text": {
        **dict(head_dim=12, global_head_dim=16, num_key_value_heads=4, num_global_key_value_heads=2, sliding_window=5),
        **dict(layer_types=["sliding_attention", "full_attention"], hidden_size_per_layer_input=0),
        "attention_k_eq_v": True,
    },
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 12},
    "glm4_moe": {
        **dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, first_k_dense_replace=1),
        **dict(head_dim=12, use_qk_norm=True, attention_bias=True),
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "olmo2": {"head_dim": 12},
    "olmo3": {"head_dim": 12, "sliding_window": 5},
    "phi3": {"sliding_window": 6},
    "qwen3": {"head_dim": 12},
    "seed_oss": {"head_dim": 12},
    "qwen2_moe": {
        **dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=16)
    },
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": {**_LINEAR, **_EXPERTS},
    "qwen3_next": {**_LINEAR, **_EXPERTS},
    "smollm3": {"no_rope_layer_interval": 2},
    "qwen3_moe": {"head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
"""What each family has beside the sizes."""


def make_model(
    family: str, *, scorer: bool = False, dtype: torch.dtype = torch.float32, seed: int = 11, **other: Any
) -> nn.Module:
    """A model of a family with every weight random, norms and biases too."""
    table = FAMILIES[family]
    config = type(transformers.AutoConfig.for_model(family))
    labels = {"num_labels": 1} if scorer else {}
    values = {
        "tie_word_embeddings": table.defaults["tie_word_embeddings"],
        **SIZES,
        **TOKENS,
        **OTHER.get(family, {}),
        **labels,
    }
    model = getattr(transformers, table.scorer if scorer else table.causal)(config(**{**values, **other}))
    randomize(model, seed, 0.15)
    return model.to(dtype).eval()


def save(model: nn.Module, path: Path, **how: Any) -> Path:
    """The model as transformers saves it, with a tokenizer's files beside."""
    model.save_pretrained(path, **how)
    (path / "tokenizer.json").write_text('{"version": "1.0"}')
    (path / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    (path / "tokenizer.model").write_bytes(bytes(range(256)))
    return path


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Every tensor of a directory of safetensors, read by their own library."""
    return {key: tensor for file in sorted(path.glob("*.safetensors")) for key, tensor in load_file(file).items()}


def same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Whether names, dtypes, shapes and bytes are equal."""
    return ours.keys() == theirs.keys() and all(
        ours[key].dtype == theirs[key].dtype
        and ours[key].shape == theirs[key].shape
        and bytes(ours[key].contiguous().view(-1).view(torch.uint8).numpy())
        == bytes(theirs[key].contiguous().view(-1).view(torch.uint8).numpy())
        for key in theirs
    )


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
