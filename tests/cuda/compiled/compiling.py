"""Compiles the Triton kernels that a call would launch, for GPUs that are not there."""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


@dataclass(frozen=True, kw_only=True)
class Use:
    """What a program of a compiled kernel uses.

    Attributes:
        registers: Of a thread.
        stack_bytes: Of a thread, where registers do not suffice.
        local_bytes: The same, in the kernel's own declaration.
        shared_bytes: Shared memory.
        wide_loads: Instructions that read 16 bytes of the GPU's memory.
        narrow_loads: Instructions that read 2 bytes.
        uses_tf32: Whether products round fp32 to 10 bits of the fraction.
    """

    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    wide_loads: int
    narrow_loads: int
    uses_tf32: bool


@dataclass(frozen=True)
class Launch:
    """A kernel with the types of its arguments, its constants and its options, each as sorted pairs.

    Attributes:
        aligned: Arguments that Triton specializes for, since they are multiples of 16.
    """

    kernel: JITFunction[Any]
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, int], ...]
    aligned: frozenset[str]

    @property
    def name(self) -> str:
        """Return the kernel's name."""
        return str(self.kernel.__name__)


@contextlib.contextmanager
def recording(monkeypatch) -> Iterator[list[Launch]]:
    """Write down the launches within, each once, instead of launching: settings are those of the code under test."""
    found: list[Launch] = []

    def run(self, *args, grid, warmup, **kwargs):
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        constants = {param.name: given[param.name] for param in self.params if _is_constant(param, given[param.name])}
        signature = {name: _type(given[name]) for name in self.arg_names if name not in constants}
        aligned = frozenset(param.name for param in self.params if _is_aligned(param, given[param.name]))
        launch = Launch(self, *(tuple(sorted(each.items())) for each in (signature, constants, options)), aligned)
        if launch not in found:
            found.append(launch)

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        yield found


def _is_constant(param: Any, value: Any) -> bool:
    """Return whether Triton compiles a value in: declared constants, and every 1 that it may specialize for."""
    return param.is_constexpr or (not param.do_not_specialize and type(value) is int and value == 1)


def _is_aligned(param: Any, value: Any) -> bool:
    """Return whether Triton counts on 16 bytes: all memory of a GPU that torch allocates, and widths that are known."""
    if param.is_constexpr:
        return False
    is_multiple = type(value) is int and value != 1 and value % 16 == 0 and not param.do_not_specialize
    return isinstance(value, Tensor) or is_multiple


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return _TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


@functools.cache
def compiled(launch: Launch, capability: int, folder: Path) -> Use:
    """Compile to machine code of ``sm_<capability>``, and return what it uses."""
    signature = dict(launch.signature) | {name: "constexpr" for name, _ in launch.constants}
    # In the kernel's own order.
    signature = {name: signature[name] for name in launch.kernel.arg_names}
    attributes = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(signature) if name in launch.aligned}
    source = ASTSource(launch.kernel, signature, dict(launch.constants), attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(launch.options))
    path = folder / f"{launch.name}.cubin"
    path.write_bytes(kernel.asm["cubin"])
    dump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    text = subprocess.run([dump, "-res-usage", path], capture_output=True, text=True, timeout=300, check=True).stdout
    told = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert told is not None, text
    registers, stack, local = map(int, told.groups())
    program = kernel.asm["ptx"]
    return Use(
        registers=registers,
        stack_bytes=stack,
        local_bytes=local,
        shared_bytes=kernel.metadata.shared,
        wide_loads=len(re.findall(r"cp\.async\.cg|ld\.global\S*\.(?:v4\.b32|v2\.b64)", program)),
        narrow_loads=len(re.findall(r"ld\.global\S*\.[bu]16", program)),
        uses_tf32="tf32" in program,
    )
