"""Specs by hand, and plans against a brute-force model of the meshes in numpy that shares no code with them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from hybridflow.errors import ReshardError
from hybridflow.layout.mesh import Coordinate, DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.reshard.balance import balance, busiest_limit
from hybridflow.reshard.holdings import WeightHoldings
from hybridflow.reshard.plan import (
    Copy,
    Flows,
    aliases,
    bucket_bytes,
    digest,
    held_bytes,
    participants,
    plan,
    received_limit,
    shares_storage,
)
from hybridflow.reshard.spec import ModelSpec, TensorSpec, shard
from tests.support.reshard_cases import NUM_LAYERS, make_mesh, make_model, mesh_pairs, scatter, summarize, whole_arrays

# --- The checker: copies by hand ---------


def holdings(model: ModelSpec, *meshes: DeviceMesh) -> tuple[WeightHoldings, ...]:
    return tuple(WeightHoldings(model, mesh) for mesh in meshes)


def execute(
    model: ModelSpec, before: list[dict[int, np.ndarray]], source: DeviceMesh, target: DeviceMesh
) -> list[dict[int, np.ndarray]]:
    """Target shards filled by the ranks' plans alone, -1 elsewhere; fails on an element written twice."""
    one, other = holdings(model, source, target)
    plans = [plan(model, one, other, rank) for rank in participants(source, target)]
    after: list[dict[int, np.ndarray]] = []
    for spec in model.tensors:
        shapes = scatter(spec, np.zeros(spec.shape, dtype=np.int64), target)
        after.append({rank: np.full(array.shape, -1) for rank, array in shapes.items()})
    origins: dict[tuple[str, int, int], tuple[int, ...]] = {}

    def origin(mesh: DeviceMesh, tensor: int, rank: int) -> tuple[int, ...]:
        found = origins.get((mesh.name, tensor, rank))
        if found is None:
            held = shard(model.tensors[tensor], mesh.layout, mesh.coordinate(rank), NUM_LAYERS)
            assert held is not None
            found = origins[mesh.name, tensor, rank] = tuple(start for start, _ in held.box)
        return found

    def write(copy: Copy, arrays: list[dict[int, np.ndarray]], mesh: DeviceMesh) -> None:
        held, needed = origin(mesh, copy.tensor, copy.source), origin(target, copy.tensor, copy.destination)
        inside = tuple(slice(a - o, b - o) for (a, b), o in zip(copy.box, held, strict=True))
        outside = tuple(slice(a - o, b - o) for (a, b), o in zip(copy.box, needed, strict=True))
        destination, values = after[copy.tensor][copy.destination], arrays[copy.tensor][copy.source][inside]
        name = model.tensors[copy.tensor].name
        assert values.size > 0 and values.min() >= 0, f"{name}: rank {copy.source} sends what it does not have"
        assert destination[outside].max() == -1, f"{name}: an element of rank {copy.destination} is written twice"
        destination[outside] = values

    for part in plans:
        for copy in (*part.local, *part.waves[0].receives):
            write(copy, before, source)
    relayed = [copy for part in plans for copy in part.waves[1].receives]
    fetched = [{rank: array.copy() for rank, array in shards.items()} for shards in after]
    for copy in relayed:
        write(copy, fetched, target)
    return after


def assert_equal(one: list[dict[int, np.ndarray]], other: list[dict[int, np.ndarray]]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        for rank in mine:
            assert np.array_equal(mine[rank], theirs[rank]), (rank, mine[rank], theirs[rank])


def limit_bytes(model: ModelSpec, source: DeviceMesh, target: DeviceMesh) -> dict[int, int]:
    """Needed minus owned, element by element: the least that each rank can receive."""
    least = dict.fromkeys(participants(source, target), 0)
    for spec, whole in zip(model.tensors, whole_arrays(model), strict=True):
        owned, needed = scatter(spec, whole, source), scatter(spec, whole, target)
        for rank, array in needed.items():
            missing = set(array.flatten().tolist()) - set(owned.get(rank, np.array([])).flatten().tolist()) - {-1}
            least[rank] += len(missing) * (2 if spec.dtype == "bf16" else 4)
    return least


# --- Properties -------------------------------------------------------------------------------------------------------


LAYOUTS = [
    layout
    for tp, pp, dp, cp in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 3, 4, 8), (1, 2))
    if (layout := ParallelLayout(tp=tp, pp=pp, dp=dp, cp=cp)).world_size <= 8
]
LAYOUTS += [ParallelLayout.parse(text) for text in ("pp2.vpp2", "pp2.tp2.layers3-1", "tp2.dp2.ep4.etp1", "dp4.ep2")]


