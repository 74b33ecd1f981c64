"""Messages carry every element once, within their bounds, and in an order in which nobody waits in a circle."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.layout.mesh import DeviceMesh
from hybridflow.reshard import messages
from hybridflow.reshard.execute import ALIGNED_BYTES, _Ring
from hybridflow.reshard.holdings import WeightHoldings
from hybridflow.reshard.messages import Message, Pair, divide, region_of, slots
from hybridflow.reshard.plan import Copy, participants, plan
from hybridflow.reshard.spec import ITEM_BYTES, Box, ModelSpec, num_elements
from tests.support.reshard_cases import make_mesh, make_model

RUN_BYTES, BUCKET_BYTES = 48, 40
MODEL = make_model(vocab_size=13, padded_to=2, tied=True, num_experts=4)
MESHES = [
    ("tp4", "tp2.dp2"),
    ("tp2.pp2", "dp4"),
    ("pp4", "tp4"),
    ("dp4.ep4", "tp2.pp2.ep2.etp1"),
    ("pp2.vpp2.tp2", "pp2.dp2.layers1-3"),
]


@pytest.fixture(autouse=True)
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "RUN_BYTES", RUN_BYTES)


def pairs_of_ranks(source: DeviceMesh, target: DeviceMesh) -> dict[Pair, list[Copy]]:
    """What each pair of ranks has in the first wave."""
    holdings = WeightHoldings(MODEL, source), WeightHoldings(MODEL, target)
    found: dict[Pair, list[Copy]] = {}
    for rank in participants(source, target):
        for copy in plan(MODEL, *holdings, rank).waves[0].sends:
            found.setdefault((copy.source, copy.destination), []).append(copy)
    return found


def runs(model: ModelSpec, holdings: WeightHoldings, tensor: int, rank: int, box: Box) -> list[int]:
    """Lengths of the runs of a rank's memory that a box takes, in bytes: found element by element."""
    spec = model.tensors[tensor]
    region = region_of(holdings, spec, rank, box)
    places = np.arange(np.prod(region.local_shape)).reshape(region.local_shape)
    inner = tuple(slice(a - origin, b - origin) for (a, b), (origin, _) in zip(box, region.box, strict=True))
    taken = places[inner].ravel()
    breaks = np.flatnonzero(np.diff(taken) != 1) + 1
    return [len(run) * ITEM_BYTES[spec.dtype] for run in np.split(taken, breaks)]


def elements(pieces: list[tuple[int, Box]]) -> Counter[tuple[int, ...]]:
    return Counter(
        (tensor, *place) for tensor, box in pieces for place in itertools.product(*(range(a, b) for a, b in box))
    )


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize(("source", "target"), MESHES)
def test_messages_are_whole_and_bounded(source: str, target: str, is_plain: bool) -> None:
    holdings = [WeightHoldings(MODEL, make_mesh(layout)) for layout in (source, target)]
    has_run_in_place = False
    for pair, copies in pairs_of_ranks(*(each.mesh for each in holdings)).items():
        divided: list[Message] = divide(MODEL, copies, *holdings, BUCKET_BYTES, is_plain=is_plain)
        pieces = [piece for message in divided for piece in message.pieces]
        assert elements(pieces) == elements([(copy.tensor, copy.box) for copy in copies])
        for message in divided:
            sizes = [num_elements(box) * ITEM_BYTES[MODEL.tensors[tensor].dtype] for tensor, box in message.pieces]
            assert message.num_bytes == sum(sizes)
            # A piece that starts elsewhere cannot be viewed in its dtype.
            starts = itertools.accumulate(sizes, initial=0)
            assert not any(
                start % ITEM_BYTES[MODEL.tensors[tensor].dtype]
                for start, (tensor, _) in zip(starts, message.pieces, strict=False)
            )
            if message.num_bytes > BUCKET_BYTES:
                ((tensor, box),) = message.pieces
                at_both = [runs(MODEL, each, tensor, rank, box) for each, rank in zip(holdings, pair, strict=True)]
                assert is_plain and at_both == [[message.num_bytes]] * 2
                has_run_in_place = True
        # A copy that comes in long runs at one end, or at both, is so many messages beside those that fill buckets.
        at_ends = [
            [runs(MODEL, each, copy.tensor, rank, copy.box) for each, rank in zip(holdings, pair, strict=True)]
            for copy in copies
        ]
        long = sum(max((len(run) for run in both if run[0] >= RUN_BYTES), default=0) for both in at_ends)
        assert len(divided) <= 1 + sum(message.num_bytes for message in divided) // BUCKET_BYTES + long
    assert has_run_in_place == is_plain


