"""A layout laid over named ranks. Pure geometry: no torch, so that a login node can use it."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

from hybridflow.errors import LayoutError
from hybridflow.layout.parallel_layout import ParallelLayout

AXES = ("tp", "cp", "dp", "pp")
"""Axes from the fastest to the slowest: neighbors in a mesh are tensor-parallel peers, as in Megatron-LM."""


class Coordinate(NamedTuple):
    """A rank's place in a mesh, one index for each axis."""

    tp: int
    cp: int
    dp: int
    pp: int


@functools.lru_cache(maxsize=64)
def _places(tp: int, cp: int, dp: int, pp: int) -> tuple[Coordinate, ...]:
    """Return the coordinates of a layout's ranks in mesh order."""
    sizes = (range(size) for size in (pp, dp, cp, tp))
    return tuple(Coordinate(*reversed(place)) for place in itertools.product(*sizes))


@dataclass(frozen=True, kw_only=True)
class DeviceMesh:
    """A layout laid over ranks: who is whose tensor, pipeline and data-parallel peer.

    Attributes:
        name: What messages call it (``"actor.update"``); two meshes that differ in name alone are the same place.
        layout: How the model is cut.
        ranks: Global ranks in mesh order, tensor-parallel index fastest, then cp, dp, pp. A permuted order
            gives strided groups.
        ranks_per_node: Ranks ``[k * ranks_per_node, (k + 1) * ranks_per_node)`` share node ``k``.

    Raises:
        LayoutError: The layout does not fill the ranks, a rank is named twice, or ``ranks_per_node`` is not positive.
    """

    name: str
    layout: ParallelLayout
    ranks: tuple[int, ...]
    ranks_per_node: int

    def __post_init__(self) -> None:
        self.layout.check_fits(len(self.ranks), self.name)
        if len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise LayoutError(f"{self.name}: ranks {list(self.ranks)}: expected distinct ranks from 0 up")
        if self.ranks_per_node < 1:
            raise LayoutError(f"{self.name}: ranks_per_node={self.ranks_per_node}: expected at least 1")

    @functools.cached_property
    def _coordinates(self) -> dict[int, Coordinate]:
        """Return the place of each rank. A search makes many large meshes of which it asks a stage or nothing."""
        layout = self.layout
        return dict(zip(self.ranks, _places(layout.tp, layout.cp, layout.dp, layout.pp), strict=True))

    def __contains__(self, rank: int) -> bool:
        return rank in self._coordinates

    @property
    def key(self) -> tuple[ParallelLayout, tuple[int, ...]]:
        """Return layout and ranks in order; two meshes with equal keys are the same place."""
        return self.layout, self.ranks

    @property
    def role(self) -> str:
        """Return the role whose mesh it is."""
        return role_of(self.name)

    @property
    def layout_key(self) -> str:
        """Return the key of a recipe that sets its layout."""
        return self.name if self.name != self.role else f"{self.name}.layout"

    def coordinate(self, rank: int) -> Coordinate:
        """Return the place of a global rank.

        Raises:
            LayoutError: The rank is not in this mesh.
        """
        if rank not in self._coordinates:
            raise LayoutError(f"{self.name}: rank {rank} is not among its ranks {list(self.ranks)}")
        return self._coordinates[rank]

    def stage(self, rank: int) -> int:
        """Return the pipeline stage of a global rank of the mesh."""
        return self.ranks.index(rank) * self.layout.pp // len(self.ranks)

    def first_of_stage(self, stage: int) -> int:
        """Return the global rank that is the first of a pipeline stage."""
        return self.ranks[len(self.ranks) // self.layout.pp * stage]

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Split the mesh into groups whose ranks differ only along ``axes``, each in mesh order."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in self.ranks:
            place = self._coordinates[rank]
            fixed = tuple(getattr(place, axis) for axis in AXES if axis not in axes)
            groups.setdefault(fixed, []).append(rank)
        return tuple(tuple(group) for group in groups.values())

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the group along ``axes`` that holds ``rank``.

        Raises:
            LayoutError: The rank is not in this mesh.
        """
        self.coordinate(rank)
        return next(group for group in self.groups(*axes) if rank in group)

    def shard_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that share each parameter with a rank under FSDP, in mesh order."""
        first = self.coordinate(rank).dp // self.layout.fsdp * self.layout.fsdp
        return self.ranks[first : first + self.layout.fsdp]

    def twin_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the same part of each parameter as a rank under FSDP, in mesh order."""
        return self.ranks[self.coordinate(rank).dp % self.layout.fsdp :: self.layout.fsdp]

    def replica(self, dp: int) -> tuple[int, ...]:
        """Return all ranks of one data-parallel replica of the model, in mesh order."""
        return tuple(rank for rank in self.ranks if self._coordinates[rank].dp == dp)

    def replica_of(self, rank: int) -> tuple[int, ...]:
        """Return all ranks of the replica that a global rank has a part of, in mesh order."""
        return self.replica(self.coordinate(rank).dp)

    def output_ranks(self, dp: int) -> tuple[int, ...]:
        """Return the ranks of a replica that own the model's outputs: those of the last pipeline stage."""
        last = self.layout.pp - 1
        return tuple(rank for rank in self.replica(dp) if self._coordinates[rank].pp == last)

    def has_outputs(self, rank: int) -> bool:
        """Return whether a global rank of the mesh owns its replica's outputs."""
        return self.coordinate(rank).pp == self.layout.pp - 1

    @property
    def speakers(self) -> tuple[int, ...]:
        """Return the first of the ranks that own each replica's outputs."""
        return tuple(self.output_ranks(dp)[0] for dp in range(self.layout.dp))

    def speaks(self, rank: int) -> bool:
        """Return whether a global rank is one of the ``speakers``."""
        return rank in self and self.output_ranks(self.coordinate(rank).dp)[0] == rank

    def node(self, rank: int) -> int:
        """Return the node on which a global rank runs."""
        return rank // self.ranks_per_node

    def spans_nodes(self, *axes: str) -> bool:
        """Return whether some ranks that differ only along ``axes`` are on different nodes."""
        return any(len({self.node(rank) for rank in group}) > 1 for group in self.groups(*axes))


def role_of(mesh_name: str) -> str:
    """Return the role whose mesh has this name."""
    return mesh_name.partition(".")[0]


def format_ranks(ranks: list[int]) -> str:
    """Format ascending ranks with runs shortened: ``0-3,6``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
