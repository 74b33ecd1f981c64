"""How packed bytes travel between ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.parallel.failure import lost_contact
from hybridflow.parallel.world import World


class Transport(Protocol):
    """Moves packed buffers among a fixed set of ranks."""

    def exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> None:
        """Send and fill buffers; returns when this rank's are all done.

        Args:
            sends: Destination rank -> ``[bytes]`` uint8, contiguous.
            receives: Source rank -> ``[bytes]`` uint8, contiguous, of the size that the source sends.

        Raises:
            DeadlineError: A peer did not come within the deadline.
        """
        ...


class TorchTransport:
    """Point to point over torch.distributed: NCCL for buffers on GPUs, gloo for those in host memory.

    Collective: all of ``ranks`` make it together.

    Args:
        world: The job; its group over ``ranks`` was made before.
        ranks: Who may exchange.
        name: What is exchanged, in errors.
    """

    def __init__(self, world: World, ranks: tuple[int, ...], name: str) -> None:
        self._group = world.group(ranks)
        self._deadline_s = world.deadline_s
        self._name = name
        self._ranks = ranks
        if world.device.type == "cuda":
            # NCCL wants every rank of a group in its first operation, and an exchange need not concern all of them.
            dist.all_reduce(torch.zeros(1, device=world.device), group=self._group)

    def exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> None:
        """See ``Transport.exchange``."""
        operations = [dist.P2POp(dist.irecv, buffer, rank, self._group) for rank, buffer in receives.items()]
        operations += [dist.P2POp(dist.isend, buffer, rank, self._group) for rank, buffer in sends.items()]
        if not operations:
            return
        with lost_contact(self._name, self._ranks, self._deadline_s):
            for work in dist.batch_isend_irecv(operations):
                work.wait(timedelta(seconds=self._deadline_s))
