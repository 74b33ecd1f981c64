"""A role's model that PyTorch FSDP shards: megatron-core's modules, or a user's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method

from hybridflow.config.roles import LoRAConfig, OptimizerConfig
from hybridflow.models.fsdp import FsdpTrainable, forward_in_step, freeze_buffers, shard_model
from hybridflow.models.layers import transformer_layers
from hybridflow.models.microbatch import MicroBatch
from hybridflow.models.specs import logical_parameters
from hybridflow.models.user_model import Uncut
from hybridflow.placement.placed_model import PlacedModel
from hybridflow.placement.user_model import UserModel


class _Sharded(PlacedModel):
    """This rank's part of a role's model under FSDP. It computes on its own samples, with layers gathered in turn.

    Attributes:
        output: Computes the outputs of the rows that a micro-batch asks for. Collective: all ranks of the mesh.
    """

    output: Callable[[MicroBatch], Tensor]

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
            world.device,
            settings,
        )

    def forward(self, parts: list[MicroBatch], compute: Callable[..., Any]) -> list[Any]:
        """Run forward passes as ``PlacedModel`` does. Collective: all ranks of the mesh."""
        group = self._world.group(self.mesh.ranks)
        with self.at_hand():
            return forward_in_step(self.transformer, self.output, group, parts, self._world.device, compute)


class FsdpModel(_Sharded):
    """A model of megatron-core's modules under FSDP."""

    def output(self, part: MicroBatch) -> Tensor:
        """Compute logits ``[rows, padded vocab]``, or values ``[rows, 1]``."""
        found: Tensor = self.megatron_model(part.tokens, part.attention, part.rows)
        return found


class FsdpUserModel(_Sharded, UserModel):
    """A module that no table describes, a user's own or one of ``transformers``, under FSDP."""

    def build(self, *, has_value_head: bool = False, lora: LoRAConfig | None = None) -> None:
        """Shard the module of a critic; of an actor, whose rollout takes the module itself, a copy.

        Collective: all ranks of the mesh.

        Raises:
            ConfigError: The module has no list of layers.
        """
        super().build(has_value_head=has_value_head, lora=lora)
        if self._role == "actor":
            self.module = copy.deepcopy(self.module)
            self.transformer = Uncut(self.module)
        freeze_buffers(self.transformer)
        layers = transformer_layers(self.module, self._name)
        if not self._job.is_resumed:
            # From here on no rank has all of a tensor.
            super()._initialize()
        shard_model(self.module, layers, self._world, self.mesh, in_host_memory=self._is_in_host_memory)
        if has_value_head:
            register_fsdp_forward_method(self.module, "values")

    def _initialize(self) -> None:
        """Do nothing: ``build`` has."""