PAIRS = mesh_pairs(LAYOUTS)
models = st.builds(make_model, st.integers(1, 20), st.integers(1, 4), st.booleans(), st.sampled_from([0, 0, 4]))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(PAIRS, models)
def test_there_and_back(pair: tuple[DeviceMesh, DeviceMesh], model: ModelSpec) -> None:
    source, target = pair
    arrays = whole_arrays(model)
    before = [scatter(spec, whole, source) for spec, whole in zip(model.tensors, arrays, strict=True)]
    expected = [scatter(spec, whole, target) for spec, whole in zip(model.tensors, arrays, strict=True)]
    after = execute(model, before, source, target)
    assert_equal(after, expected)
    assert_equal(execute(model, after, target, source), before)


def every_layout(size: int) -> list[str]:
    """All layouts of so many ranks: TP x PP x DP of powers of two, and one of each other kind on top of some."""
    found = [
        f"tp{tp}.pp{pp}.dp{size // tp // pp}"
        for tp, pp in itertools.product((1, 2, 4, 8), (1, 2, 4))
        if size % (tp * pp) == 0
    ]
    half, quarter = size // 2, size // 4
    return [
        *found,
        f"pp2.dp{half}.vpp2",
        f"pp2.dp{half}.layers1-3",
        f"pp2.vpp2.tp{half}.layers0-1-2-1" if half <= 8 else f"pp2.vpp2.dp{half}.layers0-1-2-1",
        f"tp2.dp{half}.ep2",
        f"tp2.dp{half}.ep4.etp1",
        f"tp2.pp2.dp{quarter}.ep2.etp1",
        f"tp4.dp{quarter}.ep2.etp2",
        f"tp2.cp2.dp{quarter}",
    ]


@pytest.mark.parametrize(
    ("tied", "size"),
    [
        (True, 4),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((False, 4), (False, 8), (True, 8), (True, 16))),
    ],
)
def test_every_pair_of_layouts(size: int, tied: bool) -> None:
    """Values by an independent checker; all ranks on one node, and up to 8 ranks also on nodes of two."""
    model = make_model(vocab_size=13, padded_to=2, tied=tied, num_experts=4)
    arrays = whole_arrays(model)
    for ranks_per_node in (16,) if size == 16 else (16, 2):
        meshes = [make_mesh(layout, ranks_per_node=ranks_per_node) for layout in every_layout(size)]
        shards = [[scatter(*pair, mesh) for pair in zip(model.tensors, arrays, strict=True)] for mesh in meshes]
        for (source, before), (target, expected) in itertools.product(zip(meshes, shards, strict=True), repeat=2):
            assert_equal(execute(model, before, source, target), expected)


def test_every_pair_of_layouts_receives_the_least() -> None:
    model = make_model(padded_to=2, tied=True, num_experts=4)
    for source, target in itertools.product([make_mesh(layout) for layout in every_layout(8)], repeat=2):
        least = limit_bytes(model, source, target)
        one, other = holdings(model, source, target)
        assert summarize(model, one, other).received_bytes == least
        assert {rank: received_limit(model, one, other, rank) for rank in least} == least


@settings(max_examples=100, deadline=None)
@given(PAIRS, models)
def test_ranks_receive_no_more_than_they_lack(pair: tuple[DeviceMesh, DeviceMesh], model: ModelSpec) -> None:
    source, target = pair
    one, other = holdings(model, source, target)
    summary, least = summarize(model, one, other), limit_bytes(model, source, target)
    assert summary.received_bytes == least
    assert {rank: received_limit(model, one, other, rank) for rank in least} == least
    assert sum(summary.sent_bytes.values()) == sum(summary.received_bytes.values())


