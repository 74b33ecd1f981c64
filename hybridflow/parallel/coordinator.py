"""Small messages among the ranks of a mesh: decisions, gathered facts, columns.

They go over MPI when MPI started the job, else over gloo.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from hybridflow.errors import HybridflowError
from hybridflow.exit_status import pack_error, unpack_error
from hybridflow.parallel.failure import lost_contact

_FIRST_FRAME_BYTES = 2048
_LARGEST_FRAME_BYTES = 1 << 17
"""A message that fits the frame travels in one collective, a longer one in two.

All ranks see each size, so all make the frame larger together, up to this.
"""


class Messenger(Protocol):
    """Byte messages among a fixed set of ranks; what a coordinator is built on."""

    def broadcast(self, payload: bytes | None, name: str) -> bytes:
        """Return the lowest rank's bytes on every rank."""

    def gather(self, payload: bytes, name: str) -> list[bytes]:
        """Return every rank's bytes, in rank order, on every rank."""

    def exchange(self, sends: dict[int, np.ndarray], receives: dict[int, np.ndarray], name: str) -> None:
        """Exchange point-to-point arrays of known sizes, all posted at once."""


@dataclass(eq=False)
class GlooMessenger:
    """Byte messages among the ranks of a gloo process group."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    deadline_s: float
    _broadcast_frame_bytes: int = _FIRST_FRAME_BYTES
    _gather_frame_bytes: int = _FIRST_FRAME_BYTES

    def broadcast(self, payload: bytes | None, name: str) -> bytes:
        """Return the lowest rank's bytes on every rank. Raises DeadlineError when a rank does not come."""
        root = self.ranks[0]
        frame = _frame(payload, self._broadcast_frame_bytes)
        with lost_contact(name, self.ranks, self.deadline_s):
            dist.broadcast(frame, src=root, group=self.group)
            size = _size(frame)
            if size > self._broadcast_frame_bytes:
                self._broadcast_frame_bytes = _larger(size)
                frame = _frame(payload, size)
                dist.broadcast(frame, src=root, group=self.group)
        return _content(frame)

    def gather(self, payload: bytes, name: str) -> list[bytes]:
        """Return every rank's bytes, in rank order, on every rank. Raises DeadlineError when a rank does not come."""
        with lost_contact(name, self.ranks, self.deadline_s):
            frames = self._gather(payload, self._gather_frame_bytes)
            largest = max(map(_size, frames))
            if largest > self._gather_frame_bytes:
                self._gather_frame_bytes = _larger(largest)
                frames = self._gather(payload, largest)
        return [_content(frame) for frame in frames]

    def _gather(self, payload: bytes, num_bytes: int) -> list[torch.Tensor]:
        frame = _frame(payload, num_bytes)
        frames = torch.empty(len(self.ranks), len(frame), dtype=torch.uint8)
        # From each to all at once: gloo's own all-gather passes frames on from rank to rank, which takes longer.
        dist.all_to_all_single(frames, frame.expand(len(self.ranks), -1).contiguous(), group=self.group)
        return list(frames)

    def exchange(self, sends: dict[int, np.ndarray], receives: dict[int, np.ndarray], name: str) -> None:
        """Exchange point-to-point arrays of known sizes, all posted at once. Raises DeadlineError if one is missing."""
        with lost_contact(name, self.ranks, self.deadline_s):
            works = [
                dist.irecv(torch.from_numpy(array), src=rank, group=self.group) for rank, array in receives.items()
            ]
            works += [dist.isend(torch.from_numpy(array), dst=rank, group=self.group) for rank, array in sends.items()]
            for work in works:
                assert work is not None, "this rank is not in the group"
                work.wait(timedelta(seconds=self.deadline_s))


class Coordinator:
    """Decisions and gathered facts among the ranks of a mesh.

    Each method is collective over the coordinator's ranks, takes JSON values (or tensors in host memory), and raises
    ``DeadlineError`` with its name when a rank does not come within the deadline.
    """

    def __init__(self, rank: int, ranks: tuple[int, ...], messenger: Messenger | None) -> None:
        assert rank in ranks, f"rank {rank} does not belong to this coordinator's ranks {ranks}"
        assert messenger is not None or len(ranks) == 1, "several ranks need a messenger"
        self.rank = rank
        self.ranks = ranks
        self._messenger = messenger

    @property
    def is_lead(self) -> bool:
        """Return whether this rank takes the decisions: the first of the ranks."""
        return self.rank == self.ranks[0]

    def decide(self, name: str, value: Any) -> Any:
        """Return the lead's JSON value on every rank; the values of the others are not read."""
        if self._messenger is None:
            return value
        payload = json.dumps(value).encode() if self.is_lead else None
        return json.loads(self._messenger.broadcast(payload, name))

    def on_lead(self, name: str, work: Callable[[], Any]) -> Any:
        """Return on every rank what ``work`` gives on the lead, in JSON; an error there is raised on every rank.

        Raises:
            HybridflowError: As ``work`` raised it.
            OSError: The file system refuses; with the same errno.
        """
        told = None
        if self.is_lead:
            try:
                told = [work(), None]
            except (HybridflowError, OSError) as error:
                told = [None, pack_error(error)]
        value, refusal = self.decide(name, told)
        if refusal is not None:
            raise unpack_error(*refusal)
        return value

    def gather(self, value: Any, name: str = "gather") -> list[Any]:
        """Return every rank's JSON value, in the order of ``ranks``, on every rank."""
        if self._messenger is None:
            return [value]
        return [json.loads(payload) for payload in self._messenger.gather(json.dumps(value).encode(), name)]

    def barrier(self, name: str) -> None:
        """Return when every rank has come."""
        self.gather(None, name)

    def exchange(
        self, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor], name: str = "exchange"
    ) -> None:
        """Send contiguous host tensors to ranks and fill others from ranks; both sides know the sizes.

        Args:
            sends: Destination rank -> tensor of bytes, ``[bytes]`` uint8.
            receives: Source rank -> tensor to fill, ``[bytes]`` uint8.
            name: What the wait is for, in errors.
        """
        if self._messenger is None:
            assert not sends and not receives, "a single rank has nobody to exchange with"
            return
        self._messenger.exchange(
            {rank: tensor.numpy() for rank, tensor in sends.items()},
            {rank: tensor.numpy() for rank, tensor in receives.items()},
            name,
        )


def _frame(payload: bytes | None, num_bytes: int) -> torch.Tensor:
    """Return the size of a payload, and the payload itself if it fits, ``[8 + num_bytes]`` uint8; zeros for None."""
    frame = np.zeros(8 + num_bytes, dtype=np.uint8)
    if payload is not None:
        frame[:8] = np.frombuffer(len(payload).to_bytes(8, "little"), dtype=np.uint8)
        if len(payload) <= num_bytes:
            frame[8 : 8 + len(payload)] = np.frombuffer(payload, dtype=np.uint8)
    return torch.from_numpy(frame)


def _size(frame: torch.Tensor) -> int:
    return int.from_bytes(frame[:8].numpy().tobytes(), "little")


def _content(frame: torch.Tensor) -> bytes:
    return frame[8 : 8 + _size(frame)].numpy().tobytes()


def _larger(num_bytes: int) -> int:
    """Return the next frame: the smallest power of two that holds such a message, within bounds."""
    return min(1 << (num_bytes - 1).bit_length(), _LARGEST_FRAME_BYTES)
