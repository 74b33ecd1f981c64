"""Experts of a mixture by grouped products: one kernel for all of them, and no question to the device.

The rows of each expert begin at a multiple of ``ALIGNED_ROWS``, as the product of gradients with inputs wants it. An
expert without a token has so many rows of zeros: on Blackwell torch gives a group without rows a gradient that is not
zero (pytorch issue 172439). How many rows that takes is known without their counts: at most ``ALIGNED_ROWS`` more for
each expert. What is left over are zeros of the last group.

Groups come in the order in which the experts' weights lie in memory. Weights at equal distances need no copy. A model
is made with the weights of a layer's experts in one storage, the last one first: so megatron-core lays the sums of
gradients, and gradients are added to all of them at once. Its distributed optimizer lays the weights anew, likewise:
all parameters side by side, the last one first, unless a bucket ends in a gap among a layer's experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import grouped_mm

from hybridflow.models.pairs import Pairs, at_places, collect, spread
from hybridflow.models.shapes import ALIGNED_ROWS


def is_grouped(hidden: Tensor, config: TransformerConfig) -> bool:
    """Return whether the device has a kernel for such experts: a GPU for bf16, in widths of 16 bytes."""
    widths = config.hidden_size, config.moe_ffn_hidden_size // config.expert_tensor_parallel_size
    return hidden.is_cuda and hidden.dtype == torch.bfloat16 and not any(width % 8 for width in widths)


@torch.no_grad()
def lay_side_by_side(weights: Sequence[Tensor]) -> None:
    """Give weights of one shape one storage, the last one first."""
    falling = tuple(weights[::-1])
    for weight, place in zip(falling, torch.stack(falling), strict=True):
        weight.data = place


def grouped_experts(
    hidden: Tensor,
    order: Tensor,
    counts: Tensor,
    weights: Tensor,
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    gate: Callable[[Tensor], Tensor],
    *,
    biases: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None,
    num_sharers: int = 1,
    adds_gradients: bool = False,
) -> Tensor:
    """Compute gated feed-forward blocks of experts, and sum the outputs of each token.

    Args:
        hidden: ``[tokens, hidden]``.
        order: The pairs of a token and one of its experts by expert, ``[pairs]``; those of a token have numbers in a
            row.
        counts: Pairs of each expert, ``[experts]``.
        weights: By which a pair's output is multiplied, ``[tokens, pairs of a token]``.
        first: Gate and input of each expert, ``[2 * ffn, hidden]``.
        second: Output of each expert, ``[hidden, ffn]``.
        gate: Maps gate and other half, ``[rows, 2 * ffn]``, to ``[rows, ffn]``.
        biases: Of each expert, of the first product ``[2 * ffn]`` and of the second ``[hidden]``; None: there are none.
        num_sharers: Ranks that cut each expert, of which each adds its part of the second bias.
        adds_gradients: Whether weights have sums, ``main_grad``, to which their gradients are added here.

    Returns:
        ``[tokens, hidden]``.
    """
    is_descending = first[0].storage_offset() > first[-1].storage_offset()
    if is_descending:
        first, second = first[::-1], second[::-1]
        biases = None if biases is None else (biases[0][::-1], biases[1][::-1])
    pairs, stops = _place(order, counts, weights.shape, is_descending)
    scales = weights.new_zeros(len(pairs.tokens)).index_copy(0, pairs.slots.flatten(), weights.flatten())
    mixed = _GroupedLinear.apply(spread(hidden, pairs), stops, adds_gradients, *first)
    if biases is not None:
        rows = torch.arange(len(mixed), dtype=stops.dtype, device=stops.device)
        groups = torch.searchsorted(stops, rows, right=True)
        mixed = _GroupedBias.apply(mixed, None, stops, groups, 1, *biases[0])
    inner = (gate(mixed) * scales[:, None]).to(hidden.dtype)
    output = _GroupedLinear.apply(inner, stops, adds_gradients, *second)
    if biases is not None:
        output = _GroupedBias.apply(output, scales, stops, groups, num_sharers, *biases[1])
    return collect(output, pairs)


def _place(order: Tensor, counts: Tensor, shape: torch.Size, is_descending: bool) -> tuple[Pairs, Tensor]:
    """Lay pairs out with experts in rising or in falling order; return where each group ends too, ``[experts]``."""
    num_rows = len(order) + ALIGNED_ROWS * len(counts)
    room = (counts.clamp(min=1) + ALIGNED_ROWS - 1) // ALIGNED_ROWS * ALIGNED_ROWS
    stops = (room.flip(0) if is_descending else room).cumsum(0)
    starts = (stops.flip(0) if is_descending else stops) - room
    shifts = starts - (counts.cumsum(0) - counts)
    places = torch.arange(len(order), device=order.device)
    places = places + shifts.repeat_interleave(counts, output_size=len(order))
    stops[-1] = num_rows
    return at_places(order, places, num_rows, shape), stops.to(torch.int32)


class _GroupedLinear(torch.autograd.Function):
    """Products of groups of rows with a weight each, ``[rows, in]`` to ``[rows, out]``.

    Weights that have to be laid side by side are laid anew for the backward pass, so that no copy of them is kept.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, stops: Tensor, adds_gradients: bool, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, stops, *weights)
        ctx.adds_gradients, ctx.whole = adds_gradients, _side_by_side(weights)
        return grouped_mm(rows, _stacked(ctx.whole, weights).transpose(-2, -1), offs=stops)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, stops, *weights = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_rows = grouped_mm(gradient, _stacked(ctx.whole, weights), offs=stops) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[3:]):
            return of_rows, None, None, *(None for _ in weights)
        of_weights = grouped_mm(gradient.t(), rows, offs=stops)
        if ctx.adds_gradients:
            _add_gradients(of_weights, weights)
        return of_rows, None, None, *of_weights.unbind()