@settings(max_examples=50, deadline=None)
@given(PAIRS, models)
def test_nothing_moves_to_the_same_mesh(pair: tuple[DeviceMesh, DeviceMesh], model: ModelSpec) -> None:
    mesh, _ = pair
    assert shares_storage(mesh, mesh)
    assert Flows(model, *holdings(model, mesh, mesh)).all() == []
    names = {rank: aliases(model, *holdings(model, mesh, mesh), rank) for rank in mesh.ranks}
    assert all(names[rank] == {spec.name for spec in model.tensors if _holds(spec, mesh, rank)} for rank in mesh.ranks)


@settings(max_examples=100, deadline=None)
@given(PAIRS, models)
def test_parts_fit_together(pair: tuple[DeviceMesh, DeviceMesh], model: ModelSpec) -> None:
    """What each rank works out for itself is what the others expect, in their order."""
    source, target = pair
    parts = {rank: plan(model, *holdings(model, source, target), rank) for rank in range(12)}
    for one, other in itertools.permutations(range(12), 2):
        for mine, theirs in zip(parts[one].waves, parts[other].waves, strict=True):
            sent = [copy for copy in mine.sends if copy.destination == other]
            assert sent == [copy for copy in theirs.receives if copy.source == one]
    received = {
        rank: sum(_size(model, copy) for wave in part.waves for copy in wave.receives) for rank, part in parts.items()
    }
    summary = summarize(model, *holdings(model, source, target))
    assert {rank: received[rank] for rank in summary.received_bytes} == summary.received_bytes


@settings(max_examples=100, deadline=None)
@given(PAIRS, models)
def test_every_byte_enters_a_node_once(pair: tuple[DeviceMesh, DeviceMesh], model: ModelSpec) -> None:
    """And none that a rank of the node holds; within the node the rest is passed on."""
    source, target = pair
    arrays, size = whole_arrays(model), source.ranks_per_node
    least, entering = dict.fromkeys(range(12), 0), dict.fromkeys(range(12), 0)
    for spec, whole in zip(model.tensors, arrays, strict=True):
        owned, needed = scatter(spec, whole, source), scatter(spec, whole, target)
        for node in range(12):
            lacks: set[int] = set()
            for rank in range(node * size, (node + 1) * size):
                lacks |= set(needed.get(rank, np.array([])).flatten().tolist())
            for rank in range(node * size, (node + 1) * size):
                lacks -= set(owned.get(rank, np.array([])).flatten().tolist())
            least[node] += len(lacks - {-1}) * (2 if spec.dtype == "bf16" else 4)
    for flow in Flows(model, *holdings(model, source, target)).all():
        if source.node(flow.source) != source.node(flow.destination):
            assert flow.wave == 0
            entering[source.node(flow.destination)] += flow.stop - flow.start
    assert entering == least


def _holds(spec: TensorSpec, mesh: DeviceMesh, rank: int) -> bool:
    return shard(spec, mesh.layout, mesh.coordinate(rank), NUM_LAYERS) is not None


def _size(model: ModelSpec, copy: Copy) -> int:
    elements = int(np.prod([stop - start for start, stop in copy.box]))
    return elements * (2 if model.tensors[copy.tensor].dtype == "bf16" else 4)


# --- The busiest sender -----------------------------------------------------------------------------------------------


