"""What this rank's pieces of work cost beside time, and how fast its device could be."""

from __future__ import annotations

import contextlib
import os
import re
import time

import torch

from hybridflow.observe.work import work_done

PEAK_TFLOPS = {
    "A100": 312.0,
    "A10": 125.0,
    "A30": 165.0,
    "B200": 2250.0,
    "GH200": 989.5,
    "H100": 989.5,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.5,
    "H200": 989.5,
    "L4": 121.0,
    "L40S": 362.0,
}
"""Of dense products of bf16 matrices, by what a GPU is called; from NVIDIA's data sheets, without sparsity."""

_MEASURE_S = 0.1
_CPU_SIZE, _GPU_SIZE = 384, 8192


def known_peak_flops(name: str) -> float | None:
    """Return a GPU's bf16 operations per second by its data sheet, or None if not in ``PEAK_TFLOPS``.

    Args:
        name: As CUDA has it, such as ``NVIDIA H100 80GB HBM3``.
    """
    found = [each for each in PEAK_TFLOPS if re.search(rf"\b{each}\b", " ".join(re.split(r"[\s-]+", name)))]
    return PEAK_TFLOPS[max(found, key=len)] * 1e12 if found else None


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second that MFU is a share of: the device's peak, or the best measured.

    The best measured is the quickest product of square matrices in a tenth of a second, with this rank's threads.
    """
    if device.type == "cuda" and dtype == torch.bfloat16:
        known = known_peak_flops(torch.cuda.get_device_name(device))
        if known is not None:
            return known
    size = _GPU_SIZE if device.type == "cuda" else _CPU_SIZE
    one, other = (torch.full((size, size), 0.5, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(one)
    end, quickest_s = time.perf_counter() + _MEASURE_S, float("inf")
    while time.perf_counter() < end:
        began = time.perf_counter()
        torch.mm(one, other, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        quickest_s = min(quickest_s, time.perf_counter() - began)
    return 2.0 * size**3 / quickest_s


class RankMeter:
    """Operations, tokens and memory of one piece of work after the other, see ``timeline.Meter``.

    On a CPU memory is what the process has resident, and its peak, ``VmHWM``, is set back before each piece of work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = work_done()
        self._status: int | None = None
        self._clear: int | None = None
        if device.type != "cuda":
            # Where there is no Linux, or one that does not let us, there is no peak.
            with contextlib.suppress(OSError):
                self._status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
                self._clear = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)

    def begin(self) -> None:
        """See ``timeline.Meter``."""
        self._before = work_done()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._clear is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._clear, b"5", 0)

    def end(self) -> tuple[float, float, int]:
        """See ``timeline.Meter``."""
        done = work_done()
        return done.flops - self._before.flops, done.tokens - self._before.tokens, self._peak_bytes()

    def _peak_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if self._status is None or self._clear is None:
            return 0
        found = re.search(rb"VmHWM:\s+(\d+) kB", os.pread(self._status, 8192, 0))
        return 0 if found is None else int(found[1]) << 10
