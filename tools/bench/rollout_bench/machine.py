"""What this machine can do: bytes read per second, and matrix products in every form that there is."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridflow.rollout.cpu.kernels import Shape, Vocabulary, load_kernels
from hybridflow.rollout.cpu.transformer import pack

_STREAM_BYTES = 512 << 20


def measure_bandwidth(device: torch.device, repeats: int = 5) -> float:
    """The most bytes read per second, of a sum and a matrix-vector product over more than the caches hold."""
    wide = torch.ones(_STREAM_BYTES // 4 // 8192, 8192, device=device)
    vector = torch.ones(8192, device=device)
    kinds: tuple[Callable[[], Tensor], ...] = (lambda: wide.sum(), lambda: wide @ vector)
    return max(_STREAM_BYTES / _seconds(kind, device) for kind in kinds for _ in range(repeats))


def measure_square(device: torch.device, dtype: torch.dtype, size: int = 2048, repeats: int = 5) -> float:
    """Operations per second of the best product of two square matrices."""
    if device.type == "cuda":
        size = 8192
    left, right = (torch.rand(size, size, device=device, dtype=dtype) for _ in range(2))
    return max(2 * size**3 / _seconds(lambda: left @ right, device) for _ in range(1 + repeats))


def measure_products(matrices: Sequence[tuple[str, Tensor]], rows: int, repeats: int) -> dict[str, Any]:
    """Products of a step's inputs with all its weights in their order, so that each finds its weights cold.

    Every kind of matrix counts with the best of its forms: plain, and on a CPU in fp32 laid out beforehand, for oneDNN,
    whole or in two halves, or for our own kernels.

    Returns:
        ``flop_per_s`` of all products together, ``best_flop_per_s`` of the best kind of matrix, and ``kinds``: of each
        kind and form the operations per second.
    """
    inputs = {
        weight.shape[1]: torch.rand(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
        for _, weight in matrices
    }
    flops: dict[str, int] = {}
    for name, weight in matrices:
        flops[name] = flops.get(name, 0) + 2 * rows * weight.numel()
    rates: dict[str, dict[str, float]] = {name: {} for name in flops}
    for form, prepare in _forms(matrices[0][1]).items():
        runs = [(name, weight.shape[1], prepare(weight)) for name, weight in matrices]
        taken: dict[str, list[float]] = {name: [] for name in flops}
        for turn in range(1 + repeats):
            spent_s = dict.fromkeys(flops, 0.0)
            for name, width, run in runs:
                spent_s[name] += _seconds(lambda run=run, width=width: run(inputs[width]), matrices[0][1].device)
            for name, each_s in spent_s.items():
                taken[name] += [each_s] * (turn > 0)
        for name, each in taken.items():
            rates[name][form] = flops[name] / median(each)
    best = {name: max(found.values()) for name, found in rates.items()}
    total_s = sum(flops[name] / best[name] for name in flops)
    return {"flop_per_s": sum(flops.values()) / total_s, "best_flop_per_s": max(best.values()), "kinds": rates}


def _forms(example: Tensor) -> dict[str, Callable[[Tensor], Callable[[Tensor], object]]]:
    forms: dict[str, Callable[[Tensor], Callable[[Tensor], object]]] = {
        "plain": lambda weight: lambda inputs: F.linear(inputs, weight)
    }
    if example.device.type == "cpu" and example.dtype is torch.float32 and torch.backends.mkldnn.is_available():
        forms |= {"packed": _packed, "packed halves": _packed_halves}
        if load_kernels() is not None:
            forms["own"] = _own
    return forms


def _packed(weight: Tensor) -> Callable[[Tensor], object]:
    laid_out = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 64)
    return lambda inputs: torch.ops.mkldnn._linear_pointwise.default(inputs, laid_out, None, "none", [], "")


def _packed_halves(weight: Tensor) -> Callable[[Tensor], object]:
    halves = [_packed(half) for half in weight.chunk(2)]
    return lambda inputs: [half(inputs) for half in halves]


def _own(weight: Tensor) -> Callable[[Tensor], object]:
    kernels, laid_out, (outputs, width) = load_kernels(), pack(weight), weight.shape
    assert kernels is not None
    shape = Shape(hidden=width)

    def run(inputs: Tensor) -> Tensor:
        out, copy = inputs.new_empty(len(inputs), outputs), torch.empty_like(inputs)
        vocabulary = Vocabulary(output=laid_out.data_ptr(), outputs=outputs)
        described = map(ctypes.addressof, (shape, vocabulary))
        kernels.hf_output(out.data_ptr(), copy.data_ptr(), *described, inputs.data_ptr(), None, None, len(inputs))
        return out

    return run


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began_s = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began_s
