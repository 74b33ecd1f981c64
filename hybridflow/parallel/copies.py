"""Copies to a GPU for which the host does not wait."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return values on a device, of the same shape and dtype. The host goes on while a GPU still works on other things.

    A copy out of memory that is not pinned may wait for all work that the GPU was given, so values in host memory are
    pinned first. Do not change the values afterwards: on their own device they are the result.
    """
    if values.device.type == "cpu" and device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)