def busiest_by_linear_programme(model: ModelSpec, source: DeviceMesh, target: DeviceMesh) -> float:
    """The least load of the busiest sender on one node, by scipy, element by element over distinct sets of ranks."""
    loads: dict[tuple[int, ...], int] = {}
    for spec, whole in zip(model.tensors, whole_arrays(model), strict=True):
        output_ranks, needers = ({value: set() for value in range(whole.size)} for _ in range(2))
        for mesh, ranks in ((source, output_ranks), (target, needers)):
            for rank, array in scatter(spec, whole, mesh).items():
                for value in set(array.flatten().tolist()) - {-1}:
                    ranks[value].add(rank)
        for value in range(whole.size):
            key = tuple(sorted(output_ranks[value]))
            wanted = len(needers[value] - output_ranks[value]) * (2 if spec.dtype == "bf16" else 4)
            loads[key] = loads.get(key, 0) + wanted
    pairs = [(key, rank) for key in loads for rank in key]
    ranks = sorted({rank for _, rank in pairs})
    # Variables: a share for each pair, then the largest load.
    equal = np.array([[key == other for other, _ in pairs] + [False] for key in loads], dtype=float)
    below = np.array([[rank == other for _, other in pairs] + [-1] for rank in ranks], dtype=float)
    cost = np.zeros(len(pairs) + 1)
    cost[-1] = 1
    found = linprog(cost, A_ub=below, b_ub=np.zeros(len(ranks)), A_eq=equal, b_eq=list(loads.values()))
    assert found.success
    return float(found.fun)


ROW_BYTES = 12
"""Of the longest row in these models: a stream is cut between rows only."""


def check_busiest(model: ModelSpec, source: DeviceMesh, target: DeviceMesh) -> None:
    flows = Flows(model, *holdings(model, source, target))
    sent = dict.fromkeys(source.ranks, 0)
    for flow in flows.all():
        sent[flow.source] += flow.stop - flow.start
    least = busiest_by_linear_programme(model, source, target)
    assert flows.busiest_limit - 1 < least + 1e-6, "a bound above what is possible"
    assert flows.busiest_limit >= least - 1e-6, "not the best bound, or not the best shares"
    # Each stretch of each sender is off by less than a row at both ends, or by a 256th.
    slack = sum(2 * ROW_BYTES for _ in flows.streams) + least / 128
    assert max(sent.values()) <= least + slack


@settings(max_examples=60, deadline=None)
@given(PAIRS, models)
def test_the_busiest_sender_sends_as_little_as_can_be(pair: tuple[DeviceMesh, DeviceMesh], model: ModelSpec) -> None:
    one_node = [DeviceMesh(name=mesh.name, layout=mesh.layout, ranks=mesh.ranks, ranks_per_node=12) for mesh in pair]
    check_busiest(model, *one_node)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sets(st.integers(0, 7), min_size=1), st.integers(0, 10_000)), min_size=1, max_size=10))
def test_any_sets_of_carriers_are_balanced(demands: list[tuple[set[int], int]]) -> None:
    carriers, totals = [sorted(each) for each, _ in demands], [total for _, total in demands]
    shares = balance(carriers, totals)
    assert [sum(share) for share in shares] == totals
    assert all(part >= 0 for share in shares for part in share)
    loads = dict.fromkeys(range(8), 0)
    for each, share in zip(carriers, shares, strict=True):
        for carrier, part in zip(each, share, strict=True):
            loads[carrier] += part
    best = max(
        (sum(total for each, total in demands if each <= set(group)) / len(group))
        for size in range(1, 9)
        for group in itertools.combinations(range(8), size)
    )
    # A whole number for each carrier: a few bytes above the fraction.
    assert best <= max(loads.values()) <= best + 8
    assert max(loads.values()) - 8 <= busiest_limit(carriers, totals, shares) <= max(loads.values())


def test_buckets_are_a_64th_of_the_destination() -> None:
    """1 GB in each of two stages of two ranks: 8 MB; and never above 64 MB, or below 64 KB."""
    for gigabytes, expected in ((1, 8 << 20), (64, 64 << 20), (1 / 1024, 64 << 10)):
        spec = [
            TensorSpec(name=f"{layer}", shape=(int(gigabytes * (1 << 20)), 256), dtype="fp32", tp_dim=0, place=layer)
            for layer in range(2)
        ]
        model = ModelSpec(tensors=tuple(spec), num_layers=2)
        target = WeightHoldings(model, make_mesh("tp2.pp2"))
        assert bucket_bytes(model, target) == expected
        assert held_bytes(model, target, 3) == int(gigabytes * (1 << 29))


