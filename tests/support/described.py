"""How a model's tensors are cut, read off the model itself: the truth that ``models.shapes`` is compared with."""

from __future__ import annotations

from dataclasses import replace

import torch

from hybridflow.config.roles import LoRAConfig
from hybridflow.families.model import ModelConfig
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.gpt import build_transformer
from hybridflow.models.specs import describe
from hybridflow.parallel.megatron import collection
from hybridflow.parallel.world import World
from hybridflow.reshard.spec import ModelSpec


def describe_model(
    world: World, model: ModelConfig, *, vocab_size: int, has_value_head: bool = False, lora: LoRAConfig | None = None
) -> ModelSpec:
    """Describe how every tensor of a model is cut, by building it without memory.

    Args:
        world: Gives this rank's group of one.
        model: The model's shape.
        vocab_size: True vocabulary, before padding.
        has_value_head: Values instead of logits.
        lora: Its adapters.
    """
    alone = DeviceMesh(
        name="whole model", layout=ParallelLayout(), ranks=(world.rank,), ranks_per_node=world.ranks_per_node
    )
    whole = build_transformer(
        # Without padding, which is the layout's and not the model's.
        replace(model, vocab_divisible_by=1),
        alone.layout,
        collection(world, alone),
        torch.device("meta"),
        vocab_size=vocab_size,
        has_value_head=has_value_head,
        lora=lora,
    )
    return describe(whole, vocab_divisible_by=model.vocab_divisible_by)
