"""The pairs of layouts that are measured. No torch: names are checked before ranks are started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hybridflow.errors import ConfigError
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout


class Grid(NamedTuple):
    """How DTensor says the same pair: the ranks as a grid, and for each of its axes what lies along it.

    Attributes:
        shape: Of the grid; ranks are counted through with the last axis fastest.
        source: One letter for each axis: S, tensors are cut along it; R, they are replicated.
        target: Likewise.
    """

    shape: tuple[int, ...]
    source: str
    target: str


@dataclass(frozen=True, kw_only=True)
class Pair:
    """From one layout to another, on the same ranks.

    Attributes:
        name: In the report and on the command line.
        source: Layout before; ranks in their order.
        target: Layout after.
        order: Ranks in the target mesh's order, where that is not their own: strided groups.
        grid: For DTensor; None where it cannot say it, as with pipeline stages.
    """

    name: str
    source: str
    target: str
    order: tuple[int, ...] | None = None
    grid: Grid | None = None

    @property
    def num_ranks(self) -> int:
        """How many ranks it takes."""
        return ParallelLayout.parse(self.source).world_size

    def meshes(self, ranks_per_node: int) -> tuple[DeviceMesh, DeviceMesh]:
        """The mesh before and the mesh after."""
        ranks = tuple(range(self.num_ranks))
        source, target = (
            DeviceMesh(
                name=f"{self.name} {layout}",
                layout=ParallelLayout.parse(layout),
                ranks=order,
                ranks_per_node=ranks_per_node,
            )
            for layout, order in ((self.source, ranks), (self.target, self.order or ranks))
        )
        return source, target


PAIRS = (
    Pair(
        name="tp4.dp2-tp2.dp4",
        source="tp4.dp2",
        target="tp2.dp4",
        grid=Grid((2, 2, 2), "RSS", "RRS"),
    ),
    Pair(
        name="tp4.dp2-tp2.dp4-strided",
        source="tp4.dp2",
        target="tp2.dp4",
        order=(0, 2, 1, 3, 4, 6, 5, 7),
        grid=Grid((2, 2, 2), "RSS", "RSR"),
    ),
    Pair(name="tp2.pp2.dp2-tp2.dp4", source="tp2.pp2.dp2", target="tp2.dp4"),
    Pair(name="pp4.dp2-tp4.dp2", source="pp4.dp2", target="tp4.dp2"),
    Pair(name="tp8-dp8", source="tp8", target="dp8", grid=Grid((8,), "S", "R")),
    Pair(name="tp4-tp2.dp2", source="tp4", target="tp2.dp2", grid=Grid((2, 2), "SS", "RS")),
    Pair(
        name="tp4-tp2.dp2-strided",
        source="tp4",
        target="tp2.dp2",
        order=(0, 2, 1, 3),
        grid=Grid((2, 2), "SS", "SR"),
    ),
    Pair(name="tp2.pp2-dp4", source="tp2.pp2", target="dp4"),
)


def choose(names: Sequence[str] | None, ranks: Sequence[int] | None) -> list[Pair]:
    """The pairs of these names and these numbers of ranks; None: whichever.

    Raises:
        ConfigError: There is no such pair.
    """
    known = [pair for pair in PAIRS if ranks is None or pair.num_ranks in ranks]
    found = [pair for pair in known if names is None or pair.name in names]
    if not found or not {pair.name for pair in PAIRS}.issuperset(names or ()):
        given = "all pairs" if names is None else f"pairs {' '.join(names)}"
        raise ConfigError(
            f"{given} of {'any' if ranks is None else ' or '.join(map(str, ranks))} ranks: there is none, or a name is "
            f"unknown; choose among {', '.join(f'{pair.name} ({pair.num_ranks} ranks)' for pair in PAIRS)}"
        )
    return found
