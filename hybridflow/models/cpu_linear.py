"""Linear layers of fp32 models on a CPU by oneDNN, which torch has, but does not use for fp32 products on x86.

Torch's own go through MKL, which takes longer wherever it has to wait for memory; of the gradients of weights, which
would have to be laid out anew, MKL's are as quick. ``tools/bench/bench_step.py`` measures it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn

_LEAST_ROWS = 1024
"""Products of fewer are torch's own."""

_ROWS = 128
"""Others have a multiple of so many, since oneDNN makes, and keeps, code of half a megabyte for each number of rows."""


class _Linear(torch.autograd.Function):
    """``[…, in]`` times ``[out, in]``, transposed; with a group, the input's gradient is summed over its ranks.

    With ``is_split`` the input is a rank's slice of the tokens. The slices are gathered, once more in the backward
    pass, which keeps the rank's own alone; the input's gradient is scattered as it is summed.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, group: dist.ProcessGroup | None, is_split: bool) -> Tensor:
        ctx.save_for_backward(inputs if ctx.needs_input_grad[1] else None, weight)
        ctx.group, ctx.is_split = group, is_split
        return _product(gather_from_sequence_parallel_region(inputs, group=group) if is_split else inputs, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        of_inputs = of_weight = work = None
        if ctx.needs_input_grad[0]:
            of_inputs = _product(gradient, weight.t())
            if ctx.is_split:
                summed = of_inputs.contiguous()
                of_inputs = summed.new_empty(len(summed) // ctx.group.size(), *summed.shape[1:])
                work = dist.reduce_scatter_tensor(of_inputs, summed, group=ctx.group, async_op=True)
            elif ctx.group is not None:
                work = dist.all_reduce(of_inputs, group=ctx.group, async_op=True)
        if ctx.needs_input_grad[1]:
            whole = gather_from_sequence_parallel_region(inputs, group=ctx.group) if ctx.is_split else inputs
            of_weight = gradient.flatten(0, -2).t() @ whole.flatten(0, -2)
        if work is not None:
            work.wait()
        return of_inputs, of_weight, None, None


def _product(inputs: Tensor, weight: Tensor) -> Tensor:
    """Multiply ``[…, in]`` by the transpose of ``[out, in]``, which may be a view."""
    rows = inputs.flatten(0, -2)
    if len(rows) < _LEAST_ROWS:
        return inputs @ weight.t()
    padded = nn.functional.pad(rows, (0, 0, 0, -len(rows) % _ROWS))
    product = torch.ops.mkldnn._linear_pointwise.default(padded, weight, None, "none", [], "")
    found: Tensor = product[: len(rows)].unflatten(0, inputs.shape[:-1])
    return found


def _forward(
    *,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    allreduce_dgrad: bool,
    tp_group: Any,
    sequence_parallel: bool,
    gradient_accumulation_fusion: bool,
    **_: Any,
) -> Tensor:
    assert not gradient_accumulation_fusion, "fusion is for GPUs alone"
    group = tp_group if allreduce_dgrad or sequence_parallel else None
    output: Tensor = _Linear.apply(input, weight, group, sequence_parallel)
    return output if bias is None else output + bias


def use_onednn(model: nn.Module) -> None:
    """Have megatron-core's linear layers of a model, fp32 and on a CPU, multiply by oneDNN, where torch has it.

    Not for fused gradient accumulation, which is not for CPUs.
    """
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            module._forward_impl = _forward
