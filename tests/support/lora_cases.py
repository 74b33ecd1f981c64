"""Small models and adapters of Hugging Face, and one checkpoint written as another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from hybridflow.checkpoint.formats.registry import Options, make_target
from hybridflow.checkpoint.formats.source import Source
from hybridflow.checkpoint.tensor_file import TORCH_DTYPES

SIZES: dict[str, Any] = dict(
    vocab_size=101,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
MAKERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, SIZES),
    "reward": (
        transformers.LlamaConfig,
        transformers.LlamaForSequenceClassification,
        {**SIZES, "num_labels": 1, "pad_token_id": 0},
    ),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {**SIZES, "head_dim": 12}),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM, {**SIZES, "pad_token_id": 0}),
}


def make_model(name: str, seed: int = 5, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model with every weight random."""
    make_config, make, sizes = MAKERS[name]
    model: nn.Module = make(make_config(**sizes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            centre = 1.0 if parameter.dim() == 1 else 0.0
            parameter.copy_(centre + 0.2 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype).eval()


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


def write_as(format: str, source: Source, folder: Path, options: Options | None = None) -> Path:
    """Write a checkpoint in a format, all at once."""
    target = make_target(format, source, Options() if options is None else options)
    folder.mkdir(parents=True)
    hashes: dict[str, dict[str, str]] = {file: {} for file in target.files}
    writers = {file: target.open(folder / file, file) for file in target.files}
    for tensor in source.tensors:
        for file, key, part in target.parts(tensor, source.read(tensor), target.files.keys()):
            wanted = TORCH_DTYPES[target.files[file][key].dtype]
            hashes[file][key] = writers[file].write(key, part.to(wanted))
    for writer in writers.values():
        writer.sync()
        writer.close()
    target.finish(folder, hashes)
    return folder
