"""Room for tensors: freed between phases, kept in host memory meanwhile, and asked for again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from hybridflow.errors import ReshardError

_LEAST_BLOCK_BYTES = 1 << 20


@contextlib.contextmanager
def room_for(num_bytes: int, device: torch.device, owner: str) -> Iterator[None]:
    """Turn an allocation that fails into an error that names who wanted how much.

    Args:
        num_bytes: What is being allocated.
        device: Where.
        owner: Which rank wants it for what, in the error.

    Raises:
        ReshardError: There is no room.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # Torch has a class for a full GPU only.
        is_full = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
            words in str(error) for words in ("allocate memory", "out of memory")
        )
        if not is_full:
            raise
        raise ReshardError(
            f"{owner}: no room for {num_bytes} bytes on {device}; cut the target layout into smaller shards (a larger "
            "tp or pp), put fewer ranks on a node, or free what the phase does not need"
        ) from error


def release(tensors: Iterable[Tensor]) -> int:
    """Free the storages of tensors; the tensors stay, without contents, until ``restore``.

    Args:
        tensors: Nobody may read or write them, or a view of them, before they are restored.

    Returns:
        Bytes freed.

    Raises:
        ReshardError: A storage in host memory is shared with other processes; nothing was freed. On a GPU it cannot be
            told: there, release nothing that a Resharder has as its source.
    """
    storages = [storage for storage, _ in _storages(tensors)]
    # On a GPU every storage says that it is shared.
    if any(storage.device.type == "cpu" and storage.is_shared() for storage in storages):
        raise ReshardError(
            "cannot free tensors that other processes read in place; release only what no Resharder has as its source"
        )
    freed = sum(storage.nbytes() for storage in storages)
    for storage in storages:
        storage.resize_(0)
    return freed


def restore(tensors: Iterable[Tensor], owner: str) -> None:
    """Give released tensors their storages back, of undefined contents; others stay as they are.

    Args:
        tensors: The tensors that were given to ``release``.
        owner: Which rank wants them for what, in the error.

    Raises:
        ReshardError: There is no room; what was restored before is released again.
    """
    _grow([(storage, extent) for storage, extent in _storages(tensors) if storage.nbytes() == 0], owner)


def give_back(device: torch.device) -> None:
    """Give a GPU back what torch holds unused, so that the next phase finds it in one piece; on a CPU do nothing."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


class HostOffload:
    """Tensors that spend a phase in host memory, to make room on the device: optimizer state, frozen weights.

    Whole storages move, so that views which tensors share stay shared. The host memory is pinned where the device is a
    GPU, allocated once in few blocks, and kept.

    Args:
        tensors: What is to be kept.
        zeroed: What need not be: it comes back as zeros.
        owner: Which rank has them for what, in errors.
    """

    def __init__(self, tensors: Iterable[Tensor], *, zeroed: Iterable[Tensor] = (), owner: str) -> None:
        self._kept = list(tensors)
        self._zeroed = list(zeroed)
        self._owner = owner
        self._host: list[Tensor] = []
        self._away: list[tuple[torch.UntypedStorage, int]] = []

    @property
    def is_away(self) -> bool:
        """Return whether the tensors are in host memory."""
        return bool(self._away)

    def offload(self, *, is_unchanged: bool = False) -> int:
        """Move the tensors to host memory.

        Args:
            is_unchanged: Nobody has written to them since they were there the last time, so nothing need be copied.

        Returns:
            Bytes freed on the device.

        Raises:
            ReshardError: The host has no room; everything is still on the device.
        """
        if self._away:
            return 0
        storages = [storage for storage, _ in _storages(self._kept)]
        is_gpu = any(storage.device.type == "cuda" for storage in storages)
        if not self._host:
            num_bytes = sum(storage.nbytes() for storage in storages)
            with room_for(num_bytes, torch.device("cpu"), self._owner):
                self._host = [torch.empty(each, dtype=torch.uint8, pin_memory=is_gpu) for each in blocks(num_bytes)]
            is_unchanged = False
        if not is_unchanged:
            for on_device, on_host in self._pairs(storages):
                on_host.copy_(on_device, non_blocking=True)
        wait_for_copies(storages)
        away = [(storage, storage.nbytes()) for storage, _ in _storages(self._kept + self._zeroed)]
        freed = release(self._kept + self._zeroed)
        self._away = away
        return freed

    def _pairs(self, storages: Iterable[torch.UntypedStorage]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the storages piece by piece, each piece with its place in host memory."""
        host = iter(self._host)
        room = next(host, torch.empty(0, dtype=torch.uint8))
        for storage in storages:
            rest = _bytes(storage)
            while len(rest):
                room = room if len(room) else next(host)
                size = min(len(rest), len(room))
                yield rest[:size], room[:size]
                rest, room = rest[size:], room[size:]

    def restore(self) -> None:
        """Move them back.

        Raises:
            ReshardError: The device has no room; everything is still in host memory.
        """
        if not self._away:
            return
        _grow(self._away, self._owner)
        for storage, _ in _storages(self._zeroed):
            _bytes(storage).zero_()
        for on_device, on_host in self._pairs(storage for storage, _ in _storages(self._kept)):
            on_device.copy_(on_host, non_blocking=True)
        self._away = []

    @contextlib.contextmanager
    def at_hand(self, *, is_written: bool = True) -> Iterator[None]:
        """Bring the tensors to the device for the duration, if they are away.

        Args:
            is_written: They are changed within.

        Raises:
            ReshardError: The device has no room.
        """
        is_away = self.is_away
        self.restore()
        try:
            yield
        finally:
            if is_away:
                self.offload(is_unchanged=not is_written)


def wait_for_copies(storages: Iterable[torch.UntypedStorage]) -> None:
    """Wait until copies that were begun on the storages' devices are done."""
    if any(storage.device.type == "cuda" for storage in storages):
        torch.cuda.current_stream().synchronize()


def blocks(num_bytes: int) -> list[int]:
    """Cut memory into blocks of a power of two each, to which torch rounds pinned memory up: it then wastes little.

    Returns:
        Bytes of each block, the largest first; together the bytes wanted, and less than 1 MiB more.
    """
    rest, found = -(-num_bytes // _LEAST_BLOCK_BYTES) * _LEAST_BLOCK_BYTES, []
    while rest:
        found.append(1 << rest.bit_length() - 1)
        rest -= found[-1]
    return found


def _grow(storages: list[tuple[torch.UntypedStorage, int]], owner: str) -> None:
    """Give storages these bytes, or none of them any."""
    try:
        for storage, num_bytes in storages:
            with room_for(sum(num_bytes for _, num_bytes in storages), storage.device, owner):
                storage.resize_(num_bytes)
    except ReshardError:
        for storage, _ in storages:
            storage.resize_(0)
        raise


def _storages(tensors: Iterable[Tensor]) -> list[tuple[torch.UntypedStorage, int]]:
    """Return each storage once, with the number of its bytes that the tensors reach."""
    found: dict[int, tuple[torch.UntypedStorage, int]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        extent = int(tensor.storage_offset() + reach) * tensor.element_size() if tensor.numel() else 0
        found[storage._cdata] = storage, max(extent, found.get(storage._cdata, (storage, 0))[1])
    return list(found.values())


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