TRAFFIC = st.dictionaries(
    st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda pair: pair[0] != pair[1]), st.integers(1, 9)
)


@given(TRAFFIC)
def test_a_rank_has_one_message_each_way_in_a_slot(counts: dict[Pair, int]) -> None:
    found = slots(counts)
    assert {pair: len(places) for pair, places in found.items()} == counts
    for side in (0, 1):
        used = Counter((pair[side], place) for pair, places in found.items() for place in places)
        assert all(count == 1 for count in used.values())
    assert all(places == sorted(places) for places in found.values())
    loads = Counter[tuple[int, int]]()
    for pair, count in counts.items():
        for side in (0, 1):
            loads[side, pair[side]] += count
    used_slots = {place for places in found.values() for place in places}
    assert max(loads.values(), default=0) <= len(used_slots) < max(2 * max(loads.values(), default=0), 1) + 1


def slots_needed(source: str, target: str, order: tuple[int, ...] | None = None) -> tuple[int, int]:
    """Slots for the traffic of a pair of layouts, and messages of its busiest rank one way."""
    counts = {pair: len(copies) for pair, copies in pairs_of_ranks(make_mesh(source), make_mesh(target, order)).items()}
    loads = Counter[tuple[int, int]]()
    for pair, count in counts.items():
        for side in (0, 1):
            loads[side, pair[side]] += count
    return max(place for places in slots(counts).values() for place in places) + 1, max(loads.values())


@pytest.mark.parametrize(
    ("source", "target"),
    [("tp4.dp2", "tp2.dp4"), ("tp2.pp2.dp2", "tp2.dp4"), ("pp4.dp2", "tp4.dp2"), ("tp8", "dp8"), ("tp4", "tp2.dp2")],
)
def test_usual_traffic_takes_hardly_more_slots_than_its_busiest_rank_has_messages(source: str, target: str) -> None:
    needed, least = slots_needed(source, target)
    assert least <= needed <= 1.25 * least


@given(st.lists(st.integers(1, 4 * ALIGNED_BYTES), max_size=30))
def test_room_in_buckets_is_given_anew_only_when_its_steps_are_finished(sizes: list[int]) -> None:
    ring, rooms, num_finished = _Ring(7 * ALIGNED_BYTES), list[tuple[int, int]](), 0
    for number, size in enumerate(sizes):
        start, after = ring.reserve(size, number)
        assert start % ALIGNED_BYTES == 0 and start + size <= 7 * ALIGNED_BYTES
        # Steps begin in order: what one has waited for is finished for those behind it too.
        num_finished = max(num_finished, after)
        users = [user for user, (low, high) in enumerate(rooms) if low < start + size and start < high]
        assert max(users, default=-1) < num_finished <= number
        rooms.append((start, start + size))


def test_room_in_buckets_by_hand() -> None:
    ring = _Ring(4 * ALIGNED_BYTES)
    # The first two fill it. The third takes the room of the first, and the fourth half of that of the second.
    units = [2, 2, 2, 1, 4, 1]
    found = [ring.reserve(number * ALIGNED_BYTES, step) for step, number in enumerate(units)]
    assert [start // ALIGNED_BYTES for start, _ in found] == [0, 2, 0, 2, 0, 0]
    assert [after for _, after in found] == [0, 0, 1, 2, 4, 5]
