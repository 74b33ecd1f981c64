"""The memory of a job's ranks as text."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from hybridflow.layout.mesh import format_ranks
from hybridflow.mapping.memory import RankMemory
from hybridflow.observe.console import format_bytes
from hybridflow.observe.table import format_table

_LARGEST_GROUPS = 12


def memory_table(memory: Sequence[RankMemory]) -> str:
    """Return a table of ranks × models × bytes.

    Ranks with the same figures share a row; those that need the most come first.
    """
    groups: dict[tuple[tuple[str, ...], ...], list[int]] = {}
    rows_of = functools.cache(_rows)
    for rank, needed in enumerate(memory):
        groups.setdefault(rows_of(needed), []).append(rank)
    order = sorted(groups, key=lambda rows: -max(memory[rank].peak for rank in groups[rows]))
    shown = order if len(order) <= _LARGEST_GROUPS else [*order[: _LARGEST_GROUPS - 1], order[-1]]
    lines: list[tuple[str, ...]] = [
        ("ranks", "mesh", "weights", "gradients", "optimizer", "cache", "activations", "rollout", "update")
    ]
    for rows in shown:
        named = format_ranks(groups[rows])
        if len(named) > 40:
            named = f"{named[:30].rpartition(',')[0]},… ({len(groups[rows])})"
        lines += [(named if index == 0 else "", *row) for index, row in enumerate(rows)]
    table = format_table(lines, num_left=2)
    if len(order) > len(shown):
        table.insert(-len(order[-1]), f"… {len(order) - len(shown)} more groups of ranks, each between these")
    return "\n".join(table)


def _rows(needed: RankMemory) -> tuple[tuple[str, ...], ...]:
    rows = []
    for index, part in enumerate(needed.meshes):
        figures = part.weights, part.gradients, part.optimizer, part.cache, part.activations
        totals = ("", "") if index else (format_bytes(needed.rollout), format_bytes(needed.update))
        rows.append((part.mesh, *(format_bytes(number) if number else "–" for number in figures), *totals))
    return tuple(rows) or (("none", *[""] * 7),)


def memory_summary(memory: Sequence[RankMemory]) -> str:
    """Describe the ranks that need the most and the least, and what the estimate leaves out."""
    order = sorted(range(len(memory)), key=lambda rank: memory[rank].peak)
    least, most = order[0], max(order, key=lambda rank: (memory[rank].peak, -rank))
    lines = [
        f"most on rank {most}: {format_bytes(memory[most].peak)}; least on rank {least}: "
        f"{format_bytes(memory[least].peak)}",
        "rollout, update: all models of the rank in that phase; without the CUDA context, NCCL and fragmentation",
    ]
    if memory[most].spare:
        tightest = max(range(len(memory)), key=lambda rank: (memory[rank].least, -rank))
        lines[0] = (
            f"must fit: {format_bytes(memory[tightest].least)} on rank {tightest}; a cache takes rollout.cache_memory "
            f"of what is free beside it\nwith the largest caches that rollouts could use, as in the table: {lines[0]}"
        )
    return "\n".join(lines)