def test_buckets_are_a_64th_of_the_least_loaded_stage() -> None:
    """3 GB in the first stage of two ranks, 1 GB in the second."""
    spec = [
        TensorSpec(name=f"{layer}", shape=(size << 20, 256), dtype="fp32", tp_dim=0, place=layer)
        for layer, size in enumerate((3, 1))
    ]
    model = ModelSpec(tensors=tuple(spec), num_layers=2)
    assert bucket_bytes(model, WeightHoldings(model, make_mesh("tp2.pp2"))) == 8 << 20


def test_large_streams_are_cut_between_tensors_or_rows() -> None:
    """Three needers of what two ranks hold: 1.5 models each, so one model is cut in half."""
    tensors = [
        TensorSpec(name=f"{layer}", shape=(2, 1001, 64), dtype="bf16", tp_dim=1, place=layer) for layer in range(3)
    ]
    model = ModelSpec(tensors=tuple(tensors), num_layers=3)
    source, target = make_mesh("dp2"), make_mesh("dp3", (2, 3, 4))
    sent = {rank: plan(model, *holdings(model, source, target), rank).waves[0].sends for rank in (0, 1)}
    whole = sum(_size(model, copy) for copies in sent.values() for copy in copies) / 3
    for copies in sent.values():
        assert sum(_size(model, copy) for copy in copies) == pytest.approx(1.5 * whole, rel=0.001)
    # Seven of the nine whole tensors, one of which is cut at the end of its first half: no piece but whole rows.
    boxes = [copy.box for copies in sent.values() for copy in copies]
    assert all(box[2] == (0, 64) for box in boxes)
    assert len(boxes) <= 12


# --- By hand ----------------------------------------------------------------------------------------------------------


def held(spec: TensorSpec, layout: str, **place: int) -> object:
    coordinate = Coordinate(**{"tp": 0, "cp": 0, "dp": 0, "pp": 0, **place})
    return shard(spec, ParallelLayout.parse(layout), coordinate, NUM_LAYERS)


def test_gate_up_is_cut_inside_each_half() -> None:
    spec = TensorSpec(name="gate_up", shape=(2, 8, 3), dtype="fp32", tp_dim=1, place=2)
    # Four parts of 8 rows: part 3 has rows 6 and 7 of gate and of up.
    assert held(spec, "tp4", tp=3) == (((0, 2), (6, 8), (0, 3)), (2, 2, 3), 0)
    # Layers 0 and 1 are on stage 0, 2 and 3 on stage 1.
    assert held(spec, "pp2", pp=0) is None
    assert held(spec, "pp2", pp=1) == (((0, 2), (0, 8), (0, 3)), (2, 8, 3), 0)


def test_vocabulary_padding_is_outside_the_box() -> None:
    spec = TensorSpec(name="embedding", shape=(13, 2), dtype="fp32", tp_dim=0, place="embedding", padded_to=4)
    # A multiple of 4·2 = 8 rows: 16, of which each rank has 8; the last three are padding.
    assert held(spec, "tp2", tp=1) == (((8, 13), (0, 2)), (8, 2), 0)
    # A multiple of 4·8 = 32 rows, 4 each: rank 3 has row 12 alone, rank 4 and on only padding.
    assert held(spec, "tp8", tp=3) == (((12, 13), (0, 2)), (4, 2), 0)
    assert held(spec, "tp8", tp=4) == (((13, 13), (0, 2)), (4, 2), 0)


def test_tied_embedding_has_two_holders() -> None:
    spec = make_model(tied=True).tensors[0]
    assert [held(spec, "pp4", pp=stage) is not None for stage in range(4)] == [True, False, False, True]
    assert held(spec, "pp1") is not None


def test_replicas_share_the_sending() -> None:
    """tp1·dp2 on ranks 0, 1 to dp4 on ranks 2..5: each of the two holders sends two whole models."""
    summary = summarize(make_model(), *holdings(make_model(), make_mesh("dp2"), make_mesh("dp4", (2, 3, 4, 5))))
    assert summary.sent_bytes[0] == summary.sent_bytes[1] == 2 * summary.received_bytes[2]


