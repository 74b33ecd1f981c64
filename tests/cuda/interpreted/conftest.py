"""What Triton's interpreter lacks."""

from __future__ import annotations

import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


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
