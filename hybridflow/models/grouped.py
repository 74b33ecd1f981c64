"""Experts of a mixture by grouped products: one kernel for all of them, and no question to the device.

The rows of each expert begin at a multiple of ``ALIGNED_ROWS``, as the product of gradients with inputs wants it. An
expert without a token has so many rows of zeros: on Blackwell torch gives a group without rows a gradient that is not
zero (pytorch issue 172439). How many rows that takes is known without their counts: at most ``ALIGNED_ROWS`` more for
each expert. What is past the last expert's rows is computed by nobody, and read by nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import grouped_mm

from hybridflow.models.gated import gated

ALIGNED_ROWS = 8


def is_grouped(hidden: Tensor, config: TransformerConfig) -> bool:
    """Return whether the device has a kernel for such experts: a GPU for bf16, in widths of 16 bytes.

    ``grouped_experts`` knows neither biases nor gates with a bound or an offset.
    """
    if config.add_bias_linear or config.activation_func_clamp_value is not None or config.glu_linear_offset:
        return False
    widths = config.hidden_size, config.moe_ffn_hidden_size // config.expert_tensor_parallel_size
    return hidden.is_cuda and hidden.dtype == torch.bfloat16 and not any(width % 8 for width in widths)


def grouped_experts(
    hidden: Tensor,
    counts: Tensor,
    weights: Tensor,
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """Compute gated feed-forward blocks of experts.

    Args:
        hidden: ``[pairs, hidden]``, ordered by expert.
        counts: Pairs of each expert, ``[experts]``.
        weights: By which a pair's output is multiplied, ``[pairs]``.
        first: Gate and input of each expert, ``[2 * ffn, hidden]``.
        second: Output of each expert, ``[hidden, ffn]``.
        activation: Of the gate.

    Returns:
        ``[pairs, hidden]``.
    """
    num_rows = len(hidden) + ALIGNED_ROWS * len(first)
    room = (counts.clamp(min=1) + ALIGNED_ROWS - 1) // ALIGNED_ROWS * ALIGNED_ROWS
    ends = room.cumsum(0)
    shifts = (ends - room) - (counts.cumsum(0) - counts)
    places = torch.arange(len(hidden), device=hidden.device)
    places = places + shifts.repeat_interleave(counts, output_size=len(hidden))
    spread = hidden.new_zeros(num_rows, hidden.shape[1]).index_copy(0, places, hidden)
    stops = ends.to(torch.int32)
    mixed = _GroupedLinear.apply(spread, stops, *first).index_select(0, places)
    inner = (gated(mixed, activation) * weights[:, None]).to(hidden.dtype)
    spread = inner.new_zeros(num_rows, inner.shape[1]).index_copy(0, places, inner)
    output: Tensor = _GroupedLinear.apply(spread, stops, *second).index_select(0, places)
    return output


class _GroupedLinear(torch.autograd.Function):
    """Products of groups of rows with a weight each, ``[rows, in]`` to ``[rows, out]``.

    The weights are laid side by side anew for the backward pass, so that no copy of them is kept.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, stops: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, stops, *weights)
        return grouped_mm(rows, torch.stack(weights).transpose(-2, -1), offs=stops)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, stops, *weights = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_rows = grouped_mm(gradient, torch.stack(weights), offs=stops) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return of_rows, None, *(None for _ in weights)
        return of_rows, None, *grouped_mm(gradient.t(), rows, offs=stops).unbind()
