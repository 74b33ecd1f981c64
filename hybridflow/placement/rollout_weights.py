"""The actor's weights in its rollout layout: brought over before a rollout, freed while the actor learns."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor, nn

from hybridflow.models.adapters import base_spec, factor_spec, is_factor
from hybridflow.models.experts import mixtures
from hybridflow.models.fp8 import is_rounded, rounded
from hybridflow.models.fsdp import local_part
from hybridflow.models.specs import logical_tensors
from hybridflow.placement.job import Job
from hybridflow.placement.placed_model import PlacedModel
from hybridflow.reshard.execute import Resharder
from hybridflow.reshard.fsdp import weight_holdings
from hybridflow.reshard.holdings import Holdings
from hybridflow.reshard.memory import release, restore
from hybridflow.reshard.plan import aliases, held_bytes
from hybridflow.reshard.spec import ModelSpec


def offloads_shards(job: Job) -> bool:
    """Return whether the shards of the update layout are in host memory during a rollout."""
    actor = job.recipe.actor
    return actor.offload and job.meshes["actor.update"].layout.fsdp > 1 and actor.reshard in ("auto", "torch")


class RolloutWeights:
    """A second layout of a model's weights, on the ranks of the first or on others.

    Tensors of which a rank holds the same in both layouts have one storage and are never copied. The base weights of a
    model with adapters are moved once and stay; only the adapters are moved each time.

    With ``actor.fp8`` each rank rounds its weights of the update as its forward pass does, and these are moved. No
    storage is shared then.

    Collective: all ranks of either mesh make it together.

    Args:
        job: The job.
        spec: The model's tensors.
        update: The weights that learn; None on a rank outside their mesh.
        rollout: Those that generate, of undefined contents until ``refresh``; None likewise.

    Attributes:
        unshared: This rank's tensors of the update layout that the rollout layout does not share.
    """

    def __init__(self, job: Job, spec: ModelSpec, update: PlacedModel | None, rollout: PlacedModel | None) -> None:
        self._job, self._update, self._rollout = job, update, rollout
        self._has_adapters = job.recipe.actor.lora is not None
        self._base = base_spec(spec)
        self._is_base_current = False
        moved = factor_spec(spec) if self._has_adapters else spec
        source, target = self._holdings(moved)
        self._owner = f"rank {job.world.rank}: weights of the rollout layout"
        self._own: list[Tensor] = []
        self.unshared: list[Tensor] = []
        self._own_bytes = 0
        if rollout is not None:
            is_apart = job.recipe.actor.keeps_rollout_apart
            shared = frozenset[str]() if is_apart else aliases(spec, *self._holdings(spec), job.world.rank)
            if update is not None:
                mine, theirs = logical_tensors(rollout.transformer), logical_tensors(update.transformer)
                _lay_apart(rollout.transformer, {id(mine[name]) for name in shared})
                for name in shared:
                    mine[name].data = local_part(theirs[name].detach()).view(mine[name].shape)
                self.unshared = [tensor for name, tensor in update.tensors().items() if name not in shared]
            own = {name: tensor for name, tensor in rollout.tensors().items() if name not in shared}
            self._own_bytes = sum(tensor.nbytes for tensor in own.values())
            self._own = [tensor for name, tensor in own.items() if is_factor(name) or not self._has_adapters]
        self._adapter_bytes = held_bytes(moved, target, job.world.rank)
        sources = None if update is None else update.tensors(moved)
        self._rounded: dict[str, Tensor] = {}
        if sources is not None and job.recipe.actor.fp8 != "none":
            self._rounded = {name: torch.empty_like(each) for name, each in sources.items() if is_rounded(name)}
            sources = {**sources, **self._rounded}
        # Memory that others read in place cannot be freed during a rollout, nor behind it.
        is_freed = offloads_shards(job) or job.recipe.actor.fp8 != "none"
        self._resharder = Resharder(
            job.world,
            moved,
            source,
            target,
            source_tensors=sources,
            target_tensors=None if rollout is None else rollout.tensors(moved),
            transport="torch" if is_freed else job.recipe.actor.reshard,
        )
        release(self._rounded.values())

    def base_changed(self) -> None:
        """Mark the base weights below the adapters to be moved with the next ``refresh``."""
        self._is_base_current = False

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
        found: dict[str, float] = {}
        if self._has_adapters:
            found["reshard/adapter_bytes"] = self._adapter_bytes
            if not self._is_base_current:
                found["reshard/base_bytes"] = self._bring_base()
        self._round()
        stats = self._resharder.run()
        release(self._rounded.values())
        return {
            **found,
            "reshard/time_s": stats.time_s,
            "reshard/bytes": stats.received_bytes,
            "reshard/limit_bytes": stats.limit_bytes,
            "reshard/extra_bytes": self._own_bytes + stats.extra_bytes,
        }

    def _round(self) -> None:
        """Fill the rounded copies of the update's weights."""
        if not self._rounded:
            return
        assert self._update is not None, "rounded on a rank of the update"
        restore(self._rounded.values(), f"rank {self._job.world.rank}: rounded weights of actor.update")
        weights = self._update.tensors()
        for name, target in self._rounded.items():
            # The tensor may tell gate from up, or one group of heads from the next: the layer has rows and columns.
            rows = weights[name].flatten(0, -2)
            target.copy_(rounded(rows, self._job.recipe.actor.fp8).view(target.shape))

    def release(self) -> None:
        """Free what the update layout does not share, until ``refresh``; what lies below adapters stays."""
        release(self._own)

    def _bring_base(self) -> int:
        """Move the base weights, and return the bytes that came from other ranks."""
        resharder = Resharder(
            self._job.world,
            self._base,
            *self._holdings(self._base),
            source_tensors=None if self._update is None else self._update.tensors(self._base),
            target_tensors=None if self._rollout is None else self._rollout.tensors(self._base),
            # For a copy that is seldom made it does not pay to open the source's memory to the node.
            transport="torch",
        )
        self._is_base_current = True
        return resharder.run().received_bytes

    def _holdings(self, spec: ModelSpec) -> tuple[Holdings, Holdings]:
        meshes = self._job.meshes
        return weight_holdings(spec, meshes["actor.update"]), weight_holdings(spec, meshes["actor.rollout"])


def _lay_apart(transformer: nn.Module, left: Set[int]) -> None:
    """Give experts a storage each where that of all of a layer would keep the places of some that leave it.

    Args:
        transformer: Its weights have no contents yet.
        left: Which weights are to have another storage, by ``id``.
    """
    for stack in (stack for mixture in mixtures(transformer) for stack in mixture.stacks):
        stay = [weight for weight in stack if id(weight) not in left]
        for weight in stay if len(stay) < len(stack) else ():
            weight.data = torch.empty_like(weight)
