"""One role's weights as another's beginning: a plan from mesh to mesh over the tensors that both have."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor

from hybridflow.placement.job import Job
from hybridflow.placement.placed_model import PlacedModel
from hybridflow.reshard.execute import Resharder
from hybridflow.reshard.holdings import WeightHoldings
from hybridflow.reshard.spec import ModelSpec, shard


def copy_weights(job: Job, source: Any, source_mesh: str, target: Any, target_mesh: str) -> None:
    """Copy the tensors that two roles' models share; heads that only one has stay as they are.

    Collective: all ranks of both meshes; other ranks return at once.

    Args:
        job: The job.
        source: Role with ``spec`` and ``model`` (None on ranks outside its mesh).
        source_mesh: Name of the source's mesh.
        target: As ``source``.
        target_mesh: Name of the target's mesh.
    """
    one, other = job.meshes[source_mesh], job.meshes[target_mesh]
    if job.world.rank not in one and job.world.rank not in other:
        return
    names = {tensor.name for tensor in source.spec.tensors}
    # As the target has them: the second copy of an embedding that is tied in the source alone is not needed.
    shared = ModelSpec(
        tensors=tuple(tensor for tensor in target.spec.tensors if tensor.name in names),
        num_layers=target.spec.num_layers,
    )
    with contextlib.nullcontext() if target.model is None else target.model.at_hand(is_written=True):
        Resharder(
            job.world,
            shared,
            WeightHoldings(shared, one),
            WeightHoldings(shared, other),
            source_tensors=_tensors(source.model, shared, job.world.rank),
            target_tensors=_tensors(target.model, shared, job.world.rank),
            # For a single copy it does not pay to open the source's memory to the node.
            transport="torch",
        ).run()


def _tensors(model: PlacedModel | None, spec: ModelSpec, rank: int) -> dict[str, Tensor] | None:
    if model is None:
        return None
    mesh, tensors = model.mesh, model.tensors()
    place = mesh.coordinate(rank)
    held = [each.name for each in spec.tensors if shard(each, mesh.layout, place, spec.num_layers) is not None]
    return {name: tensors[name] for name in held}