class _GroupedBias(torch.autograd.Function):
    """Groups of rows, ``[rows, out]``, each plus a bias, multiplied by each row's scale if there are any; in place.

    Of several sharers each adds its part of a bias, which is whole on each, and so is the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, scales: Tensor | None, stops: Tensor, groups: Tensor, num_sharers: int, *biases: Tensor
    ) -> Tensor:
        ctx.save_for_backward(scales, stops, groups, *biases)
        ctx.num_sharers = num_sharers
        ctx.mark_dirty(rows)
        added = torch.stack(biases).index_select(0, groups)
        return rows.add_(added if scales is None else added * scales[:, None], alpha=1 / num_sharers)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scales, stops, groups, *biases = ctx.saved_tensors
        gradient, of_scales = gradients[0], None
        scaled = gradient
        if scales is not None:
            scaled = (gradient * scales[:, None]).to(gradient.dtype)
            of_scales = (gradient * torch.stack(biases).index_select(0, groups)).sum(1) / ctx.num_sharers
        if not any(ctx.needs_input_grad[5:]):
            return gradient, of_scales, None, None, None, *(None for _ in biases)
        # A sum over the rows of each group, in fp32: a product with ones, of 16 bytes a row.
        sums = grouped_mm(scaled.contiguous().t(), gradient.new_ones(len(gradient), 8), offs=stops)
        return gradient, of_scales, None, None, None, *sums[..., 0].unbind()


def _add_gradients(gradients: Tensor, weights: Sequence[Any]) -> None:
    """Add gradients, ``[experts, out, in]``, to the sums of the weights, and tell megatron-core's hooks so."""
    sums = [weight.main_grad for weight in weights]
    whole = _side_by_side(sums)
    if whole is None:
        torch._foreach_add_(sums, gradients.unbind())
    else:
        whole.add_(gradients)
    for weight in weights:
        weight.grad_added_to_main_grad = True


def _stacked(whole: Tensor | None, weights: Sequence[Tensor]) -> Tensor:
    """Return weights as one tensor, ``[experts, out, in]``; a copy only where there is no view of them."""
    return torch.stack(tuple(weights)) if whole is None else whole


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return tensors of one shape as a view with one dimension more, or None if there is none."""
    first, storage = tensors[0], tensors[0].untyped_storage()._cdata
    places = [each.storage_offset() for each in tensors]
    distance = places[1] - places[0] if len(places) > 1 else first.numel()
    is_even = all(after - before == distance for before, after in pairwise(places))
    is_one = all(each.untyped_storage()._cdata == storage and each.is_contiguous() for each in tensors)
    if not (is_even and is_one and distance >= first.numel()):
        return None
    return first.detach().as_strided((len(tensors), *first.shape), (distance, *first.stride()))
