"""Which rank takes which place of a target mesh, so that it already holds as much as it can of what it is to hold.

Pure arithmetic: no torch, so that a login node can use it. What a rank holds in common with a place is measured by the
layouts alone: the layers that both their stages have, times the part of each that both their tensor parallel indices
have, and of its experts likewise, where a layout treats them apart.

Paper: arXiv 2409.19256, section 5, forms the tensor parallel groups of generation at a stride of the training ranks.
Giving each rank the place of largest overlap comes to the same where the layouts nest, and holds for all others too.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.reshard.spec import expert_place, stage_of

EXPERTS_TO_DENSE = 32
"""How much the experts of a layer weigh for each part of its other weights: 32 to 34 in Mixtral and Qwen 3."""


class Spot(NamedTuple):
    """What a place of a mesh holds: the ranks of one spot have the same weights.

    Attributes:
        pp: Pipeline stage.
        tp: Tensor parallel index.
        expert: Tensor parallel index inside experts, and the block of experts.
    """

    pp: int
    tp: int
    expert: tuple[int, int]


Block = tuple[Spot, ...]
"""Consecutive places that lie in one node: a tensor parallel group, or one node's part of it."""


class Origin(NamedTuple):
    """All that the choice of a rank's place depends on.

    Attributes:
        held: Its spot in the source mesh; None: it holds nothing.
        given: Its spot in the target mesh as given, which it keeps if no other is better.
    """

    held: Spot | None
    given: Spot


@functools.lru_cache(maxsize=16)
def max_overlap(
    source: DeviceMesh, layout: ParallelLayout, ranks: tuple[int, ...], *, num_layers: int, name: str
) -> DeviceMesh:
    """Return a mesh over the given ranks, in the order with the largest overlap with their source holdings.

    Tensor parallel groups stay inside a node, or are made of whole nodes where they are larger. Within a node the
    choice is exact; which node hosts which groups is chosen from parts of nodes that hold a whole layer as far as
    possible. The order given is kept where no other has more overlap, and where its ranks do not fill nodes evenly.
    A search for layouts asks many times for the same meshes.

    Args:
        source: Where the weights are.
        layout: Layout of the target.
        ranks: Global ranks of the target, in any order.
        num_layers: Layers of the whole model.
        name: Name of the target mesh.

    Returns:
        The mesh; where the layouts and the sets of ranks are equal, it shares the source's storage.

    Raises:
        LayoutError: The layout does not fill the ranks.
        ReshardError: A layout cannot deal the layers to its stages.
    """
    given = DeviceMesh(name=name, layout=layout, ranks=ranks, ranks_per_node=source.ranks_per_node)
    if layout == source.layout and set(ranks) == set(source.ranks):
        return dataclasses.replace(given, ranks=source.ranks)
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(given.node(rank), []).append(rank)
    width = _block_width(layout.tp, [len(members) for members in nodes.values()])
    if width is None:
        return given
    search = _Search(source, given, num_layers, width)
    # Blocks of one rank are in one node wherever they are.
    groups = [list(ranks)] if width == 1 else [nodes[node] for node in sorted(nodes)]
    found = dataclasses.replace(given, ranks=search.order(groups))
    is_better = search.overlap(found) > search.overlap(given)
    return found if is_better or not _fills_nodes(given, width) else given


def _block_width(tp: int, sizes: Sequence[int]) -> int | None:
    """Return how many ranks of a tensor parallel group share a node; None where groups do not fit such nodes."""
    if all(size % tp == 0 for size in sizes):
        return tp
    return sizes[0] if len(set(sizes)) == 1 and tp % sizes[0] == 0 else None


def _fills_nodes(mesh: DeviceMesh, width: int) -> bool:
    """Return whether the mesh's blocks of this width lie within nodes."""
    blocks = (mesh.ranks[start : start + width] for start in range(0, len(mesh.ranks), width))
    return all(len({mesh.node(rank) for rank in block}) == 1 for block in blocks)


