"""How layers are dealt to pipeline stages so that the slowest is as fast as it can be. Pure arithmetic: no torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence


def balanced_layers(layer_costs: Sequence[float], num_stages: int, *, last: float = 0.0) -> tuple[int, ...]:
    """Return the layers of each stage: the largest cost of a stage is least, then the sum of their squares.

    Args:
        layer_costs: Cost of each layer, in order.
        num_stages: Stages, at most as many as layers; each has at least one.
        last: What the last stage has to do besides.
    """
    num_layers = len(layer_costs)
    sums = [0.0, *itertools.accumulate(layer_costs)]

    def cost(start: int, stop: int, stage: int) -> float:
        return sums[stop] - sums[start] + (last if stage == num_stages - 1 else 0.0)

    def dealt(most: float) -> list[list[tuple[float, float, int]]]:
        """Return for stages and layers so far: the largest cost, the sum of squares, and where the last stage begins.

        Largest costs up to ``most`` are as good as one another.
        """
        best = [[(0.0, 0.0, 0)] + [(math.inf, math.inf, 0)] * num_layers]
        for stage in range(num_stages):
            row = [(math.inf, math.inf, 0)] * (num_layers + 1)
            for stop in range(stage + 1, num_layers + 1):
                # The stage has more to do with each earlier start: no further one helps once it has too much.
                for start in reversed(range(stage, stop)):
                    largest, squares, _ = best[-1][start]
                    mine = cost(start, stop, stage)
                    if max(mine, most) > row[stop][0]:
                        break
                    row[stop] = min(row[stop], (max(largest, mine, most), squares + mine * mine, start))
            best.append(row)
        return best

    # The least largest cost first; squares can be compared only among ways that keep to it.
    best = dealt(dealt(0.0)[num_stages][num_layers][0])
    stops = [num_layers]
    for stage in range(num_stages, 0, -1):
        stops.append(best[stage][stops[-1]][2])
    return tuple(stop - start for stop, start in itertools.pairwise(stops))[::-1]
