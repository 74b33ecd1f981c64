"""Which devices a program's roles lie on: by their numbers, or by process groups that Megatron has made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from hybridflow.api.parts import Part
from hybridflow.api.settings import ranks_of
from hybridflow.api.world import find_world
from hybridflow.errors import ConfigError, LayoutError
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.parallel.world import World

ROLES = ("actor", "rollout", "critic", "reference", "reward")
"""What a sub-mesh may be for; ``rollout``: where the actor generates, if not where it learns."""

_AXES = {"tensor": "tp", "pipeline": "pp"}

Devices = Sequence[int | str]
"""Ranks, one for each device, or names such as ``cuda:1``."""


class DeviceMesh(Part):
    """Devices, one rank each, and which of them each role has. Collective: all ranks, with the same devices.

    ``DeviceMesh(devices=[0, 1, 2, 3], sub_meshes={"critic": [2], "reward": [3]})`` puts the critic on device 2, the
    reward on device 3, and all else on those that are left: 0 and 1. Where the sub-meshes leave none, all else is on
    all devices. A role's layout is data parallel unless its sizes say otherwise.

    ``DeviceMesh("tensor", group)``, or ``DeviceMesh(groups={"tensor": …, "pipeline": …})``, takes process groups that a
    Megatron program has made: each rank gives its own, and the actor's layout is theirs.

    Args:
        axis: ``tensor`` or ``pipeline``: what ``group`` is.
        group: A process group of ``torch.distributed`` with this rank.
        devices: All that are used; None: those of all ranks.
        sub_meshes: Role -> its devices, of ``devices``.
        groups: Axis -> process group, in the place of ``axis`` and ``group``.

    Attributes:
        ranks: Ranks of the actor, in mesh order.
        rollout_ranks: Where the actor generates, in mesh order.
        layout: The actor's, where groups say it; else None.

    Raises:
        ConfigError: A device is not there, is named twice, or is not among ``devices``; a role is unknown.
        LayoutError: The groups of the ranks make no grid.
    """

    def __init__(
        self,
        axis: str | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        devices: Devices | None = None,
        sub_meshes: Mapping[str, Devices] | None = None,
        groups: Mapping[str, dist.ProcessGroup] | None = None,
    ) -> None:
        world = find_world()
        if (axis is None) != (group is None):
            raise ConfigError("DeviceMesh: give an axis and its group, such as DeviceMesh('tensor', group)")
        given = dict(groups or {}) if axis is None or group is None else {axis: group}
        if given and devices is not None:
            raise ConfigError("DeviceMesh: devices and groups both say which ranks there are; give one of the two")
        self.layout: ParallelLayout | None = None
        own: dict[str, Any] = {}
        if given:
            self.layout, ranks = _grid(world, given)
            own = {"update": {"tp": self.layout.tp, "pp": self.layout.pp, "dp": self.layout.dp}}
        else:
            ranks = tuple(range(world.size)) if devices is None else _ranks(devices, world.size, "devices")
        parts = _parts(sub_meshes or {}, ranks, world.size)
        self.ranks = _rest(parts, ranks)
        if given and self.ranks != ranks:
            raise ConfigError(
                "DeviceMesh: sub_meshes take ranks that the groups have for the actor; name ranks for all roles by "
                "devices, or give sub_meshes all of the groups' ranks"
            )
        self.rollout_ranks = parts.get("rollout", self.ranks)
        actor: dict[str, Any] = {"devices": list(self.ranks), **own}
        if "rollout" in parts:
            actor |= {"rollout_ranks": list(parts["rollout"]), "rollout": {"dp": len(parts["rollout"])}}
        roles = {name: {"devices": list(found)} for name, found in parts.items() if name not in ("actor", "rollout")}
        super().__init__({"actor": actor, **roles})


def _ranks(devices: Devices, num_ranks: int, key: str) -> tuple[int, ...]:
    found = tuple(ranks_of(devices, num_ranks, key=f"DeviceMesh.{key}"))
    twice = sorted({rank for rank in found if found.count(rank) > 1})
    if twice or not found:
        what = f"device {twice[0]} is named twice" if twice else "no devices"
        raise ConfigError(f"DeviceMesh.{key}={list(devices)}: {what}; name each device once, and at least one")
    return found


def _parts(sub_meshes: Mapping[str, Devices], ranks: tuple[int, ...], num_ranks: int) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each role that has ranks of its own."""
    parts = {}
    for role, devices in sub_meshes.items():
        key = f"sub_meshes[{role!r}]"
        if role not in ROLES:
            raise ConfigError(f"DeviceMesh.{key}: no such role; expected one of {', '.join(ROLES)}")
        parts[role] = _ranks(devices, num_ranks, key)
        strangers = [rank for rank in parts[role] if rank not in ranks]
        if strangers:
            raise ConfigError(
                f"DeviceMesh.{key}={list(devices)}: {strangers} are not among devices={list(ranks)}; add them there, "
                "or name others"
            )
    return parts