def test_tp4_to_tp2_twice() -> None:
    """Contiguous groups move 3/8 of the model on average, strided ones 1/4 (arXiv 2409.19256, section 5)."""
    spec = TensorSpec(name="w", shape=(8, 8), dtype="fp32", tp_dim=0, place=0)
    model = ModelSpec(tensors=(spec,), num_layers=1)
    whole = 8 * 8 * 4
    contiguous = summarize(model, *holdings(model, make_mesh("tp4"), make_mesh("tp2.dp2")))
    # Quarters 0..3 on ranks 0..3. Ranks 0 and 2 need half 0, ranks 1 and 3 half 1: 0 and 3 lack a quarter, 1 and 2 two.
    assert contiguous.received_bytes == {0: whole // 4, 1: whole // 2, 2: whole // 2, 3: whole // 4}
    strided = summarize(model, *holdings(model, make_mesh("tp4"), make_mesh("tp2.dp2", (0, 2, 1, 3))))
    assert strided.received_bytes == dict.fromkeys(range(4), whole // 4)


def test_digest_tells_plans_apart() -> None:
    source, target = make_mesh("tp2"), make_mesh("dp2")

    def of(model: ModelSpec, *meshes: DeviceMesh) -> str:
        return digest(model, *holdings(model, *meshes))

    digests = {
        of(make_model(), source, target),
        of(make_model(vocab_size=14), source, target),
        of(make_model(), target, source),
        of(make_model(), source, make_mesh("dp2", (1, 0))),
        of(make_model(), make_mesh("tp2", ranks_per_node=1), make_mesh("dp2", ranks_per_node=1)),
    }
    assert len(digests) == 5
    assert of(make_model(), source, target) in digests


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tp3", r"0\.qkv: dim 0 of \[16, 3\] cannot be cut into tp=3 equal parts; choose a tp that divides 16"),
        ("pp3", r"4 layers cannot be dealt to pp=3 equal stages; choose one that divides 4"),
        ("pp2.vpp4", r"4 layers cannot be dealt to pp·vpp=8 equal stages; choose one that divides 4"),
        ("pp2.layers3-2", r"layout tp1.pp2.dp1.layers3-2 has 5 layers, the model 4; make the two equal"),
        ("dp3.ep3", r"0\.0\.up: 4 experts cannot be dealt to ep=3 equal blocks; choose a divisor of 4"),
    ],
)
def test_indescribable_layouts_are_refused(layout: str, message: str) -> None:
    with pytest.raises(ReshardError, match=message):
        model = make_model(num_experts=4)
        Flows(model, *holdings(model, make_mesh(layout), make_mesh("tp1")))


def test_meshes_that_disagree_about_the_nodes_are_refused() -> None:
    source, target = make_mesh("dp2", ranks_per_node=2), make_mesh("tp2", ranks_per_node=4)
    with pytest.raises(ReshardError, match="dp2 has ranks_per_node=2, tp2 4; make both meshes with the job's own"):
        plan(make_model(), *holdings(make_model(), source, target), 0)


def test_contradictory_descriptions_are_refused() -> None:
    with pytest.raises(ReshardError, match=r"w: shape \[\]: expected a dim or more, of at least 1 each"):
        TensorSpec(name="w", shape=(), dtype="fp32", tp_dim=None, place=1)
    spec = TensorSpec(name="w", shape=(4,), dtype="fp32", tp_dim=None, place=1)
    with pytest.raises(ReshardError, match="w: described twice"):
        ModelSpec(tensors=(spec, spec), num_layers=2)
    with pytest.raises(ReshardError, match="w: layer 1 is not one of the model's 1 layers"):
        ModelSpec(tensors=(spec,), num_layers=1)
    with pytest.raises(ReshardError, match=r"tp_dim=2 is not a dim of shape \[4\]"):
        TensorSpec(name="w", shape=(4,), dtype="fp32", tp_dim=2, place=1)
    with pytest.raises(ReshardError, match="padded_to=4 with tp_dim=None"):
        TensorSpec(name="w", shape=(4,), dtype="fp32", tp_dim=None, place=1, padded_to=4)
    with pytest.raises(ReshardError, match="dtype 'float32': expected one of fp32"):
        TensorSpec(name="w", shape=(4,), dtype="float32", tp_dim=0, place=1)  # type: ignore[arg-type]
