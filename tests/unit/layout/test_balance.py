"""Layers are dealt to stages so that the largest cost of a stage is least, and stages are alike."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hybridflow.layout.balance import balanced_layers


def every_deal(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    cuts = itertools.combinations(range(1, num_layers), num_stages - 1)
    return [tuple(stop - start for start, stop in itertools.pairwise((0, *cut, num_layers))) for cut in cuts]


def stage_costs(costs: list[int], layers: tuple[int, ...], last: int) -> list[int]:
    ends = list(itertools.accumulate(layers, initial=0))
    sums = [sum(costs[start:stop]) for start, stop in itertools.pairwise(ends)]
    return [*sums[:-1], sums[-1] + last]


@given(
    costs=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    num_stages=st.integers(1, 8),
    last=st.integers(0, 20),
)
def test_no_other_deal_is_better(costs, num_stages, last):
    num_stages = min(num_stages, len(costs))
    found = balanced_layers(costs, num_stages, last=last)

    def worth(layers: tuple[int, ...]) -> tuple[int, int]:
        each = stage_costs(costs, layers, last)
        return max(each), sum(cost * cost for cost in each)

    assert len(found) == num_stages and sum(found) == len(costs) and min(found) >= 1
    assert worth(found) == min(worth(layers) for layers in every_deal(len(costs), num_stages))


def test_an_output_layer_takes_the_place_of_layers():
    assert balanced_layers([2] * 10, 4, last=3) == (3, 3, 3, 1)
    assert balanced_layers([2] * 8, 4) == (2, 2, 2, 2)
    # The largest cost before the squares: 1, 5 and 2+1+2, not 1+5, 2 and 1+2, whose squares are 49 in the place of 51.
    assert balanced_layers([1, 5, 2, 1], 3, last=2) == (1, 1, 2)
    # Dense layers at the beginning that cost three times the others.
    assert balanced_layers([3, 3, 1, 1, 1, 1, 1, 1], 4) == (1, 1, 3, 3)
