"""Initial values of tensors, each a function of (seed, logical name, variant) alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor


def initial_matrix(name: str, shape: Sequence[int], *, seed: int, std: float, variant: int = 0) -> Tensor:
    """Return a normal matrix, fp32 in host memory.

    Args:
        name: Logical name.
        shape: Its shape.
        seed: Seed of the numbers.
        std: Standard deviation.
        variant: Another number gives another matrix.
    """
    return torch.empty(*shape).normal_(0.0, std, generator=_generator(name, seed, variant))


def initial_factor(name: str, shape: Sequence[int], *, seed: int, variant: int = 0) -> Tensor:
    """Return a factor of an adapter: B is 0, A uniform within ``1 / sqrt(in)``, as in PEFT."""
    if name.endswith(".B"):
        return torch.zeros(*shape)
    bound = 1 / math.sqrt(shape[-1])
    return torch.empty(*shape).uniform_(-bound, bound, generator=_generator(name, seed, variant))


def initial_rates(name: str, shape: Sequence[int], *, seed: int, variant: int = 0) -> Tensor:
    """Return the rates by which states of linear attention decay, uniform from 0.01 to 16, as in ``transformers``."""
    return torch.empty(*shape).uniform_(0.01, 16.0, generator=_generator(name, seed, variant))


def _generator(name: str, seed: int, variant: int) -> torch.Generator:
    origin = f"{seed}:{name}:{variant}" if variant else f"{seed}:{name}"
    digest = hashlib.sha256(origin.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
