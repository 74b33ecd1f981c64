"""How fast this node is: products of matrices and copies on each GPU, or on the CPU; and messages to another node."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

_MEASURE_S = 1.0
_CPU_SIZE, _GPU_SIZE = 1024, 8192
_CPU_COPY_BYTES, _GPU_COPY_BYTES = 256 * 2**20, 2**30
_MESSAGE_BYTES = 16 * 2**20
_MESSAGES = 5
_GPU_CALLS = 20
"""Started together on a GPU, so that the time of one is without the host's."""


def devices() -> list[torch.device]:
    """Return all GPUs that this process sees, else the CPU."""
    if torch.cuda.is_available():
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [torch.device("cpu")]


def use_all_cores() -> None:
    """Let products use every core that this process may use, whatever number of threads a launcher has set."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))


def matmul_flops_per_s(device: torch.device, columns: int | None = None) -> float:
    """Measure a product of matrices: bf16 on a GPU, fp32 on a CPU.

    Args:
        device: Where.
        columns: Of both matrices, ``[rows, columns]`` and ``[columns, columns]``; None: as many as rows.

    Returns:
        Operations a second: the median over a second, as a job would get.
    """
    on_gpu = device.type == "cuda"
    rows, dtype = (_GPU_SIZE, torch.bfloat16) if on_gpu else (_CPU_SIZE, torch.float32)
    columns = columns or rows
    one, other = (torch.full((size, columns), 0.5, device=device, dtype=dtype) for size in (rows, columns))
    out = torch.empty_like(one)
    return 2.0 * rows * columns**2 / _median_s(lambda: torch.mm(one, other, out=out), device)


def attention_flops_per_s(device: torch.device) -> float:
    """Measure causal attention of one long text, forward and backward; in bf16 on a GPU.

    Returns:
        Operations a second, of the half of the scores that count: two products forward and five backward.
    """
    on_gpu = device.type == "cuda"
    tokens, dtype = (_GPU_SIZE, torch.bfloat16) if on_gpu else (_CPU_SIZE, torch.float32)
    heads, width = 16, 128
    query, key, value = (
        torch.randn(1, heads, tokens, width, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    gradient = torch.ones_like(query)

    def work() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(out, (query, key, value), gradient)

    return 7.0 * tokens**2 * heads * width / _median_s(work, device)


def memory_bytes_per_s(device: torch.device) -> float:
    """Read and written together, of a copy from the device's memory to the same memory."""
    num_bytes = _GPU_COPY_BYTES if device.type == "cuda" else _CPU_COPY_BYTES
    source, target = (torch.ones(num_bytes // 4, device=device) for _ in range(2))
    return 2.0 * num_bytes / _median_s(lambda: target.copy_(source), device)


def host_bytes_per_s(device: torch.device) -> float:
    """Measure a copy from the host's memory, which it is pinned in, to a GPU's."""
    source = torch.ones(_CPU_COPY_BYTES // 4, pin_memory=True)
    target = torch.empty_like(source, device=device)
    return _CPU_COPY_BYTES / _median_s(lambda: target.copy_(source, non_blocking=True), device)


def _median_s(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call: the median of as many as fit into the time, after one warm-up call."""
    calls = _GPU_CALLS if device.type == "cuda" else 1

    def timed() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / calls

    timed()
    end, taken = time.monotonic() + _MEASURE_S, [timed()]
    while time.monotonic() < end:
        taken.append(timed())
    return statistics.median(taken)


def pair_bytes_per_s(peer: int, device: torch.device) -> float:
    """Return the bytes per second each way while both ranks of a pair send at once.

    This is the median of some messages.

    Collective: this rank and ``peer``.

    Raises:
        RuntimeError: The peer is gone, or silent for longer than the process group waits.
    """
    sent, received = (torch.ones(_MESSAGE_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    taken = []
    for _ in range(1 + _MESSAGES):  # the first one connects
        start = time.perf_counter()
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)])
        for work in works:
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return _MESSAGE_BYTES / statistics.median(taken[1:])
