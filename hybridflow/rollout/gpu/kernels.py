"""Triton kernels of a decode step, but for the matrix products and sampling.

All arithmetic is in fp32, whatever the format of the weights. A row whose position is -1 is padding: it reads and
writes no cache, and its output is 0. The cache is page-major: ``[blocks, BLOCK_TOKENS, groups, head]``, keys and values
apart. Kernels find it by addresses in a table on the device, so that a captured graph outlives the cache that it was
captured with.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def found_at(place, ELEMENT: tl.constexpr):
    """Return the pointer to ``ELEMENT`` that is at a place in a table of addresses, which are multiples of 16.

    An address tells Triton nothing of its alignment: unless it is told, it reads element by element.
    """
    return tl.multiple_of(tl.load(place).to(tl.pointer_type(ELEMENT)), 16)


@triton.jit
def add_norm(hidden, product, post_weight, factor, weight, normed, width, eps, centre, HAS_PRODUCT: tl.constexpr,
             HAS_POST: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_NORM: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    """Add a product to hidden states, in place, and normalize the sum; one program for each row.

    Args:
        hidden: ``[rows, width]``.
        product: What is added, ``[rows, width]``.
        post_weight: Weight of the norm of the product before it is added, ``[width]``.
        factor: What the sum is multiplied by, ``[1]``.
        weight: Weight of the norm of the sum, ``[width]``.
        normed: Takes the normalized sum, ``[rows, width]``.
        width: Width of a row.
        eps: Added to mean squares.
        centre: Added to the norms' weights.
        HAS_PRODUCT: Whether anything is added.
        HAS_POST: Whether the product is normalized first.
        HAS_FACTOR: Whether the sum is multiplied; only if something is added.
        HAS_NORM: Whether the sum is normalized.
        BLOCK: Power of 2, at least ``width``.
    """
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    is_there = at < width
    value = tl.load(hidden + row + at, mask=is_there, other=0.0).to(tl.float32)
    if HAS_PRODUCT:
        added = tl.load(product + row + at, mask=is_there, other=0.0).to(tl.float32)
        if HAS_POST:
            scale = tl.load(post_weight + at, mask=is_there, other=0.0).to(tl.float32) + centre
            added = added * tl.rsqrt(tl.sum(added * added, 0) / width + eps) * scale
            added = added.to(hidden.dtype.element_ty).to(tl.float32)
        value = (value + added).to(hidden.dtype.element_ty).to(tl.float32)
        if HAS_FACTOR:
            value = (value * tl.load(factor).to(tl.float32)).to(hidden.dtype.element_ty).to(tl.float32)
        tl.store(hidden + row + at, value.to(hidden.dtype.element_ty), mask=is_there)
    if HAS_NORM:
        scale = tl.load(weight + at, mask=is_there, other=0.0).to(tl.float32) + centre
        value = value * tl.rsqrt(tl.sum(value * value, 0) / width + eps) * scale
        tl.store(normed + row + at, value.to(normed.dtype.element_ty), mask=is_there)


@triton.jit
def mean_squares(squares, mixed, ranks, GROUPS: tl.constexpr, SHARERS: tl.constexpr, HEAD: tl.constexpr,
                 HEADS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Sum this rank's part of the mean squares of queries and keys over all heads; one program for each row.

    Args:
        squares: Takes them, ``[rows, 2]`` fp32.
        mixed: As for ``store``, without gates.
        ranks: Ranks that have so many heads each.
        GROUPS: Query groups on this rank.
        SHARERS: Queries of a group.
        HEAD: Width of a head.
        HEADS: Power of 2, at least ``SHARERS + 1``.
        WIDTH: Power of 2, at least ``HEAD``.
    """
    row = tl.program_id(0).to(tl.int64)
    head, at = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    queries, keys = tl.zeros([HEADS, WIDTH], tl.float32), tl.zeros([HEADS, WIDTH], tl.float32)
    for group in range(GROUPS):
        source = mixed + (row * GROUPS + group) * (SHARERS + 2) * HEAD + head * HEAD + at
        value = tl.load(source, mask=(head <= SHARERS) & (at < HEAD), other=0.0).to(tl.float32)
        queries += tl.where(head < SHARERS, value * value, 0.0)
        keys += tl.where(head == SHARERS, value * value, 0.0)
    width = ranks * GROUPS * HEAD
    tl.store(squares + 2 * row, tl.sum(tl.sum(queries, 1), 0) / (width * SHARERS))
    tl.store(squares + 2 * row + 1, tl.sum(tl.sum(keys, 1), 0) / width)


