"""The critic: a value for each response token, learned from returns."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms.losses import Totals, aggregate, value_loss
from hybridflow.config.roles import CriticConfig as Settings
from hybridflow.dataflow.batch import Batch
from hybridflow.dataflow.role import Role
from hybridflow.models.microbatch import MicroBatch
from hybridflow.models.training import Trainable
from hybridflow.parallel.copies import to_device
from hybridflow.placement.job import Job
from hybridflow.placement.loss_mask import is_last_mini_batch, mini_batch
from hybridflow.placement.place import place_model
from hybridflow.placement.placed_model import role_spec
from hybridflow.reshard.memory import HostOffload

COLUMNS = {"critic": ("values", "returns"), "cost_critic": ("cost_values", "cost_returns")}
"""Role -> the columns of its values, and of what it learns."""


class Critic(Role):
    """The value model. The value of a response token is that of the state before it.

    Its role, ``critic`` or ``cost_critic``, says which section of the recipe it is, and which mesh.

    Attributes:
        model: Its weights; None on a rank outside its mesh.
        trainable: Gradients and optimizer of ``model``.
    """

    call_names = ("values", "update")

    def __init__(self, job: Job, role: str = "critic") -> None:
        self._settings: Settings = getattr(job.recipe, role)
        super().__init__()
        self.spec = role_spec(job, role, has_value_head=True)
        self._job = job
        self._role = role
        self._values, self._returns = COLUMNS[role]
        self.model = place_model(job, job.meshes[role], self.spec, has_value_head=True)
        self.trainable: Trainable | None = None
        if self.model is not None:
            self.trainable = self.model.make_trainable(self._settings.optimizer)
        self._offload: HostOffload | None = None
        if self.trainable is not None and self._settings.offload is True:
            self._offload = self.trainable.offload(f"rank {job.world.rank}: optimizer of {role}")

    def put_optimizer_away(self) -> None:
        """Move the optimizer's state to host memory, if it is to be there while the critic does not learn."""
        if self._offload is not None:
            self._offload.offload()

    def optimizer_at_hand(self) -> contextlib.AbstractContextManager[None]:
        """Hold the optimizer's state on its device inside the block."""
        return contextlib.nullcontext() if self._offload is None else self._offload.at_hand()

    def values(self, batch: Batch, decided: Mapping[str, Any]) -> Batch | None:
        """Compute ``values``, or ``cost_values``, before the update."""
        assert self.model is not None, "called outside its mesh"
        column = self.model.per_token(batch, self.model.values)
        return None if column is None else Batch(batch.ids, {self._values: column})

    def update(self, batch: Batch, decided: Mapping[str, Any]) -> None:
        """Take one optimizer step on one mini-batch, or none if no token counts. Collective: all ranks of the mesh."""
        assert self.model is not None, "called outside its mesh"
        turn = decided["critic_mini_batch"]
        part = mini_batch(self._job, batch, turn)
        if self._offload is not None:
            self._offload.restore()
        totals, is_last = self.model.totals(part), is_last_mini_batch(self._job, turn)
        if totals is None:
            self.model.settle()
        else:
            self._learn(part, totals, is_followed=not is_last)
        if is_last:
            self.put_optimizer_away()

    def _learn(self, part: Batch, totals: Totals, *, is_followed: bool) -> None:
        """Take an optimizer step. Collective: all ranks of the mesh."""
        assert self.model is not None and self.trainable is not None, "called outside its mesh"
        results = self.trainable.accumulate(
            self.model.micro_batches(part), lambda output, micro_batch: self._loss(output, micro_batch, part, totals)
        )
        grad_norm = self.trainable.step(is_followed=is_followed)
        if self.model.is_output_rank:
            loss, clipped = self.model.add_up(results, 2)
            told = {f"{self._role}/loss": loss, f"{self._role}/clip_share": clipped}
            self.metrics.add_update(self._role, grad_norm, told)

    def _loss(self, output: Tensor, micro_batch: MicroBatch, part: Batch, totals: Totals) -> tuple[Tensor, Tensor]:
        assert self.model is not None, "called outside its mesh"
        values, samples = micro_batch.pad(self.model.values(output, micro_batch)), torch.tensor(micro_batch.samples)
        mask, old, returns = (
            to_device(part.ragged(name).select(samples).pad(0), output.device)
            for name in ("response_mask", self._values, self._returns)
        )
        per_token = value_loss(values, old, returns, value_clip=self._settings.value_clip)
        # The factor 0.5 of the definition is inside value_loss.
        loss = aggregate(per_token, mask, "token-mean", totals)
        is_clipped = per_token.detach() > 0.5 * (values.detach() - returns).square()
        clipped = (is_clipped & (mask > 0)).sum() / totals.num_tokens
        return loss, torch.stack([loss.detach(), clipped])
