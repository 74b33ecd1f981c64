"""The compiled kernels of decoding on a CPU, see kernels.c: found where the installation could build them."""

from __future__ import annotations

import ctypes
import functools
import zlib
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
    """The kernels as C functions that take addresses; None where there are none that fit this source and machine."""
    library = find_kernels()
    return None if isinstance(library, str) else library


def find_kernels() -> ctypes.CDLL | str:
    """The compiled kernels, or why they are not used."""
    folder = Path(__file__).parent
    path = next((path for each in machinery.EXTENSION_SUFFIXES if (path := folder / f"_kernels{each}").exists()), None)
    if path is None:
        return "not built; with a C compiler, install hybridflow again"
    try:
        library = ctypes.CDLL(str(path))
        library.hf_source.restype = ctypes.c_uint32
        if library.hf_source() != zlib.crc32((folder / "kernels.c").read_bytes()):
            return f"{path} was built from another kernels.c; install hybridflow again"
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        return f"{path} cannot be used: {error}; install hybridflow again on this machine"
    return library
