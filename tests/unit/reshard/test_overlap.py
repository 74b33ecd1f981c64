"""The order of a target mesh's ranks, against brute force over all orders and against what a plan then moves."""

from __future__ import annotations

import itertools
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from hybridflow.errors import LayoutError, ReshardError
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.reshard.holdings import WeightHoldings
from hybridflow.reshard.overlap import assign, max_overlap
from hybridflow.reshard.plan import received_limit, shares_storage
from hybridflow.reshard.spec import ModelSpec, TensorSpec
from tests.support.reshard_cases import make_mesh, summarize


def on_nodes(layout: str, ranks_per_node: int, ranks: tuple[int, ...] | None = None) -> DeviceMesh:
    return make_mesh(layout, ranks, ranks_per_node)


def layers_alone(num_layers: int, shapes: tuple[tuple[int, ...], ...] = ((8, 3),), dim: int = 0) -> ModelSpec:
    """A model of equal layers, all of whose tensors are cut."""
    return ModelSpec(
        tensors=tuple(
            TensorSpec(name=f"{layer}.{index}", shape=shape, dtype="fp32", tp_dim=dim, place=layer)
            for layer in range(num_layers)
            for index, shape in enumerate(shapes)
        ),
        num_layers=num_layers,
    )


def received(model: ModelSpec, source: DeviceMesh, target: DeviceMesh) -> dict[int, int]:
    return summarize(model, WeightHoldings(model, source), WeightHoldings(model, target)).received_bytes


def total_bytes(model: ModelSpec) -> int:
    return sum(tensor.num_bytes for tensor in model.tensors)


# --- The assignment ---------------------------------------------------------------------------------------------------


def random_problems(number: int) -> list[tuple[np.ndarray, list[int], list[int]]]:
    """Gains with many ties, with supplies and demands of one sum."""
    random, problems = np.random.default_rng(5), []
    for _ in range(number):
        rows, columns = random.integers(1, 6, size=2).tolist()
        supplies = random.integers(1, 4, size=rows).tolist()
        while sum(supplies) < columns:
            supplies[0] += 1
        demands = [1] * columns
        for _ in range(sum(supplies) - columns):
            demands[random.integers(columns)] += 1
        problems.append((random.integers(0, 7, size=(rows, columns)), supplies, demands))
    return problems


def test_assignment_has_the_gain_that_scipy_finds():
    for gains, supplies, demands in random_problems(200):
        flow = np.array(assign(gains.tolist(), supplies, demands))
        assert (flow >= 0).all()
        assert flow.sum(1).tolist() == supplies and flow.sum(0).tolist() == demands
        one_by_one = np.repeat(np.repeat(gains, supplies, axis=0), demands, axis=1)
        best = one_by_one[linear_sum_assignment(one_by_one, maximize=True)].sum()
        assert (flow * gains).sum() == best


def test_assignment_has_the_gain_that_brute_force_finds():
    random = np.random.default_rng(6)
    for _ in range(20):
        gains = random.integers(0, 50, size=(5, 5))
        best = max(gains[range(5), order].sum() for order in itertools.permutations(range(5)))
        assert (np.array(assign(gains.tolist(), [1] * 5, [1] * 5)) * gains).sum() == best


# --- HybridFlow's strided groups --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "order"),
    [
        ("tp4", "tp2.dp2", (0, 2, 1, 3)),
        ("tp8", "tp2.dp4", (0, 4, 1, 5, 2, 6, 3, 7)),
        ("tp4.dp2", "tp2.dp4", (0, 2, 1, 3, 4, 6, 5, 7)),
        ("tp8", "dp8", tuple(range(8))),
    ],
)
def test_groups_are_strided_where_layouts_nest(before, after, order):
    """Equation of arXiv 2409.19256, section 5.2, each rank: (tp·pp - t_g·p_g) / (t_g·p_g·tp·pp) of the model."""
    source = on_nodes(before, 8)
    target = max_overlap(source, ParallelLayout.parse(after), source.ranks, num_layers=4, name="rollout")
    assert target.ranks == order
    model = layers_alone(4, ((2, 8, 3), (5, 16)), dim=1)
    parts, target_parts = source.layout.tp, target.layout.tp
    share = Fraction(parts - target_parts, target_parts * parts)
    assert set(received(model, source, target).values()) == {share * total_bytes(model)}


