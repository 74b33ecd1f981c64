"""A small model with every kind of cut, and its shards in numpy, by padding and splitting whole arrays."""

from __future__ import annotations

import itertools

import numpy as np

from hybridflow.parallel.layout import ParallelLayout
from hybridflow.parallel.mesh import DeviceMesh
from hybridflow.reshard.spec import ModelSpec, TensorSpec

NUM_LAYERS = 4


def make_model(vocab_size: int = 13, padded_to: int = 1, tied: bool = False) -> ModelSpec:
    """Every kind of cut: padded vocabulary, fused QKV, gate/up, row-parallel, replicated, on every kind of place."""
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
    stages = np.repeat(np.arange(layout.pp), NUM_LAYERS // layout.pp)
    wanted = {
        0 if place == "embedding" else layout.pp - 1 if place == "output" else int(stages[place])
        for place in (spec.place, spec.also_held_by)
        if place is not None
    }
    grid = np.array(mesh.ranks).reshape(layout.pp, layout.dp, layout.cp, layout.tp)
    return {
        int(grid[pp, dp, cp, tp]): parts[tp].copy()
        for pp, dp, cp, tp in itertools.product(*map(range, grid.shape))
        if pp in wanted
    }


def whole_arrays(model: ModelSpec) -> list[np.ndarray]:
    """Arrays of whole numbers, each different from every other in its tensor."""
    random = np.random.default_rng(0)
    return [random.permutation(int(np.prod(spec.shape))).reshape(spec.shape) for spec in model.tensors]
