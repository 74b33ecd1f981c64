"""Small models and adapters of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.support import checkpoint_cases


def make_model(name: str, seed: int = 5, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model of a family, or ``reward``, with every weight random."""
    family = "llama" if name == "reward" else name
    return checkpoint_cases.make_model(family, scorer=name == "reward", dtype=dtype, seed=seed, vocab_size=101)


def make_adapter(
    folder: Path, model: nn.Module, ranks: Mapping[str, int], config: Mapping[str, Any], seed: int = 9
) -> dict[str, Tensor]:
    """Write an adapter's directory as PEFT does, with factors for every linear module whose name ends so.

    Args:
        folder: Of the adapter.
        model: Its base.
        ranks: Last part of a module's name -> rank.
        config: Put over the usual settings.

    Returns:
        The tensors by PEFT's keys.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        rank = ranks.get(name.rpartition(".")[2])
        if rank is not None and isinstance(module, nn.Linear):
            for side, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                tensors[f"base_model.model.{name}.lora_{side}.weight"] = torch.randn(shape, generator=generator)
    usual = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": sorted(ranks), "rank_pattern": {}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**usual, **config}, indent=2))
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return tensors