@pytest.mark.parametrize(
    ("before", "after"), [("tp2.pp4.dp2", "tp2.pp2.dp4"), ("tp4.pp2", "tp2.pp1.dp4"), ("tp2.pp2", "dp4")]
)
def test_each_shard_lies_inside_the_new_one_where_stages_nest_too(before, after):
    source = on_nodes(before, 16)
    target = max_overlap(source, ParallelLayout.parse(after), source.ranks, num_layers=4, name="rollout")
    model = layers_alone(4)
    parts, target_parts = (mesh.layout.tp * mesh.layout.pp for mesh in (source, target))
    share = Fraction(parts - target_parts, target_parts * parts)
    assert set(received(model, source, target).values()) == {share * total_bytes(model)}


def test_layouts_that_do_not_nest():
    """By hand, of the 1/4 M that each of eight ranks of TP4 needs, in quarters of a layer's tp, layers in quarters.

    Contiguous: each rank holds half of one layer. Ranks 0 and 4 (half 0, quarter 0), 1 and 5 (half 1, quarter 1: none),
    2 and 6 (half 0, quarter 2: none), 3 and 7 (half 1, quarter 3) hold 1/16 M, 0, 0, 1/16 M of what they need, so that
    they receive 1/4 - 1/32 = 0.219 M on average. At best each quarter lies in its rank's half: 1/4 - 1/16 = 0.188 M.
    """
    model, source = layers_alone(4), on_nodes("tp2.pp4", 8)
    as_given = on_nodes("tp4.dp2", 8)
    chosen = max_overlap(source, as_given.layout, as_given.ranks, num_layers=4, name="rollout")
    moved = [sum(received(model, source, mesh).values()) / 8 / total_bytes(model) for mesh in (as_given, chosen)]
    assert moved == [7 / 32, 3 / 16]


# --- Brute force ------------------------------------------------------------------------------------------------------


def layouts_of(num_ranks: int, num_layers: int) -> list[str]:
    sizes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    return [
        f"tp{tp}.pp{pp}.dp{num_ranks // (tp * pp)}"
        for tp, pp in itertools.product(sizes, sizes)
        if num_ranks % (tp * pp) == 0 and num_layers % pp == 0
    ]


@pytest.mark.parametrize("shapes", [((8, 3),), ((4,), (12, 2)), ((8, 1), (8, 5), (4, 4))])
def test_no_order_of_four_ranks_moves_less(shapes):
    model = layers_alone(4, shapes)
    for before, after in itertools.product(layouts_of(4, 4), repeat=2):
        source, layout = on_nodes(before, 4), ParallelLayout.parse(after)
        chosen = max_overlap(source, layout, source.ranks, num_layers=4, name="rollout")
        orders = (on_nodes(after, 4, order) for order in itertools.permutations(range(4)))
        least = min(sum(received(model, source, mesh).values()) for mesh in orders)
        assert sum(received(model, source, chosen).values()) == least, (before, after)


