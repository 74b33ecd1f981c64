"""The distributed optimizer's ranges against buffers that are laid out and cut in numpy, element by element."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.reshard.holdings import Holdings, WeightHoldings
from hybridflow.reshard.optimizer import OptimizerHoldings, bucket_elements, flat_ranges
from hybridflow.reshard.plan import Copy, digest, plan
from hybridflow.reshard.spec import ModelSpec, Shard, TensorSpec, num_elements
from tests.support.reshard_cases import make_mesh, mesh_pairs

NUM_LAYERS, NUM_EXPERTS, PADDED_TO, WIDTH = 4, 4, 3, 11
State = dict[tuple[str, int], np.ndarray]
"""(tensor, rank) -> its flat state, whole numbers that tell the elements apart; -1 is padding."""


def make_model(vocab_size: int, tied: bool) -> ModelSpec:
    """Every kind of cut, large enough that ranges begin and end inside a row, and inside the padding."""

    def tensor(name: str, shape: tuple[int, ...], tp_dim: int | None, place: object, **more: object) -> TensorSpec:
        return TensorSpec(name=name, shape=shape, dtype="fp32", tp_dim=tp_dim, place=place, **more)  # type: ignore

    also = "output" if tied else None
    tensors = [
        tensor("embedding", (vocab_size, WIDTH), 0, "embedding", padded_to=PADDED_TO, also_held_by=also),
        tensor("norm", (WIDTH,), None, "output"),
    ]
    if not tied:
        tensors.append(tensor("output", (vocab_size, WIDTH), 0, "output", padded_to=PADDED_TO))
    for layer in range(NUM_LAYERS):
        tensors += [
            tensor(f"{layer}.qkv", (16, WIDTH), 0, layer),
            tensor(f"{layer}.gate_up", (2, 8, WIDTH), 1, layer),
            tensor(f"{layer}.down", (WIDTH, 8), 1, layer),
            tensor(f"{layer}.router", (WIDTH, 7), None, layer),
        ]
        for expert in range(NUM_EXPERTS):
            where = (expert, NUM_EXPERTS)
            tensors += [
                tensor(f"{layer}.{expert}.up", (8, WIDTH), 0, layer, expert=where),
                tensor(f"{layer}.{expert}.down", (WIDTH, 8), 1, layer, expert=where),
            ]
    return ModelSpec(tensors=tuple(tensors), num_layers=NUM_LAYERS)


# --- The truth: arrays that are padded, split, joined and split again ---


def virtual_stages(spec: TensorSpec, layout: ParallelLayout) -> list[int]:
    last = layout.pp * layout.vpp - 1
    layers = layout.layers or (NUM_LAYERS // (last + 1),) * (last + 1)
    of_layer = np.repeat(np.arange(last + 1), layers)
    found = [
        0 if place == "embedding" else last if place == "output" else int(of_layer[place])
        for place in (spec.place, spec.also_held_by)
        if place is not None
    ]
    return list(dict.fromkeys(found))


def whole_array(spec: TensorSpec) -> np.ndarray:
    return np.arange(math.prod(spec.shape)).reshape(spec.shape)


def shards_of(spec: TensorSpec, mesh: DeviceMesh) -> Iterator[tuple[int, int, int, np.ndarray]]:
    """Rank, virtual stage, replica and flat parameter, padding -1, of everyone who holds something."""
    layout, whole = mesh.layout, whole_array(spec)
    parts = layout.tp if spec.expert is None else layout.expert_tp
    if spec.padded_to is not None:
        missing = -len(whole) % (spec.padded_to * parts)
        whole = np.concatenate([whole, np.full((missing, *whole.shape[1:]), -1)])
    pieces = [whole] * parts if spec.tp_dim is None else np.split(whole, parts, axis=spec.tp_dim)
    blocks = 1 if spec.expert is None else layout.ep
    grid = np.array(mesh.ranks).reshape(layout.pp, -1, blocks, parts)
    block = 0 if spec.expert is None else spec.expert[0] // (NUM_EXPERTS // blocks)
    for virtual in virtual_stages(spec, layout):
        for replica, index in itertools.product(range(grid.shape[1]), range(parts)):
            yield int(grid[virtual % layout.pp, replica, block, index]), virtual, replica, pieces[index].flatten()


def dealt_state(model: ModelSpec, mesh: DeviceMesh, bucket_size: int | None = None) -> State:
    """Each rank's share of each tensor: fill the buffers, last parameter first, and cut them."""
    buffers: dict[tuple[int, int, bool], list[tuple[str, int, np.ndarray]]] = {}
    is_apart = mesh.layout.ep > 1 or mesh.layout.expert_tp != mesh.layout.tp
    for second in (False, True):
        for spec in model.tensors:
            is_expert = spec.expert is not None and is_apart
            for rank, virtual, replica, array in shards_of(spec, mesh):
                if second == (virtual != virtual_stages(spec, mesh.layout)[0]):
                    buffers.setdefault((rank, virtual, is_expert), []).append((spec.name, replica, array))
    tied = {spec.name for spec in model.tensors if spec.also_held_by is not None and mesh.layout.pp > 1}
    state: State = {}
    for (rank, virtual, is_expert), held in buffers.items():
        layout = mesh.layout
        stage_ranks = layout.tp * layout.cp * layout.dp
        replicas = stage_ranks // (layout.expert_tp * layout.ep if is_expert else layout.tp)
        in_buckets: list[list[tuple[str, int, np.ndarray]]] = [[]]
        most, filled = (bucket_size or math.inf) if virtual % layout.pp == 0 else math.inf, 0
        for entry in reversed(held):
            if entry[0] in tied:
                in_buckets += [[entry], []]
                filled = 0
            else:
                in_buckets[-1].append(entry)
                filled += -filled % 64 + len(entry[2])
            if filled >= most:
                in_buckets.append([])
                filled = 0
        for bucket in filter(None, in_buckets):
            names, values = np.zeros(0, dtype=object), np.zeros(0, dtype=int)
            for name, _, array in bucket:
                gap = -len(values) % 64
                names = np.concatenate([names, np.full(gap, ""), np.full(len(array), name, dtype=object)])
                values = np.concatenate([values, np.full(gap, -2), array])
            gap = -len(values) % math.lcm(replicas, 128)
            names, values = np.concatenate([names, np.full(gap, "")]), np.concatenate([values, np.full(gap, -2)])
            mine = slice(bucket[0][1] * len(values) // replicas, (bucket[0][1] + 1) * len(values) // replicas)
            for name in set(names[mine]) - {""}:
                state[name, rank] = values[mine][names[mine] == name]
    return state


def whole_state(model: ModelSpec, mesh: DeviceMesh) -> State:
    """Where the optimizer is not distributed."""
    return {(spec.name, rank): array for spec in model.tensors for rank, _, _, array in shards_of(spec, mesh)}


# --- The checker ---


def read(spec: TensorSpec, regions: tuple[Shard, ...]) -> np.ndarray:
    """The flat state that regions describe."""
    flat = np.full(sum(math.prod(region.local_shape) for region in regions), -3)
    for box, local_shape, offset in regions:
        local = flat[offset : offset + math.prod(local_shape)].reshape(local_shape)
        local[:] = -1
        cells = whole_array(spec)[tuple(slice(*edge) for edge in box)]
        local[tuple(slice(0, size) for size in cells.shape)] = cells
    return flat


def where(region: Shard, box: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(box, region.box, strict=True))


def run(model: ModelSpec, source: Holdings, target: Holdings, before: State) -> State:
    """Carry out the plans of all ranks on flat arrays; fails where an element is written twice."""
    after = {
        (spec.name, rank): np.where(read(spec, regions) == -1, -1, -3)
        for spec in model.tensors
        for rank in target.mesh.ranks
        if (regions := target.regions(spec, rank))
    }

    def cells(holdings: Holdings, state: State, spec: TensorSpec, rank: int, copy: Copy) -> np.ndarray:
        (region,) = [
            region
            for region in holdings.regions(spec, rank)
            if all(
                low <= start and stop <= high for (start, stop), (low, high) in zip(copy.box, region.box, strict=True)
            )
            and num_elements(region.box)
        ]
        flat = state[spec.name, rank][region.offset :][: math.prod(region.local_shape)]
        return flat.reshape(region.local_shape)[where(region, copy.box)]

    plans = [plan(model, source, target, rank) for rank in sorted({*source.mesh.ranks, *target.mesh.ranks})]
    first = [copy for mine in plans for copy in (*mine.local, *mine.waves[0].receives)]
    for wave, copies in enumerate([first, [copy for mine in plans for copy in mine.waves[1].receives]]):
        for copy in copies:
            spec = model.tensors[copy.tensor]
            taken = cells(*((target, after) if wave else (source, before)), spec, copy.source, copy)
            written = cells(target, after, spec, copy.destination, copy)
            assert (written == -3).all(), f"{spec.name}: an element of rank {copy.destination} is written twice"
            written[:] = taken
    return after


def assert_equal(one: State, other: State) -> None:
    assert one.keys() == other.keys()
    for key in one:
        np.testing.assert_array_equal(one[key], other[key], err_msg=str(key))


DENSE = ["dp1", "tp2.dp2", "dp3", "tp2.pp2", "dp4", "tp4", "pp4", "tp2.cp2", "cp2.dp2", "tp2.pp2.dp2", "dp8", "pp2.dp4"]
UNUSUAL = ["pp2.vpp2.dp2", "pp2.layers3-1.dp2", "pp2.layers1-3.tp2.dp2", "pp4.dp2", "pp2.dp3"]
EXPERTS = [
    "tp2.dp2.ep2",
    "tp2.dp4.ep2.etp1",
    "dp4.ep4",
    "tp4.dp2.ep4.etp1",
    "pp2.tp2.dp2.ep2",
    "cp2.dp2.ep2",
    "dp2.etp2",
]
LAYOUTS = [ParallelLayout.parse(text) for text in (*DENSE, *UNUSUAL, *EXPERTS)]
models = st.builds(make_model, st.integers(1, 40), st.booleans())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("vocab_size", "tied"), [(13, False), (40, True), (1, True)])
def test_regions_are_the_buffer_cut_into_ranges(layout: ParallelLayout, vocab_size: int, tied: bool) -> None:
    model, mesh = make_model(vocab_size, tied), make_mesh(str(layout), tuple(reversed(range(layout.world_size))))
    holdings = OptimizerHoldings(model, mesh)
    found = {
        (spec.name, rank): read(spec, regions)
        for spec in model.tensors
        for rank in mesh.ranks
        if (regions := holdings.regions(spec, rank))
    }
    assert_equal(found, dealt_state(model, mesh))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_parts_are_the_regions_of_those_who_hold_them(layout: ParallelLayout) -> None:
    model, mesh = make_model(23, True), make_mesh(str(layout))
    holdings = OptimizerHoldings(model, mesh)
    by_key: dict[object, object] = {}
    for spec in model.tensors:
        times_covered, parts = np.zeros(spec.shape, dtype=int), holdings.parts(spec)
        for box, ranks in parts:
            times_covered[tuple(slice(*edge) for edge in box)] += 1
            output_ranks = [
                rank for rank in mesh.ranks if box in [region.box for region in holdings.regions(spec, rank)]
            ]
            assert list(ranks) == output_ranks, spec.name
        assert (times_covered == 1).all(), spec.name
        held = Counter(
            region.box for rank in mesh.ranks for region in holdings.regions(spec, rank) if num_elements(region.box)
        )
        assert held.keys() == {box for box, _ in parts}
        assert by_key.setdefault(holdings.key(spec), parts) == parts, "equal keys, other parts"


