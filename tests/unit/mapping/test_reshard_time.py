"""Reshards of large jobs, timed by smaller ones."""

import itertools
from dataclasses import replace

import pytest

from hybridflow.errors import LayoutError
from hybridflow.families.model import ModelConfig
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.mapping.hardware import hardware
from hybridflow.mapping.reshard_time import fewer_replicas, least_seconds
from hybridflow.mapping.sizes import Size
from hybridflow.models.shapes import model_spec
from hybridflow.reshard.holdings import WeightHoldings
from hybridflow.reshard.overlap import max_overlap
from hybridflow.reshard.report import Bandwidth, reshard_seconds

DENSE = ModelConfig(
    **{"num_layers": 8, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32},
    **{"num_query_groups": 8, "head_dim": 128, "max_context": 4096, "vocab_size": 128256, "dtype": "bf16"},
)
MIXTURE = replace(DENSE, num_experts=32, ffn_hidden_size=1536, experts_per_token=4)
BANDWIDTH = Bandwidth(node=300.0, network=40.0)


def mesh(layout, first=0):
    layout = ParallelLayout.parse(layout)
    ranks = tuple(range(first, first + layout.world_size))
    return DeviceMesh(name=str(layout), layout=layout, ranks=ranks, ranks_per_node=8)


def seconds(shape, source, target):
    spec = model_spec(shape)
    return reshard_seconds(spec, WeightHoldings(spec, source), WeightHoldings(spec, target), BANDWIDTH)


@pytest.mark.parametrize(
    ("shape", "source", "target", "first", "fewer"),
    [
        (DENSE, "tp8.pp4.dp8", "tp8.dp32", 0, 4),
        (DENSE, "tp8.pp4.dp8", "tp4.dp64", 0, 4),
        (DENSE, "tp4.pp2.dp32", "tp1.dp256", 0, 8),
        (DENSE, "tp2.pp8.dp16", "tp2.dp128", 0, 2),
        (DENSE, "tp4.pp4.dp4.cp4", "tp8.dp32", 0, 4),
        # Split: the rollout is elsewhere, on as many ranks or on others.
        (DENSE, "tp8.pp2.dp8", "tp8.dp16", 128, 4),
        (DENSE, "tp8.pp2.dp8", "tp4.dp32", 128, 4),
        (DENSE, "tp4.pp2.dp32", "tp8.dp32", 256, 8),
        (MIXTURE, "tp2.pp4.dp16.ep8.etp1", "tp4.dp32.ep4.etp1", 0, 2),
        (MIXTURE, "tp4.pp2.dp32.ep16.etp1", "tp8.dp32.ep4.etp1", 0, 8),
    ],
)
def test_fewer_replicas_take_as_long(shape, source, target, first, fewer):
    source, target = mesh(source), mesh(target, first)
    found = fewer_replicas(source, target)
    assert [len(each.ranks) * fewer for each in found] == [len(source.ranks), len(target.ranks)]
    # Senders take turns in whole rows of matrices: the busiest of few sends a little more or less than that of many.
    assert seconds(shape, *found) == pytest.approx(seconds(shape, source, target), rel=0.01)


@pytest.mark.parametrize(
    ("shape", "source", "target"),
    [
        (DENSE, "tp8.pp4.dp8", "tp4.dp64"),
        (DENSE, "tp2.pp4.dp32", "tp8.dp32"),
        (DENSE, "tp4.pp2.dp32", "tp1.dp256"),
        (MIXTURE, "tp2.pp4.dp16.ep8.etp1", "tp4.dp32.ep4.etp1"),
        (MIXTURE, "tp4.pp2.dp32.ep16.etp1", "tp8.dp32.ep4.etp1"),
        (MIXTURE, "tp2.pp2.dp64.ep32.etp1", "tp8.dp32.ep16.etp1"),
        (MIXTURE, "tp1.pp2.dp128.ep8", "tp4.dp64.ep32.etp1"),
    ],
)
def test_so_do_fewer_whose_ranks_have_the_places_of_most_overlap(shape, source, target):
    def placed(source, target):
        return source, max_overlap(source, target.layout, target.ranks, num_layers=shape.num_layers, name="rollout")

    pair = mesh(source), mesh(target)
    fewer = fewer_replicas(*pair)
    assert len(fewer[0].ranks) < len(pair[0].ranks)
    assert seconds(shape, *placed(*fewer)) == pytest.approx(seconds(shape, *placed(*pair)), rel=0.01)


@pytest.mark.parametrize(
    ("source", "target", "first"),
    [
        ("tp4.dp2", "tp1.dp8", 0),  # One node.
        ("tp2.pp8.dp4", "tp2.dp32", 0),  # A stage is a node.
        ("tp4.pp2.dp4", "tp4.dp8", 8),  # The rollout begins in the middle.
        ("tp8.pp2.dp8", "tp1.dp128.ep64.etp1", 0),  # Experts spread over a whole stage.
        ("fsdp16", "tp2.dp8", 0),
    ],
)
def test_nodes_and_groups_stay_whole(source, target, first):
    pair = mesh(source), mesh(target, first)
    assert fewer_replicas(*pair) == pair


def test_ranks_in_another_order_stay():
    source, target = mesh("tp8.dp8"), mesh("tp4.dp16")
    permuted = replace(target, ranks=tuple(itertools.chain(target.ranks[1::2], target.ranks[::2])))
    assert fewer_replicas(source, permuted) == (source, permuted)


@pytest.mark.parametrize(
    "shape", [pytest.param(DENSE, id="dense"), pytest.param(MIXTURE, id="mixture", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("first", [0, 1024], ids=["together", "apart"])
def test_no_reshard_takes_less_than_the_bound(shape, first):
    size, machine = Size(model=shape), hardware("h100-sxm")
    links = Bandwidth(
        node=machine.node_bandwidth * machine.node_share / 1e9,
        network=machine.network_bandwidth * machine.network_share / 1e9,
    )
    spec, shares = model_spec(shape), []
    experts = [""] if shape.num_experts is None else ["", ".ep4", ".ep4.etp1", ".ep16.etp1", ".etp1"]
    for update, rollout in itertools.product(
        ("tp8.dp4", "tp2.pp4.dp4", "pp2.dp16", "tp4.pp8"), ("tp8.dp4", "tp2.dp16")
    ):
        for source, target in itertools.product(experts, experts):
            try:
                source, target = mesh(update + source), mesh(rollout + target, first)
            except LayoutError:
                continue
            least = least_seconds(
                *(size, source.layout, target.layout, machine),
                **{"ranks_per_node": 8, "is_together": first == 0, "is_whole_nodes": True},
            )
            taken = reshard_seconds(spec, WeightHoldings(spec, source), WeightHoldings(spec, target), links)
            assert least <= taken
            shares.append(least / taken if taken else 1.0)
    assert len(shares) >= 8 and max(shares) > 0.9
