"""A role's model that PyTorch FSDP shards: megatron-core's modules, or a user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hybridflow.config.roles import OptimizerConfig
from hybridflow.models.fsdp import FsdpTrainable, forward_in_step
from hybridflow.models.microbatch import MicroBatch
from hybridflow.models.specs import logical_parameters
from hybridflow.placement.placed_model import PlacedModel


class FsdpModel(PlacedModel):
    """This rank's part of a role's model under FSDP. It computes on its own samples, with layers gathered in turn."""

    def make_trainable(self, settings: OptimizerConfig) -> Any:
        """Make gradients and an optimizer for this rank's part, as ``PlacedModel`` does."""
        assert self.transformer is not None, "called within its mesh"
        world, mesh = self._world, self.mesh
        return FsdpTrainable(
            self.transformer,
            logical_parameters(self.transformer),
            self.output,
            world.group(mesh.ranks),
            world.group(mesh.shard_ranks(world.rank)),
            settings,
        )

    def forward(self, parts: list[MicroBatch], compute: Callable[..., Any]) -> list[Any]:
        """Run forward passes as ``PlacedModel`` does. Collective: all ranks of the mesh."""
        group = self._world.group(self.mesh.ranks)
        with self.at_hand():
            return forward_in_step(self.transformer, self.output, group, parts, self._world.device, compute)

    def output(self, part: MicroBatch) -> Tensor:
        """Compute logits ``[rows, padded vocab]``, or values ``[rows, 1]``, of the rows that a micro-batch asks for."""
        found: Tensor = self.megatron_model(part.tokens, part.attention, part.rows)
        return found
