"""Who sends which box of which tensor to whom. Pure planning: no torch, no communication, the same on every rank.

The shards of one layout partition each tensor, so a piece that a rank needs is the overlap of its target shard with
one source shard, and every holder of that shard is a possible source: the rank itself if it is one, else a rank of its
node, else any; of several, the one that sends least so far.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from hybridflow.errors import ReshardError
from hybridflow.parallel.mesh import DeviceMesh
from hybridflow.reshard.spec import ITEM_BYTES, Box, ModelSpec, TensorSpec, intersect, num_elements, shard

VERSION = 1
"""Part of the digest: raise it when equal input gives another plan."""


class Copy(NamedTuple):
    """One box of one tensor, from a rank that holds it to a rank that needs it.

    Attributes:
        tensor: Index into the model's tensors.
        source: Global rank that holds the box before.
        destination: Global rank that needs it; the source itself for a copy in its own memory.
        box: In logical coordinates, never empty.
    """

    tensor: int
    source: int
    destination: int
    box: Box


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """The part of a plan that concerns one rank; in each peer's part the same copies stand in the same order.

    Attributes:
        rank: Whose part this is.
        sends: Copies to other ranks.
        receives: Copies from other ranks.
        local: Copies within the rank's own memory.
    """

    rank: int
    sends: tuple[Copy, ...]
    receives: tuple[Copy, ...]
    local: tuple[Copy, ...]


@dataclass(frozen=True, kw_only=True)
class PlanSummary:
    """What a plan moves: bytes by global rank, for every rank of the two meshes."""

    received_bytes: dict[int, int]
    sent_bytes: dict[int, int]
    local_bytes: dict[int, int]


def shares_storage(one: DeviceMesh, other: DeviceMesh) -> bool:
    """Whether every rank holds the same shards in both meshes: one storage serves both, and nothing is copied."""
    return one.key == other.key


def participants(source_mesh: DeviceMesh, target_mesh: DeviceMesh) -> tuple[int, ...]:
    """The ranks of either mesh, ascending."""
    return tuple(sorted({*source_mesh.ranks, *target_mesh.ranks}))


def plan(model: ModelSpec, source_mesh: DeviceMesh, target_mesh: DeviceMesh, rank: int) -> RankPlan:
    """One rank's part in turning the shards of one mesh into those of another.

    Every element that a rank needs is written once; it travels only if the rank does not hold it already, so each rank
    receives the least that it can.

    Args:
        model: The tensors.
        source_mesh: Where they are.
        target_mesh: Where they are to be: the same ranks, others, or some of both.
        rank: Global rank whose part is wanted; in neither mesh, it has no copies.

    Raises:
        ReshardError: A mesh does not cut some tensor into equal parts, or the meshes disagree about the nodes.
    """
    sends, receives, own = [], [], []
    for copy in all_copies(model, source_mesh, target_mesh):
        if copy.source == copy.destination == rank:
            own.append(copy)
        elif copy.source == rank:
            sends.append(copy)
        elif copy.destination == rank:
            receives.append(copy)
    return RankPlan(rank=rank, sends=tuple(sends), receives=tuple(receives), local=tuple(own))


def summarize(model: ModelSpec, source_mesh: DeviceMesh, target_mesh: DeviceMesh) -> PlanSummary:
    """The bytes that the whole plan moves. Raises ReshardError as ``plan`` does."""
    ranks = participants(source_mesh, target_mesh)
    received, sent, local = (dict.fromkeys(ranks, 0) for _ in range(3))
    for copy in all_copies(model, source_mesh, target_mesh):
        size = copy_bytes(model, copy)
        if copy.source == copy.destination:
            local[copy.source] += size
        else:
            sent[copy.source] += size
            received[copy.destination] += size
    return PlanSummary(received_bytes=received, sent_bytes=sent, local_bytes=local)


def digest(model: ModelSpec, source_mesh: DeviceMesh, target_mesh: DeviceMesh) -> str:
    """The sha256 of all that a plan depends on: two ranks of equal digest have parts of one plan."""
    meshes = [[str(mesh.layout), mesh.ranks, mesh.ranks_per_node] for mesh in (source_mesh, target_mesh)]
    return hashlib.sha256(json.dumps([VERSION, model.digest(), *meshes]).encode()).hexdigest()


def copy_bytes(model: ModelSpec, copy: Copy) -> int:
    """Bytes of a copy, in the dtype of its tensor's description."""
    return num_elements(copy.box) * ITEM_BYTES[model.tensors[copy.tensor].dtype]


def all_copies(model: ModelSpec, source_mesh: DeviceMesh, target_mesh: DeviceMesh) -> Iterator[Copy]:
    """The copies of all ranks, in an order that is the same everywhere: by tensor, target box, destination.

    Raises:
        ReshardError: As ``plan``.
    """
    if source_mesh.ranks_per_node != target_mesh.ranks_per_node:
        raise ReshardError(
            f"{source_mesh.name} has ranks_per_node={source_mesh.ranks_per_node}, {target_mesh.name} "
            f"{target_mesh.ranks_per_node}; make both meshes with the job's own"
        )
    sent_bytes = dict.fromkeys(source_mesh.ranks, 0)
    for index, spec in enumerate(model.tensors):
        holders = holders_by_box(spec, source_mesh, model.num_layers)
        for box, needers in holders_by_box(spec, target_mesh, model.num_layers).items():
            pieces = [
                (piece, ranks) for held, ranks in holders.items() if num_elements(piece := intersect(box, held)) > 0
            ]
            assert sum(num_elements(piece) for piece, _ in pieces) == num_elements(box), f"{spec.name}: not covered"
            for rank in needers:
                for piece, ranks in pieces:
                    source = _choose_source(rank, ranks, sent_bytes, source_mesh)
                    if source != rank:
                        sent_bytes[source] += num_elements(piece) * ITEM_BYTES[spec.dtype]
                    yield Copy(index, source, rank, piece)


def holders_by_box(spec: TensorSpec, mesh: DeviceMesh, num_layers: int) -> dict[Box, tuple[int, ...]]:
    """The distinct boxes that a mesh cuts a tensor into, each with the ranks that hold it; disjoint, and covering it.

    Raises:
        ReshardError: The mesh does not cut the tensor into equal parts.
    """
    holders: dict[Box, list[int]] = {}
    for rank in mesh.ranks:
        held = shard(spec, mesh.layout, mesh.coordinate(rank), num_layers)
        if held is not None and num_elements(held.box) > 0:
            holders.setdefault(held.box, []).append(rank)
    return {box: tuple(ranks) for box, ranks in holders.items()}


def _choose_source(rank: int, holders: tuple[int, ...], sent_bytes: dict[int, int], mesh: DeviceMesh) -> int:
    if rank in holders:
        return rank
    near = [holder for holder in holders if mesh.node(holder) == mesh.node(rank)]
    candidates = near if near else holders
    return min(candidates, key=lambda holder: (sent_bytes[holder], holder))
