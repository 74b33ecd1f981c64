"""Columns from one mesh to another: who gets which sample, who sends it, and the bytes.

Who sends what is decided alike on every participant from one gathered table of ids and lengths; only then come bytes,
one message for each pair of ranks with all columns in it.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridflow.dataflow.batch import Batch, Column, Ragged
from hybridflow.dataflow.graph import ORDER
from hybridflow.dataflow.schedule import Move, describe, participants
from hybridflow.errors import DataError, GraphError
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.parallel.world import World

Array = NDArray[np.int64]
Table = Sequence[Sequence[int] | Array]
"""Data-parallel index -> the ids of the samples that the replica has."""

_ALIGN_BYTES = 8
_WEIGHT = "tokens"
"""The column whose lengths weigh the samples when they are dealt out."""


def balance(lengths: Sequence[int], num_parts: int, chunk: int) -> list[int]:
    """Deal out samples so that within every chunk the parts have about equal sums of lengths.

    Longest first, each to the part with the least so far; the largest part is at most 4/3 of the best possible
    (Graham 1969, "Bounds on multiprocessing timing anomalies"). Ties go to the part with less in the chunks before,
    then to the lower index.

    Args:
        lengths: Tokens of each sample, in order of id.
        num_parts: Data-parallel replicas.
        chunk: Samples of one mini-batch: each consecutive ``chunk`` samples are balanced on their own.

    Returns:
        The part of each sample.
    """
    parts = [0] * len(lengths)
    totals = [0] * num_parts
    for start in range(0, len(lengths), chunk):
        members = range(start, min(start + chunk, len(lengths)))
        heap = [(0, totals[part], part) for part in range(num_parts)]
        heapq.heapify(heap)
        for sample in sorted(members, key=lambda index: (-lengths[index], index)):
            load, total, part = heap[0]
            parts[sample] = part
            totals[part] += lengths[sample]
            heapq.heapreplace(heap, (load + lengths[sample], total, part))
    return parts


def plan_transfers(
    source: Table, destination: Table, source_mesh: DeviceMesh, destination_mesh: DeviceMesh
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Plan which rank gives which samples to whom: each sample once to each receiving rank.

    A rank that holds a sample itself takes its own; else a holder on the same node gives it, else any holder; among
    equals the one that gives the least so far, then the first in the mesh.

    Args:
        source: Ids of each replica of the source mesh; its holders have them.
        destination: Ids wanted on every rank of each replica of the destination mesh.
        source_mesh: The mesh of the source.
        destination_mesh: The mesh of the destination.

    Returns:
        (giving rank, receiving rank) -> ids in ascending order; the two are the same rank for samples that stay.
    """
    samples, owners = _by_id(source)
    given = dict.fromkeys(source_mesh.ranks, 0)
    transfers: dict[tuple[int, int], tuple[int, ...]] = {}
    for dp, ids in enumerate(destination):
        wanted = np.sort(_array(ids))
        replicas = owners[np.searchsorted(samples, wanted)]
        shares = {replica: tuple(wanted[replicas == replica].tolist()) for replica in np.unique(replicas).tolist()}
        for receiver in destination_mesh.replica(dp):
            for replica, share in shares.items():
                output_ranks = source_mesh.output_ranks(replica)
                near = [rank for rank in output_ranks if source_mesh.node(rank) == source_mesh.node(receiver)]
                giver = receiver if receiver in output_ranks else min(near or output_ranks, key=given.__getitem__)
                given[giver] += len(share) if giver != receiver else 0
                transfers[giver, receiver] = share
    return transfers


