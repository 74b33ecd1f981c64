"""What every formula does first: refuse unlike shapes, which broadcasting would hide, and leave half precision."""

from __future__ import annotations

import torch
from torch import Tensor


def alike(**tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in the order given, each in fp32 or wider, after checking that their shapes are equal.

    Raises:
        ValueError: Two shapes differ; the message has every name with its shape.
    """
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        found = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"shapes differ: {found}; all must be equal")
    return tuple(tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors.values())
