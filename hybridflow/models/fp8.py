"""FP8 in training: which layers, on which devices, and the rounding of their weights for the rollout.

Transformer Engine computes the products of the linear layers between embedding and output in 8-bit numbers (e4m3).
Weights, gradients and optimizer state stay in bf16 and fp32, and so does all else of the model.

Scales are powers of two. A rounded weight has four significant bits, so bf16 holds it exactly: the rollout has the same
weights as the forward pass of training.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from hybridflow.config.types import Fp8
from hybridflow.errors import ConfigError
from hybridflow.families.fp8 import BLOCK, LAYERS
from hybridflow.parallel.accelerators import transformer_engine_fault

ALIGNED_TOKENS = 128
"""The tokens of a micro-batch are padded to a multiple of this; so blocks of activations are whole, too."""

LARGEST = 448.0
"""The largest number of e4m3."""

_ROW_BLOCK = 32
_SWITCHES = ("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "NVTE_FP8_BLOCK_AMAX_EPSILON")


def is_rounded(name: str) -> bool:
    """Return whether a logical tensor is a weight that Transformer Engine rounds."""
    return name.endswith(LAYERS)


def rounded(weight: Tensor, fp8: Fp8) -> Tensor:
    """Return a rank's weight as the forward pass of training sees it.

    A block of weights with largest magnitude ``a`` is divided by ``s``, the least power of two that is at least
    ``a / 448``, rounded to e4m3, and multiplied by ``s`` again.

    Args:
        weight: ``[out, in]``, this rank's.
        fp8: ``blockwise`` for blocks of 128 by 128, ``mxfp8`` for 32 numbers of a row.

    Returns:
        The same shape and dtype.
    """
    rows, columns = (BLOCK, BLOCK) if fp8 == "blockwise" else (1, _ROW_BLOCK)
    blocks = weight.detach().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scales = _power_above(blocks.float().abs().amax((1, 3), keepdim=True) * (1.0 / LARGEST))
    found: Tensor = (blocks.float() / scales).to(torch.float8_e4m3fn).float() * scales
    return found.to(weight.dtype).view_as(weight)


def _power_above(values: Tensor) -> Tensor:
    """Return the least power of two that is not below each value, and 1 for 0."""
    mantissa, exponent = torch.frexp(values)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.where(values == 0, 1.0, torch.ldexp(torch.ones_like(values), exponent))


def check_device(fp8: Fp8, device: torch.device) -> None:
    """Refuse a device on which layers would ignore FP8, or round otherwise than ``rounded`` does.

    Raises:
        ConfigError: It is such a device; says why.
    """
    found = _fault(fp8, device)
    if found:
        raise ConfigError(f"actor.fp8={fp8}: {found}; set actor.fp8 to none")


def _fault(fp8: Fp8, device: torch.device) -> str:
    if device.type != "cuda":
        return "needs a GPU with Transformer Engine, and this rank computes on a CPU, whose layers would ignore it"
    fault = transformer_engine_fault()
    if fault:
        return f"needs Transformer Engine, and {fault}"
    capability = torch.cuda.get_device_capability(device)
    name = "sm_{}{}".format(*capability)
    if fp8 == "mxfp8" and not (10, 0) <= capability < (12, 0):
        return f"needs a GPU of sm_100 or sm_103 (Blackwell), and this one is {name}"
    if fp8 == "blockwise" and capability[0] != 9:
        return f"needs a GPU of sm_90 (Hopper), and this one is {name}"
    cuda = str(torch.version.cuda)
    if fp8 == "blockwise" and tuple(map(int, cuda.split(".")[:2])) < (12, 9):
        return f"needs CUDA 12.9 or newer, and torch was built for {cuda}"
    for switch in _SWITCHES:
        if os.environ.get(switch, "0") not in ("", "0", "0.0"):
            return f"the environment variable {switch}={os.environ[switch]} gives scales that are no powers of two"
    return ""