@triton.jit
def _scaled(values, scale, query_weight, key_weight, at, is_query, is_key, centre):
    """Return the normalized dims ``at`` of queries and of the key, ``[heads, dims]``."""
    weight = tl.load(query_weight + at, mask=is_query, other=0.0).to(tl.float32)
    weight += tl.load(key_weight + at, mask=is_key, other=0.0).to(tl.float32)
    return values * scale * (weight + centre)


@triton.jit(do_not_specialize=["layer", "table_width"])
def store(query, mixed, caches, tables, sequences, positions, rotary, shifts, query_weight, key_weight, squares,
          layer, table_width, eps, centre, GROUPS: tl.constexpr, SHARERS: tl.constexpr, HEAD: tl.constexpr,
          TURNED: tl.constexpr, BLOCK_TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
          REST: tl.constexpr, WIDTH: tl.constexpr, HAS_NORM: tl.constexpr, IS_WIDE: tl.constexpr,
          HAS_VALUE_NORM: tl.constexpr, HAS_GATE: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
          HAS_SHIFTS: tl.constexpr):  # fmt: skip
    """Rotate queries and keys, and write keys and values to the cache; a program for each row and query group.

    Args:
        query: Takes the rotated queries, ``[rows, groups, sharers, head]``.
        mixed: Output of the fused projection, ``[rows, groups, sharers + 2, head]``: queries, key, value. With
            ``HAS_GATE`` each query has its gate behind it.
        caches: Addresses of each layer's keys and values, ``[layers, 2]`` int64.
        tables: Blocks of each sequence, ``[sequences, table_width]`` int32.
        sequences: Sequence of each row, ``[rows]`` int64.
        positions: Position of each row in its sequence, ``[rows]`` int64; -1: padding.
        rotary: Cosines and sines, ``[turns, 2, TURNED]`` fp32; those of a row are at its position.
        shifts: With ``HAS_SHIFTS`` they are at its position plus this, ``[rows]`` int64.
        query_weight: Weight of the queries' norm, ``[head]``; with ``IS_WIDE`` ``[groups, sharers, head]``.
        key_weight: Weight of the keys' norm, ``[head]``; with ``IS_WIDE`` ``[groups, head]``.
        squares: With ``IS_WIDE`` mean squares of queries and keys, ``[rows, 2]`` fp32.
        layer: Which layer's cache.
        table_width: Blocks in a row of the table.
        eps: Added to mean squares.
        centre: Added to the norms' weights.
        GROUPS: Query groups on this rank.
        SHARERS: Queries of a group.
        HEAD: Width of a head.
        TURNED: Pairs of dims that turn, at most ``HEAD / 2``; the dims behind them stay as they are.
        BLOCK_TOKENS: Tokens of a block.
        HEADS: Power of 2, at least ``SHARERS + 1``.
        HALF: Power of 2, at least ``TURNED``.
        REST: Power of 2, at least the dims that stay; 0: all turn.
        WIDTH: Power of 2, at least ``HEAD``.
        HAS_NORM: Whether queries and keys are normalized.
        IS_WIDE: Whether they are normalized over all heads.
        HAS_VALUE_NORM: Whether values are normalized, without a weight.
        HAS_GATE: Whether there are gates.
        IS_INTERLEAVED: Whether neighboring dims turn together, instead of a dim of each half.
        HAS_SHIFTS: Whether there are shifts.
    """
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + row)
    head, at = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    places: tl.constexpr = 2 if HAS_GATE else 1
    is_there = (head <= SHARERS) & (at < TURNED)
    is_query, is_key = is_there & (head < SHARERS), is_there & (head == SHARERS)
    source = mixed + (row * GROUPS + group) * (places * SHARERS + 2) * HEAD
    from_head = source + head * places * HEAD
    at_low = (2 * at if IS_INTERLEAVED else at) + head * 0
    at_high = at_low + (1 if IS_INTERLEAVED else TURNED)
    low = tl.load(from_head + at_low, mask=is_there, other=0.0).to(tl.float32)
    high = tl.load(from_head + at_high, mask=is_there, other=0.0).to(tl.float32)
    square = tl.sum(low * low + high * high, 1)
    if REST > 0:
        at_rest = 2 * TURNED + tl.arange(0, REST)[None, :] + head * 0
        has_rest = (head <= SHARERS) & (at_rest < HEAD)
        rest_query, rest_key = has_rest & (head < SHARERS), has_rest & (head == SHARERS)
        rest = tl.load(from_head + at_rest, mask=has_rest, other=0.0).to(tl.float32)
        square += tl.sum(rest * rest, 1)
    if HAS_NORM:
        mean = square / HEAD
        if IS_WIDE:
            part = tl.arange(0, HEADS)
            mean = tl.load(squares + 2 * row + (part >= SHARERS))
            query_weight += (group * SHARERS + head) * HEAD
            key_weight += group * HEAD
        scale = tl.rsqrt(mean + eps)[:, None]
        low = _scaled(low, scale, query_weight, key_weight, at_low, is_query, is_key, centre)
        high = _scaled(high, scale, query_weight, key_weight, at_high, is_query, is_key, centre)
        if REST > 0:
            rest = _scaled(rest, scale, query_weight, key_weight, at_rest, rest_query, rest_key, centre)
    turn_at = position
    if HAS_SHIFTS:
        turn_at += tl.load(shifts + row)
    turn = rotary + tl.maximum(turn_at, 0) * 2 * TURNED + tl.arange(0, HALF)
    is_turn = tl.arange(0, HALF) < TURNED
    cosine = tl.load(turn, mask=is_turn, other=0.0)[None, :]
    sine = tl.load(turn + TURNED, mask=is_turn, other=0.0)[None, :]
    element = query.dtype.element_ty
    turned_low, turned_high = (low * cosine - high * sine).to(element), (high * cosine + low * sine).to(element)
    target = query + (row * GROUPS + group) * SHARERS * HEAD + head * HEAD
    tl.store(target + at_low, turned_low, mask=is_query)
    tl.store(target + at_high, turned_high, mask=is_query)
    if REST > 0:
        tl.store(target + at_rest, rest.to(element), mask=rest_query)
    if position >= 0:
        sequence = tl.load(sequences + row)
        block = tl.load(tables + sequence * table_width + position // BLOCK_TOKENS).to(tl.int64)
        place = ((block * BLOCK_TOKENS + position % BLOCK_TOKENS) * GROUPS + group) * HEAD
        keys = found_at(caches + 2 * layer, element) + place
        values = found_at(caches + 2 * layer + 1, element) + place
        tl.store(keys + at_low, turned_low, mask=is_key)
        tl.store(keys + at_high, turned_high, mask=is_key)
        if REST > 0:
            tl.store(keys + at_rest, rest.to(element), mask=rest_key)
        at_value = tl.arange(0, WIDTH)
        value = tl.load(source + (places * SHARERS + 1) * HEAD + at_value, mask=at_value < HEAD, other=0.0)
        if HAS_VALUE_NORM:
            value = value.to(tl.float32)
            value = (value * tl.rsqrt(tl.sum(value * value, 0) / HEAD + eps)).to(element)
        tl.store(values + at_value, value, mask=at_value < HEAD)


@triton.jit
def gate_heads(context, mixed, SHARERS: tl.constexpr, HEAD: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Multiply the context of each query by the sigmoid of its gate, in place; a program for each row and query group.

    Args:
        context: ``[rows, groups, sharers, head]``.
        mixed: As for ``store``, with gates.
        SHARERS: Queries of a group.
        HEAD: Width of a head.
        HEADS: Power of 2, at least ``SHARERS``.
        WIDTH: Power of 2, at least ``HEAD``.
    """
    place = tl.program_id(0).to(tl.int64)
    head, at = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    is_there = (head < SHARERS) & (at < HEAD)
    gates = mixed + (place * (2 * SHARERS + 2) + 2 * head + 1) * HEAD + at
    gate = tl.load(gates, mask=is_there, other=0.0).to(tl.float32)
    target = context + (place * SHARERS + head) * HEAD + at
    value = tl.load(target, mask=is_there, other=0.0).to(tl.float32)
    # Warps that have the same numbers all read before any writes.
    tl.debug_barrier()
    tl.store(target, (value * tl.sigmoid(gate)).to(context.dtype.element_ty), mask=is_there)


@triton.jit(do_not_specialize=["layer", "num_rows", "table_width"])
def attend(context, partial, sums, query, caches, tables, sequences, positions, firsts, counts, sinks, layer, num_rows,
           table_width, scale, softcap, window, GROUPS: tl.constexpr, SHARERS: tl.constexpr, HEAD: tl.constexpr,
           BLOCK_TOKENS: tl.constexpr, SPLITS: tl.constexpr, HAS_TILES: tl.constexpr, HAS_CAP: tl.constexpr,
           HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
           WIDTH: tl.constexpr):  # fmt: skip
    """Attend to the cached tokens of each row's own sequence, up to the row itself.

    A program computes a tile of rows of one sequence, for one query group, over one share of the keys. The shares are
    brought together by ``combine``.

    Args:
        context: Takes the result if ``SPLITS`` is 1, ``[rows, groups, sharers, head]``.
        partial: Takes each share's result otherwise, ``[splits, rows, groups, sharers, head]`` fp32.
        sums: Takes each share's largest score and sum of exponentials, ``[2, splits, rows, groups, sharers]`` fp32.
        query: As ``context``.
        caches: As for ``store``.
        tables: As for ``store``.
        sequences: As for ``store``.
        positions: As for ``store``; they rise within a tile.
        firsts: First row of each tile, ``[tiles]`` int32; without ``HAS_TILES`` each row is a tile.
        counts: Rows of each tile, ``[tiles]`` int32.
        sinks: One more score of each head, whose weight goes to no value, ``[groups, sharers]``, with ``HAS_SINKS``.
        layer: Which layer's cache.
        num_rows: Rows.
        table_width: Blocks in a row of the table.
        scale: Factor on the scores.
        softcap: Scores s become cap * tanh(s / cap), with ``HAS_CAP``.
        window: Tokens that each row sees, itself included, with ``HAS_WINDOW``.
        GROUPS: Query groups on this rank.
        SHARERS: Queries of a group.
        HEAD: Width of a head.
        BLOCK_TOKENS: Tokens of a block.
        SPLITS: Shares of the keys.
        HAS_TILES: Whether tiles are given.
        HAS_CAP: Whether scores are capped.
        HAS_WINDOW: Whether rows see a window.
        HAS_SINKS: Whether there are sinks.
        QUERIES: Power of 2, at least 16 and at least the rows of a tile times ``SHARERS``.
        KEYS: Keys at a time; a power of 2, at least 16.
        WIDTH: Power of 2, at least ``HEAD``.
    """
    tile, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tile.to(tl.int64)
    count = 1
    if HAS_TILES:
        first = tl.load(firsts + tile).to(tl.int64)
        count = tl.load(counts + tile)
    end = tl.load(positions + first + count - 1) + 1
    begin = end * 0
    if HAS_WINDOW:
        begin = tl.maximum(tl.load(positions + first) - window + 1, 0)
    place = tl.arange(0, QUERIES)
    is_row = place // SHARERS < count
    row = first + place // SHARERS
    position = tl.load(positions + row, mask=is_row, other=-1)
    at = tl.arange(0, WIDTH)
    is_dim = at < HEAD
    heads = (row * GROUPS + group) * SHARERS + place % SHARERS
    q = tl.load(query + heads[:, None] * HEAD + at[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0)
    element = query.dtype.element_ty
    keys = found_at(caches + 2 * layer, element)
    values = found_at(caches + 2 * layer + 1, element)
    sequence = tl.load(sequences + first)
    per_split = tl.cdiv(tl.cdiv(end, KEYS) - begin // KEYS, SPLITS)
    start = (begin // KEYS + split * per_split) * KEYS
    stop = tl.minimum(start + per_split * KEYS, end)
    largest = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    if HAS_SINKS:
        # As if the first share had seen a key whose value is 0.
        has_sink = is_row & (split == 0)
        sink = tl.load(sinks + group * SHARERS + place % SHARERS, mask=has_sink, other=-float("inf"))
        largest = sink.to(tl.float32)
        total = has_sink.to(tl.float32)
    result = tl.zeros([QUERIES, WIDTH], tl.float32)
    for base in range(start, stop, KEYS):
        key_at = base + tl.arange(0, KEYS)
        is_key = key_at < stop
        block = tl.load(tables + sequence * table_width + key_at // BLOCK_TOKENS, mask=is_key, other=0).to(tl.int64)
        where = ((block * BLOCK_TOKENS + key_at % BLOCK_TOKENS) * GROUPS + group) * HEAD
        k = tl.load(keys + where[None, :] + at[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if HAS_CAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        is_seen = is_key[None, :] & (key_at[None, :] <= position[:, None])
        if HAS_WINDOW:
            is_seen = is_seen & (key_at[None, :] > position[:, None] - window)
        scores = tl.where(is_seen, scores, -float("inf"))
        top = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen nothing yet: its exponentials are 0, not of infinity less infinity.
        base_score = tl.where(top == -float("inf"), 0.0, top)
        factor = tl.exp(largest - base_score)
        weights = tl.exp(scores - base_score[:, None])
        v = tl.load(values + where[:, None] + at[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0)
        total = total * factor + tl.sum(weights, 1)
        result = result * factor[:, None] + tl.dot(weights.to(element), v, input_precision="ieee")
        largest = top
    is_out = is_row[:, None] & is_dim[None, :]
    if SPLITS == 1:
        result = result / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(context + heads[:, None] * HEAD + at[None, :], result.to(element), mask=is_out)
    else:
        num_heads = num_rows.to(tl.int64) * GROUPS * SHARERS
        mine = split * num_heads + heads
        tl.store(partial + mine[:, None] * HEAD + at[None, :], result, mask=is_out)
        tl.store(sums + mine, largest, mask=is_row)
        tl.store(sums + SPLITS * num_heads + mine, total, mask=is_row)


@triton.jit(do_not_specialize=["num_heads"])
def combine(context, partial, sums, num_heads, HEAD: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
            WIDTH: tl.constexpr):  # fmt: skip
    """Bring the shares of ``attend`` together; one program for each row and head.

    Args:
        context: Takes the result, ``[rows, heads, head]``.
        partial: As ``attend`` leaves it.
        sums: As ``attend`` leaves it.
        num_heads: Rows times heads.
        HEAD: Width of a head.
        SPLITS: Shares.
        PARTS: Power of 2, at least ``SPLITS``.
        WIDTH: Power of 2, at least ``HEAD``.
    """
    mine = tl.program_id(0).to(tl.int64)
    part, at = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    is_part = part < SPLITS
    where = part * num_heads.to(tl.int64) + mine
    largest = tl.load(sums + where, mask=is_part, other=-float("inf"))
    total = tl.load(sums + SPLITS * num_heads + where, mask=is_part, other=0.0)
    top = tl.max(largest, 0)
    factor = tl.exp(largest - tl.where(top == -float("inf"), 0.0, top))
    is_there = is_part[:, None] & (at < HEAD)[None, :]
    values = tl.load(partial + where[:, None] * HEAD + at[None, :], mask=is_there, other=0.0)
    whole = tl.sum(total * factor, 0)
    result = tl.sum(values * factor[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(context + mine * HEAD + at, result.to(context.dtype.element_ty), mask=at < HEAD)
