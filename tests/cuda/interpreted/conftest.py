"""What Triton's interpreter lacks, and what it does for nothing."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, InterpreterOptions, TensorHandle


@pytest.fixture(autouse=True)
def products_of_bf16(monkeypatch):
    """Multiply bf16 tiles; the interpreter keeps them as 16-bit integers, and would multiply these."""
    create_dot = InterpreterBuilder.create_dot

    def widened(handle: TensorHandle) -> TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    monkeypatch.setattr(
        InterpreterBuilder, "create_dot", lambda self, a, b, *rest: create_dot(self, widened(a), widened(b), *rest)
    )


@pytest.fixture(autouse=True)
def last_program_first(monkeypatch):
    """Run the programs of a launch from the last to the first, since a GPU starts them in no order that counts."""
    set_place = InterpreterBuilder.set_grid_idx

    def set_mirrored(self, *place):
        set_place(self, *(size - 1 - at for size, at in zip(self.grid_dim, place, strict=True)))

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", set_mirrored)


@pytest.fixture(autouse=True, scope="session")
def work_spared():
    """Spare the interpreter work that changes no number: half of its time."""
    # Triton's language is replaced by numpy's for each launch, and again for each function that a kernel calls.
    replaced = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    number_of = functools.cache(interpreter._get_np_dtype)

    def dtype_of(type) -> np.dtype:
        return np.dtype(np.uint64) if type.scalar.is_ptr() else number_of(type.scalar)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(interpreter, "_patch_lang", lambda _: interpreter._LangPatchScope())
        patched.setattr(interpreter, "_get_np_dtype", dtype_of)
        # Integers are added and multiplied once more in 64 bits, for an assertion that only options.debug makes.
        patched.setattr(interpreter.interpreter_builder, "options", InterpreterOptions(sanitize_overflow=False))
        yield
    replaced.restore()