def _rest(parts: Mapping[str, tuple[int, ...]], ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the actor's ranks: those that were named for it, or that no other role has."""
    if "actor" in parts:
        return parts["actor"]
    taken = {rank for found in parts.values() for rank in found}
    rest = tuple(rank for rank in ranks if rank not in taken)
    if not rest and "rollout" in parts:
        raise ConfigError(
            "DeviceMesh.sub_meshes: leave no device to the actor, which cannot learn where 'rollout' has it generate; "
            "name devices for 'actor'"
        )
    return rest or ranks


def _grid(world: World, groups: Mapping[str, dist.ProcessGroup]) -> tuple[ParallelLayout, tuple[int, ...]]:
    """Return the layout that the groups of all ranks make, and their ranks in mesh order. Collective: all ranks."""
    for axis in groups:
        if axis not in _AXES:
            raise ConfigError(
                f"DeviceMesh: axis {axis!r}; expected {' or '.join(map(repr, _AXES))} (replicas are what is left)"
            )
    mine = {_AXES[axis]: list(dist.get_process_group_ranks(group)) for axis, group in groups.items()}
    told: list[Any] = world.everyone().gather(mine, "process groups of a mesh")
    return grid_of(told)


def grid_of(told: Sequence[Mapping[str, Sequence[int]]]) -> tuple[ParallelLayout, tuple[int, ...]]:
    """Return the layout that groups make, and the ranks in mesh order.

    Args:
        told: Of each rank, axis (``tp``, ``pp``) -> the ranks of its group there, in their order.

    Raises:
        LayoutError: They make no grid: groups differ in size, or a rank is in one that does not have it.
    """
    own = [{axis: tuple(each.get(axis, (rank,))) for axis in ("tp", "pp")} for rank, each in enumerate(told)]
    sizes = {axis: len(own[0][axis]) for axis in ("tp", "pp")}
    for rank, each in enumerate(own):
        for axis, ranks in each.items():
            is_shared = all(0 <= other < len(own) and own[other][axis] == ranks for other in ranks)
            if rank not in ranks or len(ranks) != sizes[axis] or not is_shared:
                raise LayoutError(
                    f"DeviceMesh: rank {rank} gave a group of ranks {list(ranks)} for {axis}; expected {sizes[axis]} "
                    "ranks with itself, the same on all of them: give each rank the group that it is in"
                )
    places: dict[tuple[int, int, int], int] = {}
    for number, replica in enumerate(_replicas(own)):
        for rank in replica:
            place = own[rank]["pp"].index(rank), number, own[rank]["tp"].index(rank)
            if places.setdefault(place, rank) != rank or len(replica) != sizes["tp"] * sizes["pp"]:
                raise LayoutError(
                    f"DeviceMesh: ranks {list(replica)} make no grid of tp={sizes['tp']} by pp={sizes['pp']}; give the "
                    "tensor and pipeline groups of one model"
                )
    layout = ParallelLayout(tp=sizes["tp"], pp=sizes["pp"], dp=len(own) // (sizes["tp"] * sizes["pp"]))
    return layout, tuple(places[place] for place in sorted(places))


def _replicas(own: Sequence[Mapping[str, Iterable[int]]]) -> list[tuple[int, ...]]:
    """Return the sets of ranks that groups join, ordered by their lowest rank."""
    joined = {rank: {rank} for rank in range(len(own))}
    for each in own:
        for ranks in each.values():
            whole = set().union(*(joined[rank] for rank in ranks))
            for rank in whole:
                joined[rank] = whole
    return sorted({tuple(sorted(each)) for each in joined.values()})
