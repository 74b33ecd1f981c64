"""Sharing loads among those who may carry them, so that the most loaded carries as little as possible.

The problem is a small linear program: minimize ``T`` such that each demand is shared among its own carriers and no
carrier has more than ``T``. Filling the least loaded first solves it for one demand; doing so for each in turn, given
the rest, lowers the sum of the squares of the loads until no demand can, and the loads that minimize that sum over such
a polytope also minimize the largest. Whole numbers throughout, so that every rank finds the same.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_PASSES = 32
"""One pass is enough where of any two sets of carriers one holds the other or they are disjoint, as is usual."""


def balance(carriers: Sequence[Sequence[int]], totals: Sequence[int]) -> list[list[int]]:
    """Return each demand's share for each of its carriers.

    Args:
        carriers: For each demand, those who may carry it, at least one.
        totals: For each demand, what is to be carried.

    Returns:
        For each demand a whole number for each of its carriers, adding up to its total.
    """
    loads = {carrier: 0 for each in carriers for carrier in each}
    shares = [[0] * len(each) for each in carriers]
    for demand, each in enumerate(carriers):
        if len(each) == 1:
            shares[demand] = [totals[demand]]
            loads[each[0]] += totals[demand]
    # The most constrained first: then supersets fill what these leave.
    choices = [demand for demand, each in enumerate(carriers) if len(each) > 1]
    choices.sort(key=lambda demand: len(carriers[demand]))
    for _ in range(MAX_PASSES):
        is_changed = False
        for demand in choices:
            before = [loads[carrier] - share for carrier, share in zip(carriers[demand], shares[demand], strict=True)]
            filled = fill(before, totals[demand])
            if filled != shares[demand]:
                is_changed = True
                shares[demand] = filled
                for carrier, load, share in zip(carriers[demand], before, filled, strict=True):
                    loads[carrier] = load + share
        if not is_changed:
            break
    return shares


def fill(loads: Sequence[int], total: int) -> list[int]:
    """Return how much to add to each load, ``total`` in all, so that the largest of those that grow is minimal."""
    order = sorted(range(len(loads)), key=loads.__getitem__)
    level, count, left = loads[order[0]], 0, total
    for index in order:
        need = (loads[index] - level) * count
        if need > left:
            break
        left -= need
        level = loads[index]
        count += 1
    level, rest = level + left // count, left % count
    shares = [0] * len(loads)
    for place, index in enumerate(order[:count]):
        shares[index] = level - loads[index] + (place < rest)
    return shares


def busiest_limit(carriers: Sequence[Sequence[int]], totals: Sequence[int], shares: Sequence[Sequence[int]]) -> int:
    """Return a bound that no sharing beats and a balanced one reaches.

    Demands whose carriers all belong to one set are carried by that set: one of it carries at least their sum divided
    by its size. The sets tried are those of the carriers above each load of the given sharing.
    """
    loads: dict[int, int] = {}
    for each, share in zip(carriers, shares, strict=True):
        for carrier, part in zip(each, share, strict=True):
            loads[carrier] = loads.get(carrier, 0) + part
    # A demand belongs to the set above a load if its least loaded carrier does.
    lowest = sorted(
        ((min(loads[carrier] for carrier in each), total) for each, total in zip(carriers, totals, strict=True)),
        reverse=True,
    )
    above = sorted(loads.values(), reverse=True)
    bound, total, count, place = 0, 0, 0, 0
    for level in sorted(set(above), reverse=True):
        while count < len(above) and above[count] >= level:
            count += 1
        while place < len(lowest) and lowest[place][0] >= level:
            total += lowest[place][1]
            place += 1
        bound = max(bound, -(-total // count))
    return bound
