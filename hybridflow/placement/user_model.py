"""A user's own module in the place of a role's model: whole on each rank, asked on padded batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridflow.config.roles import LoRAConfig, OptimizerConfig
from hybridflow.models.adapters import is_factor
from hybridflow.models.hf_adapters import restart_adapters
from hybridflow.models.lora import actor_of
from hybridflow.models.microbatch import MicroBatch
from hybridflow.models.user_model import Uncut, ask_logits, ask_values
from hybridflow.models.user_training import UserTrainable
from hybridflow.parallel.copies import to_device
from hybridflow.placement.placed_model import PlacedModel
from hybridflow.placement.user_objects import user_class_of


class UserModel(PlacedModel):
    """A user's module as a role's model. All replicas begin as that of the mesh's first rank.

    An actor, and an actor's reference, is asked by ``forward``, a critic by ``values``; rows of a micro-batch are
    picked from what they give for all its tokens.

    Attributes:
        module: The user's; of a reference a copy.
    """

    transformer: Uncut

    def build(self, *, has_value_head: bool = False, lora: LoRAConfig | None = None) -> None:
        """Take the module; of a reference that stays what the actor was, a copy."""
        given = user_class_of(self._job, self._role)
        assert given is not None, "an own model is placed where one was given"
        # A reference that stays what the actor was must not be the very object that learns.
        is_shared = self._role != "actor" and given is user_class_of(self._job, "actor")
        self.module: nn.Module = copy.deepcopy(given) if is_shared else given
        if is_shared:
            self.module.zero_grad(set_to_none=True)
        self._has_values = has_value_head
        self._name = f"{self._role}: {type(given).__name__}"
        self.module.to(self._world.device).eval()
        self.transformer = Uncut(self.module)
        for _, tensor in self.transformer.tensors():
            # What lies in a mapped file cannot be freed between two phases.
            if not tensor.untyped_storage().resizable():
                tensor.data = tensor.detach().clone()

    @torch.no_grad()
    def _initialize(self) -> None:
        if self.groups.dp.size() > 1:
            first = dist.get_global_rank(self.groups.dp, 0)
            for _, tensor in self.transformer.tensors():
                dist.broadcast(tensor.data, first, group=self.groups.dp)

    def initialize(self, names: Collection[str] | None = None, variant: int = 0) -> None:
        """Set the adapters' factors anew, as ``ModelOnMesh`` does: the rest of a module is never set here."""
        assert names is not None and all(map(is_factor, names)), "asked for adapters alone"
        restart_adapters(actor_of(self.transformer), seed=self._seed, variant=variant)

    def make_trainable(self, settings: OptimizerConfig) -> Any:
        """Make gradients and an optimizer for the model, as ``PlacedModel`` does."""
        return UserTrainable(self.transformer, self.output, self.groups.dp, settings)

    @property
    def is_output_rank(self) -> bool:
        """Return whether this rank has the model's outputs: each has."""
        return True

    def load_given(self) -> None:
        """Do nothing: the module has the weights that it was given with."""

    @torch.no_grad()
    def forward(self, parts: list[MicroBatch], compute: Callable[..., Any]) -> list[Any]:
        """Run forward passes as ``PlacedModel`` does; no rank waits for another."""
        with self.at_hand():
            return [compute(self.output(part), part) for part in parts]

    def output(self, part: MicroBatch) -> Tensor:
        """Compute logits ``[rows, vocab]``, or values ``[rows, 1]``, of the rows that a micro-batch asks for.

        Raises:
            ConfigError: The module gave something of another shape.
        """
        samples = torch.repeat_interleave(torch.arange(len(part.places)), torch.tensor(part.lengths))
        within = torch.cat([torch.arange(length) for length in part.lengths])
        where = to_device(torch.stack([samples, within, torch.cat(part.places)]), part.tokens.device)
        (sample, place, token), shape = where, (len(part.places), max(part.lengths))
        ids = part.tokens.new_zeros(shape).index_put((sample, place), part.tokens[token])
        mask = part.tokens.new_zeros(shape).index_put((sample, place), torch.ones_like(token))
        # A prompt that several samples share is read in the last of them.
        sample_of = torch.zeros_like(part.tokens).scatter_reduce(0, token, sample, "amax")
        place_of = torch.zeros_like(part.tokens).scatter_reduce(0, token, place, "amax")
        if self._has_values:
            found = ask_values(self.module, ids, mask, name=self._name)[:, :, None]
        else:
            found = ask_logits(self.module, ids, vocab_size=self.vocab_size, name=self._name)
        return found[sample_of[part.rows], place_of[part.rows]]
