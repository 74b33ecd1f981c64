"""The compiled kernels of decoding on a CPU, see kernels.c: found where the installation could build them."""

from __future__ import annotations

import ctypes
import functools
from importlib import machinery
from pathlib import Path

import torch  # noqa: F401  (its OpenMP has to be there first, so that kernels and matrix products share threads)

_POINTER, _INTEGER, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "hf_rms_norm": (None, [_POINTER] * 3 + [_INTEGER] * 2 + [_FLOAT] * 2),
    "hf_store": (None, [_POINTER] * 7 + [_INTEGER] * 4 + [_POINTER] * 2 + [_FLOAT] * 2),
    "hf_attend": (None, [_POINTER] * 5 + [_INTEGER] + [_POINTER] * 2 + [_INTEGER] * 4 + [_FLOAT] * 2 + [_INTEGER]),
    "hf_sample": (None, [_POINTER] * 5 + [_INTEGER] * 4),
    "hf_sum_by_digit": (None, [_POINTER] * 5 + [_INTEGER] * 3),
}


@functools.cache
def load_kernels() -> ctypes.CDLL | None:
    """The kernels as C functions that take addresses; None where no compiler was there to build them."""
    for suffix in machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_kernels{suffix}")
        if path.exists():
            library = ctypes.CDLL(str(path))
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
            return library
    return None
