"""A picture of a plan: who holds what before and after, where it comes from, and who sends how much to whom."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from hybridflow.layout.mesh import DeviceMesh
from hybridflow.observe.console import format_bytes
from hybridflow.reshard.holdings import Holdings
from hybridflow.reshard.plan import Flows, participants
from hybridflow.reshard.report import traffic
from hybridflow.reshard.spec import ModelSpec, stage_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_NODES = 8
"""Ranks of more nodes than these are not drawn one by one; the table of who sends to whom has all."""

MAX_NUMBERS = 12
"""Up to so many ranks, the table has its numbers written in."""

Origin = Literal["before", "own", "node", "network"]
"""What a region shows: what a rank holds before; of what it holds after, whether itself, its node or others had it."""

_ORIGINS: dict[Origin, tuple[str, str]] = {  # colours of Okabe and Ito: told apart by all
    "before": ("#999999", "held before"),
    "own": ("#009E73", "kept in its own memory"),
    "node": ("#56B4E9", "from its node"),
    "network": ("#D55E00", "from other nodes"),
}
_KEY = (
    "A box is the whole model: layers from top to bottom, parts of each matrix from left to right; coloured is what "
    "the rank holds."
)
_RELAY = "\nWhat no rank of a node held enters the node once, and its ranks pass it on to each other."


class Region(NamedTuple):
    """Consecutive layers, and a part of each of their matrices, of the model drawn as a unit square."""

    left: float
    right: float
    top: float
    bottom: float
    origin: Origin


def draw_reshard(path: Path, title: str, model: ModelSpec, source: Holdings, target: Holdings) -> None:
    """Draw a plan.

    Each rank is a box that stands for the whole model, layers from top to bottom, and parts of each matrix from left to
    right; coloured is what the rank holds. Experts, which are cut otherwise, are in the table alone.

    Args:
        path: Path of the PNG.
        title: What the model is called.
        model: The tensors.
        source: Where they are.
        target: Where they are to be.

    Raises:
        ReshardError: As ``plan.plan``.
        OSError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A figure of its own canvas, past pyplot, whose backend is a global that belongs to the user's program.
    figure = Figure(figsize=(17, 6.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontweight="bold")
    before, after, table = figure.subplots(1, 3)
    ranks = participants(source.mesh, target.mesh)
    nodes = [list(each) for _, each in itertools.groupby(ranks, source.mesh.node)]
    shown = nodes[:MAX_NODES]
    rest = f", {len(shown)} of {len(nodes)} nodes" if len(shown) < len(nodes) else ""
    _draw_ranks(before, shown, lambda rank: held_regions(model, source.mesh, rank))
    before.set_title(f"before: {source.mesh.layout}{rest}")
    nearby = Nearby(model, source.mesh)
    _draw_ranks(after, shown, lambda rank: nearby.regions(held_regions(model, target.mesh, rank), rank))
    after.set_title(f"after: {target.mesh.layout}{rest}")
    most = _draw_table(table, ranks, nodes, Flows(model, source, target))
    _add_legend(figure, most)
    figure.savefig(path, format="png")


def held_regions(model: ModelSpec, mesh: DeviceMesh, rank: int) -> list[Region]:
    """Return a rank's holdings in a mesh: runs of layers, and one part of their matrices."""
    if rank not in mesh:
        return []
    place, layout = mesh.coordinate(rank), mesh.layout
    # A layout has tp or fsdp.
    index, parts = place.tp + place.dp % layout.fsdp, layout.tp * layout.fsdp
    left, right = index / parts, (index + 1) / parts
    mine = [
        layer for layer in range(model.num_layers) if stage_of(layer, layout, model.num_layers, mesh.name) == place.pp
    ]
    starts = [layer for layer in mine if layer - 1 not in mine]
    stops = [layer + 1 for layer in mine if layer + 1 not in mine]
    scale = model.num_layers
    return [
        Region(left, right, start / scale, stop / scale, "before") for start, stop in zip(starts, stops, strict=True)
    ]


class Nearby:
    """Where a rank finds what it is to hold: which regions are held by itself, by its node, by others."""

    def __init__(self, model: ModelSpec, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._own = {rank: set(held_regions(model, mesh, rank)) for rank in mesh.ranks}
        self._node: dict[int, set[Region]] = {}
        for rank, regions in self._own.items():
            self._node.setdefault(mesh.node(rank), set()).update(regions)
        self._all = sorted(set().union(*self._own.values()))

    def regions(self, needed: list[Region], rank: int) -> list[Region]:
        """Cut the needed regions as the source is cut, each with its origin."""
        own, node = self._own.get(rank, set()), self._node.get(self._mesh.node(rank), set())
        found = []
        for one, other in itertools.product(needed, self._all):
            left, right = max(one.left, other.left), min(one.right, other.right)
            top, bottom = max(one.top, other.top), min(one.bottom, other.bottom)
            if left < right and top < bottom:
                origin: Origin = "own" if other in own else "node" if other in node else "network"
                found.append(Region(left, right, top, bottom, origin))
        return found


def _draw_ranks(axes: Axes, nodes: list[list[int]], regions: Callable[[int], list[Region]]) -> None:
    """Draw a box for each rank, and a frame around those of each node."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    size = max(map(len, nodes))
    columns = math.ceil(math.sqrt(size))
    columns = next(number for number in range(columns, size + 1) if size % number == 0)
    rows = size // columns
    across = min(range(1, len(nodes) + 1), key=lambda number: abs(number * columns - -(-len(nodes) // number) * rows))
    frames, boxes, filled, colours = [], [], [], []
    inch = 5.2 / max(across * columns, -(-len(nodes) // across) * rows)
    for index, ranks in enumerate(nodes):
        left, top = index % across * (columns + 0.25), index // across * (rows + 0.25)
        frames.append(Rectangle((left, top), columns, rows))
        if len(nodes) > 1:
            where = left - 0.02, top + rows / 2
            axes.text(*where, f"node {index}", ha="right", va="center", rotation=90, fontsize=min(9.0, 9 * inch))
        for place, rank in enumerate(ranks):
            x, y = left + place % columns + 0.12, top + place // columns + 0.2
            boxes.append(Rectangle((x, y), 0.76, 0.7))
            for region in regions(rank):
                corner = x + 0.76 * region.left, y + 0.7 * region.top
                width, height = 0.76 * (region.right - region.left), 0.7 * (region.bottom - region.top)
                filled.append(Rectangle(corner, width, height))
                colours.append(_ORIGINS[region.origin][0])
            axes.text(x + 0.38, y - 0.02, str(rank), ha="center", va="bottom", fontsize=min(11.0, 10 * inch))
    axes.add_collection(PatchCollection(frames, facecolor="#f4f4f4", edgecolor="#bbbbbb"))
    axes.add_collection(PatchCollection(boxes, facecolor="white", edgecolor="none"))
    axes.add_collection(PatchCollection(filled, facecolor=colours, edgecolor="white", linewidth=0.3))
    axes.add_collection(PatchCollection(boxes, facecolor="none", edgecolor="#444444", linewidth=0.6))
    axes.autoscale_view()
    axes.set_aspect("equal")
    axes.invert_yaxis()
    axes.axis("off")


def _draw_table(axes: Axes, ranks: tuple[int, ...], nodes: list[list[int]], flows: Flows) -> dict[Origin, int]:
    """Draw the bytes by sender and receiver, more in fuller color; return the most between two ranks, by origin."""
    from matplotlib.colors import to_rgb

    place = {rank: index for index, rank in enumerate(ranks)}
    node = {rank: index for index, members in enumerate(nodes) for rank in members}
    sums = np.zeros((len(ranks), len(ranks)))
    for stream in flows.streams:
        for rank in set(stream.output_ranks).intersection(stream.needers):
            sums[place[rank], place[rank]] += stream.num_bytes
    for (sender, receiver, _), number in traffic(flows).items():
        sums[place[sender], place[receiver]] += number
    of_node = np.array([node[rank] for rank in ranks])
    is_near = of_node[:, None] == of_node[None, :]
    is_own = np.eye(len(ranks), dtype=bool)
    image, most = np.ones((*sums.shape, 3)), dict[Origin, int]()
    masks: dict[Origin, Any] = {"own": is_own, "node": is_near & ~is_own, "network": ~is_near}
    for origin, mask in masks.items():
        most[origin] = int(sums.max(where=mask, initial=0))
        shade = np.where(mask & (sums > 0), 0.15 + 0.85 * sums / sums.max(), 0.0)[:, :, None]
        image = image * (1 - shade) + np.array(to_rgb(_ORIGINS[origin][0])) * shade
    axes.imshow(image, interpolation="nearest")
    edges = [index - 0.5 for index in range(1, len(ranks)) if of_node[index] != of_node[index - 1]]
    for edge in edges if len(edges) < 32 else ():
        axes.axhline(edge, color="#bbbbbb", linewidth=0.6)
        axes.axvline(edge, color="#bbbbbb", linewidth=0.6)
    if len(ranks) <= MAX_NUMBERS:
        for (row, column), amount in np.ndenumerate(sums):
            if amount:
                axes.text(
                    column, row, format_bytes(int(amount)).replace(" ", "\n"), ha="center", va="center", fontsize=7
                )
    step = -(-len(ranks) // 16)
    axes.set_xticks(range(0, len(ranks), step), [str(rank) for rank in ranks[::step]])
    axes.set_yticks(range(0, len(ranks), step), [str(rank) for rank in ranks[::step]])
    axes.set_xlabel("to rank")
    axes.set_ylabel("from rank")
    axes.set_title("from rank to rank, more in fuller colour")
    return most


def _add_legend(figure: Figure, most: dict[Origin, int]) -> None:
    from matplotlib.patches import Patch

    handles = []
    for origin, (colour, label) in _ORIGINS.items():
        if origin == "before" or most[origin]:
            amount = "" if origin == "before" else f": up to {format_bytes(most[origin])}"
            handles.append(Patch(facecolor=colour, label=label + amount))
    title = _KEY + (_RELAY if most["network"] else "")
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, title=title)
