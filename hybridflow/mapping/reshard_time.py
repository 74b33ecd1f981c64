"""The time in which the actor's weights reach the rollout's layout, on described hardware. No torch."""

from __future__ import annotations

import math
from dataclasses import replace

from hybridflow.config.recipe import Recipe
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.mapping.estimate import kept_bytes, most_bytes
from hybridflow.mapping.hardware import Hardware
from hybridflow.mapping.sizes import Size
from hybridflow.models.shapes import model_spec
from hybridflow.reshard.holdings import WeightHoldings
from hybridflow.reshard.overlap import max_overlap
from hybridflow.reshard.plan import shares_storage
from hybridflow.reshard.report import Bandwidth
from hybridflow.reshard.report import reshard_seconds as plan_seconds


def reshard_seconds(recipe: Recipe, source: DeviceMesh, target: DeviceMesh, hardware: Hardware) -> float:
    """Return the seconds in which the actor's weights reach the rollout's layout, for each step."""
    if shares_storage(source, target):
        return 0.0
    model = recipe.sized_model_of("actor.update")
    spec = model_spec(model)
    bandwidth = Bandwidth(
        node=hardware.node_bandwidth * hardware.node_share / 1e9,
        network=hardware.network_bandwidth * hardware.network_share / 1e9,
    )
    if recipe.actor.rollout_ranks is None:
        source, target = fewer_replicas(source, replace(target, ranks=source.ranks))
        target = max_overlap(source, target.layout, target.ranks, num_layers=model.num_layers, name=target.name)
    else:
        source, target = fewer_replicas(source, target)
    moved = plan_seconds(spec, WeightHoldings(spec, source), WeightHoldings(spec, target), bandwidth)
    return moved / recipe.actor.reshard_every


def least_seconds(
    size: Size,
    update: ParallelLayout,
    rollout: ParallelLayout,
    hardware: Hardware,
    *,
    ranks_per_node: int,
    is_together: bool,
    is_whole_nodes: bool,
) -> float:
    """Return seconds below which no reshard is: what is lacking comes over all links, and to each node once.

    Args:
        size: Of the actor.
        update: Layout in which its weights are.
        rollout: Layout in which they are to be.
        hardware: Where.
        ranks_per_node: Ranks of a node.
        is_together: Whether the ranks are the same; otherwise they have nothing in common.
        is_whole_nodes: Whether both fill nodes.
    """
    needed = kept_bytes(size, rollout)["first"]["weights"]
    held = most_bytes(size, update, "weights") if is_together else 0.0
    within, across = hardware.node_bandwidth * hardware.node_share, hardware.network_bandwidth * hardware.network_share
    seconds = max(0.0, needed - held) / (within + across)
    if not is_whole_nodes or not across:
        return seconds
    # At least what differs between the ranks of a tensor-parallel group: experts may be the same on some of them.
    cut = needed - size.model.num_layers * size.whole_weights * size.item_bytes
    entering = cut * min(rollout.tp, rollout.ep * rollout.expert_tp) - held * ranks_per_node
    return max(seconds, entering / ranks_per_node / across)


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
    if first % block or stage % block or stage < 2 * times * mesh.ranks_per_node:
        return None
    ranks = tuple(range(first // times, (first + number) // times))
    return replace(mesh, layout=replace(layout, dp=layout.dp // times), ranks=ranks)
