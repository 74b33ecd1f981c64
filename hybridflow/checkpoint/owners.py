"""Which rank writes which box, so that every element is written once, by a rank that holds it. Pure arithmetic.

Weights are held by all data parallel ranks alike, and each box goes to the holder that has least to write so far. The
state of a distributed optimizer lies on the ranks in ranges that megatron-core decides and that only their holders
need to know: of those that hold the same range, their place in the mesh tells which writes it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from hybridflow.layout.mesh import DeviceMesh
from hybridflow.reshard.fsdp import FsdpHoldings
from hybridflow.reshard.holdings import Part, WeightHoldings
from hybridflow.reshard.spec import ITEM_BYTES, Box, ModelSpec, TensorSpec, num_elements, replica_of

SMALLEST_BYTES = 1 << 20
"""A part is not divided into boxes smaller than this."""


class Owned(NamedTuple):
    """A box that a rank writes.

    Attributes:
        tensor: Logical name.
        box: In logical coordinates, not empty.
    """

    tensor: str
    box: Box


def owned_weights(model: ModelSpec, mesh: DeviceMesh) -> dict[int, tuple[Owned, ...]]:
    """Return rank of the mesh -> the boxes of the weights that it writes, in the model's order; bytes are dealt evenly.

    Raises:
        ReshardError: The mesh cannot cut a tensor.
    """
    holdings = WeightHoldings(model, mesh)
    fair_bytes = max(SMALLEST_BYTES, math.ceil(sum(tensor.num_bytes for tensor in model.tensors) / len(mesh.ranks)))
    boxes: list[tuple[int, Owned, tuple[int, ...]]] = []
    for tensor in model.tensors:
        item_bytes = ITEM_BYTES[tensor.dtype]
        for part in holdings.parts(tensor):
            number = min(len(part.ranks), math.ceil(num_elements(part.box) * item_bytes / fair_bytes))
            boxes += [
                (num_elements(box) * item_bytes, Owned(tensor.name, box), part.ranks)
                for box in _divide(part.box, number)
            ]
    load = dict.fromkeys(mesh.ranks, 0)
    writers: dict[Owned, int] = {}
    # The largest first, so that the small ones even out what these leave.
    for num_bytes, owned, ranks in sorted(boxes, key=lambda box: -box[0]):
        writer = min(ranks, key=load.__getitem__)
        writers[owned] = writer
        load[writer] += num_bytes
    found: dict[int, list[Owned]] = defaultdict(list)
    for _, owned, _ in boxes:
        found[writers[owned]].append(owned)
    return {rank: tuple(found[rank]) for rank in mesh.ranks}


def _divide(box: Box, number: int) -> Iterator[Box]:
    """Split a box into about so many equal boxes along its longest dim."""
    dim = max(range(len(box)), key=lambda dim: box[dim][1] - box[dim][0])
    start, stop = box[dim]
    step = math.ceil((stop - start) / number)
    for low in range(start, stop, step):
        yield (*box[:dim], (low, min(low + step, stop)), *box[dim + 1 :])


def writes_state(model: ModelSpec, mesh: DeviceMesh, rank: int) -> set[str]:
    """Return the tensors of which a rank writes the state that a distributed optimizer, or FSDP, keeps on it.

    Its twins, which keep the same range of the same part, do not: tensor parallel ranks of a tensor that is not cut,
    and the second stage of tied embeddings. Which of them writes goes round from tensor to tensor.
    """
    if mesh.layout.fsdp > 1:
        sharded = FsdpHoldings(mesh)
        return {tensor.name for number, tensor in enumerate(model.tensors) if sharded.writes(number, rank)}
    holdings, found = WeightHoldings(model, mesh), set()
    for number, tensor in enumerate(model.tensors):
        for part in holdings.parts(tensor) if holdings.regions(tensor, rank) else ():
            if (
                rank in part.ranks
                and _twins(tensor, part, mesh, rank)[number % len(_twins(tensor, part, mesh, rank))] == rank
            ):
                found.add(tensor.name)
    return found


def _twins(tensor: TensorSpec, part: Part, mesh: DeviceMesh, rank: int) -> list[int]:
    def replica(rank: int) -> int:
        return replica_of(mesh.layout, mesh.coordinate(rank), of_expert=tensor.expert is not None)

    own = replica(rank)
    return [each for each in part.ranks if replica(each) == own]
