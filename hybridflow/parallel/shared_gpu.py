"""Process groups for ranks that share a GPU, for tests: NCCL refuses them, so gloo carries copies in host memory.

gloo alone takes tensors on GPUs in some operations only, and reads their addresses as the host's in others.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "hybridflow_shared_gpu"

_NAMES = {
    **{name: name for name in ("broadcast", "allreduce", "allreduce_coalesced", "reduce", "allgather", "gather")},
    **{name: name for name in ("scatter", "reduce_scatter", "alltoall", "send", "recv", "recv_anysource", "barrier")},
    # Under the names that torch called them by until 2.12, and from then on.
    "_allgather_base": "_allgather_base",
    "all_gather_single": "_allgather_base",
    "_reduce_scatter_base": "_reduce_scatter_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "alltoall_base": "alltoall_base",
    "all_to_all_single": "alltoall_base",
}
"""What torch.distributed calls of a group -> what gloo calls it."""

_COALESCED = {
    "allgather_into_tensor_coalesced": "_allgather_base",
    "all_gather_single_coalesced": "_allgather_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "_reduce_scatter_base",
}
"""Likewise, of several tensors at once."""


def register() -> str:
    """Make the backend known to torch; return its name for ``init_process_group``."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, SharedGpuGroup, devices=["cpu", "cuda"])
    return f"cpu:{BACKEND},cuda:{BACKEND}"


class SharedGpuGroup(dist.ProcessGroup):
    """A gloo group whose operations take tensors on GPUs by way of host memory.

    Args:
        store: Where the group's ranks meet.
        rank: This rank's place in the group.
        size: Ranks of the group.
        timeout: Longest wait for another rank.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the form for groups in Python
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo

    def _run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run an operation of gloo; what it writes is its first argument."""
        written: list[tuple[Tensor, Tensor]] = []
        read: list[tuple[Tensor, Tensor]] = []
        staged = [_staged(each, read if place or name == "send" else written) for place, each in enumerate(args)]
        work = getattr(self._gloo, name)(*staged, **kwargs)
        return _Work([work], written) if written or read else work


def _operation(name: str) -> Callable[..., Any]:
    def run(self: SharedGpuGroup, *args: Any, **kwargs: Any) -> Any:
        return self._run(name, *args, **kwargs)

    return run


def _operations(name: str) -> Callable[..., Any]:
    def run(self: SharedGpuGroup, outputs: list[Tensor], inputs: list[Tensor], *options: Any) -> Any:
        return _Work([self._run(name, *pair, *options) for pair in zip(outputs, inputs, strict=True)], [])

    return run


for _called, _name in _NAMES.items():
    setattr(SharedGpuGroup, _called, _operation(_name))
for _called, _name in _COALESCED.items():
    setattr(SharedGpuGroup, _called, _operations(_name))


class _Work(dist._Work):
    """Operations under way; who waits for them finds the results on the GPU.

    Args:
        works: The operations.
        written: Tensors on the GPU, and the copies that the operations write.
    """

    def __init__(self, works: list[Any], written: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._works, self._written = works, written

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait, and copy what was received."""
        waits = [work.wait() if timeout is None else work.wait(timeout) for work in self._works]
        while self._written:
            target, source = self._written.pop()
            target.detach().copy_(source)
        return all(waits)

    def is_completed(self) -> bool:
        """Return whether they are over; if so, the results are there."""
        return all(work.is_completed() for work in self._works) and self.wait()


def _is_staged(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def _staged(value: Any, pairs: list[tuple[Tensor, Tensor]]) -> Any:
    """Return a value with copies in host memory of the tensors in it, and take up both of each."""
    if isinstance(value, (list, tuple)):
        return [_staged(each, pairs) for each in value]
    if not isinstance(value, Tensor) or not _is_staged(value):
        return value
    copy = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    pairs.append((value, copy))
    return copy
