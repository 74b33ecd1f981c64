"""The one door to Transformer Engine and Apex: whether they are there (megatron-core then picks their fused Adam)."""

from __future__ import annotations

import functools
import importlib.util

import torch


@functools.cache
def has_transformer_engine() -> bool:
    """Return whether Transformer Engine can be used: it is installed, and there is a CUDA device."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
