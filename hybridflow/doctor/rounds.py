"""Which nodes speak with each other in which round. Pure."""

from __future__ import annotations

MAX_ROUNDS = 15
"""Up to 16 nodes each meets each; of more, each meets this many others."""


def tournament(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs.

    No node has two partners at once, and no pair meets twice.

    This is the circle method: one place is fixed, and the others turn by one each round. With an odd number one node
    rests.
    """
    places = list(range(num_nodes)) + ([-1] if num_nodes % 2 else [])
    rounds = []
    for _ in range(min(len(places) - 1, MAX_ROUNDS)):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def partner(node: int, pairs: list[tuple[int, int]]) -> int | None:
    """Return a node's partner in a round; None: it rests."""
    return next((one + other - node for one, other in pairs if node in (one, other)), None)
