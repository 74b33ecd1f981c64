"""A user's own module in training: gradients summed over its replicas, and AdamW in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.config.roles import OptimizerConfig
from hybridflow.models.adam import Adam
from hybridflow.models.microbatch import MicroBatch
from hybridflow.models.training import LossFunction
from hybridflow.models.user_model import Uncut


class UserTrainable(Adam):
    """One replica of a module in training, with what ``training.Trainable`` has.

    Optimizer state is not cut over the replicas, whatever ``optimizer.distributed`` says.

    Args:
        model: The module.
        output: What it gives for the rows of a micro-batch.
        group: Its replicas' ranks.
        settings: How it learns.

    Attributes:
        model: The module.
    """

    def __init__(
        self,
        model: Uncut,
        output: Callable[[MicroBatch], Tensor],
        group: dist.ProcessGroup,
        settings: OptimizerConfig,
    ) -> None:
        self.model = model
        self._output, self._group = output, group
        super().__init__(dict(model.module.named_parameters()), settings)

    @torch.enable_grad()
    def accumulate(self, micro_batches: list[MicroBatch], loss: LossFunction) -> list[Any]:
        """Run forward and backward over this rank's micro-batches; gradients are summed over the replicas at the end.

        Collective: dp. A replica without samples passes no micro-batch and still takes part.

        Returns:
            What ``loss`` gave beside the loss for each micro-batch.
        """
        self._gradients.zero_()
        self.model.train()
        kept = []
        for micro_batch in micro_batches:
            share, found = loss(self._output(micro_batch), micro_batch)
            share.backward()
            self.take_gradients()
            kept.append(found)
        self.model.eval()
        if self._group.size() > 1:
            dist.all_reduce(self._gradients, group=self._group)
        return kept
