"""The tensors of models that run in ``transformers``, from the files of their directories. No torch.

No table says what such a model consists of, and its settings tell rough sizes alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hybridflow.checkpoint.model_info import weight_shapes
from hybridflow.config.roles import LoRAConfig
from hybridflow.families.model import ModelConfig
from hybridflow.models.adapters import is_factor
from hybridflow.reshard.spec import ModelSpec, Place, TensorSpec

_LAYER = re.compile(r"\.(?:layers?|blocks?|h)\.(\d+)\.")
_OUTPUT_LAYERS = ("lm_head.weight", "embed_out.weight")


def spec_of_files(folder: Path, model: ModelConfig, *, has_value_head: bool) -> ModelSpec | None:
    """Return the tensors of a model that runs in ``transformers``: each rank holds them whole.

    Args:
        folder: Its directory.
        model: Its settings; its tensors get their number format.
        has_value_head: Whether values take the place of logits.

    Returns:
        None where rough sizes have to tell: not all of its weights are there.

    Raises:
        CheckpointError: Its manifest is damaged.
    """
    shapes = weight_shapes(folder)
    if shapes is None or any(map(is_factor, shapes)):
        return None
    left_out = _OUTPUT_LAYERS if has_value_head else ()
    held = [(name, shape) for name, shape in shapes.items() if 0 not in shape and not name.endswith(left_out)]
    return _spec(held, model)


def adapters_of(whole: ModelSpec, model: ModelConfig, lora: LoRAConfig) -> ModelSpec:
    """Return the factors of adapters on the linear layers that ``lora.targets`` names by their last part."""
    found: list[tuple[str, Sequence[int]]] = []
    for tensor in whole.tensors:
        layer = tensor.name.removesuffix(".weight")
        if len(tensor.shape) == 2 and layer != tensor.name and layer.rpartition(".")[2] in lora.targets:
            rows, columns = tensor.shape
            found += [(f"{layer}.lora.A", (lora.rank, columns)), (f"{layer}.lora.B", (rows, lora.rank))]
    return _spec(found, model)


def _spec(shapes: Sequence[tuple[str, Sequence[int]]], model: ModelConfig) -> ModelSpec:
    tensors = [
        TensorSpec(name=name, shape=tuple(shape) or (1,), dtype=model.dtype, tp_dim=None, place=_place(name, model))
        for name, shape in shapes
    ]
    return ModelSpec(tensors=tuple(tensors), num_layers=model.num_layers, is_part=True)


def _place(name: str, model: ModelConfig) -> Place:
    """Return the layer that a tensor belongs to by its name."""
    found = _LAYER.search(f".{name}")
    layer = None if found is None else int(found[1])
    return "embedding" if layer is None or layer >= model.num_layers else layer
