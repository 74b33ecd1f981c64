"""Which groups of a mesh stay on a node, and what a plan says where tensor parallelism does not."""

from dataclasses import replace

import pytest

from hybridflow.cli import main
from hybridflow.errors import LayoutError
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.trainer.plan import placement_warnings


def make_mesh(layout, ranks, ranks_per_node):
    return DeviceMesh(name="m", layout=ParallelLayout.parse(layout), ranks=tuple(ranks), ranks_per_node=ranks_per_node)


@pytest.mark.parametrize(
    ("layout", "ranks", "per_node", "axes"),
    [
        # tp varies fastest: pairs (0 1) (2 3) … lie on nodes of 4, and of 2.
        ("tp2.pp2.dp2", range(8), 4, "pp"),
        ("tp2.pp2.dp2", range(8), 2, "dp pp"),
        ("tp2.dp4", range(8), 8, ""),
        ("tp4.dp2", range(8), 2, "tp dp"),
        # (1 2) lies on nodes 0 and 1.
        ("tp2.dp2", range(1, 5), 2, "tp dp"),
        ("tp2.dp2", (0, 2, 1, 3), 2, "tp"),
        ("tp3", range(3), 2, "tp"),
    ],
)
def test_axes_that_reach_across_nodes(layout, ranks, per_node, axes):
    mesh = make_mesh(layout, ranks, per_node)
    assert [axis for axis in ("tp", "dp", "pp") if mesh.spans_nodes(axis)] == axes.split()


def test_a_rank_has_one_place_in_a_mesh():
    with pytest.raises(LayoutError, match=r"m: ranks \[0, 1, 1, 2\]: expected distinct ranks from 0 up"):
        make_mesh("tp2.dp2", (0, 1, 1, 2), 2)


def test_a_rank_has_the_stage_of_its_place():
    placed = make_mesh("tp2.pp2.dp2", (7, 5, 3, 1, 0, 2, 4, 6), 8)
    # The first four ranks are the first stage.
    assert [placed.stage(rank) for rank in placed.ranks] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert all(placed.stage(rank) == placed.coordinate(rank).pp for rank in placed.ranks)
    with pytest.raises(LayoutError, match=r"m: rank 8 is not among its ranks \[7, 5, 3"):
        placed.coordinate(8)


def test_a_replica_has_a_share_of_each_stage_and_its_last_stage_speaks():
    placed = make_mesh("tp2.pp2.dp2", (7, 5, 3, 1, 0, 2, 4, 6), 8)
    # Pairs (7 5) (3 1) of the first stage, (0 2) (4 6) of the last; the first of each is of replica 0.
    assert [placed.replica(dp) for dp in (0, 1)] == [(7, 5, 0, 2), (3, 1, 4, 6)]
    assert [placed.output_ranks(dp) for dp in (0, 1)] == [(0, 2), (4, 6)] and placed.speakers == (0, 4)
    assert [rank for rank in placed.ranks if placed.has_outputs(rank)] == [0, 2, 4, 6]
    assert [rank for rank in range(9) if placed.speaks(rank)] == [0, 4]
    assert placed.group_of(1, "tp") == (3, 1) and placed.group_of(1, "dp", "pp") == (5, 1, 2, 6)


def test_plan_warns_of_tensor_parallelism_across_nodes_by_the_name_of_the_mesh(capsys):
    settings = ["cluster.ranks=4", "actor.update={tp: 2, dp: 2}", "actor.rollout={dp: 4}"]
    assert main(["plan", "job", "quickstart", *settings, "cluster.ranks_per_node=2"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["plan", "job", "quickstart", *settings, "cluster.ranks_per_node=1"]) == 0
    # The reference has the actor's layout.
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith(
        "hybridflow: actor.update, reference: tensor-parallel groups of 2 reach across nodes (ranks on each: 1), and"
    )


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        ((), ["a", "b"]),
        # Three ranks and one: a divisor of both is all that a mesh knows.
        (("x", "x", "x", "y"), ["b"]),
        (("x", "y", "y", "y"), ["a"]),
    ],
)
def test_groups_on_one_of_several_nodes_of_unequal_size_are_not_warned_of(hosts, names):
    meshes = {name: replace(make_mesh("tp2", ranks, 1), name=name) for name, ranks in (("a", (0, 1)), ("b", (2, 3)))}
    (warning,) = placement_warnings(meshes, hosts)
    assert warning.startswith(f"{', '.join(names)}: tensor-parallel groups of 2 reach across nodes")
