"""What tests of checkpoint formats share: a source in memory, and writing a target without the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.checkpoint.formats.source import Source, Target
from hybridflow.checkpoint.manifest import TensorEntry
from hybridflow.checkpoint.tensor_file import DTYPE_NAMES, TORCH_DTYPES
from hybridflow.families.model import ModelConfig
from hybridflow.models.shapes import model_spec, shape_of

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
    specs = model_spec(shape_of(model, model.vocab_size), has_value_head=has_value_head).tensors
    return {spec.name: torch.randn(spec.shape, generator=generator).to(TORCH_DTYPES[spec.dtype]) for spec in specs}


class MemorySource:
    """A checkpoint in memory."""

    path = Path("memory")
    format = "memory"
    layout = None

    def __init__(self, model: ModelConfig, *, family: str | None = "qwen2", has_value_head: bool = False) -> None:
        self.model, self.family, self.has_value_head = model, family, has_value_head
        self.values = logical_values(model, has_value_head=has_value_head)
        self.tensors = {
            name: TensorEntry(DTYPE_NAMES[value.dtype], tuple(value.shape)) for name, value in self.values.items()
        }

    def read(self, tensor: str) -> Tensor:
        return self.values[tensor]

    def release(self) -> None:
        pass

    def assets(self) -> dict[str, bytes]:
        return {"config.json": b'{"model_type": "none"}\n', "vocab.json": b""}

    def identity(self) -> str:
        return "memory"


def write_target(source: Source, target: Target, out: Path) -> dict[str, dict[str, str]]:
    """Write all of a target at once; gives the hashes."""
    folder = out.parent if target.is_single_file else out
    folder.mkdir(exist_ok=True)
    paths = {file: out if target.is_single_file else folder / file for file in target.files}
    writers = {file: target.open(path, file) for file, path in paths.items()}
    hashes: dict[str, dict[str, str]] = {file: {} for file in target.files}
    for name in source.tensors:
        values = source.read(name)
        for file, key, part in target.parts(name, values, set(target.files)):
            assert (file, key) in target.places(name)
            hashes[file][key] = writers[file].write(key, part.to(TORCH_DTYPES[target.files[file][key].dtype]))
    for file, writer in writers.items():
        assert hashes[file].keys() == target.files[file].keys()
        writer.sync()
        writer.close()
    target.finish(folder, hashes)
    return hashes


def assert_same(source: Source, values: dict[str, Tensor]) -> None:
    """The source holds these values bit for bit, and nothing else."""
    assert list(source.tensors) == list(values)
    for name, expected in values.items():
        found = source.read(name)
        assert found.dtype == expected.dtype and found.shape == expected.shape, name
        assert source.tensors[name] == TensorEntry(DTYPE_NAMES[expected.dtype], tuple(expected.shape)), name
        assert torch.equal(bits(found), bits(expected)), name


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def in_bf16(model: ModelConfig) -> ModelConfig:
    return replace(model, dtype="bf16")
