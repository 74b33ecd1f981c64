"""Who gets which sample, and who gives it: pure functions, before any byte moves."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.dataflow.move import Mover, balance, plan_transfers
from hybridflow.dataflow.schedule import Move
from hybridflow.errors import DataError, GraphError
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.parallel.coordinator import Coordinator
from tests.support import flows


def mesh(layout: str, ranks, ranks_per_node: int = 2) -> DeviceMesh:
    return flows.mesh(layout, layout, ranks, ranks_per_node)


def test_balance_by_hand() -> None:
    # Longest first: 5→0, 4→1, 3→1 (4 < 5), 3→0 (5 < 7): loads 8 and 7.
    assert balance([3, 5, 4, 3], 2, chunk=4) == [1, 0, 1, 0]
    # Chunks of two, each on its own. In the second, part 1 has had less (2 < 6), so the longer goes there.
    assert balance([6, 2, 6, 2], 2, chunk=2) == [0, 1, 1, 0]
    assert balance([], 3, chunk=4) == []


@given(st.lists(st.integers(1, 20), max_size=7), st.integers(1, 3))
@settings(deadline=None)
def test_the_largest_part_is_within_a_third_of_the_best(lengths: list[int], num_parts: int) -> None:
    parts = balance(lengths, num_parts, chunk=max(1, len(lengths)))
    largest = max(sum(n for n, part in zip(lengths, parts, strict=True) if part == which) for which in range(num_parts))
    best = min(
        max(sum(n for n, part in zip(lengths, choice, strict=True) if part == which) for which in range(num_parts))
        for choice in itertools.product(range(num_parts), repeat=len(lengths))
    )
    assert len(parts) == len(lengths) and 3 * largest <= 4 * best


@given(st.lists(st.integers(0, 20), max_size=30), st.integers(1, 4), st.integers(1, 8))
def test_each_chunk_is_balanced_on_its_own(lengths: list[int], num_parts: int, chunk: int) -> None:
    parts = balance(lengths, num_parts, chunk)
    assert parts == balance(lengths, num_parts, chunk) and set(parts) <= set(range(num_parts))
    for start in range(0, len(lengths), chunk):
        pairs = list(zip(lengths, parts, strict=True))[start : start + chunk]
        loads = [sum(n for n, part in pairs if part == which) for which in range(num_parts)]
        # The last sample put on the largest part found it the smallest, so no two parts differ by more than one sample.
        assert max(loads) - min(loads) <= max(n for n, _ in pairs)


@pytest.mark.parametrize(
    ("source", "destination", "have", "want", "expected"),
    [
        # The same ranks, other replicas: what a rank has stays, the rest comes from its one holder.
        ("dp2", "tp2", [[1, 3], [2]], [[1, 2, 3]], {(0, 0): (1, 3), (1, 0): (2,), (0, 1): (1, 3), (1, 1): (2,)}),
        # Only the last pipeline stage (ranks 2 and 3) holds; both stages want.
        ("pp2.dp2", "pp2.dp2", [[1], [2]], [[1], [2]], {(2, 0): (1,), (2, 2): (1,), (3, 1): (2,), (3, 3): (2,)}),
        # Two holders on one node: each takes its own.
        ("tp2", "dp2", [[1, 2]], [[2], [1]], {(0, 0): (2,), (1, 1): (1,)}),
        # Nobody wants anything of an empty batch.
        ("dp2", "tp2", [[], []], [[]], {}),
    ],
)
def test_transfers_by_hand(source: str, destination: str, have, want, expected) -> None:
    sizes = [ParallelLayout.parse(text).world_size for text in (source, destination)]
    plan = plan_transfers(have, want, mesh(source, range(sizes[0]), 4), mesh(destination, range(sizes[1]), 4))
    assert plan == expected


def test_givers_are_near_first_then_the_least_loaded() -> None:
    # One replica held by ranks 0-3 on nodes {0, 1} and {2, 3}; ranks 3, 4, 5, 6 want it, where 4, 5 and 6 have no
    # holder on their nodes {4, 5} and {6, 7}.
    source, destination = mesh("tp4", range(4)), mesh("tp4", (3, 4, 5, 6))
    assert plan_transfers([[7]], [[7]], source, destination) == {(3, 3): (7,), (0, 4): (7,), (1, 5): (7,), (2, 6): (7,)}
    # Rank 1 shares its node with holder 0, which gives although rank 2 gives nothing.
    assert plan_transfers([[7]], [[7]], mesh("tp2", (0, 2)), mesh("tp2", (1, 3))) == {(0, 1): (7,), (2, 3): (7,)}
    # What a rank holds already does not count as given: rank 0 gives to rank 2 as well as rank 1 would.
    assert plan_transfers([[7]], [[7]], mesh("tp2", (0, 1)), mesh("tp2", (0, 2))) == {(0, 0): (7,), (0, 2): (7,)}


LAYOUTS = ["dp1", "dp2", "tp2", "pp2", "dp4", "tp2.dp2", "pp2.dp2", "tp2.pp2", "dp3", "tp2.pp2.dp2"]


@given(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS), st.integers(0, 6), st.integers(1, 4), st.data())
def test_every_receiver_gets_each_sample_once(source: str, destination: str, shift: int, per_node: int, data) -> None:
    sender = mesh(source, range(ParallelLayout.parse(source).world_size), per_node)
    size = ParallelLayout.parse(destination).world_size
    receiver = mesh(destination, data.draw(st.permutations(range(shift, shift + size))), per_node)
    ids = data.draw(st.lists(st.integers(0, 99), unique=True, max_size=12))
    have = [ids[dp :: sender.layout.dp] for dp in range(sender.layout.dp)]
    owner = data.draw(st.lists(st.integers(0, receiver.layout.dp - 1), min_size=len(ids), max_size=len(ids)))
    want = [[i for i, dp in zip(ids, owner, strict=True) if dp == which] for which in range(receiver.layout.dp)]
    plan = plan_transfers(have, want, sender, receiver)
    held = {rank: set(have[dp]) for dp in range(sender.layout.dp) for rank in sender.output_ranks(dp)}
    for rank in receiver.ranks:
        mine = want[receiver.coordinate(rank).dp]
        got = [(giver, sample) for (giver, to), samples in plan.items() if to == rank for sample in samples]
        assert sorted(sample for _, sample in got) == sorted(mine), "each of its samples, once"
        for giver, sample in got:
            assert sample in held[giver], "a giver holds what it gives"
            assert giver == rank or sample not in held.get(rank, set()), "own samples are not sent"
            has_near = any(sample in held[other] and other // per_node == rank // per_node for other in held)
            assert giver // per_node == rank // per_node or not has_near, "a near holder gives"


def alone(chunk: int = 4) -> Mover:
    world = SimpleNamespace(rank=0, coordinator=lambda ranks: Coordinator(0, ranks, None))
    return Mover(world, {"a": mesh("dp1", range(1)), "b": mesh("dp1", range(1))}, chunk)  # type: ignore[arg-type]


def test_one_rank_gets_its_samples_in_order() -> None:
    source = Batch(torch.tensor([9, 2, 5]), {"tokens": Ragged.from_list([[1], [2, 3], []], torch.int64)})
    moved = alone().move(Move(("tokens",), "a", "b"), source, None)
    assert moved is not None and moved.ids.tolist() == [2, 5, 9] and moved.columns["order"].tolist() == [0, 1, 2]
    assert [row.tolist() for row in moved.columns["tokens"].to_list()] == [[2, 3], [], [1]]


def test_a_column_that_was_not_written_is_named() -> None:
    source = Batch(torch.tensor([1]), {"tokens": torch.zeros(1)})
    with pytest.raises(GraphError, match="move tokens, values from a to b: rank 0 holds no values there"):
        alone().move(Move(("tokens", "values"), "a", "b"), source, None)
    with pytest.raises(GraphError, match="rank 0 holds no samples there"):
        alone().move(Move((), "a", "b"), None, None)


class Script:
    """A coordinator whose other ranks have already said what they say."""

    def __init__(self, others: list[dict]) -> None:
        self.others = others

    def gather(self, value, name: str) -> list:
        return [value, *self.others]

    def exchange(self, sends, receives, name: str) -> None:
        raise AssertionError("nothing is to be exchanged")


@pytest.mark.parametrize(
    ("ids", "dtype", "error", "message"),
    [
        ([1], "float32", DataError, "a sample id is in two replicas of a"),
        ([2], "int64", GraphError, r"column 'x' as dense float32 .* and dense int64 .*; its type must be the same"),
    ],
)
def test_replicas_that_disagree_are_refused(ids, dtype: str, error, message: str) -> None:
    columns = {"x": {"dtype": dtype, "shape": [], "lengths": None}}
    share = {"ids": ids, "weights": None, "columns": columns, "lengths": []}
    world = SimpleNamespace(rank=0, coordinator=lambda ranks: Script([{"source": share, "destination": ids}]))
    mover = Mover(world, {"a": mesh("dp2", range(2))}, 4)  # type: ignore[arg-type]
    batch = Batch(torch.tensor([1]), {"x": torch.zeros(1)})
    with pytest.raises(error, match=message):
        mover.move(Move(("x",), "a", "a"), batch, batch)
