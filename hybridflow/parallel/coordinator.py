"""Small messages among the ranks of a mesh: decisions, gathered facts, columns. Over MPI when MPI started the job, else gloo."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from hybridflow.errors import DeadlineError

_INLINE_BYTES = 2048
"""A message up to this size travels in one collective; a longer one in two."""


class Messenger(Protocol):
    """Byte messages among a fixed set of ranks; what a coordinator is built on."""

    def broadcast(self, payload: bytes | None, name: str) -> bytes: ...

    def gather(self, payload: bytes, name: str) -> list[bytes]: ...

    def exchange(self, sends: dict[int, np.ndarray], receives: dict[int, np.ndarray], name: str) -> None: ...


class GlooMessenger:
    """Byte messages among the ranks of a gloo process group."""

    def __init__(self, group: dist.ProcessGroup, ranks: tuple[int, ...], deadline_s: float) -> None:
        self._group = group
        self._ranks = ranks
        self._deadline_s = deadline_s

    def broadcast(self, payload: bytes | None, name: str) -> bytes:
        """The lowest rank's bytes on every rank. Raises DeadlineError when a rank does not come."""
        root = self._ranks[0]
        frame = torch.zeros(8 + _INLINE_BYTES, dtype=torch.uint8)
        if payload is not None:
            _fill(frame, payload)
        with _lost(name, self._ranks, self._deadline_s):
            dist.broadcast(frame, src=root, group=self._group)
            size = _size(frame)
            if size <= _INLINE_BYTES:
                return frame[8 : 8 + size].numpy().tobytes()
            rest = torch.empty(size, dtype=torch.uint8)
            if payload is not None:
                rest.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
            dist.broadcast(rest, src=root, group=self._group)
        return rest.numpy().tobytes()

    def gather(self, payload: bytes, name: str) -> list[bytes]:
        """Every rank's bytes, in rank order, on every rank. Raises DeadlineError when a rank does not come."""
        frame = torch.zeros(8 + _INLINE_BYTES, dtype=torch.uint8)
        _fill(frame, payload)
        frames = [torch.empty_like(frame) for _ in self._ranks]
        with _lost(name, self._ranks, self._deadline_s):
            dist.all_gather(frames, frame, group=self._group)
            sizes = [_size(each) for each in frames]
            if max(sizes) <= _INLINE_BYTES:
                return [each[8 : 8 + size].numpy().tobytes() for each, size in zip(frames, sizes, strict=True)]
            mine = torch.zeros(max(sizes), dtype=torch.uint8)
            mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            whole = [torch.empty_like(mine) for _ in self._ranks]
            dist.all_gather(whole, mine, group=self._group)
        return [each[:size].numpy().tobytes() for each, size in zip(whole, sizes, strict=True)]

    def exchange(self, sends: dict[int, np.ndarray], receives: dict[int, np.ndarray], name: str) -> None:
        """Point-to-point arrays of known sizes, all posted at once. Raises DeadlineError when one does not come."""
        with _lost(name, self._ranks, self._deadline_s):
            works = [
                dist.irecv(torch.from_numpy(array), src=rank, group=self._group) for rank, array in receives.items()
            ]
            works += [dist.isend(torch.from_numpy(array), dst=rank, group=self._group) for rank, array in sends.items()]
            for work in works:
                assert work is not None, "this rank is not in the group"
                work.wait(timedelta(seconds=self._deadline_s))


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
        """Whether this is the rank that takes the decisions: the first of the ranks."""
        return self.rank == self.ranks[0]

    def decide(self, name: str, value: Any) -> Any:
        """The lead's JSON value on every rank; what the others pass is not read."""
        if self._messenger is None:
            return value
        payload = json.dumps(value).encode() if self.is_lead else None
        return json.loads(self._messenger.broadcast(payload, name))

    def gather(self, value: Any, name: str = "gather") -> list[Any]:
        """Every rank's JSON value, in the order of ``ranks``, on every rank."""
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


def _fill(frame: torch.Tensor, payload: bytes) -> None:
    """Write the size, and the payload when it fits, into a frame."""
    frame[:8] = torch.frombuffer(bytearray(len(payload).to_bytes(8, "little")), dtype=torch.uint8)
    if 0 < len(payload) <= _INLINE_BYTES:
        frame[8 : 8 + len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)


def _size(frame: torch.Tensor) -> int:
    return int.from_bytes(frame[:8].numpy().tobytes(), "little")


class _lost:
    """Turn gloo's RuntimeError about a missing peer into a DeadlineError that says what was being done."""

    def __init__(self, name: str, ranks: tuple[int, ...], deadline_s: float) -> None:
        self._message = (
            f"{name}: lost contact with some of ranks {list(ranks)} (deadline {deadline_s:g} s); look for a rank that failed "
            "earlier, or raise cluster.deadline_s if one is only slow"
        )

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise DeadlineError(f"{self._message}: {str(error).splitlines()[0]}") from error
