"""How messages travel between two ranks that both take part: torch.distributed, or MPI."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.parallel.failure import lost_contact
from hybridflow.parallel.world import World


class Leg(NamedTuple):
    """One end of a message.

    Attributes:
        peer: Global rank at the other end.
        data: ``[bytes]`` uint8, contiguous, on the transport's device.
        is_fixed: It stays where it is in memory as long as the transport.
    """

    peer: int
    data: Tensor
    is_fixed: bool


class Exchange(Protocol):
    """A message out, a message in, or both, to be carried again and again."""

    def start(self) -> None:
        """Begin; ``data`` of the sent is ready."""
        ...

    def wait(self) -> None:
        """Return when both are done. Raises DeadlineError: a peer did not come within the deadline."""
        ...


class Transport(Protocol):
    """Moves messages among a fixed set of ranks.

    Attributes:
        device: Where the data of its messages must be.
    """

    device: torch.device

    def prepare(self, send: Leg | None, receive: Leg | None) -> Exchange:
        """Prepare an exchange of at most one message each way; no communication yet."""
        ...


class TorchTransport:
    """Point to point over torch.distributed: NCCL for tensors on GPUs, gloo for those in host memory.

    Collective: all of ``ranks`` make it together.

    Args:
        world: The job; its group over ``ranks`` was made before.
        ranks: The ranks that may exchange.
        name: What is exchanged, in errors.
    """

    def __init__(self, world: World, ranks: tuple[int, ...], name: str) -> None:
        self.device = world.device
        self._group = world.group(ranks)
        self._deadline_s = world.deadline_s
        self._name = name
        if world.device.type == "cuda":
            # NCCL wants every rank of a group in its first operation, and an exchange need not concern all of them.
            dist.all_reduce(torch.zeros(1, device=world.device), group=self._group)

    def prepare(self, send: Leg | None, receive: Leg | None) -> Exchange:
        """See ``Transport.prepare``."""
        peers = _peers(send, receive)
        if self.device.type == "cpu":
            return _GlooExchange(self._group, send, receive, (self._name, peers, self._deadline_s))
        # Both in one group: NCCL carries them at once, where one after the other could wait in a circle.
        operations = [] if receive is None else [dist.P2POp(dist.irecv, receive.data, receive.peer, self._group)]
        operations += [] if send is None else [dist.P2POp(dist.isend, send.data, send.peer, self._group)]
        return _NcclExchange(operations, (self._name, peers, self._deadline_s))


_Contact = tuple[str, tuple[int, ...], float]
"""What ``lost_contact`` takes: name, peers, deadline."""


class _NcclExchange:
    def __init__(self, operations: list[Any], contact: _Contact) -> None:
        self._operations = operations
        self._contact = contact
        self._works: Sequence[Any] = ()

    def start(self) -> None:
        with lost_contact(*self._contact):
            self._works = dist.batch_isend_irecv(self._operations)

    def wait(self) -> None:
        _wait(self._works, self._contact)
        self._works = ()


class _GlooExchange:
    """By the group's own calls: what torch.distributed does around them costs as much as a small message."""

    def __init__(self, group: Any, send: Leg | None, receive: Leg | None, contact: _Contact) -> None:
        ends = ((group.recv, receive), (group.send, send))
        self._calls = [
            (call, [leg.data], dist.get_group_rank(group, leg.peer)) for call, leg in ends if leg is not None
        ]
        self._contact = contact
        self._works: Sequence[Any] = ()

    def start(self) -> None:
        with lost_contact(*self._contact):
            self._works = [call(data, peer, 0) for call, data, peer in self._calls]

    def wait(self) -> None:
        _wait(self._works, self._contact)
        self._works = ()


def _wait(works: Sequence[Any], contact: _Contact) -> None:
    with lost_contact(*contact):
        for work in works:
            work.wait(timedelta(seconds=contact[2]))


def mpi_device(world: World) -> torch.device:
    """Return where the data of MPI messages must be: host memory, unless the library takes a GPU's addresses."""
    from hybridflow.parallel.mpi import reads_gpu_memory

    return world.device if world.device.type == "cpu" or reads_gpu_memory() else torch.device("cpu")


class MpiTransport:
    """Point to point over MPI; staged in host memory where the library cannot read a GPU's.

    Collective: all of ``ranks`` make it together.

    Args:
        world: The job, which MPI started.
        ranks: The ranks that may exchange.
        name: What is exchanged, in errors.
    """

    def __init__(self, world: World, ranks: tuple[int, ...], name: str) -> None:
        self.device = mpi_device(world)
        self._link = world.mpi_link(ranks)
        self._name = name
        self._world_device = world.device

    def prepare(self, send: Leg | None, receive: Leg | None) -> Exchange:
        """See ``Transport.prepare``."""
        return _MpiExchange(self._link, send, receive, self._name, self._world_device)


class _MpiExchange:
    """Persistent requests for fixed buffers, new ones for tensors, which may move between runs."""

    def __init__(self, link: Any, send: Leg | None, receive: Leg | None, name: str, device: torch.device) -> None:
        self._link = link
        self._device = device
        self._contact = name, _peers(send, receive)
        ends = [(leg, is_send) for leg, is_send in ((receive, False), (send, True)) if leg is not None]
        self._moving = [(leg, is_send) for leg, is_send in ends if not leg.is_fixed]
        self._persistent = [link.prepare(leg.peer, _buffer(leg.data), is_send) for leg, is_send in ends if leg.is_fixed]
        self._requests: list[Any] = []

    def start(self) -> None:
        if self._device.type == "cuda":
            # MPI knows no streams.
            torch.cuda.current_stream(self._device).synchronize()
        for request in self._persistent:
            request.Start()
        started = [self._link.start(leg.peer, _buffer(leg.data), is_send) for leg, is_send in self._moving]
        self._requests = self._persistent + started

    def wait(self) -> None:
        self._link.wait(self._requests, *self._contact)
        self._requests = []


def _buffer(data: Tensor) -> Any:
    """Return the buffer in mpi4py's form: it reads a GPU's address from the tensor itself."""
    return data.numpy() if data.device.type == "cpu" else data


def _peers(*legs: Leg | None) -> tuple[int, ...]:
    return tuple(sorted({leg.peer for leg in legs if leg is not None}))
