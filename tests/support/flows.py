"""Meshes and nodes of made-up flows, in few words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hybridflow.dataflow.graph import Node
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout


def mesh(name: str, layout: str, ranks: Iterable[int], ranks_per_node: int = 8) -> DeviceMesh:
    """A mesh of a layout on some ranks."""
    parsed = ParallelLayout.parse(layout)
    return DeviceMesh(name=name, layout=parsed, ranks=tuple(ranks), ranks_per_node=ranks_per_node)


def node(name: str, place: str, reads: str = "", writes: str = "", **options: Any) -> Node:
    """A call of a role, ``role.call``, on a mesh; columns are words."""
    role, call = name.split(".")
    columns = {"reads": tuple(reads.split()), "writes": tuple(writes.split())}
    return Node(name=name, role=role, call=call, mesh=place, **columns, **options)
