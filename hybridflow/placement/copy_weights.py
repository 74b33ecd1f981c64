"""One model's weights as another's beginning: a plan from mesh to mesh over the tensors that both have."""

from __future__ import annotations

from torch import Tensor

from hybridflow.parallel.world import World
from hybridflow.placement.model_on_mesh import ModelOnMesh
from hybridflow.reshard.execute import Resharder
from hybridflow.reshard.holdings import WeightHoldings
from hybridflow.reshard.spec import ModelSpec


def copy_weights(world: World, source: ModelOnMesh, target: ModelOnMesh) -> None:
    """Copy the tensors that two models share; heads that only one has stay as they are.

    Collective: all ranks of both meshes; other ranks return at once.

    Args:
        world: This rank and the others.
        source: What is read; without weights on a rank outside its mesh.
        target: What is written, likewise.
    """
    if world.rank not in source.mesh and world.rank not in target.mesh:
        return
    names = {tensor.name for tensor in source.spec.tensors}
    # As the target has them: the second copy of an embedding that is tied in the source alone is not needed.
    shared = ModelSpec(
        tensors=tuple(tensor for tensor in target.spec.tensors if tensor.name in names),
        num_layers=target.spec.num_layers,
        is_part=True,
    )

    def held(model: ModelOnMesh) -> dict[str, Tensor] | None:
        return model.tensors(shared) if world.rank in model.mesh else None

    with target.at_hand(is_written=True):
        Resharder(
            world,
            shared,
            WeightHoldings(shared, source.mesh),
            WeightHoldings(shared, target.mesh),
            source_tensors=held(source),
            target_tensors=held(target),
            # For a single copy it does not pay to open the source's memory to the node.
            transport="torch",
        ).run()
