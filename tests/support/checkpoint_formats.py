"""What tests of checkpoint formats share: a source in memory, and what it holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.checkpoint.formats.source import Source
from hybridflow.checkpoint.tensor_file import entry_of
from hybridflow.families.model import ModelConfig
from hybridflow.models.shapes import model_spec
from hybridflow.reshard.views import TORCH_DTYPES

SMALL = ModelConfig(
    num_layers=4,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=4,
    num_query_groups=2,
    max_context=32,
    vocab_size=29,
    qkv_bias=True,
)
"""With grouped queries, biases and a vocabulary that has to be padded."""


def logical_values(model: ModelConfig, seed: int = 0, *, has_value_head: bool = False) -> dict[str, Tensor]:
    """Random values of every logical tensor of a model."""
    generator = torch.Generator().manual_seed(seed)
    specs = model_spec(model, has_value_head=has_value_head).tensors
    return {spec.name: torch.randn(spec.shape, generator=generator).to(TORCH_DTYPES[spec.dtype]) for spec in specs}


class MemorySource:
    """A checkpoint in memory."""

    path = Path("memory")
    format = "memory"
    layout = None

    def __init__(self, model: ModelConfig, *, family: str | None = "qwen2", has_value_head: bool = False) -> None:
        self.model, self.family, self.has_value_head = model, family, has_value_head
        self.values = logical_values(model, has_value_head=has_value_head)
        self.tensors = {name: entry_of(value) for name, value in self.values.items()}

    def read(self, tensor: str) -> Tensor:
        return self.values[tensor]

    def release(self) -> None:
        pass

    def assets(self) -> dict[str, bytes]:
        return {"config.json": b'{"model_type": "none"}\n', "vocab.json": b""}

    def identity(self) -> str:
        return "memory"


def assert_same(source: Source, values: dict[str, Tensor]) -> None:
    """The source holds these values bit for bit, and nothing else."""
    assert list(source.tensors) == list(values)
    for name, expected in values.items():
        found = source.read(name)
        assert entry_of(found) == source.tensors[name] == entry_of(expected), name
        assert torch.equal(bits(found), bits(expected)), name


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def in_bf16(model: ModelConfig) -> ModelConfig:
    return replace(model, dtype="bf16")
