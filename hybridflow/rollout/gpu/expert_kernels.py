"""Triton kernels of a mixture of experts: who gets which token, and products with a matrix for each expert."""

from __future__ import annotations

import triton
import triton.language as tl

from hybridflow.models.layer_kernels import activated
from hybridflow.rollout.gpu.kernels import found_at


@triton.jit
def _in_best_groups(scores, group_size, GROUPS: tl.constexpr, NUM_CHOSEN: tl.constexpr, SLOTS: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    """Leave the scores of the groups whose two best experts have the largest sum; the others become -infinity."""
    at, slot = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    sums = tl.full([SLOTS], -float("inf"), tl.float32)
    for group in range(GROUPS):
        own = tl.where(at // group_size == group, scores, -float("inf"))
        best = tl.argmax(own, 0)
        second = tl.max(tl.where(at == best, -float("inf"), own), 0)
        sums = tl.where(slot == group, tl.max(own, 0) + second, sums)
    found = tl.full([BLOCK], -float("inf"), tl.float32)
    for _ in range(NUM_CHOSEN):
        group = tl.argmax(sums, 0)
        found = tl.where(at // group_size == group, scores, found)
        sums = tl.where(slot == group, -float("inf"), sums)
    return found


@triton.jit
def route(chosen, shares, logits, bias, num_experts, scale, NUM_CHOSEN: tl.constexpr, SLOTS: tl.constexpr,
          IS_SOFTMAX: tl.constexpr, HAS_BIAS: tl.constexpr, IS_NORMALIZED: tl.constexpr, GROUPS: tl.constexpr,
          NUM_GROUPS_CHOSEN: tl.constexpr, GROUP_SLOTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Choose the experts of each token; one program for each.

    Args:
        chosen: Takes the experts, the best first, ``[tokens, NUM_CHOSEN]`` int32.
        shares: Takes their shares, ``[tokens, NUM_CHOSEN]`` fp32, rounded to the format of the logits.
        logits: Of the router, ``[tokens, num_experts]``.
        bias: Added to sigmoids when experts are chosen, ``[num_experts]`` fp32.
        num_experts: Experts.
        scale: Factor on the shares.
        NUM_CHOSEN: Experts of each token.
        SLOTS: Power of 2, at least ``NUM_CHOSEN``.
        IS_SOFTMAX: Whether scores are by softmax; else by sigmoid.
        HAS_BIAS: Whether there is a bias.
        IS_NORMALIZED: Whether shares are those of the chosen experts' scores; else shares are scores.
        GROUPS: Groups of experts side by side, of which those with the best two experts are chosen from; 1: none.
        NUM_GROUPS_CHOSEN: How many groups are chosen from.
        GROUP_SLOTS: Power of 2, at least ``GROUPS``.
        BLOCK: Power of 2, at least ``num_experts``.
    """
    row = tl.program_id(0).to(tl.int64)
    at, slot = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    left = tl.load(logits + row * num_experts + at, mask=at < num_experts, other=-float("inf")).to(tl.float32)
    if IS_SOFTMAX:
        score = tl.exp(left - tl.max(left, 0))
        total = tl.sum(score, 0)
    else:
        score = tl.sigmoid(left)
        total = 1.0
        left = tl.where(at < num_experts, score, left)
        if HAS_BIAS:
            left += tl.load(bias + at, mask=at < num_experts, other=0.0)
    if GROUPS > 1:
        left = _in_best_groups(left, num_experts // GROUPS, GROUPS, NUM_GROUPS_CHOSEN, GROUP_SLOTS, BLOCK)
    expert, share = tl.zeros([SLOTS], tl.int32), tl.zeros([SLOTS], tl.float32)
    for each in range(NUM_CHOSEN):
        place = tl.argmax(left, 0)
        expert = tl.where(slot == each, place, expert)
        share = tl.where(slot == each, tl.sum(tl.where(at == place, score, 0.0), 0), share)
        left = tl.where(at == place, -float("inf"), left)
    if IS_NORMALIZED:
        total = tl.sum(share, 0) + 1e-20
    share = (share / total * scale).to(logits.dtype.element_ty).to(tl.float32)
    tl.store(chosen + row * NUM_CHOSEN + slot, expert, mask=slot < NUM_CHOSEN)
    tl.store(shares + row * NUM_CHOSEN + slot, share, mask=slot < NUM_CHOSEN)


@triton.jit(do_not_specialize=["first"])
def sort_pairs(order, bounds, chosen, num_pairs, first, BLOCK: tl.constexpr):
    """Put the pairs of tokens and experts in order by expert, those of an expert as they come; a program for each.

    Pairs of experts that have no program are left out.

    Args:
        order: Takes the pairs, ``[pairs]`` int64.
        bounds: Takes where the pairs of each expert begin, and the last one's end, ``[experts + 1]`` int64.
        chosen: The expert of each pair, ``[pairs]`` int32.
        num_pairs: Pairs.
        first: The expert of the first program.
        BLOCK: Pairs at a time; a power of 2.
    """
    own = tl.program_id(0)
    expert = own + first
    at = tl.arange(0, BLOCK)
    begin = tl.zeros([], tl.int64)
    for start in range(0, num_pairs, BLOCK):
        given = tl.load(chosen + start + at, mask=start + at < num_pairs, other=2147483647)
        begin += tl.sum((given < expert).to(tl.int64), 0)
    tl.store(bounds + own, begin)
    for start in range(0, num_pairs, BLOCK):
        given = tl.load(chosen + start + at, mask=start + at < num_pairs, other=2147483647)
        is_mine = given == expert
        place = tl.cumsum(is_mine.to(tl.int32), 0) - 1
        tl.store(order + begin + place, (start + at).to(tl.int64), mask=is_mine)
        begin += tl.sum(is_mine.to(tl.int64), 0)
    if own == tl.num_programs(0) - 1:
        tl.store(bounds + own + 1, begin)


@triton.jit
def expert_product(result, source, matrices, order, bounds, shares, biases, inputs, outputs, num_chosen,
                   IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr, CLAMP: tl.constexpr,
                   OFFSET: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """Multiply the rows of each expert with its matrix; a program for each expert and ``COLUMNS`` outputs.

    A pair is a token and one of its experts. An expert without pairs reads nothing.

    Args:
        result: Takes a row for each pair, ``[pairs, outputs]``.
        source: A row for each token with ``IS_GATED``, for each pair otherwise, ``[rows, inputs]``.
        matrices: Addresses of ``[outputs, inputs]``, with ``IS_GATED`` of two, gate and other half, ``[experts]``
            int64.
        order: Pairs by expert, ``[pairs]`` int64.
        bounds: Where the pairs of each expert begin, and the last one's end, ``[experts + 1]`` int64.
        shares: By which the gated product of a pair is multiplied, or its bias where that is not gated, ``[pairs]``
            fp32.
        biases: Addresses of ``[outputs]``, with ``IS_GATED`` of two, ``[experts]`` int64, with ``HAS_BIAS``.
        inputs: Width of a row of the source.
        outputs: Width of a row of the result.
        num_chosen: Pairs of each token.
        IS_GATED: Whether there are two products, of which the activated first one multiplies the second.
        HAS_BIAS: Whether there are biases.
        KIND: How the gate is activated, see ``activated``.
        CLAMP: Bound of the gate from above, and of the other half both ways; 0: none.
        OFFSET: Added to the other half.
        ROWS: Pairs at a time; a power of 2, at least 16.
        COLUMNS: Outputs at a time; a power of 2, at least 16.
        DEPTH: Inputs at a time; a power of 2, at least 16.
    """
    expert = tl.program_id(0)
    begin, end = tl.load(bounds + expert), tl.load(bounds + expert + 1)
    element = source.dtype.element_ty
    matrix = found_at(matrices + expert, element)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < outputs
    for start in range(begin, end, ROWS):
        place = start + tl.arange(0, ROWS)
        is_row = place < end
        pair = tl.load(order + place, mask=is_row, other=0)
        row = pair
        if IS_GATED:
            row = pair // num_chosen
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        other = tl.zeros([ROWS, COLUMNS], tl.float32)
        for depth in range(0, inputs, DEPTH):
            at = depth + tl.arange(0, DEPTH)
            is_at = at < inputs
            given = tl.load(
                source + row[:, None] * inputs + at[None, :], mask=is_row[:, None] & is_at[None, :], other=0.0
            )
            weights = matrix + column[None, :] * inputs + at[:, None]
            is_weight = is_column[None, :] & is_at[:, None]
            total += tl.dot(given, tl.load(weights, mask=is_weight, other=0.0), input_precision="ieee")
            if IS_GATED:
                upper = tl.load(weights + outputs * inputs, mask=is_weight, other=0.0)
                other += tl.dot(given, upper, input_precision="ieee")
        if IS_GATED or HAS_BIAS:
            share = tl.load(shares + pair, mask=is_row, other=0.0)[:, None]
        if HAS_BIAS:
            bias = tl.load(biases + expert).to(tl.pointer_type(element)) + column
            added = tl.load(bias, mask=is_column, other=0.0).to(tl.float32)[None, :]
            total += added if IS_GATED else added * share
        if IS_GATED:
            if HAS_BIAS:
                other += tl.load(bias + outputs, mask=is_column, other=0.0).to(tl.float32)[None, :]
            if CLAMP > 0:
                total, other = tl.minimum(total, CLAMP), tl.clamp(other, -CLAMP, CLAMP)
            total = activated(total, KIND) * (other + OFFSET) * share
        is_result = is_row[:, None] & is_column[None, :]
        tl.store(result + pair[:, None] * outputs + column[None, :], total.to(element), mask=is_result)