@dataclass(frozen=True)
class Mover:
    """Executes moves.

    Attributes:
        world: The ranks of the job; it has the groups that ``schedule.rank_sets`` names.
        meshes: Name -> mesh.
        chunk: Samples of a mini-batch, each of which is balanced over the replicas.
    """

    world: World
    meshes: Mapping[str, DeviceMesh]
    chunk: int

    def move(self, move: Move, source: Batch | None, destination: Batch | None) -> Batch | None:
        """Bring columns to every rank of the destination. Collective: the ranks of both meshes.

        Args:
            move: Which columns, from where to where.
            source: What this rank holds at the source place; None if nothing.
            destination: What it holds at the destination place; samples that are there already stay where they are.

        Returns:
            On ranks of the destination, this rank's samples in order of id, with the moved columns and ``order``.

        Raises:
            GraphError: A holder lacks a column, or two of them give it another type.
            DataError: A sample is in two replicas.
            DeadlineError: A rank does not come.
        """
        source_mesh, destination_mesh = self.meshes[move.source], self.meshes[move.destination]
        ranks = participants(move, self.meshes)
        coordinator = self.world.coordinator(ranks)
        report = self._report(move, source, destination)
        reports = dict(zip(ranks, coordinator.gather(report, describe(move)), strict=True))
        shares = [reports[rank]["source"] for rank in source_mesh.speakers]
        table = [_array(share["ids"]) for share in shares]
        everything, _ = _by_id(table)
        if bool((everything[1:] == everything[:-1]).any()):
            raise DataError(f"{describe(move)}: a sample id is in two replicas of {move.source}; ids must be distinct")
        common = _common(move, shares)
        known = [reports[rank]["destination"] for rank in destination_mesh.speakers]
        wanted = self._assign(everything, known, shares)
        transfers = plan_transfers(table, wanted, source_mesh, destination_mesh)

        me = self.world.rank
        held = source if source is not None else Batch.empty()
        sends = {
            receiver: _pack(_pick(held, ids, move.columns))
            for (giver, receiver), ids in transfers.items()
            if giver == me != receiver
        }
        incoming = {
            giver: _Layout(shares[source_mesh.coordinate(giver).dp], ids, move.columns)
            for (giver, receiver), ids in transfers.items()
            if receiver == me != giver
        }
        buffers = {giver: torch.empty(layout.num_bytes, dtype=torch.uint8) for giver, layout in incoming.items()}
        coordinator.exchange(
            {rank: buffer for rank, buffer in sends.items() if len(buffer)},
            {rank: buffer for rank, buffer in buffers.items() if len(buffer)},
            describe(move),
        )
        if me not in destination_mesh:
            return None
        pieces = [_Layout(common, (), move.columns).unpack(torch.empty(0, dtype=torch.uint8))]
        pieces += [layout.unpack(buffers[giver]) for giver, layout in incoming.items()]
        if (me, me) in transfers:
            pieces.append(_pick(held, transfers[me, me], move.columns))
        batch = Batch.concat(pieces)
        batch = batch.select(batch.ids.argsort())
        order = torch.searchsorted(torch.from_numpy(everything), batch.ids)
        return batch.with_columns({ORDER: order})

    def _report(self, move: Move, source: Batch | None, destination: Batch | None) -> dict[str, Any]:
        """Report what the others need to know of this rank; one rank reports for each replica."""
        source_mesh, destination_mesh = self.meshes[move.source], self.meshes[move.destination]
        report: dict[str, Any] = {"source": None, "destination": None}
        if source_mesh.speaks(self.world.rank):
            missing = [name for name in move.columns if source is None or name not in source.columns]
            if source is None or missing:
                raise GraphError(
                    f"{describe(move)}: rank {self.world.rank} holds no {', '.join(missing) or 'samples'} there; "
                    "a call on the source must write it before"
                )
            # Most columns have the lengths of others: each list is named once, so that the report is one short message.
            lengths: list[list[int]] = []
            weight = source.columns.get(_WEIGHT)
            report["source"] = {
                "ids": source.ids.tolist(),
                "weights": _intern(weight.lengths.tolist(), lengths) if isinstance(weight, Ragged) else None,
                "columns": {name: _kind(source.columns[name], lengths) for name in move.columns},
                "lengths": lengths,
            }
        if destination_mesh.speaks(self.world.rank) and destination is not None:
            report["destination"] = destination.ids.tolist()
        return report

    def _assign(self, everything: Array, known: list[list[int] | None], shares: list[dict[str, Any]]) -> Table:
        """Assign samples to the destination's replicas: as they are there already, else balanced by tokens."""
        there = [_array(ids) for ids in known if ids is not None]
        if len(there) == len(known) and np.array_equal(_by_id(there)[0], everything):
            return there
        weights = np.ones(len(everything), dtype=np.int64)
        for share in shares:
            if share["weights"] is not None:
                weights[np.searchsorted(everything, _array(share["ids"]))] = share["lengths"][share["weights"]]
        parts = _array(balance(weights.tolist(), len(known), self.chunk))
        return [everything[parts == dp] for dp in range(len(known))]


