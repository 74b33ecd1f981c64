"""Specs by hand, and plans against a brute-force model of the meshes in numpy that shares no code with them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.errors import ReshardError
from hybridflow.parallel.layout import ParallelLayout
from hybridflow.parallel.mesh import Coordinate, DeviceMesh
from hybridflow.reshard.plan import Copy, all_copies, digest, participants, plan, shares_storage, summarize
from hybridflow.reshard.spec import ModelSpec, TensorSpec, shard
from tests.reshard_cases import NUM_LAYERS, make_mesh, make_model, scatter, whole_arrays

# --- The checker: copies by hand ---------


def execute(
    model: ModelSpec, copies: list[Copy], before: list[dict[int, np.ndarray]], source: DeviceMesh, target: DeviceMesh
) -> list[dict[int, np.ndarray]]:
    """Target shards filled by the copies alone, -1 elsewhere; fails on an element written twice."""
    after: list[dict[int, np.ndarray]] = []
    for spec in model.tensors:
        shapes = scatter(spec, np.zeros(spec.shape, dtype=np.int64), target)
        after.append({rank: np.full(array.shape, -1) for rank, array in shapes.items()})
    for copy in copies:
        spec = model.tensors[copy.tensor]
        held = shard(spec, source.layout, source.coordinate(copy.source), NUM_LAYERS)
        needed = shard(spec, target.layout, target.coordinate(copy.destination), NUM_LAYERS)
        assert held is not None and needed is not None
        inside = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(copy.box, held.box, strict=True))
        outside = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(copy.box, needed.box, strict=True))
        destination = after[copy.tensor][copy.destination]
        assert (destination[outside] == -1).all(), (
            f"{spec.name}: an element of rank {copy.destination} is written twice"
        )
        destination[outside] = before[copy.tensor][copy.source][inside]
    return after


def assert_equal(one: list[dict[int, np.ndarray]], other: list[dict[int, np.ndarray]]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        for rank in mine:
            np.testing.assert_array_equal(mine[rank], theirs[rank])


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


@st.composite
def mesh_pairs(draw: st.DrawFn) -> tuple[DeviceMesh, DeviceMesh]:
    """Two meshes over any ranks below 12: the same, disjoint, overlapping, in any order."""
    ranks_per_node = draw(st.sampled_from([1, 2, 4, 12]))
    meshes = []
    for name in ("source", "target"):
        layout = draw(st.sampled_from(LAYOUTS))
        ranks = tuple(draw(st.permutations(range(12)))[: layout.world_size])
        meshes.append(DeviceMesh(name=name, layout=layout, ranks=ranks, ranks_per_node=ranks_per_node))
    return meshes[0], meshes[1]


models = st.builds(make_model, st.integers(1, 20), st.integers(1, 4), st.booleans())


@settings(max_examples=150, deadline=None)
@given(mesh_pairs(), models)
def test_there_and_back(pair: tuple[DeviceMesh, DeviceMesh], model: ModelSpec) -> None:
    source, target = pair
    arrays = whole_arrays(model)
    before = [scatter(spec, whole, source) for spec, whole in zip(model.tensors, arrays, strict=True)]
    expected = [scatter(spec, whole, target) for spec, whole in zip(model.tensors, arrays, strict=True)]
    after = execute(model, list(all_copies(model, source, target)), before, source, target)
    assert_equal(after, expected)
    assert_equal(execute(model, list(all_copies(model, target, source)), after, target, source), before)


@settings(max_examples=100, deadline=None)
@given(mesh_pairs(), models)
def test_ranks_receive_no_more_than_they_lack(pair: tuple[DeviceMesh, DeviceMesh], model: ModelSpec) -> None:
    source, target = pair
    summary = summarize(model, source, target)
    assert summary.received_bytes == limit_bytes(model, source, target)
    assert sum(summary.sent_bytes.values()) == sum(summary.received_bytes.values())


@settings(max_examples=50, deadline=None)
@given(mesh_pairs(), models)
def test_nothing_moves_to_the_same_mesh(pair: tuple[DeviceMesh, DeviceMesh], model: ModelSpec) -> None:
    mesh, _ = pair
    assert shares_storage(mesh, mesh)
    assert all(copy.source == copy.destination for copy in all_copies(model, mesh, mesh))


@settings(max_examples=50, deadline=None)
@given(mesh_pairs(), models)
def test_parts_fit_together(pair: tuple[DeviceMesh, DeviceMesh], model: ModelSpec) -> None:
    source, target = pair
    parts = {rank: plan(model, source, target, rank) for rank in range(12)}
    for one, other in itertools.permutations(range(12), 2):
        sent = [copy for copy in parts[one].sends if copy.destination == other]
        assert sent == [copy for copy in parts[other].receives if copy.source == one]
    everything = [copy for part in parts.values() for copy in (*part.receives, *part.local)]
    assert sorted(everything) == sorted(all_copies(model, source, target))


@settings(max_examples=50, deadline=None)
@given(mesh_pairs(), models)
def test_sources_are_near(pair: tuple[DeviceMesh, DeviceMesh], model: ModelSpec) -> None:
    """No piece crosses nodes while a rank of the destination's node holds it."""
    source, target = pair
    for copy in all_copies(model, source, target):
        if source.node(copy.source) != target.node(copy.destination):
            spec = model.tensors[copy.tensor]
            for rank in source.ranks:
                held = shard(spec, source.layout, source.coordinate(rank), NUM_LAYERS)
                holds = held is not None and all(
                    a <= c and d <= b for (a, b), (c, d) in zip(held.box, copy.box, strict=True)
                )
                assert not (holds and source.node(rank) == target.node(copy.destination))


