"""A small model with every kind of cut, and its shards in numpy, by padding and splitting whole arrays."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.reshard.holdings import Holdings
from hybridflow.reshard.plan import Flows, participants
from hybridflow.reshard.spec import DType, ModelSpec, TensorSpec

NUM_LAYERS = 4


def make_model(vocab_size: int = 13, padded_to: int = 1, tied: bool = False, num_experts: int = 0) -> ModelSpec:
    """Every kind of cut: padded vocabulary, fused QKV, gate/up, row-parallel, replicated, experts; in every place."""
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
        tensors += [
            TensorSpec(
                name=f"{layer}.{expert}.{name}",
                shape=shape,
                dtype="fp32",
                tp_dim=tp_dim,
                place=layer,
                expert=(expert, num_experts),
            )
            for expert in range(num_experts)
            for name, shape, tp_dim in (("up", (2, 8, 3), 1), ("down", (3, 8), 1), ("bias", (3,), None))
        ]
    return ModelSpec(tensors=tuple(tensors), num_layers=NUM_LAYERS)


def make_large_model(dtype: DType = "fp32") -> ModelSpec:
    """About 50 MB in fp32: pieces that travel in place, pieces that fill several buckets, and many small ones."""
    hidden, ffn, vocab_size = 512, 1024, 2003
    tensors = [
        TensorSpec(name="embedding", shape=(vocab_size, hidden), dtype=dtype, tp_dim=0, place="embedding", padded_to=8),
        TensorSpec(name="norm", shape=(hidden,), dtype=dtype, tp_dim=None, place="output"),
    ]
    for layer in range(NUM_LAYERS):
        tensors += [
            TensorSpec(name=f"{layer}.qkv", shape=(3 * hidden, hidden), dtype=dtype, tp_dim=0, place=layer),
            TensorSpec(name=f"{layer}.gate_up", shape=(2, ffn, hidden), dtype=dtype, tp_dim=1, place=layer),
            TensorSpec(name=f"{layer}.down", shape=(hidden, ffn), dtype=dtype, tp_dim=1, place=layer),
            TensorSpec(name=f"{layer}.norm", shape=(hidden,), dtype=dtype, tp_dim=None, place=layer),
        ]
    return ModelSpec(tensors=tuple(tensors), num_layers=NUM_LAYERS)


def make_mesh(layout: str, ranks: tuple[int, ...] | None = None, ranks_per_node: int = 16) -> DeviceMesh:
    parsed = ParallelLayout.parse(layout)
    ranks = tuple(range(parsed.world_size)) if ranks is None else ranks
    return DeviceMesh(name=layout, layout=parsed, ranks=ranks, ranks_per_node=ranks_per_node)


@st.composite
def mesh_pairs(
    draw: st.DrawFn, layouts: Sequence[ParallelLayout], nodes: Sequence[int] = (1, 2, 3, 4, 12)
) -> tuple[DeviceMesh, DeviceMesh]:
    """Two meshes over any ranks below 12: the same, disjoint, overlapping, in any order; on nodes of any such size."""
    ranks_per_node = draw(st.sampled_from(nodes))
    meshes = []
    for name in ("source", "target"):
        layout = draw(st.sampled_from(layouts))
        ranks = tuple(draw(st.permutations(range(12)))[: layout.world_size])
        meshes.append(DeviceMesh(name=name, layout=layout, ranks=ranks, ranks_per_node=ranks_per_node))
    return meshes[0], meshes[1]


def scatter(spec: TensorSpec, whole: np.ndarray, mesh: DeviceMesh) -> dict[int, np.ndarray]:
    """Rank -> its parameter, with -1 as padding."""
    layout = mesh.layout
    if spec.padded_to is not None:
        missing = -spec.shape[0] % (spec.padded_to * layout.tp)
        whole = np.concatenate([whole, np.full((missing, *whole.shape[1:]), -1)])
    cut_into = layout.tp if spec.expert is None else layout.expert_tp
    parts = [whole] * cut_into if spec.tp_dim is None else np.split(whole, cut_into, axis=spec.tp_dim)
    virtual_stages = layout.pp * layout.vpp
    layers = layout.layers or (NUM_LAYERS // virtual_stages,) * virtual_stages
    stages = [virtual % layout.pp for virtual, count in enumerate(layers) for _ in range(count)]
    wanted = {
        0 if place == "embedding" else layout.pp - 1 if place == "output" else stages[place]
        for place in (spec.place, spec.also_held_by)
        if place is not None
    }
    if spec.expert is None:
        grid = np.array(mesh.ranks).reshape(layout.pp, -1, layout.tp)
    else:
        # The experts' own order of a stage's ranks: tensor parallel fastest, then blocks of experts, then replicas.
        grid = np.array(mesh.ranks).reshape(layout.pp, -1, layout.ep, layout.expert_tp)
        index, count = spec.expert
        grid = grid[:, :, index // (count // layout.ep)]
    return {
        int(grid[pp, replica, tp]): parts[tp].copy()
        for pp, replica, tp in itertools.product(*map(range, grid.shape))
        if pp in wanted
    }


@functools.lru_cache(maxsize=2)
def whole_arrays(model: ModelSpec) -> tuple[np.ndarray, ...]:
    """Arrays of whole numbers, each different from every other in its tensor; the same to all, so not to be written."""
    random = np.random.default_rng(0)
    arrays = [random.permutation(int(np.prod(spec.shape))).reshape(spec.shape) for spec in model.tensors]
    for array in arrays:
        array.flags.writeable = False
    return tuple(arrays)


@dataclass(frozen=True, kw_only=True)
class PlanSummary:
    """What a plan moves: bytes by global rank, for every rank of the two meshes.

    Attributes:
        received_bytes: From other ranks.
        sent_bytes: To other ranks.
        local_bytes: Copied within the rank's own memory.
    """

    received_bytes: dict[int, int]
    sent_bytes: dict[int, int]
    local_bytes: dict[int, int]


def summarize(model: ModelSpec, source: Holdings, target: Holdings) -> PlanSummary:
    """The bytes that the whole plan moves. Raises ReshardError as ``plan`` does."""
    ranks = participants(source.mesh, target.mesh)
    received, sent, local = (dict.fromkeys(ranks, 0) for _ in range(3))
    found = Flows(model, source, target)
    for stream in found.streams:
        for rank in set(stream.output_ranks).intersection(stream.needers):
            local[rank] += stream.num_bytes
    for flow in found.all():
        sent[flow.source] += flow.stop - flow.start
        received[flow.destination] += flow.stop - flow.start
    return PlanSummary(received_bytes=received, sent_bytes=sent, local_bytes=local)