class _Layout:
    """Where the columns of some samples lie in one message: each column's bytes (lengths are known), 8-byte aligned."""

    def __init__(self, share: dict[str, Any], ids: Sequence[int], columns: Sequence[str]) -> None:
        positions = _positions(_array(share["ids"]), ids)
        self._ids = torch.tensor(ids, dtype=torch.int64)
        self._columns: list[tuple[str, torch.dtype, list[int], Array | None, int]] = []
        self.num_bytes = 0
        for name in columns:
            kind = share["columns"][name]
            dtype: torch.dtype = getattr(torch, kind["dtype"])
            lengths = None if kind["lengths"] is None else _array(share["lengths"][kind["lengths"]])[positions]
            shape = [len(ids) if lengths is None else int(lengths.sum()), *kind["shape"]]
            self._columns.append((name, dtype, shape, lengths, self.num_bytes))
            self.num_bytes += _aligned(torch.Size(shape).numel() * dtype.itemsize)

    def unpack(self, buffer: Tensor) -> Batch:
        """Unpack the samples of a message ``[num_bytes]`` uint8; the columns are views of it."""
        columns: dict[str, Column] = {}
        for name, dtype, shape, lengths, start in self._columns:
            end = start + torch.Size(shape).numel() * dtype.itemsize
            values = buffer[start:end].view(dtype).view(shape) if end > start else torch.empty(shape, dtype=dtype)
            columns[name] = values if lengths is None else Ragged(values, torch.from_numpy(lengths))
        return Batch(self._ids, columns)


def _pack(batch: Batch) -> Tensor:
    """Pack all columns of a batch into ``[num_bytes]`` uint8, as ``_Layout`` describes."""
    pieces: list[Tensor] = []
    for column in batch.columns.values():
        values = column.values if isinstance(column, Ragged) else column
        piece = values.contiguous().view(-1).view(torch.uint8)
        pieces += [piece, piece.new_zeros(_aligned(len(piece)) - len(piece))]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)


def _pick(source: Batch, ids: Sequence[int], columns: Sequence[str]) -> Batch:
    """Pick some of the samples, with some of the columns."""
    return source.only(columns).select(torch.from_numpy(_positions(source.ids.numpy(), ids)))


def _kind(column: Column, lengths: list[list[int]]) -> dict[str, Any]:
    """Return type, trailing shape and place in ``lengths`` of a column, as JSON."""
    values = column.values if isinstance(column, Ragged) else column
    return {
        "dtype": str(values.dtype).removeprefix("torch."),
        "shape": list(values.shape[1:]),
        "lengths": _intern(column.lengths.tolist(), lengths) if isinstance(column, Ragged) else None,
    }


def _intern(values: list[int], known: list[list[int]]) -> int:
    """Return the place of ``values`` in ``known``; add them when they are new."""
    if values not in known:
        known.append(values)
    return known.index(values)


def _common(move: Move, shares: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a share with the type that all replicas with samples agree on. Raises GraphError."""
    filled = [share for share in shares if share["ids"]] or shares[:1]
    for name in move.columns:
        kinds = {_spell(share["columns"][name]) for share in filled}
        if len(kinds) > 1:
            raise GraphError(
                f"{describe(move)}: replicas give column {name!r} as {' and '.join(sorted(kinds))}; "
                "its type must be the same on all ranks"
            )
    return filled[0]


def _spell(kind: dict[str, Any]) -> str:
    """Spell a column's type for a message: ``ragged float32 [4]``, where the shape is that of one entry."""
    return f"{'dense' if kind['lengths'] is None else 'ragged'} {kind['dtype']} {kind['shape']}"


def _array(values: Sequence[int] | Array) -> Array:
    return np.asarray(values, dtype=np.int64)


def _positions(have: Array, wanted: Sequence[int]) -> Array:
    """Return the position of each wanted id in ``have``."""
    order = np.argsort(have, kind="stable")
    return order[np.searchsorted(have, _array(wanted), sorter=order)]


def _by_id(table: Table) -> tuple[Array, Array]:
    """Return all samples of a table in order of id, and the replica that has each."""
    samples = np.concatenate([_array(ids) for ids in table])
    owners = np.repeat(np.arange(len(table)), [len(ids) for ids in table])
    order = np.argsort(samples, kind="stable")
    return samples[order], owners[order]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