PAIRS = mesh_pairs(LAYOUTS, (2, 4, 12))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(PAIRS, models, st.tuples(*[st.sampled_from([None, 1, 100])] * 2))
def test_there_and_back(
    pair: tuple[DeviceMesh, DeviceMesh], model: ModelSpec, bucket_sizes: tuple[int | None, int | None]
) -> None:
    sides = list(zip(pair, bucket_sizes, strict=True))
    source, target = (OptimizerHoldings(model, *side) for side in sides)
    before, expected = (dealt_state(model, *side) for side in sides)
    after = run(model, source, target, before)
    assert_equal(after, expected)
    assert_equal(run(model, target, source, after), before)


@settings(max_examples=20, deadline=None)
@given(PAIRS, models)
def test_to_and_from_an_optimizer_that_is_not_distributed(
    pair: tuple[DeviceMesh, DeviceMesh], model: ModelSpec
) -> None:
    dealt, whole = OptimizerHoldings(model, pair[0]), WeightHoldings(model, pair[1])
    before, expected = dealt_state(model, pair[0]), whole_state(model, pair[1])
    after = run(model, dealt, whole, before)
    assert_equal(after, expected)
    assert_equal(run(model, whole, dealt, after), before)


@settings(max_examples=20, deadline=None)
@given(PAIRS, models)
def test_elements_of_a_rank_are_those_of_its_ranges(pair: tuple[DeviceMesh, DeviceMesh], model: ModelSpec) -> None:
    for mesh in pair:
        holdings = OptimizerHoldings(model, mesh)
        for rank in mesh.ranks:
            ranges = (holdings.flat_range(tensor, rank) for tensor in model.tensors)
            assert holdings.num_elements(rank) == sum(each.stop - each.start for each in ranges if each is not None)


