"""The actor's weights in its rollout layout: brought over before a rollout, freed while the actor learns."""

from __future__ import annotations

from torch import Tensor

from hybridflow.reshard.execute import Resharder
from hybridflow.reshard.holdings import WeightHoldings
from hybridflow.reshard.memory import release, restore
from hybridflow.reshard.plan import aliases
from hybridflow.reshard.spec import ModelSpec
from hybridflow.roles.job import Job
from hybridflow.roles.placed import PlacedModel


class RolloutWeights:
    """A second layout of a model's weights, on the ranks of the first or on others.

    Tensors of which a rank holds the same in both layouts have one storage and are never copied.

    Collective: all ranks of either mesh make it together.

    Args:
        job: The job.
        spec: The model's tensors.
        update: The weights that learn; None on a rank outside their mesh.
        rollout: Those that generate, of undefined contents until ``refresh``; None likewise.
    """

    def __init__(self, job: Job, spec: ModelSpec, update: PlacedModel | None, rollout: PlacedModel | None) -> None:
        source, target = (WeightHoldings(spec, job.meshes[f"actor.{phase}"]) for phase in ("update", "rollout"))
        self._owner = f"rank {job.world.rank}: weights of the rollout layout"
        self._own: list[Tensor] = []
        if rollout is not None:
            shared = aliases(spec, source, target, job.world.rank)
            if update is not None:
                rollout.share_storage(update, shared)
            self._own = [tensor for name, tensor in rollout.tensors().items() if name not in shared]
        self._own_bytes = sum(tensor.nbytes for tensor in self._own)
        self._resharder = Resharder(
            job.world,
            spec,
            source,
            target,
            source_tensors=None if update is None else update.tensors(),
            target_tensors=None if rollout is None else rollout.tensors(),
            transport=job.recipe.actor.reshard,
        )

    def refresh(self) -> dict[str, float]:
        """Fill them with the values of the update layout.

        Collective: all ranks of either mesh.

        Returns:
            ``reshard/*`` metrics of this rank.

        Raises:
            ReshardError: There is no room for them on this rank; the others get a DeadlineError.
            DeadlineError: A rank did not come.
        """
        restore(self._own, self._owner)
        stats = self._resharder.run()
        return {
            "reshard/time_s": stats.time_s,
            "reshard/bytes": stats.received_bytes,
            "reshard/limit_bytes": stats.limit_bytes,
            "reshard/extra_bytes": self._own_bytes + stats.extra_bytes,
        }

    def release(self) -> None:
        """Free what the update layout does not share, until ``refresh``."""
        release(self._own)
