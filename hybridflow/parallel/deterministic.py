"""Numbers that repeat to the last bit on a GPU."""

from __future__ import annotations

import os

import torch


def add_in_fixed_order(device: torch.device) -> None:
    """Make this process choose operations that add in one order, before it computes anything.

    Torch then takes the deterministic backward passes of attention, of indexing and of scattering, and warns of an
    operation that has none. cuBLAS repeats its sums where its workspaces have fixed sizes. NCCL adds in the order of
    its rings and trees, which are the same on the same GPUs. A CPU repeats its numbers without all this.
    """
    if device.type == "cpu":
        return
    # Read when cuBLAS starts; another value is the user's own.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Else torch would fill what it allocates, to find reads of what was not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
