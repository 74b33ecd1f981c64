"""What one run costs this process: time, processor time, bytes that the kernel counted, memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

_ESTABLISHED = 1
_RECEIVED_AT, _SENT_AT = 128, 200
"""Where Linux's ``struct tcp_info`` has tcpi_bytes_received and tcpi_bytes_sent."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_INT, _LARGEST_MMAP_THRESHOLD = (1 << 31) - 1, 32 << 20
"""Of glibc's ``mallopt``, and the most that it takes."""


class Cost(NamedTuple):
    """What one run cost one rank.

    Attributes:
        wall_s: From the barrier before to the barrier after.
        cpu_s: Of all threads, user and system, up to the end of the rank's own part.
        kernel_received_bytes: Through TCP, as the kernel counts it.
        kernel_sent_bytes: Likewise.
    """

    wall_s: float
    cpu_s: float
    kernel_received_bytes: int
    kernel_sent_bytes: int


def timed(run: Callable[[], object]) -> Cost:
    """Run something on all ranks at once. Collective: all ranks of the job."""
    before = tcp_bytes()
    dist.barrier()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    run()
    cpu_s = time.process_time() - start_cpu_s
    dist.barrier()
    wall_s = time.perf_counter() - start_s
    received, sent = (
        sum(count[place] - before.get(key, (0, 0))[place] for key, count in tcp_bytes().items()) for place in (0, 1)
    )
    return Cost(wall_s, cpu_s, received, sent)


def keep_freed_memory() -> None:
    """Let malloc keep what is freed, as allocators of GPUs do, for the rivals that allocate anew in each run.

    Left to itself it gives memory back or not by what was freed before, and the same rival takes two to three times the
    processor time where each run has its pages to fault in again.
    """
    libc = ctypes.CDLL(None)
    for option, size in ((_M_TRIM_THRESHOLD, _LARGEST_INT), (_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)):
        assert libc.mallopt(option, size) == 1


def tcp_bytes() -> dict[str, tuple[int, int]]:
    """Bytes received and sent through each of this process's TCP connections since it was made."""
    counts = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{entry}")
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                if info[0] == _ESTABLISHED:
                    counts[name] = tuple(struct.unpack_from("=Q", info, at)[0] for at in (_RECEIVED_AT, _SENT_AT))
    return counts


class Memory:
    """How far this process's memory rises while something runs.

    Pages of files and shared memory that are mapped but were there before are not counted: one-sided transports map
    what other ranks hold.
    """

    def __init__(self) -> None:
        # What malloc keeps of earlier runs would hide what this one needs.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._before = _status()

    def peak_bytes(self) -> int:
        """The highest rise since this was made."""
        now = _status()
        mapped = sum(max(0, now[key] - self._before[key]) for key in ("RssShmem", "RssFile"))
        return max(0, now["VmHWM"] - self._before["VmRSS"] - mapped)


def _status() -> dict[str, int]:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return {key: int(size) << 10 for key, size in re.findall(r"^(VmHWM|VmRSS|Rss\w+):\s+(\d+) kB$", text, re.MULTILINE)}