class _Search:
    """The best order for one pair of meshes. Nodes, and parts of nodes, that are alike are worked out once."""

    def __init__(self, source: DeviceMesh, given: DeviceMesh, num_layers: int, width: int) -> None:
        self._source, self._given, self._width = source, given, width
        stages = [
            [stage_of(layer, mesh.layout, num_layers, mesh.name) for layer in range(num_layers)]
            for mesh in (source, given)
        ]
        self._common_layers = Counter(zip(*stages, strict=True))
        layouts = source.layout, given.layout
        self._cuts = [(layout.tp, layout.expert_tp, layout.ep) for layout in layouts]
        self._has_experts = any(layout.ep > 1 or layout.etp is not None for layout in layouts)
        self._blocks: dict[Block, list[int]] = {}
        for start in range(0, len(given.ranks), width):
            block = tuple(_spot(given, rank) for rank in given.ranks[start : start + width])
            self._blocks.setdefault(block, []).append(start)
        self._values: dict[Hashable, int] = {}
        self._dealt: dict[Hashable, list[Spot]] = {}
        # Overlap comes first; among equals, what is kept of the order given.
        self._scale = len(given.ranks) + 1

    def overlap(self, mesh: DeviceMesh) -> int:
        """Return the total that ranks already hold of their places in a target mesh."""
        return sum(self._common(self._held(rank), _spot(mesh, rank)) for rank in mesh.ranks)

    def order(self, nodes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Return the target's ranks in mesh order, given those of each node."""
        order = [-1] * len(self._given.ranks)
        starts = {block: iter(places) for block, places in self._blocks.items()}
        for ranks, blocks in zip(nodes, self._hosts(nodes), strict=True):
            dealt: dict[Spot, list[int]] = {}
            for rank, spot in zip(ranks, self._deal(tuple(map(self._origin, ranks)), blocks), strict=True):
                dealt.setdefault(spot, []).append(rank)
            queues = {spot: iter(each) for spot, each in dealt.items()}
            for block in blocks:
                start = next(starts[block])
                order[start : start + len(block)] = [next(queues[spot]) for spot in block]
        return tuple(order)

    def _hosts(self, nodes: Sequence[Sequence[int]]) -> list[tuple[Block, ...]]:
        """Return the blocks that each node hosts, by an assignment of its parts, each as large as a block."""
        blocks, copies = list(self._blocks), [len(places) for places in self._blocks.values()]
        if len(nodes) == 1:
            return [tuple(_repeat(blocks, copies))]
        parts = [list(self._parts(ranks)) for ranks in nodes]
        kinds = Counter(itertools.chain.from_iterable(parts))
        gains = [[self._value(kind, block) for block in blocks] for kind in kinds]
        dealt = assign(gains, list(kinds.values()), copies)
        turns = {kind: _repeat(blocks, numbers) for kind, numbers in zip(kinds, dealt, strict=True)}
        return [tuple(sorted(next(turns[kind]) for kind in each)) for each in parts]

    def _parts(self, ranks: Sequence[int]) -> Iterator[tuple[Origin, ...]]:
        """Split a node's ranks into parts of a block's size, if possible of one stage and evenly spread indices."""
        places = [self._source.coordinate(rank) if rank in self._source else None for rank in ranks]
        order = sorted(
            range(len(ranks)),
            key=lambda index: (
                (False, place.pp, place.dp, place.cp, place.tp)
                if (place := places[index]) is not None
                else (True, 0, 0, 0, 0)
            ),
        )
        size = self._width * max(1, self._source.layout.tp // self._width)
        for start in range(0, len(order), size):
            chunk = order[start : start + size]
            step = len(chunk) // self._width
            for first in range(step):
                yield tuple(self._origin(ranks[index]) for index in chunk[first::step])

    def _value(self, origins: tuple[Origin, ...], block: Block) -> int:
        """Return the gain of hosting a block on ranks of these origins."""
        key = origins, block
        found = self._values.get(key)
        if found is None:
            spots = self._deal(origins, (block,))
            found = sum(self._gain(origin, spot) for origin, spot in zip(origins, spots, strict=True))
            self._values[key] = found
        return found

    def _deal(self, origins: tuple[Origin, ...], blocks: tuple[Block, ...]) -> list[Spot]:
        """Deal the spots of some blocks to as many ranks of these origins."""
        key = origins, blocks
        found = self._dealt.get(key)
        if found is None:
            kinds, spots = Counter(origins), Counter(itertools.chain.from_iterable(blocks))
            gains = [[self._gain(kind, spot) for spot in spots] for kind in kinds]
            dealt = assign(gains, list(kinds.values()), list(spots.values()))
            turns = {kind: _repeat(list(spots), numbers) for kind, numbers in zip(kinds, dealt, strict=True)}
            found = self._dealt[key] = [next(turns[origin]) for origin in origins]
        return found

    def _gain(self, origin: Origin, spot: Spot) -> int:
        return self._common(origin.held, spot) * self._scale + (origin.given == spot)

    def _common(self, held: Spot | None, needed: Spot) -> int:
        """Return common layers times the common part of each, in units of one over both meshes' numbers of cuts."""
        layers = 0 if held is None else self._common_layers[held.pp, needed.pp]
        if held is None or layers == 0:
            return 0
        (tp, etp, ep), (target_tp, target_etp, target_ep) = self._cuts
        dense = _common_part(held.tp, tp, needed.tp, target_tp)
        if not self._has_experts:
            return layers * dense
        (index, block), (target_index, target_block) = held.expert, needed.expert
        experts = _common_part(index, etp, target_index, target_etp) * _common_part(block, ep, target_block, target_ep)
        # Both in the same unit.
        return layers * (dense * etp * target_etp * ep * target_ep + EXPERTS_TO_DENSE * experts * tp * target_tp)

    def _origin(self, rank: int) -> Origin:
        return Origin(self._held(rank), _spot(self._given, rank))

    def _held(self, rank: int) -> Spot | None:
        return _spot(self._source, rank) if rank in self._source else None


def _common_part(index: int, cuts: int, other: int, other_cuts: int) -> int:
    """Return the overlap of two parts of one whole, in units of ``1 / (cuts · other_cuts)``."""
    return max(0, min((index + 1) * other_cuts, (other + 1) * cuts) - max(index * other_cuts, other * cuts))


def _spot(mesh: DeviceMesh, rank: int) -> Spot:
    place = mesh.coordinate(rank)
    return Spot(place.pp, place.tp, expert_place(mesh.layout, place))


_Item = TypeVar("_Item")


def _repeat(items: Sequence[_Item], numbers: Sequence[int]) -> Iterator[_Item]:
    """Repeat each item as often as its number says."""
    return itertools.chain.from_iterable(map(itertools.repeat, items, numbers))


def assign(gains: Sequence[Sequence[int]], supplies: Sequence[int], demands: Sequence[int]) -> list[list[int]]:
    """Deal each row's supply to the columns at the largest total gain, and fill each column's demand.

    Shortest augmenting paths on reduced costs, as in the Hungarian method, which this is where all supplies and demands
    are 1 (Kuhn 1955; Jonker and Volgenant 1987); rows and columns that are alike may be given once.

    Args:
        gains: Gains of one unit of a row in a column, ``[rows][columns]``.
        supplies: Units of each row.
        demands: Units that each column takes; as many in all as the supplies.

    Returns:
        Units of each row in each column, ``[rows][columns]``.
    """
    assert sum(supplies) == sum(demands), f"{sum(supplies)} units cannot fill {sum(demands)} places"
    most = max(map(max, gains))
    flow = [[0] * len(demands) for _ in gains]
    left, row_price, column_price = list(demands), [0] * len(gains), [0] * len(demands)
    for row, supply in enumerate(supplies):
        while supply > 0:
            slack: list[float] = [math.inf] * len(demands)
            nearest = [row] * len(demands)
            through: dict[int, int | None] = {row: None}  # each row reached, and the column it gives up for that
            open_columns, fresh = dict.fromkeys(range(len(demands))), [row]
            while True:
                for each in fresh:
                    for column in open_columns:
                        cost = most - gains[each][column] - row_price[each] - column_price[column]
                        if cost < slack[column]:
                            slack[column], nearest[column] = cost, each
                end = min(open_columns, key=slack.__getitem__)
                step = int(slack[end])
                if step:
                    for each in through:
                        row_price[each] += step
                    for column in range(len(demands)):
                        if column in open_columns:
                            slack[column] -= step
                        else:
                            column_price[column] -= step
                del open_columns[end]
                if left[end]:
                    break
                fresh = [each for each in range(len(gains)) if flow[each][end] and each not in through]
                through.update(dict.fromkeys(fresh, end))
            path = _path(end, nearest, through)
            units = min(supply, left[end], *(flow[each][column] for each, column in path[1::2]))
            for place, (each, column) in enumerate(path):
                flow[each][column] += -units if place % 2 else units
            left[end] -= units
            supply -= units
    return flow


def _path(end: int, nearest: Sequence[int], through: Mapping[int, int | None]) -> list[tuple[int, int]]:
    """Return the path from a column with room back to the row that seeks it: cells to fill and to empty, in turn."""
    path, column = [], end
    while True:
        row = nearest[column]
        path.append((row, column))
        given_up = through[row]
        if given_up is None:
            return path
        path.append((row, given_up))
        column = given_up
