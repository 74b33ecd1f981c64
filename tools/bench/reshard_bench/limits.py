"""What no plan can beat, without the planner: who holds what is read off numpy grids, and scipy solves the rest."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np

from hybridflow.layout.mesh import DeviceMesh
from hybridflow.reshard.spec import ModelSpec

Ranks = tuple[int, ...]


def cells(model: ModelSpec, source: DeviceMesh, target: DeviceMesh) -> Counter[tuple[Ranks, Ranks]]:
    """Bytes by who holds them and who needs them."""
    found: Counter[tuple[Ranks, Ranks]] = Counter()
    grids = [np.array(mesh.ranks).reshape(mesh.layout.pp, mesh.layout.dp, mesh.layout.tp) for mesh in (source, target)]
    for spec in model.tensors:
        rows = []
        for grid in grids:
            ends = {"embedding": 0, "output": len(grid) - 1}
            in_stage = model.num_layers // len(grid)
            rows.append(grid[ends[spec.place] if isinstance(spec.place, str) else spec.place // in_stage])
        if spec.tp_dim is None:
            output_ranks, needers = (tuple(sorted(row.ravel().tolist())) for row in rows)
            found[output_ranks, needers] += spec.num_bytes
            continue
        size = spec.shape[spec.tp_dim]
        widths = [size // row.shape[1] for row in rows]
        edges = sorted({edge for width in widths for edge in range(0, size + 1, width)})
        for start, stop in pairwise(edges):
            output_ranks, needers = (
                tuple(sorted(row[:, start // width].tolist())) for row, width in zip(rows, widths, strict=True)
            )
            found[output_ranks, needers] += spec.num_bytes // size * (stop - start)
    return found


def busiest_sender_limit(model: ModelSpec, source: DeviceMesh, target: DeviceMesh) -> float | None:
    """The least that the busiest sender sends, in bytes, when each byte enters a node once; None without scipy.

    Minimise T where each demand is shared among those who may carry it and no rank carries more than T.
    """
    try:
        from scipy.optimize import linprog
    except ImportError:
        return None
    demands: Counter[Ranks] = Counter()
    per_node = source.ranks_per_node
    for (output_ranks, needers), size in cells(model, source, target).items():
        for node in {rank // per_node for rank in needers}:
            near = tuple(rank for rank in output_ranks if rank // per_node == node)
            missing = [rank for rank in needers if rank // per_node == node and rank not in output_ranks]
            demands[near or output_ranks] += size * len(missing) if near else size
    demands = Counter({carriers: size for carriers, size in demands.items() if size})
    if not demands:
        return 0.0
    ranks = sorted({rank for carriers in demands for rank in carriers})
    pairs = [(row, rank) for row, carriers in enumerate(demands) for rank in carriers]
    carried = np.zeros((len(ranks), len(pairs) + 1))
    carried[:, -1] = -1.0
    shared = np.zeros((len(demands), len(pairs) + 1))
    for column, (row, rank) in enumerate(pairs):
        carried[ranks.index(rank), column] = 1.0
        shared[row, column] = 1.0
    unit = max(demands.values())
    solved = linprog(
        c=[0.0] * len(pairs) + [1.0],
        A_ub=carried,
        b_ub=np.zeros(len(ranks)),
        A_eq=shared,
        b_eq=np.array([size / unit for size in demands.values()]),
    )
    assert solved.success, solved.message
    return float(solved.fun) * unit
