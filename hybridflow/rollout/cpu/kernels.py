"""The compiled kernels of decoding on a CPU, see kernels.c: found where the installation could build them."""

from __future__ import annotations

import ctypes
import functools
import zlib
from importlib import machinery
from pathlib import Path
from typing import Any

import torch  # noqa: F401  (its OpenMP has to be there first, so that kernels and matrix products share threads)

_POINTER, _INTEGER, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Layer(ctypes.Structure):
    """``layer`` of kernels.c."""

    _fields_ = [
        *((name, _POINTER) for name in ("input_norm", "qkv", "qkv_bias", "query_norm", "key_norm", "projection")),
        *((name, _POINTER) for name in ("attention_norm", "mlp_norm", "gate_up", "down", "output_norm", "rotary")),
        *(("scale", _FLOAT), ("softcap", _FLOAT), ("window", _INTEGER)),
    ]


class Shape(ctypes.Structure):
    """``shape`` of kernels.c."""

    _fields_ = [
        *((name, _INTEGER) for name in ("hidden", "groups", "sharers", "head", "inner", "activation")),
        *(("eps", _FLOAT), ("centre", _FLOAT)),
    ]


class Step(ctypes.Structure):
    """``step`` of kernels.c."""

    _fields_ = [
        *(("rows", _INTEGER), ("table_width", _INTEGER)),
        *((name, _POINTER) for name in ("sequences", "positions", "tables", "cache")),
        *(("stride", _INTEGER), ("hidden", _POINTER), ("product", _POINTER), ("space", _POINTER)),
    ]


class Vocabulary(ctypes.Structure):
    """``vocabulary`` of kernels.c."""

    _fields_ = [
        *((name, _POINTER) for name in ("embedding", "product_norm", "norm", "output")),
        *(("outputs", _INTEGER), ("real", _INTEGER), ("factor", _FLOAT), ("cap", _FLOAT)),
    ]


class Slots(ctypes.Structure):
    """``slots`` of kernels.c."""

    _fields_ = [
        *((name, _INTEGER) for name in ("capacity", "num_stops", "version")),
        *((name, _POINTER) for name in ("tokens", "lengths", "ends", "no_stop_before", "stops")),
        *((name, _POINTER) for name in ("keys", "temperatures", "greedy")),
        *((name, _POINTER) for name in ("log_probs", "sampled_log_probs", "versions", "failures")),
    ]


class Batch(ctypes.Structure):
    """``batch`` of kernels.c."""

    _fields_ = [("tokens", Step), *((name, _POINTER) for name in ("sequences", "positions", "sums", "logits"))]


_TABLES = [_POINTER, _INTEGER, _POINTER, _POINTER]
_SIGNATURES: dict[str, list[Any]] = {
    "hf_add_norm": [_POINTER] * 6 + [_INTEGER] * 2 + [_FLOAT] * 2,
    "hf_multiply": [_POINTER] * 4 + [_INTEGER] * 4,
    "hf_store": [_POINTER] * 5 + _TABLES + [_INTEGER] * 4 + [_POINTER] * 2 + [_FLOAT] * 2,
    "hf_attend": [_POINTER] * 4 + _TABLES + [_INTEGER] * 4 + [_FLOAT] * 2 + [_INTEGER],
    "hf_layers": [_POINTER] * 3 + [_INTEGER] * 2,
    "hf_output": [_POINTER] * 7 + [_INTEGER],
    "hf_sample": [_POINTER] * 5 + [_INTEGER] * 4,
    "hf_settle": [_POINTER] * 5 + [_INTEGER] * 3,
    "hf_decode": [_POINTER] * 2 + [_INTEGER] + [_POINTER] * 4 + [_INTEGER],
    "hf_sum_by_digit": [_POINTER] * 5 + [_INTEGER] * 3,
}


@functools.cache
def load_kernels() -> ctypes.CDLL | None:
    """Return the kernels as C functions that take addresses.

    None if no compiled kernels fit this source and machine.
    """
    library = find_kernels()
    return None if isinstance(library, str) else library


def find_kernels() -> ctypes.CDLL | str:
    """Return the compiled kernels, or why they are not used."""
    folder = Path(__file__).parent
    path = next((path for each in machinery.EXTENSION_SUFFIXES if (path := folder / f"_kernels{each}").exists()), None)
    if path is None:
        return "not built; with a C compiler, install hybridflow again"
    try:
        library = ctypes.CDLL(str(path))
        library.hf_source.restype = ctypes.c_uint32
        if library.hf_source() != zlib.crc32(b"".join(each.read_bytes() for each in sorted(folder.glob("*.[ch]")))):
            return f"{path} was built from other sources than those beside it; install hybridflow again"
        library.hf_choose.restype, library.hf_choose.argtypes = _INTEGER, [_INTEGER]
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = None, arguments
    except (OSError, AttributeError) as error:
        return f"{path} cannot be used: {error}; install hybridflow again on this machine"
    return library
