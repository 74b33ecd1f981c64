"""The time in which the actor's weights reach the rollout's layout, on described hardware. No torch."""

from __future__ import annotations

import math
from dataclasses import replace

from hybridflow.config.recipe import Recipe
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.mapping.hardware import Hardware
from hybridflow.mapping.memory import with_vocabulary
from hybridflow.models.shapes import model_spec, shape_of
from hybridflow.reshard.holdings import WeightHoldings
from hybridflow.reshard.plan import shares_storage
from hybridflow.reshard.report import Bandwidth
from hybridflow.reshard.report import reshard_seconds as plan_seconds


def reshard_seconds(recipe: Recipe, source: DeviceMesh, target: DeviceMesh, hardware: Hardware) -> float:
    """Return the seconds in which the actor's weights reach the rollout's layout, for each step."""
    if shares_storage(source, target):
        return 0.0
    model = with_vocabulary(recipe, "actor.update")
    assert model.vocab_size is not None, "with_vocabulary puts it in"
    spec = model_spec(shape_of(model, model.vocab_size))
    bandwidth = Bandwidth(
        node=hardware.node_bandwidth * hardware.node_share / 1e9,
        network=hardware.network_bandwidth * hardware.network_share / 1e9,
    )
    source, target = fewer_replicas(source, target)
    moved = plan_seconds(spec, WeightHoldings(spec, source), WeightHoldings(spec, target), bandwidth)
    return moved / recipe.actor.reshard_every


def fewer_replicas(source: DeviceMesh, target: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh]:
    """Return meshes with as few replicas as possible, between which a rank moves as much as between these.

    Replicas are alike: in a job of twice as many, twice as many send to twice as many. What is on a node stays
    together, and what a rank holds is on another node too. A plan for thousands of ranks takes long.
    """
    number = math.gcd(source.layout.dp, target.layout.dp)
    for times in range(number, 1, -1):
        if number % times == 0:
            fewer = [_divided(mesh, times, beside=other) for mesh, other in ((source, target), (target, source))]
            if fewer[0] is not None and fewer[1] is not None:
                return fewer[0], fewer[1]
    return source, target


def _divided(mesh: DeviceMesh, times: int, beside: DeviceMesh) -> DeviceMesh | None:
    """Return the mesh with so many times fewer replicas, or None if nodes or groups would be cut."""
    layout, first, number = mesh.layout, mesh.ranks[0], len(mesh.ranks)
    groups = [size for each in (layout, beside.layout) for size in (each.tp * each.cp, each.expert_tp * each.ep)]
    block = times * math.lcm(mesh.ranks_per_node, *groups)
    stage = number // layout.pp
    if layout.is_sharded or mesh.ranks != tuple(range(first, first + number)):
        return None
    if first % block or stage % block or stage < 2 * block:
        return None
    ranks = tuple(range(first // times, (first + number) // times))
    return replace(mesh, layout=replace(layout, dp=layout.dp // times), ranks=ranks)
