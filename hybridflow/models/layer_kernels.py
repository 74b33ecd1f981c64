"""Triton kernels between the products of a layer in training, forward and backward, each one launch.

A GPU spends as long on each small operation as it takes to read and write what that operation touches, and the host as
long as it takes to start it. As operators of torch alone these parts took a third of the time of a training step.
"""

# torch reads the annotations of an operator, so they are no strings here.
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

GATE_COLUMNS = 1024
"""Columns that a program of ``gate`` takes."""

_SUM_COLUMNS = 1024
_HEADS_AT_ONCE = 32


@triton.jit
def _gelu_argument(gates):
    """Return what ``GELU(x) = x sigmoid(...)`` takes the sigmoid of, by its approximation with tanh."""
    # 0.5 * (1 + tanh(x)) is sigmoid(2 x).
    return 1.5957691216057308 * (gates + 0.044715 * gates * gates * gates)


@triton.jit
def activated(gates, KIND: tl.constexpr):
    """Apply SiLU (0), GELU by its approximation with tanh (1), or ``x sigmoid(1.702 x)`` (2)."""
    argument = _gelu_argument(gates) if KIND == 1 else gates * 1.702 if KIND == 2 else gates
    return gates * tl.sigmoid(argument)


@triton.jit
def gate(result, mixed, inner, KIND: tl.constexpr, CLAMP: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply the activated gate with the other half; a program for each row and ``BLOCK`` columns.

    Args:
        result: Takes the product, ``[rows, inner]``.
        mixed: Gate and other half, ``[rows, 2 * inner]``.
        inner: Width of each half.
        KIND: As for ``activated``.
        CLAMP: Bound of the gate from above, and of the other half both ways; 0: none.
        OFFSET: Added to the other half.
        BLOCK: Power of 2.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < inner
    gates = tl.load(mixed + row * 2 * inner + at, mask=is_there, other=0.0).to(tl.float32)
    others = tl.load(mixed + row * 2 * inner + inner + at, mask=is_there, other=0.0).to(tl.float32)
    if CLAMP > 0:
        gates, others = tl.minimum(gates, CLAMP), tl.clamp(others, -CLAMP, CLAMP)
    others += OFFSET
    active = activated(gates, KIND).to(result.dtype.element_ty).to(tl.float32)
    tl.store(result + row * inner + at, (active * others).to(result.dtype.element_ty), mask=is_there)


@triton.jit
def _gated_gradient_kernel(result, grad, mixed, inner, KIND: tl.constexpr, CLAMP: tl.constexpr, OFFSET: tl.constexpr,
                           BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < inner
    gates = tl.load(mixed + row * 2 * inner + at, mask=is_there, other=0.0).to(tl.float32)
    others = tl.load(mixed + row * 2 * inner + inner + at, mask=is_there, other=0.0).to(tl.float32)
    given = tl.load(grad + row * inner + at, mask=is_there, other=0.0).to(tl.float32)
    of_gates, of_others = given, given
    if CLAMP > 0:
        of_gates = tl.where(gates > CLAMP, 0.0, given)
        of_others = tl.where(tl.abs(others) > CLAMP, 0.0, given)
        gates, others = tl.minimum(gates, CLAMP), tl.clamp(others, -CLAMP, CLAMP)
    others += OFFSET
    slope = gates * 0.0 + (1.702 if KIND == 2 else 1.0)
    argument = gates * 1.702 if KIND == 2 else gates
    if KIND == 1:
        argument = _gelu_argument(gates)
        slope = 1.5957691216057308 * (1.0 + 3 * 0.044715 * gates * gates)
    share = tl.sigmoid(argument)
    of_gates = of_gates * others * (share + gates * share * (1.0 - share) * slope)
    element = result.dtype.element_ty
    tl.store(result + row * 2 * inner + at, of_gates.to(element), mask=is_there)
    tl.store(result + row * 2 * inner + inner + at, (of_others * gates * share).to(element), mask=is_there)


@triton.jit(do_not_specialize=["row_stride", "head_stride"])
def _turn_kernel(result, values, table, row_stride, head_stride, sign, HEADS: tl.constexpr, HEAD: tl.constexpr,
                 DIMS: tl.constexpr, IS_INTERLEAVED: tl.constexpr, BLOCK_HEADS: tl.constexpr,
                 HALF: tl.constexpr, REST: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    pair = tl.arange(0, HALF)
    half: tl.constexpr = DIMS // 2
    is_pair = pair < half
    cosine = tl.load(table + row * DIMS + pair, mask=is_pair, other=0.0)[None, :]
    sine = sign * tl.load(table + row * DIMS + half + pair, mask=is_pair, other=0.0)[None, :]
    if IS_INTERLEAVED:
        low_at = 2 * pair[None, :]
        high_at = low_at + 1
    else:
        low_at = pair[None, :]
        high_at = low_at + half
    source = values + row * row_stride + head * head_stride
    target = result + (row * HEADS + head) * HEAD
    is_there = (head < HEADS) & is_pair[None, :]
    element = result.dtype.element_ty
    low = tl.load(source + low_at, mask=is_there, other=0.0).to(tl.float32)
    high = tl.load(source + high_at, mask=is_there, other=0.0).to(tl.float32)
    tl.store(target + low_at, (low * cosine - high * sine).to(element), mask=is_there)
    tl.store(target + high_at, (high * cosine + low * sine).to(element), mask=is_there)
    if HEAD > DIMS:
        at = DIMS + tl.arange(0, REST)[None, :]
        is_rest = (head < HEADS) & (at < HEAD)
        tl.store(target + at, tl.load(source + at, mask=is_rest, other=0.0), mask=is_rest)


@triton.jit
def _sum_rows_kernel(result, rows, order, starts, width, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < width
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(tl.load(starts + token), tl.load(starts + token + 1)):
        row = tl.load(order + place)
        total += tl.load(rows + row * width + at, mask=is_there, other=0.0).to(tl.float32)
    tl.store(result + token * width + at, total.to(result.dtype.element_ty), mask=is_there)


@torch.library.custom_op("hybridflow::gated", mutates_args=())
def gated(mixed: Tensor, kind: int, clamp: float, offset: float) -> Tensor:
    """Multiply the activated gate with the other half; differentiable.

    Args:
        mixed: Gate, and other half behind it, ``[..., 2 * inner]``.
        kind: As for ``activated``.
        clamp: Bound of the gate from above, and of the other half both ways; 0: none.
        offset: Added to the other half.

    Returns:
        ``[..., inner]``.
    """
    mixed = mixed.contiguous()
    result = _gated_like(mixed)
    if result.numel():
        inner = result.shape[-1]
        grid = result.numel() // inner, triton.cdiv(inner, GATE_COLUMNS)
        gate[grid](result, mixed, inner, KIND=kind, CLAMP=clamp, OFFSET=offset, BLOCK=GATE_COLUMNS)
    return result


def _gated_like(mixed: Tensor) -> Tensor:
    return torch.empty(*mixed.shape[:-1], mixed.shape[-1] // 2, dtype=mixed.dtype, device=mixed.device)


@gated.register_fake
def _(mixed: Tensor, kind: int, clamp: float, offset: float) -> Tensor:
    return _gated_like(mixed)


@torch.library.custom_op("hybridflow::gated_gradient", mutates_args=())
def gated_gradient(grad: Tensor, mixed: Tensor, kind: int, clamp: float, offset: float) -> Tensor:
    """Return the gradient of ``mixed``; ``grad`` is that of what ``gated`` returned."""
    grad, mixed = grad.contiguous(), mixed.contiguous()
    result = torch.empty(mixed.shape, dtype=mixed.dtype, device=mixed.device)
    if result.numel():
        inner = grad.shape[-1]
        grid = grad.numel() // inner, triton.cdiv(inner, GATE_COLUMNS)
        known = dict(KIND=kind, CLAMP=clamp, OFFSET=offset, BLOCK=GATE_COLUMNS)
        _gated_gradient_kernel[grid](result, grad, mixed, inner, **known)
    return result


@gated_gradient.register_fake
def _(grad: Tensor, mixed: Tensor, kind: int, clamp: float, offset: float) -> Tensor:
    return torch.empty(mixed.shape, dtype=mixed.dtype, device=mixed.device)


def _keep_mixed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    mixed, *ctx.how = inputs
    ctx.save_for_backward(mixed)


def _of_mixed(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return gated_gradient(grad, ctx.saved_tensors[0], *ctx.how), None, None, None


gated.register_autograd(_of_mixed, setup_context=_keep_mixed)


@torch.library.custom_op("hybridflow::turned", mutates_args=())
def turned(values: Tensor, table: Tensor, sign: float, is_interleaved: bool) -> Tensor:
    """Turn pairs of dims of each head by the angles of its token; differentiable in the values.

    Args:
        values: Queries or keys, ``[tokens, heads, head]``.
        table: Cosines of each pair, and sines behind them, ``[tokens, dims]`` fp32. Dims past these stay as they are.
        sign: 1, or -1 to turn back.
        is_interleaved: Pairs stand side by side; else half of the dims apart.

    Returns:
        ``[tokens, heads, head]``.
    """
    if values.stride(-1) != 1:
        values = values.contiguous()
    result = _like(values)
    if result.numel():
        num_tokens, heads, head = values.shape
        at_once = min(triton.next_power_of_2(heads), _HEADS_AT_ONCE)
        dims = table.shape[1]
        _turn_kernel[(num_tokens, triton.cdiv(heads, at_once))](
            *(result, values, table.contiguous(), values.stride(0), values.stride(1), sign),
            HEADS=heads,
            HEAD=head,
            DIMS=dims,
            IS_INTERLEAVED=is_interleaved,
            BLOCK_HEADS=at_once,
            HALF=triton.next_power_of_2(dims // 2),
            REST=triton.next_power_of_2(max(head - dims, 1)),
            num_warps=4,
        )
    return result


def _like(values: Tensor) -> Tensor:
    return torch.empty(values.shape, dtype=values.dtype, device=values.device)


@turned.register_fake
def _(values: Tensor, table: Tensor, sign: float, is_interleaved: bool) -> Tensor:
    return _like(values)


def _keep_turn(ctx: Any, inputs: tuple[Tensor, Tensor, float, bool], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.settings = inputs[2:]


def _turn_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    sign, is_interleaved = ctx.settings
    return turned(grad, ctx.saved_tensors[0], -sign, is_interleaved), None, None, None


turned.register_autograd(_turn_back, setup_context=_keep_turn)


@torch.library.custom_op("hybridflow::taken_rows", mutates_args=())
def taken_rows(packed: Tensor, taken: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """Pick rows, some of them more than once; the gradient of each is summed in one order, without a sort.

    Args:
        packed: ``[tokens, width]``.
        taken: Which ones, ``[rows]`` int64.
        order: The rows ordered by what they take, ``[rows]`` int64, see ``order_of``.
        starts: Where the rows that take each token start in that order, and the end, ``[tokens + 1]`` int64.

    Returns:
        ``[rows, width]``.
    """
    return packed.index_select(0, taken)


@taken_rows.register_fake
def _(packed: Tensor, taken: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    return packed.new_empty(len(taken), packed.shape[1])


def order_of(taken: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return ``order`` and ``starts`` of ``taken_rows``, where ``taken`` is."""
    of_rows, order = taken.sort(stable=True)
    return order, torch.searchsorted(of_rows, torch.arange(num_tokens + 1, device=taken.device))


@torch.library.custom_op("hybridflow::summed_rows", mutates_args=())
def summed_rows(rows: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """Sum ``[rows, width]`` over the rows that took each token, ``[tokens, width]``."""
    rows = rows.contiguous()
    result = rows.new_empty(len(starts) - 1, rows.shape[1])
    if result.numel():
        grid = len(result), triton.cdiv(rows.shape[1], _SUM_COLUMNS)
        block = min(triton.next_power_of_2(rows.shape[1]), _SUM_COLUMNS)
        _sum_rows_kernel[grid](result, rows, order, starts, rows.shape[1], BLOCK=block, num_warps=4)
    return result


@summed_rows.register_fake
def _(rows: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    return rows.new_empty(len(starts) - 1, rows.shape[1])


def _keep_order(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[2:])


def _of_packed(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return summed_rows(grad, *ctx.saved_tensors), None, None, None


taken_rows.register_autograd(_of_packed, setup_context=_keep_order)
