"""Which devices a program's roles lie on: by their numbers, or by process groups that Megatron has made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from hybridflow.api.settings import ranks_of
from hybridflow.api.world import find_world
from hybridflow.errors import ConfigError, LayoutError
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.observe.table import format_table
from hybridflow.parallel.world import World

ROLES = ("actor", "rollout", "critic", "reference", "reward")
"""What a sub-mesh may be for; ``rollout``: where the actor generates, if not where it learns."""

_ALSO = {"rm": "reward"}
"""Other names of roles."""

_AXES = {"tensor": "tp", "pipeline": "pp"}

Devices = Sequence[int | str]
"""Ranks, one for each device, or names such as ``cuda:1``."""


class DeviceMesh:
    """Devices, one rank each, and which of them each role has. It prints as a table.

    ``DeviceMesh(devices=[0, 1, 2, 3], sub_meshes={"critic": [2], "reward": [3]})`` puts the critic on device 2, the
    reward on device 3, and all else on those that are left: 0 and 1. Where the sub-meshes leave none, all else is on
    all devices. A role's layout is data parallel unless its sizes say otherwise.

    It is a description, that can be made on any machine. A job that starts on it refuses devices that are not there.

    ``DeviceMesh("tensor", group)``, or ``DeviceMesh(groups={"tensor": …, "pipeline": …})``, takes process groups that a
    Megatron program has made: each rank gives its own, and the actor's layout is theirs. Collective: all ranks.

    Args:
        axis: ``tensor`` or ``pipeline``: what ``group`` is.
        group: A process group of ``torch.distributed`` with this rank.
        devices: Those of the roles without a sub-mesh; None: those of all ranks.
        sub_meshes: Role -> its devices, of ``devices`` or others. ``rm`` is the reward.
        groups: Axis -> process group, in the place of ``axis`` and ``group``.

    Attributes:
        layout: The actor's, where groups say it; else None.

    Raises:
        ConfigError: A device is no name of one, or is named twice; a role is unknown.
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
        if (axis is None) != (group is None):
            raise ConfigError("DeviceMesh: give an axis and its group, such as DeviceMesh('tensor', group)")
        given = dict(groups or {}) if axis is None or group is None else {axis: group}
        if given and devices is not None:
            raise ConfigError("DeviceMesh: devices and groups both say which ranks there are; give one of the two")
        self.layout: ParallelLayout | None = None
        self._whole: tuple[int, ...] | None = None
        # Key -> rank -> name of its device, for messages and the table.
        self._named: dict[str, dict[int, str]] = {}
        if given:
            self.layout, self._whole = _grid(find_world(), given)
        elif devices is not None:
            self._whole = self._numbers(devices, "devices")
        self._parts: dict[str, tuple[int, ...]] = {}
        for name, listed in (sub_meshes or {}).items():
            self._add_part(name, listed)
        if self._whole is not None:
            rest = _rest(self._parts, self._whole)
            if given and rest != self._whole:
                raise ConfigError(
                    "DeviceMesh: sub_meshes take ranks that the groups have for the actor; name ranks for all roles by "
                    "devices, or give sub_meshes all of the groups' ranks"
                )

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks of the actor, in mesh order.

        Raises:
            ConfigError: A device of the mesh is not there.
        """
        size = find_world().size
        for key, listed in self._named.items():
            ranks_of(listed.values(), size, key=f"DeviceMesh.{key}")
        return _rest(self._parts, tuple(range(size)) if self._whole is None else self._whole)

    @property
    def rollout_ranks(self) -> tuple[int, ...]:
        """Return the ranks where the actor generates, in mesh order. Raises ConfigError: as ``ranks``."""
        ranks = self.ranks
        return self._parts.get("rollout", ranks)

    @property
    def settings(self) -> dict[str, Any]:
        """Return where the roles lie, as sections of ``PPOTrainer``'s config. Raises ConfigError: as ``ranks``."""
        actor: dict[str, Any] = {"devices": list(self.ranks)}
        if self.layout is not None:
            actor["update"] = {"tp": self.layout.tp, "pp": self.layout.pp, "dp": self.layout.dp}
        if "rollout" in self._parts:
            ranks = self._parts["rollout"]
            actor |= {"rollout_ranks": list(ranks), "rollout": {"dp": len(ranks)}}
        others = {name: ranks for name, ranks in self._parts.items() if name not in ("actor", "rollout")}
        return {"actor": actor, **{name: {"devices": list(ranks)} for name, ranks in others.items()}}

    def __repr__(self) -> str:
        if self._whole is None and "actor" not in self._parts:
            actor = "all others" if self._parts else "all"
        else:
            actor = self._told(_rest(self._parts, self._whole or ()))
        if self.layout is not None:
            actor += f" as {self.layout}"
        others = [(role, self._told(ranks)) for role, ranks in self._parts.items() if role != "actor"]
        return "\n".join(format_table([("role", "devices"), ("actor", actor), *others]))

    def _told(self, ranks: Sequence[int]) -> str:
        """Return the devices of ranks, as they were named."""
        names = {number: name for listed in self._named.values() for number, name in listed.items()}
        return " ".join(names.get(rank, str(rank)) for rank in ranks)

    def _add_part(self, name: str, devices: Devices) -> None:
        role, key = _ALSO.get(name, name), f"sub_meshes[{name!r}]"
        if role not in ROLES:
            raise ConfigError(f"DeviceMesh.{key}: no such role; expected one of {', '.join((*ROLES, *_ALSO))}")
        if role in self._parts:
            raise ConfigError(f"DeviceMesh.{key}: {role} is given twice; remove one of the two")
        self._parts[role] = self._numbers(devices, key)

    def _numbers(self, devices: Devices, key: str) -> tuple[int, ...]:
        """Return the ranks of devices, whether they are there or not, and remember their names."""
        listed = [devices] if isinstance(devices, str | int) else list(devices)
        found = tuple(ranks_of(listed, None, key=f"DeviceMesh.{key}"))
        twice = sorted({rank for rank in found if found.count(rank) > 1})
        if twice or not found:
            what = f"device {twice[0]} is named twice" if twice else "no devices"
            raise ConfigError(f"DeviceMesh.{key}={listed}: {what}; name each device once, and at least one")
        self._named[key] = dict(zip(found, map(str, listed), strict=True))
        return found


def settings_of_mesh(mesh: Any) -> Mapping[str, Any]:
    """Return the role placement that a program's ``device_mesh`` asks for. Raises ConfigError: it is none."""
    if mesh is None:
        return {}
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"device_mesh: found {type(mesh).__name__}; give a DeviceMesh, such as DeviceMesh(devices=[0, 1])"
        )
    return mesh.settings


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