# --- By hand ----------------------------------------------------------------------------------------------------------


def held(spec: TensorSpec, layout: str, **place: int) -> object:
    coordinate = Coordinate(**{"tp": 0, "cp": 0, "dp": 0, "pp": 0, **place})
    return shard(spec, ParallelLayout.parse(layout), coordinate, NUM_LAYERS)


def test_gate_up_is_cut_inside_each_half() -> None:
    spec = TensorSpec(name="gate_up", shape=(2, 8, 3), dtype="fp32", tp_dim=1, place=2)
    # Four parts of 8 rows: part 3 has rows 6 and 7 of gate and of up.
    assert held(spec, "tp4", tp=3) == (((0, 2), (6, 8), (0, 3)), (2, 2, 3))
    # Layers 0 and 1 are on stage 0, 2 and 3 on stage 1.
    assert held(spec, "pp2", pp=0) is None
    assert held(spec, "pp2", pp=1) == (((0, 2), (0, 8), (0, 3)), (2, 8, 3))


def test_vocabulary_padding_is_outside_the_box() -> None:
    spec = TensorSpec(name="embedding", shape=(13, 2), dtype="fp32", tp_dim=0, place="embedding", padded_to=4)
    # A multiple of 4·2 = 8 rows: 16, of which each rank has 8; the last three are padding.
    assert held(spec, "tp2", tp=1) == (((8, 13), (0, 2)), (8, 2))
    # A multiple of 4·8 = 32 rows, 4 each: rank 3 has row 12 alone, rank 4 and on only padding.
    assert held(spec, "tp8", tp=3) == (((12, 13), (0, 2)), (4, 2))
    assert held(spec, "tp8", tp=4) == (((13, 13), (0, 2)), (4, 2))


def test_tied_embedding_has_two_holders() -> None:
    spec = make_model(tied=True).tensors[0]
    assert [held(spec, "pp4", pp=stage) is not None for stage in range(4)] == [True, False, False, True]
    assert held(spec, "pp1") is not None


def test_replicas_share_the_sending() -> None:
    """tp1·dp2 on ranks 0, 1 to dp4 on ranks 2..5: each of the two holders sends two whole models."""
    summary = summarize(make_model(), make_mesh("dp2"), make_mesh("dp4", (2, 3, 4, 5)))
    assert summary.sent_bytes[0] == summary.sent_bytes[1] == 2 * summary.received_bytes[2]


def test_tp4_to_tp2_twice() -> None:
    """Contiguous groups move 3/8 of the model on average, strided ones 1/4 (arXiv 2409.19256, section 5)."""
    spec = TensorSpec(name="w", shape=(8, 8), dtype="fp32", tp_dim=0, place=0)
    model = ModelSpec(tensors=(spec,), num_layers=1)
    whole = 8 * 8 * 4
    contiguous = summarize(model, make_mesh("tp4"), make_mesh("tp2.dp2"))
    # Quarters 0..3 on ranks 0..3. Ranks 0 and 2 need half 0, ranks 1 and 3 half 1: 0 and 3 lack a quarter, 1 and 2 two.
    assert contiguous.received_bytes == {0: whole // 4, 1: whole // 2, 2: whole // 2, 3: whole // 4}
    strided = summarize(model, make_mesh("tp4"), make_mesh("tp2.dp2", (0, 2, 1, 3)))
    assert strided.received_bytes == dict.fromkeys(range(4), whole // 4)


def test_digest_tells_plans_apart() -> None:
    source, target = make_mesh("tp2"), make_mesh("dp2")
    digests = {
        digest(make_model(), source, target),
        digest(make_model(vocab_size=14), source, target),
        digest(make_model(), target, source),
        digest(make_model(), source, make_mesh("dp2", (1, 0))),
        digest(make_model(), make_mesh("tp2", ranks_per_node=1), make_mesh("dp2", ranks_per_node=1)),
    }
    assert len(digests) == 5
    assert digest(make_model(), source, target) in digests


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tp3", r"0\.qkv: dim 0 of \[16, 3\] cannot be cut into tp=3 equal parts; choose a tp that divides 16"),
        ("pp3", r"4 layers cannot be dealt to pp=3 equal stages; choose a pp that divides 4"),
        ("pp2.vpp2", "virtual pipeline chunks cannot be resharded yet; set vpp=1"),
    ],
)
def test_indescribable_layouts_are_refused(layout: str, message: str) -> None:
    with pytest.raises(ReshardError, match=message):
        list(all_copies(make_model(), make_mesh(layout), make_mesh("tp1")))


def test_contradictory_descriptions_are_refused() -> None:
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
