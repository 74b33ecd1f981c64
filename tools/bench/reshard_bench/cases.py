"""One pair set up: a model in both layouts, and what the target must hold in the end."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from hybridflow.families.model import ModelConfig
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.models.gpt import build_transformer
from hybridflow.models.shapes import model_spec
from hybridflow.models.specs import logical_parameters
from hybridflow.parallel.megatron import collection, rank_sets
from hybridflow.parallel.world import World
from hybridflow.reshard.holdings import WeightHoldings
from hybridflow.reshard.spec import ModelSpec, TensorSpec
from reshard_bench.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class Case:
    """One pair, set up on one rank.

    Attributes:
        world: The job.
        pair: Which pair.
        model: The tensors.
        source: Where they are.
        target: Where they are to be.
        source_model: megatron-core's model in the layout before.
        target_model: megatron-core's model in the layout after.
        source_tensors: Logical name -> this rank's parameter before, in the view in which a cut is a box.
        target_tensors: Likewise after.
        expected: Logical name -> what the target parameter must hold, bit by bit: slices of the whole tensors.
    """

    world: World
    pair: Pair
    model: ModelSpec
    source: WeightHoldings
    target: WeightHoldings
    source_model: nn.Module
    target_model: nn.Module
    source_tensors: dict[str, Tensor]
    target_tensors: dict[str, Tensor]
    expected: dict[str, np.ndarray]

    def spoil(self) -> None:
        """Overwrite the target, so that nothing of an earlier run passes for a result."""
        for tensor in self.target_tensors.values():
            tensor.fill_(torch.nan)

    def is_exact(self) -> bool:
        """Whether the target holds what it must."""
        return all(
            np.array_equal(tensor.numpy().view(np.uint32), self.expected[name].view(np.uint32))
            for name, tensor in self.target_tensors.items()
        )


def set_up(world: World, pair: Pair, model: ModelConfig, whole: Mapping[str, np.ndarray]) -> Case:
    """Build both models of a pair and fill the source. Collective: all ranks of the job.

    Args:
        world: The job.
        pair: Which pair.
        model: The model's shape.
        whole: Logical name -> the uncut tensor, from ``whole_tensors``.
    """
    meshes = pair.meshes(world.ranks_per_node)
    world.make_groups(rank_sets(meshes, world.size))
    spec = describe(world, model)
    models, tensors, values = [], [], []
    for mesh in meshes:
        groups = collection(world, mesh)
        models.append(build_transformer(model, mesh.layout, groups, world.device, vocab_size=model.vocab_size))
        values.append(dict(shards(spec, mesh, world.rank, whole)))
        parameters = logical_parameters(models[-1])
        tensors.append({name: parameters[name].data.view(held.shape) for name, held in values[-1].items()})
        assert tensors[-1].keys() == parameters.keys(), "the shards are not those of megatron-core's model"
    for name, tensor in tensors[0].items():
        # Where the one-sided transport would move it: so all rivals read the same memory.
        tensor.share_memory_()
        np.copyto(tensor.numpy(), values[0][name])
    return Case(
        world=world,
        pair=pair,
        model=spec,
        source=WeightHoldings(spec, meshes[0]),
        target=WeightHoldings(spec, meshes[1]),
        source_model=models[0],
        target_model=models[1],
        source_tensors=tensors[0],
        target_tensors=tensors[1],
        expected=values[1],
    )


def describe(world: World, model: ModelConfig) -> ModelSpec:
    """The tensors of the bench model, which says its vocabulary itself."""
    return model_spec(model)


def whole_tensors(world: World, model: ModelSpec) -> dict[str, np.ndarray]:
    """Every tensor uncut, once for all ranks of a node. Collective: all ranks of the job."""
    gather = world.coordinator(tuple(range(world.size))).gather
    path = None
    if world.rank % world.ranks_per_node == 0:
        with tempfile.NamedTemporaryFile(dir="/dev/shm", delete=False) as file:
            for index, spec in enumerate(model.tensors):
                file.write(_values(index, spec).data)
        path = file.name
    paths = gather(path)
    memory = np.memmap(paths[world.rank - world.rank % world.ranks_per_node], dtype=np.float32, mode="r")
    gather(None)
    if path is not None:
        os.unlink(path)
    sizes = [int(np.prod(spec.shape)) for spec in model.tensors]
    parts = np.split(memory, np.cumsum(sizes)[:-1])
    return {spec.name: part.reshape(spec.shape) for spec, part in zip(model.tensors, parts, strict=True)}


def _values(index: int, spec: TensorSpec) -> np.ndarray:
    """fp32 in [1, 2), no two of 2^23 neighbours equal, and other values in each tensor."""
    count = int(np.prod(spec.shape))
    # An odd factor permutes the 23 bits of the fraction.
    bits = (np.arange(count, dtype=np.uint32) + np.uint32(index * 40503)) * np.uint32(2654435761)
    return ((bits & np.uint32(0x7FFFFF)) | np.uint32(0x3F800000)).view(np.float32)


def shards(
    model: ModelSpec, mesh: DeviceMesh, rank: int, whole: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """A rank's tensors, sliced from the whole by numpy alone."""
    layout = mesh.layout
    grid = np.array(mesh.ranks).reshape(layout.pp, layout.dp, layout.tp)
    ((stage, _, part),) = np.argwhere(grid == rank)
    stage_of_layer = np.repeat(np.arange(layout.pp), model.num_layers // layout.pp)
    ends = {"embedding": 0, "output": layout.pp - 1}
    for spec in model.tensors:
        where = ends[spec.place] if isinstance(spec.place, str) else stage_of_layer[spec.place]
        if where == stage:
            tensor = whole[spec.name]
            yield spec.name, tensor if spec.tp_dim is None else np.split(tensor, layout.tp, spec.tp_dim)[part]