def test_ranges_by_hand() -> None:
    """Parameters of 100 and 50 elements for two replicas.

    The last comes first: 50 elements at 0, then 100 at 64, up to 164. The bucket ends at the next multiple of 128, 256,
    so replica 0 has elements 0 to 128 of it: all of the 50, and 64 of the 100.
    """
    first = TensorSpec(name="first", shape=(20, 5), dtype="fp32", tp_dim=0, place=0)
    last = TensorSpec(name="last", shape=(50,), dtype="fp32", tp_dim=None, place=0)
    model = ModelSpec(tensors=(first, last), num_layers=1)
    holdings = OptimizerHoldings(model, make_mesh("dp2"))
    assert holdings.flat_range(last, 0) == (0, 0, 50)
    assert holdings.flat_range(last, 1) is None
    assert holdings.flat_range(first, 0) == (0, 0, 64)
    assert holdings.flat_range(first, 1) == (1, 64, 100)
    assert [holdings.num_elements(rank) for rank in (0, 1)] == [50 + 64, 36]
    # 64 elements are twelve rows of five, and four of the thirteenth; the one that is left starts replica 1.
    assert holdings.regions(first, 0) == (
        (((0, 12), (0, 5)), (12, 5), 0),
        (((12, 13), (0, 4)), (1, 4), 60),
    )
    assert holdings.regions(first, 1) == ((((12, 13), (4, 5)), (1, 1), 0), (((13, 20), (0, 5)), (7, 5), 1))


