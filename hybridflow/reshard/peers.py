"""Tensors of other processes of a node, read where they are.

A rank opens the storages of its tensors to the node, once: as shared memory on a CPU, by CUDA IPC on a GPU. What it
opens is described in a file in memory that others reach as ``/proc/<pid>/fd/<fd>``, which the kernel allows to
processes of the same user that see each other; so nothing has a name in a file system, and all is gone with the
process, however it ends. A number drawn for the purpose tells that the file is not of another container's process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import secrets
import select
import stat
import struct
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from hybridflow.errors import DeadlineError, ReshardError
from hybridflow.parallel.world import World

Signal = Literal["ready", "done"]

_SIGNALS: tuple[Signal, ...] = ("ready", "done")
_RECORD = struct.Struct("<ib")
_RECORDS_AT_ONCE = 512
_SHARED_MEMORY = "/dev/shm"
_SPARE_FILES = 256
_DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


def bytes_to_move(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that opening these tensors adds to shared memory: those of storages that are not there yet."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(
        storage.nbytes() for storage in storages.values() if storage.device.type == "cpu" and not storage.is_shared()
    )


def room_to_share() -> int:
    """Free bytes of shared memory on this node, which a container may limit far below its memory."""
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


class NodePeers:
    """This rank's tensors opened to the other ranks of its node, theirs to it, and signals between them.

    A storage in host memory is moved into shared memory, where all tensors that are views of it see it; addresses taken
    before, such as those in numpy arrays, are void.

    Args:
        world: The job.
        tensors: What others may read, by name; not to be resized as long as they may.
        name: What the wait is for, in errors.

    Raises:
        OSError, RuntimeError: The system does not allow it.
        ReshardError: Memory of this kind cannot be opened.
    """

    def __init__(self, world: World, tensors: Mapping[str, Tensor], name: str) -> None:
        self._rank = world.rank
        self._device = world.device
        self._deadline_s = world.deadline_s
        self._name = name
        self._signals = Counter[tuple[int, Signal]]()
        self._inboxes: dict[int, int] = {}
        self._processes: dict[int, int] = {}
        self._files = contextlib.ExitStack()
        weakref.finalize(self, self._files.close)
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors.values()}
        _check_system(len(storages))
        places = {key: place for place, key in enumerate(storages)}
        self._inbox, inbox = os.pipe()
        description = os.memfd_create("hybridflow")
        for file in (self._inbox, inbox, description):
            self._files.callback(os.close, file)
        self.card: tuple[int, int, str] = (os.getpid(), description, secrets.token_hex(16))
        """Pid, file and number by which another rank opens what this one offers."""
        contents = {
            "number": self.card[2],
            "inbox": inbox,
            "storages": [_open_up(storage) for storage in storages.values()],
            "tensors": {
                name: [places[tensor.untyped_storage()._cdata], tensor.storage_offset(), str(tensor.dtype)]
                for name, tensor in tensors.items()
            },
        }
        with open(description, "wb", closefd=False) as writer:
            writer.write(json.dumps(contents).encode())
        os.fchmod(description, 0o400)

    def open(self, rank: int, card: tuple[int, int, str], sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """Reach a rank, and read some of its tensors where they are.

        Args:
            rank: Global rank of this node.
            card: Its ``card``.
            sizes: Elements of each tensor wanted, by name; may be none.

        Returns:
            By name, flat tensors ``[elements]`` in that rank's memory, in its dtypes.

        Raises:
            OSError, RuntimeError: The system does not allow it, or the card is that of a process which this one cannot
                see.
        """
        pid, description, number = card
        contents = _read_description(f"/proc/{pid}/fd/{description}")
        if contents.get("number") != number:
            raise OSError(f"process {pid} is not rank {rank}: the two are in different containers")
        for files, opened in (
            (self._inboxes, os.open(f"/proc/{pid}/fd/{contents['inbox']}", os.O_WRONLY)),
            (self._processes, os.pidfd_open(pid)),
        ):
            files[rank] = opened
            self._files.callback(os.close, opened)
        storages: dict[int, torch.UntypedStorage] = {}
        found = {}
        for name, size in sizes.items():
            place, offset, dtype_name = contents["tensors"][name]
            if place not in storages:
                storages[place] = _reach(pid, contents["storages"][place], self._device)
            found[name] = torch.empty(0, dtype=_DTYPES[dtype_name], device=self._device).set_(
                storages[place], offset, (size,), (1,)
            )
        return found

    def signal(self, ranks: Iterable[int], what: Signal) -> None:
        """Tell ranks that this rank's tensors may be read, or that it has read theirs.

        Raises:
            DeadlineError: One of them is gone.
        """
        record = _RECORD.pack(self._rank, _SIGNALS.index(what))
        for rank in ranks:
            try:
                os.write(self._inboxes[rank], record)
            except BrokenPipeError as error:
                raise self._lost([rank], "ended") from error

    def wait(self, ranks: Iterable[int], what: Signal) -> None:
        """Return when each of the ranks has given a signal that was not waited for before.

        Raises:
            DeadlineError: One ended, or the deadline passed; names those that did not give it.
        """
        end = time.monotonic() + self._deadline_s
        missing = set(ranks)
        while True:
            missing -= {rank for rank in missing if self._signals[rank, what]}
            if not missing:
                break
            poll = select.poll()
            for file in (self._inbox, *(self._processes[rank] for rank in missing)):
                poll.register(file, select.POLLIN)
            ready = {file for file, _ in poll.poll(max(0.0, end - time.monotonic()) * 1000)}
            if self._inbox in ready:
                records = os.read(self._inbox, _RECORD.size * _RECORDS_AT_ONCE)
                self._signals.update((rank, _SIGNALS[kind]) for rank, kind in _RECORD.iter_unpack(records))
            elif ready:
                raise self._lost([rank for rank in missing if self._processes[rank] in ready], "ended")
            elif time.monotonic() >= end:
                raise self._lost(missing, f"did not come within {self._deadline_s:g} s")
        self._signals.subtract((rank, what) for rank in ranks)

    def _lost(self, ranks: Iterable[int], how: str) -> DeadlineError:
        return DeadlineError(
            f"{self._name}: ranks {sorted(ranks)} {how}; look for a rank that failed earlier, or raise "
            "cluster.deadline_s if one is only slow"
        )


def _check_system(num_storages: int) -> None:
    """Refuse a system without the calls that are needed, or with too few files. Raises OSError."""
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        raise OSError("this Python was built without memfd_create and pidfd_open")
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = limit - len(os.listdir("/proc/self/fd")) - _SPARE_FILES
    if num_storages > room:
        raise OSError(f"{num_storages} tensors need an open file each, and ulimit -n={limit} leaves {max(0, room)}")


def _read_description(path: str) -> dict[str, Any]:
    """Read what a rank opened, without waiting if the file is another process's pipe. Raises OSError."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is no file")
        try:
            found = json.loads(file.read())
        except ValueError as error:
            raise OSError(f"{path} is no description of tensors") from error
    return found if isinstance(found, dict) else {}


