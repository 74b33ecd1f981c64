"""Parameters by their logical names, how each is cut, and their initial values.

A logical name is the parameter's name in the whole model, with the global layer index, the same with and without
Transformer Engine and in every layout. How a tensor is cut is read off megatron-core's own parameters
(``tensor_model_parallel``, ``partition_dim``) in an uncut model built without storage; only the gate and up halves of
SwiGLU are known by their module.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import replace

import torch
from megatron.core.transformer.mlp import MLP
from torch import Tensor, nn

from hybridflow.config import Model
from hybridflow.models.gpt import Transformer, ValueHead, build_transformer
from hybridflow.parallel.layout import ParallelLayout
from hybridflow.parallel.megatron import collection
from hybridflow.parallel.mesh import DeviceMesh
from hybridflow.parallel.world import World
from hybridflow.reshard.spec import ModelSpec, Shard, TensorSpec, shard

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
# Transformer Engine fuses a norm into the linear layer behind it.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def logical_parameters(model: Transformer) -> dict[str, nn.Parameter]:
    """This rank's parameters by logical name, in the order of the model."""
    found: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        match = _LAYER.fullmatch(name)
        if match is not None:
            layer = model.decoder.layers[int(match[1])].layer_number - 1
            name = f"decoder.layers.{layer}.{_FUSED_NORMS.get(match[2], match[2])}"
        elif isinstance(getattr(model, "output_layer", None), ValueHead) and name == OUTPUT:
            name = "value_head.weight"
        elif name == OUTPUT and model.share_embeddings_and_output_weights:
            name = EMBEDDING
        found[name] = parameter
    return found


def describe_model(world: World, model: Model, *, vocab_size: int, has_value_head: bool = False) -> ModelSpec:
    """How every tensor of a model is cut, without communication and the same on every rank.

    Args:
        world: Gives this rank's group of one.
        model: The model's shape.
        vocab_size: True vocabulary, before padding.
        has_value_head: Values instead of logits.
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
    )
    gated = {id(module.linear_fc1.weight) for module in whole.modules() if isinstance(module, MLP)}
    tensors = []
    for name, parameter in logical_parameters(whole).items():
        shape = tuple(parameter.shape)
        tp_dim = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
        if id(parameter) in gated:
            shape, tp_dim = (2, shape[0] // 2, *shape[1:]), 1
        match = _LAYER.fullmatch(name)
        tensors.append(
            TensorSpec(
                name=name,
                shape=shape,
                dtype=model.dtype,
                tp_dim=tp_dim,
                place=int(match[1]) if match is not None else "embedding" if name == EMBEDDING else "output",
                also_held_by="output" if name == EMBEDDING and whole.share_embeddings_and_output_weights else None,
                padded_to=model.vocab_divisible_by if name in (EMBEDDING, OUTPUT) else None,
            )
        )
    return ModelSpec(tensors=tuple(tensors), num_layers=model.num_layers)


def local_shards(model: Transformer, spec: ModelSpec, mesh: DeviceMesh, rank: int) -> dict[str, tuple[Tensor, Shard]]:
    """This rank's tensors in their logical view, each with the part of the whole that it is.

    The tensors are views of the parameters' storage.
    """
    parameters = logical_parameters(model)
    shards: dict[str, tuple[Tensor, Shard]] = {}
    for tensor in spec.tensors:
        part = shard(tensor, mesh.layout, mesh.coordinate(rank), spec.num_layers)
        if part is not None:
            shards[tensor.name] = (parameters.pop(tensor.name).data.view(part.local_shape), part)
    assert not parameters, f"parameters without a description: {sorted(parameters)}"
    return shards


def initialize(model: Transformer, spec: ModelSpec, mesh: DeviceMesh, rank: int, *, seed: int, std: float) -> None:
    """Set initial weights: a function of (seed, logical name) alone, whatever the layout.

    Norm weights are 1 and biases 0. Matrices are normal with ``std``, those that end a residual branch with
    ``std / sqrt(2 * layers)`` (GPT-2's rule). Padding rows of the vocabulary are 0.
    """
    shapes = {tensor.name: tensor for tensor in spec.tensors}
    for name, (local, part) in local_shards(model, spec, mesh, rank).items():
        local.zero_()
        inner = tuple(slice(0, stop - start) for start, stop in part.box)
        outer = tuple(slice(start, stop) for start, stop in part.box)
        local[inner].copy_(_initial_value(shapes[name], seed, std, spec.num_layers)[outer])


def _initial_value(tensor: TensorSpec, seed: int, std: float, num_layers: int) -> Tensor:
    """The whole logical tensor, fp32 in host memory."""
    if tensor.name.endswith("bias"):
        return torch.zeros(tensor.shape)
    if len(tensor.shape) == 1:
        return torch.ones(tensor.shape)
    digest = hashlib.sha256(f"{seed}:{tensor.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if tensor.name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        std = std / math.sqrt(2 * num_layers)
    return torch.empty(tensor.shape).normal_(0.0, std, generator=generator)