def volumes(mesh: DeviceMesh, num_layers: int, parts: int) -> np.ndarray:
    """Place -> what it holds, in cells of layers × parts; then, at 32 times the weight, of layers × experts × parts."""
    layout, size = mesh.layout, len(mesh.ranks)
    dense, experts = np.zeros((size, num_layers, parts)), np.zeros((size, num_layers, parts, parts))
    for place in range(size):
        stage, index = divmod(place, size // layout.pp)
        layers = slice(stage * num_layers // layout.pp, (stage + 1) * num_layers // layout.pp)
        tp, etp, ep = index % layout.tp, index % layout.expert_tp, index // layout.expert_tp % layout.ep
        cells = [
            slice(at * parts // cuts, (at + 1) * parts // cuts)
            for at, cuts in ((tp, layout.tp), (ep, layout.ep), (etp, layout.expert_tp))
        ]
        dense[place, layers, cells[0]] = 1
        experts[place, layers, cells[1], cells[2]] = 1
    return np.concatenate([dense.reshape(size, -1), np.sqrt(32 / parts) * experts.reshape(size, -1)], axis=1)


def check_by_brute_force(before: str, after: str, ranks_per_node: int, num_layers: int, orders: np.ndarray) -> None:
    source, natural = on_nodes(before, ranks_per_node), on_nodes(after, ranks_per_node)
    width, other = sorted((natural.layout.tp, ranks_per_node))
    if other % width:
        return
    size = len(source.ranks)
    common = volumes(source, num_layers, size) @ volumes(natural, num_layers, size).T
    nodes = (orders // ranks_per_node).reshape(len(orders), -1, width)
    allowed = (nodes == nodes[:, :, :1]).all(axis=(1, 2))
    best = common[orders[allowed], np.arange(size)].sum(axis=1).max()
    chosen = max_overlap(source, natural.layout, natural.ranks, num_layers=num_layers, name="rollout")
    assert common[list(chosen.ranks), np.arange(size)].sum() == pytest.approx(best), (ranks_per_node, before, after)


def test_no_order_of_six_ranks_that_keeps_groups_in_nodes_overlaps_more():
    orders = np.array(list(itertools.permutations(range(6))))
    names = layouts_of(6, 6)
    for ranks_per_node, before, after in itertools.product((2, 3, 6), names, names):
        check_by_brute_force(before, after, ranks_per_node, 6, orders)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tp4.dp2.ep2", "tp4.dp2.ep8.etp1"),
        ("tp2.pp2.dp2.ep2", "tp2.dp4.ep4.etp2"),
        ("tp2.pp2.dp2.ep4.etp1", "dp8.ep8"),
        ("dp8.ep8", "tp8.ep4.etp2"),
        ("tp4.pp2.ep2.etp2", "tp2.pp2.dp2.ep2.etp1"),
        ("tp2.dp4.ep2.etp2", "tp4.dp2.ep2.etp2"),
        ("tp4.dp2", "tp2.dp4.ep8.etp1"),
    ],
)
def test_no_order_of_eight_ranks_has_more_of_experts_and_the_rest(before, after):
    orders = np.array(list(itertools.permutations(range(8))))
    for ranks_per_node in (2, 4, 8):
        check_by_brute_force(before, after, ranks_per_node, 2, orders)


# --- Promises ---------------------------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> tuple[DeviceMesh, ParallelLayout, tuple[int, ...]]:
    """A source on some ranks and a target layout for others, on nodes of 4 or 8."""
    ranks_per_node = draw(st.sampled_from([4, 8]))
    source, target = (
        ParallelLayout(tp=draw(st.sampled_from([1, 2, 4, 8])), pp=draw(st.sampled_from([1, 2, 4])), dp=dp, cp=cp)
        for dp, cp in [draw(st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))) for _ in range(2)]
    )
    first = draw(st.sampled_from([0, 8, 16]))
    return (
        DeviceMesh(name="source", layout=source, ranks=tuple(range(source.world_size)), ranks_per_node=ranks_per_node),
        target,
        tuple(range(first, first + target.world_size)),
    )