def _open_up(storage: torch.UntypedStorage) -> list[Any]:
    """Make a storage readable by other processes; what they need to reach it, as JSON values."""
    if storage.device.type == "cpu":
        file, num_bytes = storage._share_fd_cpu_()
        return [file, num_bytes]
    variable = "PYTORCH_ALLOC_CONF" if "PYTORCH_ALLOC_CONF" in os.environ else "PYTORCH_CUDA_ALLOC_CONF"
    if re.search(r"expandable_segments\s*:\s*true", os.environ.get(variable, ""), re.IGNORECASE):
        raise ReshardError(
            f"CUDA IPC cannot open memory of expandable segments; leave expandable_segments:True out of {variable}, or "
            "set actor.reshard to torch"
        )
    _, *handle = storage._share_cuda_()
    return [part.hex() if isinstance(part, bytes) else part for part in handle]


def _reach(pid: int, handle: list[Any], device: torch.device) -> torch.UntypedStorage:
    """Open the storage that another process of the node shares."""
    if device.type == "cpu":
        file, num_bytes = handle
        storage = torch.UntypedStorage.from_file(f"/proc/{pid}/fd/{file}", True, num_bytes)
        assert isinstance(storage, torch.UntypedStorage), "from_file gives what it is a method of"
        return storage
    parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in handle]
    # On this rank's own device, whichever holds it: then a copy is one kernel that reads over the link.
    return torch.UntypedStorage._new_shared_cuda(device.index, *parts)
