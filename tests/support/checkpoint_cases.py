"""Small models of transformers, and the plainest loop from a source to a target, for tests of formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from hybridflow.checkpoint.formats.registry import Options, make_target, open_source
from hybridflow.checkpoint.formats.source import Source, Target
from hybridflow.families.tables import FAMILIES

SIZES: dict[str, Any] = dict(
    vocab_size=37,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
OTHER: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 12},
    "gemma2": {"head_dim": 12, "query_pre_attn_scalar": 24, "sliding_window": 5},
    "mistral": {"sliding_window": 5},
    "mixtral": {"num_local_experts": 4},
    "phi3": {"sliding_window": 6},
    "qwen3": {"head_dim": 12},
    "qwen3_moe": {"head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
"""What each family has beside the sizes."""


def make_model(family: str, *, scorer: bool = False, dtype: torch.dtype = torch.float32, **other: Any) -> nn.Module:
    """A model of a family with every weight random, norms and biases too."""
    table = FAMILIES[family]
    config = getattr(transformers, table.causal.replace("ForCausalLM", "Config"))
    labels = {"num_labels": 1} if scorer else {}
    values = {"tie_word_embeddings": table.defaults["tie_word_embeddings"], **SIZES, **OTHER.get(family, {}), **labels}
    model = getattr(transformers, table.scorer if scorer else table.causal)(config(**{**values, **other}))
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            centre = float(parameter.dim() == 1)
            parameter.copy_(centre + 0.15 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype).eval()


def save(model: nn.Module, path: Path, **how: Any) -> Path:
    """The model as transformers saves it, with a tokenizer's files beside."""
    model.save_pretrained(path, **how)
    (path / "tokenizer.json").write_text('{"version": "1.0"}')
    (path / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    (path / "tokenizer.model").write_bytes(bytes(range(256)))
    return path


def write(source: Source, target: Target, out: Path) -> Path:
    """Everything, in order, in one process."""
    out.mkdir(parents=True)
    writers = {file: target.open(out / file, file) for file in target.files}
    hashes: dict[str, dict[str, str]] = {file: {} for file in target.files}
    for name in source.tensors:
        written = []
        for file, key, values in target.parts(name, source.read(name), target.files):
            hashes[file][key] = writers[file].write(key, values)
            written.append((file, key))
        assert sorted(written) == sorted(target.places(name)), name
        source.release()
    for file, writer in writers.items():
        writer.sync()
        writer.close()
        assert hashes[file].keys() == target.files[file].keys(), file
    target.finish(out, hashes)
    return out


def convert(path: Path, format: str, out: Path, **options: Any) -> Path:
    """The checkpoint at a path, written as another format."""
    source = open_source(path)
    return write(source, make_target(format, source, Options(**options)), out)


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