def test_buckets_by_hand() -> None:
    """The same for four replicas: of one bucket of 256 elements each has 64, of two of 128 it has 32 of both."""
    first = TensorSpec(name="first", shape=(20, 5), dtype="fp32", tp_dim=0, place=0)
    last = TensorSpec(name="last", shape=(50,), dtype="fp32", tp_dim=None, place=0)
    model, layout = ModelSpec(tensors=(first, last), num_layers=1), ParallelLayout(dp=4)
    for bucket_size in (None, 51):
        ranges = flat_ranges(model, layout, bucket_size)
        assert ranges == {"first": ((1, 0, 64), (2, 64, 100)), "last": ((0, 0, 50),)}
    ranges = flat_ranges(model, layout, 50)
    assert ranges == {
        "first": ((0, 0, 32), (1, 32, 64), (2, 64, 96), (3, 96, 100)),
        "last": ((0, 0, 32), (1, 32, 50)),
    }
    assert [bucket_elements(ParallelLayout(tp=2, dp=dp)) for dp in (1, 2, 64)] == [None, 40_000_000, 64_000_000]
    # Ranks of cp have the same weights, and are replicas too.
    assert bucket_elements(ParallelLayout(dp=32, cp=2)) == 64_000_000


def test_the_digest_tells_state_from_weights_and_orders_apart() -> None:
    model, mesh = make_model(13, False), make_mesh("dp2")
    turned = ModelSpec(tensors=model.tensors[::-1], num_layers=NUM_LAYERS)
    kinds = [
        OptimizerHoldings(model, mesh),
        OptimizerHoldings(turned, mesh),
        OptimizerHoldings(model, mesh, 100),
        WeightHoldings(model, mesh),
    ]
    assert len({digest(model, one, other) for one in kinds for other in kinds}) == 16
