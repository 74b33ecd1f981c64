"""The process groups of a mesh in the form that megatron-core takes them.

Groups are arguments: every megatron-core call of hybridflow is given a ``ProcessGroupCollection``, and megatron-core's
globals (``parallel_state``) are never initialized. So one process may hold models in several layouts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from hybridflow.layout.mesh import DeviceMesh
from hybridflow.parallel.coordinator import GlooMessenger
from hybridflow.parallel.cpu import use_cpu_for_cuda
from hybridflow.parallel.world import World

use_cpu_for_cuda()

_CPU = torch.device("cpu")


def rank_sets(meshes: Iterable[DeviceMesh], size: int) -> list[tuple[int, ...]]:
    """Return every set of ranks that needs a process group, in one order on all ranks, for ``World.make_groups``.

    Args:
        meshes: All meshes of the job, in the same order on all ranks.
        size: Ranks of the job.
    """
    sets: list[tuple[int, ...]] = [tuple(range(size))]
    sets += [(rank,) for rank in range(size)]
    for mesh in meshes:
        sets.append(mesh.ranks)
        for axes in (
            *(("tp",), ("cp",), ("pp",), ("dp",)),
            *(("tp", "cp"), ("dp", "cp"), ("tp", "pp"), ("tp", "dp", "cp")),
        ):
            sets += mesh.groups(*axes)
        for axes in (("etp",), ("ep",), ("etp", "ep"), ("etp", "ep", "pp"), ("edp",)):
            sets += _expert_groups(mesh, *axes)
        sets += [_ends(group) for group in mesh.groups("pp")]
        if mesh.layout.fsdp > 1:
            sets += [*map(mesh.shard_ranks, mesh.ranks), *map(mesh.twin_ranks, mesh.ranks)]
    return list(dict.fromkeys(sets))


def collection(world: World, mesh: DeviceMesh) -> ProcessGroupCollection:
    """Return this rank's process groups in a mesh that it belongs to.

    Ranks of ``dp`` have other samples; ranks of ``dp_cp`` have other tokens, and sum gradients.
    """
    rank = world.rank

    def along(*axes: str) -> dist.ProcessGroup:
        return world.group(mesh.group_of(rank, *axes))

    def experts_along(*axes: str) -> dist.ProcessGroup:
        return world.group(next(group for group in _expert_groups(mesh, *axes) if rank in group))

    pipeline = mesh.group_of(rank, "pp")
    ends = _ends(pipeline)
    return ProcessGroupCollection(
        tp=along("tp"),
        pp=along("pp"),
        mp=along("tp", "pp"),
        embd=world.group(ends) if rank in ends else None,
        pos_embd=world.group((rank,)) if rank == pipeline[0] else None,
        cp=along("cp"),
        tp_cp=along("tp", "cp"),
        hcp=[along("cp")],
        ep=experts_along("ep"),
        expt_tp=experts_along("etp"),
        tp_ep=experts_along("etp", "ep"),
        tp_ep_pp=experts_along("etp", "ep", "pp"),
        dp=along("dp"),
        dp_cp=along("dp", "cp"),
        expt_dp=experts_along("edp"),
        intra_dp_cp=along("dp", "cp"),
        intra_expt_dp=experts_along("edp"),
        tp_dp_cp=along("tp", "dp", "cp"),
        intra_dist_opt=world.group(mesh.ranks),
    )


@contextmanager
def gathering_within(group: dist.ProcessGroup) -> Iterator[None]:
    """Make megatron-core gather the keys of parameter groups from ``group`` alone, and as JSON, for the duration.

    megatron-core 0.16.1 compares parameter groups over all ranks whenever it makes an optimizer, which would never end
    where some ranks have no part in the model. It unpickles what other ranks send, which can run any code.
    """
    gather = dist.all_gather_object
    ranks = tuple(dist.get_process_group_ranks(group))
    # Each wait of the group itself has the deadline of the job.
    messenger = GlooMessenger(group, ranks, group._get_backend(_CPU).options._timeout.total_seconds())

    def gather_within(objects: list[Any], mine: Any) -> None:
        told = messenger.gather(json.dumps(mine).encode(), "parameter groups of the optimizer")
        objects[:] = [[_as_tuples(key) for key in json.loads(each)] for each in told]

    dist.all_gather_object = gather_within  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.all_gather_object = gather


def _as_tuples(value: Any) -> Any:
    """Return a value that was sent as JSON with its lists as the tuples that they were."""
    return tuple(_as_tuples(each) for each in value) if isinstance(value, list) else value


def _expert_groups(mesh: DeviceMesh, *axes: str) -> list[tuple[int, ...]]:
    """Split a mesh into groups whose ranks hold parts of experts that differ only along ``axes``.

    The ranks of a stage, in mesh order, are dealt anew: tensor parallel index inside experts (``etp``) fastest, then
    block of experts (``ep``), then replica (``edp``).
    """
    layout = mesh.layout
    per_stage = len(mesh.ranks) // layout.pp
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, rank in enumerate(mesh.ranks):
        replica, within = divmod(index % per_stage, layout.expert_tp * layout.ep)
        place = {
            "etp": within % layout.expert_tp,
            "ep": within // layout.expert_tp,
            "edp": replica,
            "pp": index // per_stage,
        }
        groups.setdefault(tuple(at for axis, at in place.items() if axis not in axes), []).append(rank)
    return [tuple(group) for group in groups.values()]


def _ends(pipeline: tuple[int, ...]) -> tuple[int, ...]:
    """Return first and last stage: the ranks that share tied embeddings."""
    return pipeline if len(pipeline) <= 2 else (pipeline[0], pipeline[-1])
