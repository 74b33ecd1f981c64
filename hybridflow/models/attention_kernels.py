"""Triton kernels of attention on packed tokens, with soft caps, windows and sinks, in any format, in linear memory.

Sequences stand one after the other. The queries of a sequence are the last of its tokens: there may be fewer queries
than keys, where the first tokens were computed with another sequence. Each query sees itself and what is before it.
Scores and sums are fp32. No sum depends on the order in which programs run.
"""

# torch reads the annotations of an operator, so they are no strings here.
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _span(starts, sequence):
    """Return where a sequence begins, and how many tokens it has there."""
    first = tl.load(starts + sequence)
    return first, tl.load(starts + sequence + 1) - first


@triton.jit
def _key_range(place, num_keys, window, HAS_WINDOW: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Return the first key, a multiple of ``KEYS``, and the end of what a block of queries sees from a place on."""
    begin = place * 0
    if HAS_WINDOW:
        begin = tl.maximum(place - window + 1, 0) // KEYS * KEYS
    return begin, tl.minimum(place + QUERIES, num_keys)


@triton.jit
def _capped(scores, softcap, HAS_CAP: tl.constexpr):
    """Return capped scores, and the factor that the cap puts on their gradients."""
    slope = 1.0
    if HAS_CAP:
        # tanh(x) is 2 sigmoid(2 x) - 1.
        bent = 2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0
        scores = softcap * bent
        slope = 1.0 - bent * bent
    return scores, slope


@triton.jit
def _seen(places, key_at, num_keys, window, HAS_WINDOW: tl.constexpr):
    """Return which query sees which key, ``[queries, keys]``."""
    is_seen = (key_at[None, :] <= places[:, None]) & (key_at < num_keys)[None, :]
    if HAS_WINDOW:
        is_seen = is_seen & (key_at[None, :] > places[:, None] - window)
    return is_seen


@triton.jit
def forward(context, normalizers, query, key, value, query_starts, key_starts, num_tokens, scale, softcap, window,
            HEADS: tl.constexpr, SHARERS: tl.constexpr, HEAD: tl.constexpr, HAS_CAP: tl.constexpr,
            HAS_WINDOW: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Attend; one program for each block of queries of a sequence and each head.

    Args:
        context: Takes the result, ``[tokens, heads, head]``.
        normalizers: Takes the logarithm of each sum of exponentials, ``[heads, tokens]`` fp32.
        query: ``[tokens, heads, head]``.
        key: ``[keys, groups, head]``.
        value: As ``key``.
        query_starts: Where the queries of each sequence start, and the end, ``[sequences + 1]`` int32.
        key_starts: Where the keys of each sequence start, and the end, ``[sequences + 1]`` int32.
        num_tokens: Queries of all sequences.
        scale: Factor on the scores.
        softcap: Scores s become cap * tanh(s / cap), with ``HAS_CAP``.
        window: Tokens that each token sees, itself included, with ``HAS_WINDOW``.
        HEADS: Heads on this rank.
        SHARERS: Heads of a query group.
        HEAD: Width of a head.
        HAS_CAP: Whether scores are capped.
        HAS_WINDOW: Whether tokens see a window.
        QUERIES: Queries of a block; a power of 2, at least 16.
        KEYS: Keys at a time; a power of 2, at least 16.
        WIDTH: Power of 2, at least ``HEAD`` and 16.
    """
    sequence, head = tl.program_id(1), tl.program_id(2)
    first, num_queries = _span(query_starts, sequence)
    key_first, num_keys = _span(key_starts, sequence)
    start = tl.program_id(0) * QUERIES
    if start < num_queries:
        row, at = start + tl.arange(0, QUERIES), tl.arange(0, WIDTH)
        is_there = (row < num_queries)[:, None] & (at < HEAD)[None, :]
        places = num_keys - num_queries + row
        # 32 bits suffice within a sequence, and cost half the registers.
        base_of_rows = (first.to(tl.int64) * HEADS + head) * HEAD
        where = row[:, None] * (HEADS * HEAD) + at[None, :]
        q = tl.load(query + base_of_rows + where, mask=is_there, other=0.0)
        largest = tl.full([QUERIES], -float("inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        result = tl.zeros([QUERIES, WIDTH], tl.float32)
        begin, end = _key_range(num_keys - num_queries + start, num_keys, window, HAS_WINDOW, QUERIES, KEYS)
        groups: tl.constexpr = HEADS // SHARERS
        base_of_keys = (key_first.to(tl.int64) * groups + head // SHARERS) * HEAD
        for base in range(begin, end, KEYS):
            key_at = base + tl.arange(0, KEYS)
            of_key = key_at[:, None] * (groups * HEAD) + at[None, :]
            is_key = (key_at < num_keys)[:, None] & (at < HEAD)[None, :]
            k = tl.load(key + base_of_keys + of_key, mask=is_key, other=0.0)
            scores, _ = _capped(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, softcap, HAS_CAP)
            scores = tl.where(_seen(places, key_at, num_keys, window, HAS_WINDOW), scores, -float("inf"))
            top = tl.maximum(largest, tl.max(scores, 1))
            # A row that has seen nothing yet: its exponentials are 0, not of infinity less infinity.
            base_score = tl.where(top == -float("inf"), 0.0, top)
            factor = tl.exp(largest - base_score)
            weights = tl.exp(scores - base_score[:, None])
            v = tl.load(value + base_of_keys + of_key, mask=is_key, other=0.0)
            total = total * factor + tl.sum(weights, 1)
            result = result * factor[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            largest = top
        total = tl.where(row < num_queries, total, 1.0)
        tl.store(context + base_of_rows + where, (result / total[:, None]).to(context.dtype.element_ty), mask=is_there)
        at_normalizer = normalizers + head.to(tl.int64) * num_tokens + first + row
        tl.store(at_normalizer, largest + tl.log(total), mask=row < num_queries)


@triton.jit
def query_gradient(grad_query, deltas, grad, context, normalizers, query, key, value, query_starts, key_starts,
                   num_tokens, scale, softcap, window, HEADS: tl.constexpr, SHARERS: tl.constexpr, HEAD: tl.constexpr,
                   HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
                   WIDTH: tl.constexpr):  # fmt: skip
    """Compute the queries' gradient; one program for each block of queries of a sequence and each head.

    ``grad_query`` takes the result. ``deltas`` takes each row's product of context and its gradient ``grad``, ``[heads,
    tokens]`` fp32. ``context`` and ``normalizers`` are as ``forward`` leaves them; see there for the rest.
    """
    sequence, head = tl.program_id(1), tl.program_id(2)
    first, num_queries = _span(query_starts, sequence)
    key_first, num_keys = _span(key_starts, sequence)
    start = tl.program_id(0) * QUERIES
    if start < num_queries:
        row, at = start + tl.arange(0, QUERIES), tl.arange(0, WIDTH)
        is_row = row < num_queries
        is_there = is_row[:, None] & (at < HEAD)[None, :]
        places = num_keys - num_queries + row
        # 32 bits suffice within a sequence, and cost half the registers.
        base_of_rows = (first.to(tl.int64) * HEADS + head) * HEAD
        where = row[:, None] * (HEADS * HEAD) + at[None, :]
        q = tl.load(query + base_of_rows + where, mask=is_there, other=0.0)
        g = tl.load(grad + base_of_rows + where, mask=is_there, other=0.0)
        given = tl.load(context + base_of_rows + where, mask=is_there, other=0.0)
        delta = tl.sum(g.to(tl.float32) * given.to(tl.float32), 1)
        at_row = head.to(tl.int64) * num_tokens + first + row
        tl.store(deltas + at_row, delta, mask=is_row)
        normalizer = tl.load(normalizers + at_row, mask=is_row, other=0.0)
        result = tl.zeros([QUERIES, WIDTH], tl.float32)
        begin, end = _key_range(num_keys - num_queries + start, num_keys, window, HAS_WINDOW, QUERIES, KEYS)
        groups: tl.constexpr = HEADS // SHARERS
        base_of_keys = (key_first.to(tl.int64) * groups + head // SHARERS) * HEAD
        for base in range(begin, end, KEYS):
            key_at = base + tl.arange(0, KEYS)
            of_key = key_at[:, None] * (groups * HEAD) + at[None, :]
            is_key = (key_at < num_keys)[:, None] & (at < HEAD)[None, :]
            k = tl.load(key + base_of_keys + of_key, mask=is_key, other=0.0)
            v = tl.load(value + base_of_keys + of_key, mask=is_key, other=0.0)
            scores, slope = _capped(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, softcap, HAS_CAP)
            is_seen = _seen(places, key_at, num_keys, window, HAS_WINDOW)
            weights = tl.where(is_seen, tl.exp(scores - normalizer[:, None]), 0.0)
            of_scores = weights * (tl.dot(g, tl.trans(v), input_precision="ieee") - delta[:, None]) * slope
            result += tl.dot(of_scores.to(k.dtype), k, input_precision="ieee")
        tl.store(grad_query + base_of_rows + where, (result * scale).to(grad_query.dtype.element_ty), mask=is_there)


@triton.jit
def key_gradient(grad_key, grad_value, deltas, grad, normalizers, query, key, value, query_starts, key_starts,
                 num_tokens, scale, softcap, window, HEADS: tl.constexpr, SHARERS: tl.constexpr, HEAD: tl.constexpr,
                 HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
                 WIDTH: tl.constexpr):  # fmt: skip
    """Compute the keys' and values' gradients; one program for each block of keys of a sequence and each group.

    ``grad_key`` and ``grad_value`` take the result. ``deltas`` is as ``query_gradient`` leaves it, ``grad`` the
    gradient of the context, ``normalizers`` as ``forward`` leaves it; see there for the rest.
    """
    sequence, group = tl.program_id(1), tl.program_id(2)
    first, num_queries = _span(query_starts, sequence)
    key_first, num_keys = _span(key_starts, sequence)
    start = tl.program_id(0) * KEYS
    if start < num_keys:
        key_at, at = start + tl.arange(0, KEYS), tl.arange(0, WIDTH)
        groups: tl.constexpr = HEADS // SHARERS
        is_key = (key_at < num_keys)[:, None] & (at < HEAD)[None, :]
        base_of_keys = (key_first.to(tl.int64) * groups + group) * HEAD
        of_key = key_at[:, None] * (groups * HEAD) + at[None, :]
        k = tl.load(key + base_of_keys + of_key, mask=is_key, other=0.0)
        v = tl.load(value + base_of_keys + of_key, mask=is_key, other=0.0)
        of_keys = tl.zeros([KEYS, WIDTH], tl.float32)
        of_values = tl.zeros([KEYS, WIDTH], tl.float32)
        before = num_keys - num_queries
        begin, end = tl.maximum(start - before, 0) // QUERIES * QUERIES, num_queries
        if HAS_WINDOW:
            end = tl.minimum(start + KEYS - 1 + window - before, num_queries)
        for sharer in range(SHARERS):
            head = group * SHARERS + sharer
            for base in range(begin, end, QUERIES):
                row = base + tl.arange(0, QUERIES)
                is_row = row < num_queries
                is_there = is_row[:, None] & (at < HEAD)[None, :]
                base_of_rows = (first.to(tl.int64) * HEADS + head) * HEAD
                where = row[:, None] * (HEADS * HEAD) + at[None, :]
                q = tl.load(query + base_of_rows + where, mask=is_there, other=0.0)
                g = tl.load(grad + base_of_rows + where, mask=is_there, other=0.0)
                at_row = head.to(tl.int64) * num_tokens + first + row
                normalizer = tl.load(normalizers + at_row, mask=is_row, other=0.0)
                delta = tl.load(deltas + at_row, mask=is_row, other=0.0)
                scores, slope = _capped(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, softcap, HAS_CAP)
                is_seen = _seen(before + row, key_at, num_keys, window, HAS_WINDOW) & is_row[:, None]
                weights = tl.where(is_seen, tl.exp(scores - normalizer[:, None]), 0.0)
                of_values += tl.dot(tl.trans(weights.to(g.dtype)), g, input_precision="ieee")
                of_scores = weights * (tl.dot(g, tl.trans(v), input_precision="ieee") - delta[:, None]) * slope
                of_keys += tl.dot(tl.trans(of_scores.to(q.dtype)), q, input_precision="ieee")
        tl.store(grad_key + base_of_keys + of_key, (of_keys * scale).to(grad_key.dtype.element_ty), mask=is_key)
        tl.store(grad_value + base_of_keys + of_key, of_values.to(grad_value.dtype.element_ty), mask=is_key)


def tile_settings(kernel: Any, query: Tensor) -> dict[str, int]:
    """Return the tiles with which one of the three kernels spills no registers on any architecture."""
    width = max(16, 1 << (query.shape[2] - 1).bit_length())
    if query.itemsize == 4:
        stages = 1 if kernel is key_gradient else 2
        return dict(QUERIES=16, KEYS=16, WIDTH=width, num_warps=8, num_stages=stages)
    queries = 64 if kernel is forward and width < 256 else 32
    return dict(QUERIES=queries, KEYS=32, WIDTH=width, num_warps=8 if width == 256 else 4, num_stages=2)


@torch.library.custom_op("hybridflow::packed_attention", mutates_args=())
def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    most_queries: int,
    most_keys: int,
    scale: float,
    softcap: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Attend; differentiable in query, key and value.

    Args:
        query: ``[tokens, heads, head]``.
        key: ``[keys, groups, head]``.
        value: As ``key``.
        query_starts: Where the queries of each sequence start, and the end, ``[sequences + 1]`` int32.
        key_starts: Where the keys of each sequence start, and the end, ``[sequences + 1]`` int32.
        most_queries: Queries of the sequence that has most.
        most_keys: Keys of the longest sequence.
        scale: Factor on the scores.
        softcap: Scores s become cap * tanh(s / cap); 0: they do not.
        window: Tokens that each token sees, itself included; 0: all before it.

    Returns:
        The context, ``[tokens, heads, head]``, and the logarithms of the sums of exponentials, ``[heads, tokens]``
        fp32.
    """
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    context, normalizers = _outputs(query)
    settings = tile_settings(forward, query)
    forward[(triton.cdiv(most_queries, settings["QUERIES"]), len(query_starts) - 1, query.shape[1])](
        *(context, normalizers, query, key, value, query_starts, key_starts, len(query), scale, softcap, window),
        **_constants(query, key, softcap, window),
        **settings,
    )
    return context, normalizers


def _outputs(query: Tensor) -> tuple[Tensor, Tensor]:
    rows, heads, _ = query.shape
    context = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    return context, query.new_empty(heads, rows, dtype=torch.float32)


def _constants(query: Tensor, key: Tensor, softcap: float, window: int) -> dict[str, Any]:
    heads, head = query.shape[1:]
    shape = dict(HEADS=heads, SHARERS=heads // key.shape[1], HEAD=head)
    return shape | dict(HAS_CAP=softcap > 0, HAS_WINDOW=window > 0)


@packed_attention.register_fake
def _(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _outputs(query)


@torch.library.custom_op("hybridflow::packed_attention_gradient", mutates_args=())
def packed_attention_gradient(
    grad: Tensor,
    context: Tensor,
    normalizers: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    most_queries: int,
    most_keys: int,
    scale: float,
    softcap: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value; ``grad`` is that of the context, the rest as of the operator."""
    grad, query, key, value = (each.contiguous() for each in (grad, query, key, value))
    grads = _gradients(query, key)
    deltas = torch.empty_like(normalizers)
    constants = _constants(query, key, softcap, window)
    starts = query_starts, key_starts, len(query), scale, softcap, window
    sequences = len(query_starts) - 1
    settings = tile_settings(query_gradient, query)
    query_gradient[(triton.cdiv(most_queries, settings["QUERIES"]), sequences, query.shape[1])](
        *(grads[0], deltas, grad, context, normalizers, query, key, value, *starts), **constants, **settings
    )
    settings = tile_settings(key_gradient, query)
    key_gradient[(triton.cdiv(most_keys, settings["KEYS"]), sequences, key.shape[1])](
        *(grads[1], grads[2], deltas, grad, normalizers, query, key, value, *starts), **constants, **settings
    )
    return grads


def _gradients(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    shapes = query.shape, key.shape, key.shape
    first, second, third = (torch.empty(each, dtype=query.dtype, device=query.device) for each in shapes)
    return first, second, third


@packed_attention_gradient.register_fake
def _(grad: Tensor, context: Tensor, normalizers: Tensor, query: Tensor, key: Tensor, *_: object) -> Any:
    return _gradients(query, key)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    context, normalizers = output
    ctx.save_for_backward(context, normalizers, *inputs[:5])
    ctx.settings = inputs[5:]
    ctx.mark_non_differentiable(normalizers)


def _backward(ctx: Any, grad: Tensor, _: object) -> tuple[Tensor | None, ...]:
    found = packed_attention_gradient(grad, *ctx.saved_tensors, *ctx.settings)
    return *found, *(None for _ in range(7))


packed_attention.register_autograd(_backward, setup_context=_keep)


class _WithSinks(torch.autograd.Function):
    """``packed_attention`` whose sums of exponentials have one more term for each head.

    With the sum that has it, and the context that goes with it, the kernels' gradients are those of the whole.
    """

    @staticmethod
    def forward(ctx: Any, sinks: Tensor, *inputs: Any) -> Tensor:
        context, normalizers = packed_attention(*inputs)
        totals = torch.logaddexp(normalizers, sinks.float()[:, None])
        context = (context * (normalizers - totals).exp().t()[..., None]).to(context.dtype)
        ctx.save_for_backward(sinks, context, totals, *inputs[:5])
        ctx.settings = inputs[5:]
        return context

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sinks, context, totals, *inputs = ctx.saved_tensors
        found = packed_attention_gradient(grads[0], context, totals, *inputs, *ctx.settings)
        deltas = (grads[0].float() * context.float()).sum(-1).t()
        of_sinks = -((sinks.float()[:, None] - totals).exp() * deltas).sum(1)
        return of_sinks.to(sinks.dtype), *found, *(None for _ in range(7))


def packed_attention_with_sinks(sinks: Tensor, *inputs: Any) -> Tensor:
    """Attend as ``packed_attention`` does, with sinks ``[heads]``; differentiable in sinks, query, key and value."""
    context: Tensor = _WithSinks.apply(sinks, *inputs)
    return context
