"""A small model with every kind of cut, and its shards in numpy, by padding and splitting whole arrays."""

from __future__ import annotations

import itertools

import numpy as np

from hybridflow.parallel.layout import ParallelLayout
from hybridflow.parallel.mesh import DeviceMesh
from hybridflow.reshard.spec import ModelSpec, TensorSpec

NUM_LAYERS = 4


def make_model(vocab_size: int = 13, padded_to: int = 1, tied: bool = False, num_experts: int = 0) -> ModelSpec:
    """Every kind of cut: padded vocabulary, fused QKV, gate/up, row-parallel, replicated, on every kind of place.

    With experts, also those of odd layers, and their router.
    """
    tensors = [
        TensorSpec(
            name="embedding",
            shape=(vocab_size, 2),
            dtype="fp32",
            tp_dim=0,
            place="embedding",
            also_held_by="output" if tied else None,
            padded_to=padded_to,
        ),
        TensorSpec(name="norm", shape=(3,), dtype="fp32", tp_dim=None, place="output"),
    ]
    for layer in range(NUM_LAYERS):
        tensors += [
            TensorSpec(name=f"{layer}.qkv", shape=(16, 3), dtype="fp32", tp_dim=0, place=layer),
            TensorSpec(name=f"{layer}.gate_up", shape=(2, 8, 3), dtype="bf16", tp_dim=1, place=layer),
            TensorSpec(name=f"{layer}.down", shape=(3, 8), dtype="fp32", tp_dim=1, place=layer),
            TensorSpec(name=f"{layer}.norm", shape=(3,), dtype="bf16", tp_dim=None, place=layer),
        ]
        for expert in range(num_experts if layer % 2 else 0):
            which = (expert, num_experts)
            tensors += [
                TensorSpec(
                    name=f"{layer}.{expert}.fc1", shape=(2, 8, 2), dtype="bf16", tp_dim=1, place=layer, expert=which
                ),
                TensorSpec(
                    name=f"{layer}.{expert}.bias", shape=(5,), dtype="fp32", tp_dim=None, place=layer, expert=which
                ),
            ]
    return ModelSpec(tensors=tuple(tensors), num_layers=NUM_LAYERS)


def make_mesh(layout: str, ranks: tuple[int, ...] | None = None, ranks_per_node: int = 16) -> DeviceMesh:
    parsed = ParallelLayout.parse(layout)
    ranks = tuple(range(parsed.world_size)) if ranks is None else ranks
    return DeviceMesh(name=layout, layout=parsed, ranks=ranks, ranks_per_node=ranks_per_node)


def scatter(spec: TensorSpec, whole: np.ndarray, mesh: DeviceMesh) -> dict[int, np.ndarray]:
    """Rank -> its parameter, with -1 as padding."""
    layout = mesh.layout
    if spec.padded_to is not None:
        missing = -spec.shape[0] % (spec.padded_to * layout.tp)
        whole = np.concatenate([whole, np.full((missing, *whole.shape[1:]), -1)])
    parts = [whole] * layout.tp if spec.tp_dim is None else np.split(whole, layout.tp, axis=spec.tp_dim)
    num_stages = layout.pp * layout.vpp
    stages = np.repeat(np.arange(num_stages) % layout.pp, layout.layers or NUM_LAYERS // num_stages)
    wanted = {
        0 if place == "embedding" else layout.pp - 1 if place == "output" else int(stages[place])
        for place in (spec.place, spec.also_held_by)
        if place is not None
    }
    if spec.expert is not None:
        return _scatter_expert(spec, whole, mesh, wanted)
    grid = np.array(mesh.ranks).reshape(layout.pp, layout.dp, layout.cp, layout.tp)
    return {
        int(grid[pp, dp, cp, tp]): parts[tp].copy()
        for pp, dp, cp, tp in itertools.product(*map(range, grid.shape))
        if pp in wanted
    }


def _scatter_expert(spec: TensorSpec, whole: np.ndarray, mesh: DeviceMesh, stages: set[int]) -> dict[int, np.ndarray]:
    assert spec.expert is not None
    layout, (expert, num_experts) = mesh.layout, spec.expert
    etp = layout.tp if layout.etp is None else layout.etp
    parts = [whole] * etp if spec.tp_dim is None else np.split(whole, etp, axis=spec.tp_dim)
    grid = np.array(mesh.ranks).reshape(layout.pp, -1, layout.ep, etp)
    block = np.repeat(np.arange(layout.ep), num_experts // layout.ep)[expert]
    return {
        int(grid[pp, replica, block, index]): parts[index].copy()
        for pp in stages
        for replica in range(grid.shape[1])
        for index in range(etp)
    }


def whole_arrays(model: ModelSpec) -> list[np.ndarray]:
    """Arrays of whole numbers, each different from every other in its tensor."""
    random = np.random.default_rng(0)
    return [random.permutation(int(np.prod(spec.shape))).reshape(spec.shape) for spec in model.tensors]
