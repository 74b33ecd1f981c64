"""Running megatron-core on a machine without CUDA. Does nothing where CUDA is there.

megatron-core 0.16.1 computes correctly on the CPU, but asks for "the current CUDA device" by name in a few places.
This module answers with the CPU. It touches torch.cuda's questions about the device, and the name ``torch`` inside the
few megatron-core modules that spell ``device="cuda"``; no call outside them pays for it. An optimizer that needs a GPU
gives way to torch's.
"""

from __future__ import annotations

import functools
import importlib
import types
from typing import Any

import torch

from hybridflow.parallel.accelerators import use_torch_optimizer

_CPU = torch.device("cpu")
_MODULES_NAMING_CUDA = (
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.utils",
)


class _TorchOnCpu(types.ModuleType):
    """``torch`` whose tensor factories take ``device="cuda"`` to mean the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        for factory in ("zeros", "ones", "empty", "tensor", "full"):
            setattr(self, factory, _without_cuda(getattr(torch, factory)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _without_cuda(factory: Any) -> Any:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return make


def _type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Answer ``Tensor.type`` for a CPU tensor with the CUDA name, which megatron-core's optimizers compare with."""
    found = _tensor_type(self, *args, **kwargs)
    return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) and self.device == _CPU else found


_tensor_type = torch.Tensor.type


@functools.cache
def use_cpu_for_cuda() -> None:
    """Make megatron-core run on the CPU, if this machine has no CUDA; later calls do nothing."""
    if torch.cuda.is_available():
        return
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.Tensor.type = _type  # type: ignore[method-assign,assignment]
    torch_on_cpu = _TorchOnCpu()
    for name in _MODULES_NAMING_CUDA:
        importlib.import_module(name).torch = torch_on_cpu  # type: ignore[attr-defined]
    use_torch_optimizer()
