"""The one door to Transformer Engine and Apex: whether they can be used, and torch's own kernels in their place.

megatron-core takes the optimizer of whichever package is installed, and both packages' kernels run on GPUs only.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

FIRST_TRANSFORMER_ENGINE, PAST_TRANSFORMER_ENGINE = (2, 9), (2, 12)
"""The releases of Transformer Engine that megatron-core 0.16.1 is written against; setup.py has them too."""


@functools.cache
def has_transformer_engine() -> bool:
    """Return whether Transformer Engine can be used: there is a GPU, and the package has no fault."""
    return torch.cuda.is_available() and not transformer_engine_fault()


def transformer_engine_fault() -> str:
    """Return why Transformer Engine cannot be used, in words; empty if it can."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "it is not installed"
    found = transformer_engine_misfit()
    if found:
        return found
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # a package that was built for another torch raises whatever it likes
        return f"it cannot be imported: {type(error).__name__}: {error}"
    return ""


def transformer_engine_misfit() -> str:
    """Return why megatron-core is not written against the Transformer Engine that is installed; empty if it is."""
    found = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("transformer-engine"))
    if found is not None and FIRST_TRANSFORMER_ENGINE <= (int(found[1]), int(found[2])) < PAST_TRANSFORMER_ENGINE:
        return ""
    first, past = (".".join(map(str, each)) for each in (FIRST_TRANSFORMER_ENGINE, PAST_TRANSFORMER_ENGINE))
    return f"megatron-core needs >={first},<{past}"


_FUSION_SWITCHES = ("gradient_accumulation_fusion", "fuse_wgrad_accumulation")
"""Of megatron-core's linear layers, and of Transformer Engine's."""


def fuse_weight_gradients(modules: Iterable[nn.Module], is_fused: bool = True) -> None:
    """Let the linear layers of a model add their weight gradients to the fp32 sums of megatron-core's DDP themselves.

    Otherwise a gradient is made in the weights' format, and then added. The product is Apex's where megatron-core has
    found it, else torch's. Experts in grouped products make all gradients of a layer in that format, and add them.

    Args:
        modules: On a GPU, within DDP: without its sums a backward pass fails. None whose activations are computed anew:
            there torch gives the backward pass copies of the weights, which do not lead to the sums.
        is_fused: Whether they do so from now on.
    """
    layers: Any = importlib.import_module("megatron.core.tensor_parallel.layers")
    if not hasattr(layers, "fused_weight_gradient_mlp_cuda"):
        layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(wgrad_gemm_accum_fp32=add_weight_gradient)
    for module in modules:
        for switch in _FUSION_SWITCHES:
            if hasattr(module, switch):
                setattr(module, switch, is_fused)


def adds_weight_gradients(module: nn.Module) -> bool:
    """Return whether ``fuse_weight_gradients`` has let this layer add its gradient itself."""
    return any(getattr(module, switch, False) for switch in _FUSION_SWITCHES)


def add_weight_gradient(inputs: Tensor, gradients: Tensor, sums: Tensor) -> None:
    """Add a weight's gradient to its sums; in the place of Apex's ``wgrad_gemm_accum_fp32``.

    Args:
        inputs: Of the layer, ``[tokens, in]``.
        gradients: Of its outputs, ``[tokens, out]``, in the same format.
        sums: ``[out, in]`` fp32.
    """
    if inputs.dtype == sums.dtype:
        sums.addmm_(gradients.t(), inputs)
    else:
        torch.addmm(sums, gradients.t(), inputs, out_dtype=sums.dtype, out=sums)


def use_torch_optimizer() -> None:
    """Make megatron-core step with torch's AdamW and clip with torch's operators, whichever packages are installed."""
    optimizer: Any = importlib.import_module("megatron.core.optimizer")
    clipping: Any = importlib.import_module("megatron.core.optimizer.clip_grads")
    mixed: Any = importlib.import_module("megatron.core.optimizer.optimizer")
    utils: Any = importlib.import_module("megatron.core.utils")
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, True
    clipping.l2_norm_impl = utils.local_multi_tensor_l2_norm
    for module in (clipping, mixed):
        module.multi_tensor_applier = utils.local_multi_tensor_applier
        module.multi_tensor_scale_impl = utils.local_multi_tensor_scale


def use_cpu_optimizer(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Let torch's AdamW step without torch's compiler, whose import takes longer than the start of a small job."""
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
    for optimizer in optimizers:
        if type(optimizer) is torch.optim.AdamW:
            optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]


def use_gpu_optimizer(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Let optimizers of torch step in one kernel each, and megatron-core clip without asking the GPU tensor by tensor.

    Where Transformer Engine or Apex is installed, their kernels do both already.

    Args:
        optimizers: Of parameters on a GPU, before their first step.
    """
    clipping: Any = importlib.import_module("megatron.core.optimizer.clip_grads")
    mixed: Any = importlib.import_module("megatron.core.optimizer.optimizer")
    utils: Any = importlib.import_module("megatron.core.utils")
    if clipping.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clipping.l2_norm_impl = _l2_norm
    for module in (clipping, mixed):
        if module.multi_tensor_scale_impl is utils.local_multi_tensor_scale:
            module.multi_tensor_scale_impl = _scale
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.AdamW):
            for group in (optimizer.defaults, *optimizer.param_groups):
                group |= {"fused": True, "foreach": False}


def _l2_norm(_: int, flag: Tensor, lists: list[list[Tensor]], per_tensor: bool) -> tuple[Tensor, None]:
    """Return the norm of all tensors, ``[1]`` fp32; in the place of ``multi_tensor_l2norm``."""
    assert not per_tensor, "megatron-core asks for the norm of all"
    norms = torch._foreach_norm([tensor for each in lists for tensor in each])
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


def _scale(_: int, flag: Tensor, lists: list[list[Tensor]], factor: float) -> None:
    """Write the tensors of the first list times a factor to the second; in the place of ``multi_tensor_scale``."""
    sources, targets = lists
    if not targets:
        return
    if any(source is not target for source, target in zip(sources, targets, strict=True)):
        torch._foreach_copy_(targets, sources)
    if factor != 1.0:
        torch._foreach_mul_(targets, factor)