@given(cases())
@settings(deadline=None, max_examples=150)
def test_groups_stay_in_nodes_and_overlap_is_never_less_than_as_given(case):
    source, layout, ranks = case
    chosen = max_overlap(source, layout, ranks, num_layers=8, name="rollout")
    assert sorted(chosen.ranks) == list(ranks)
    assert chosen == max_overlap(source, layout, ranks, num_layers=8, name="rollout")
    as_given = DeviceMesh(name="rollout", layout=layout, ranks=ranks, ranks_per_node=source.ranks_per_node)
    for mine, theirs in zip(chosen.groups("tp"), as_given.groups("tp"), strict=True):
        spans = {chosen.node(rank) for rank in mine}
        assert len(spans) <= len({chosen.node(rank) for rank in theirs})
    model = layers_alone(8)
    held = [WeightHoldings(model, mesh) for mesh in (source, chosen, as_given)]
    least, natural = (
        sum(received_limit(model, held[0], target, rank) for rank in ranks) for target in (held[1], held[2])
    )
    assert least <= natural


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
@pytest.mark.parametrize("layout", ["tp4", "tp2.dp2", "dp4", "tp2.pp2", "pp4"])
def test_equal_layouts_share_storage_in_whatever_order_the_source_is(layout, ranks_per_node):
    source = on_nodes(layout, ranks_per_node, (2, 0, 3, 1))
    for ranks in ((2, 0, 3, 1), (0, 1, 2, 3)):
        assert shares_storage(source, max_overlap(source, source.layout, ranks, num_layers=4, name="rollout"))


@pytest.mark.parametrize(("before", "after"), [("dp8", "tp4.dp2"), ("dp8", "tp2.pp2.dp2"), ("tp2.dp4", "dp8")])
def test_order_given_is_kept_where_none_is_better(before, after):
    ranks = (3, 1, 2, 0, 7, 6, 5, 4)
    source = on_nodes(before, 4, ranks)
    assert max_overlap(source, ParallelLayout.parse(after), ranks, num_layers=4, name="rollout").ranks == ranks


def test_order_given_is_kept_on_other_ranks_and_on_nodes_that_groups_do_not_fill():
    source = on_nodes("tp4", 4)
    others = max_overlap(source, ParallelLayout(tp=2, dp=2), (4, 5, 6, 7), num_layers=4, name="rollout")
    assert others.ranks == (4, 5, 6, 7)
    ragged = max_overlap(on_nodes("tp6", 4), ParallelLayout(tp=3, dp=2), tuple(range(6)), num_layers=4, name="rollout")
    assert ragged.ranks == tuple(range(6))


def test_uneven_and_virtual_stages_count_their_own_layers():
    """Stages 1-3: rank 1 holds most of four layers. Two chunks: rank 0 holds layers 0 and 2, rank 1 holds 1 and 3."""
    uneven = on_nodes("pp2.layers1-3", 2)
    chosen = max_overlap(uneven, ParallelLayout.parse("pp2.layers4-0"), (0, 1), num_layers=4, name="rollout")
    assert chosen.ranks == (1, 0)
    virtual = on_nodes("pp2.vpp2", 2)
    layout = ParallelLayout.parse("pp2.vpp2.layers1-1-2-0")  # layers 0, 2 and 3; layer 1
    assert max_overlap(virtual, layout, (1, 0), num_layers=4, name="rollout").ranks == (0, 1)


def test_512_ranks_are_no_work():
    """Trying all orders, or comparing each rank with each for every layer, would take hours or minutes."""
    source = on_nodes("tp8.pp8.dp8", 8)
    start = time.process_time()
    for after in ("tp4.pp4.dp32", "tp2.dp256", "tp16.pp2.dp16", "dp512"):
        max_overlap(source, ParallelLayout.parse(after), source.ranks, num_layers=80, name="rollout")
    assert time.process_time() - start < 20.0


def test_what_cannot_be_cut_is_named():
    source = on_nodes("tp2.pp2", 4)
    with pytest.raises(LayoutError, match=r"rollout: tp 3 .* ≠ 4 ranks"):
        max_overlap(source, ParallelLayout(tp=3), source.ranks, num_layers=4, name="rollout")
    with pytest.raises(ReshardError, match="3 layers cannot be dealt to pp=2"):
        max_overlap(source, ParallelLayout(tp=4), source.ranks, num_layers=3, name="rollout")
