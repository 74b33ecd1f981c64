"""Triton kernels of latent attention in generating: one compressed vector for each token is key and value of all heads.

The cache is page-major: ``[blocks, BLOCK_TOKENS, latent + rotary]``. All arithmetic is in fp32. A row whose position is
-1 is padding, see ``kernels``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridflow.rollout.gpu.kernels import found_at


@triton.jit(do_not_specialize=["layer", "table_width"])
def store_latent(turned, query, compressed, caches, tables, sequences, positions, rotary, weight, layer, table_width,
                 eps, centre, NUM_HEADS: tl.constexpr, PLAIN: tl.constexpr, PAIRS: tl.constexpr, LATENT: tl.constexpr,
                 BLOCK_TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
                 WIDTH: tl.constexpr):  # fmt: skip
    """Normalize and rotate a token's compressed vector, cache it, and rotate the token's queries; a program a row.

    Pairs of dims that turn stand side by side in what is given. What is written has the second of each pair apart.

    Args:
        turned: Takes the rotated part of each query, ``[rows, NUM_HEADS, 2 * PAIRS]``.
        query: ``[rows, NUM_HEADS, PLAIN + 2 * PAIRS]``.
        compressed: ``[rows, LATENT + 2 * PAIRS]``.
        caches: Address of each layer's cache, twice, ``[layers, 2]`` int64.
        tables: Blocks of each sequence, ``[sequences, table_width]`` int32.
        sequences: Sequence of each row, ``[rows]`` int64.
        positions: Position of each row in its sequence, ``[rows]`` int64.
        rotary: Cosines and sines of each position, ``[context, 2, PAIRS]`` fp32.
        weight: Weight of the norm of the compressed vector, ``[LATENT]``.
        layer: Which layer's cache.
        table_width: Blocks in a row of the table.
        eps: Added to the mean square.
        centre: Added to the norm's weight.
        NUM_HEADS: Heads on this rank.
        PLAIN: Dims of a query that do not turn.
        PAIRS: Pairs of dims that do.
        LATENT: Width of the compressed keys and values.
        BLOCK_TOKENS: Tokens of a block.
        HEADS: Power of 2, at least ``NUM_HEADS``.
        HALF: Power of 2, at least ``PAIRS``.
        WIDTH: Power of 2, at least ``LATENT``.
    """
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    element = turned.dtype.element_ty
    pair = tl.arange(0, HALF)
    is_pair = pair < PAIRS
    turn = rotary + tl.maximum(position, 0) * 2 * PAIRS + pair
    cosine = tl.load(turn, mask=is_pair, other=0.0)
    sine = tl.load(turn + PAIRS, mask=is_pair, other=0.0)
    head = tl.arange(0, HEADS)[:, None]
    is_there = (head < NUM_HEADS) & is_pair[None, :]
    source = query + (row * NUM_HEADS + head) * (PLAIN + 2 * PAIRS) + PLAIN + 2 * pair[None, :]
    low = tl.load(source, mask=is_there, other=0.0).to(tl.float32)
    high = tl.load(source + 1, mask=is_there, other=0.0).to(tl.float32)
    target = turned + (row * NUM_HEADS + head) * 2 * PAIRS + pair[None, :]
    tl.store(target, (low * cosine[None, :] - high * sine[None, :]).to(element), mask=is_there)
    tl.store(target + PAIRS, (high * cosine[None, :] + low * sine[None, :]).to(element), mask=is_there)
    if position >= 0:
        block = tl.load(tables + tl.load(sequences + row) * table_width + position // BLOCK_TOKENS).to(tl.int64)
        place = (block * BLOCK_TOKENS + position % BLOCK_TOKENS) * (LATENT + 2 * PAIRS)
        kept = found_at(caches + 2 * layer, element) + place
        given = compressed + row * (LATENT + 2 * PAIRS)
        at = tl.arange(0, WIDTH)
        latent = tl.load(given + at, mask=at < LATENT, other=0.0).to(tl.float32)
        scale = tl.load(weight + at, mask=at < LATENT, other=0.0).to(tl.float32) + centre
        latent = latent * tl.rsqrt(tl.sum(latent * latent, 0) / LATENT + eps) * scale
        tl.store(kept + at, latent.to(element), mask=at < LATENT)
        first = tl.load(given + LATENT + 2 * pair, mask=is_pair, other=0.0).to(tl.float32)
        second = tl.load(given + LATENT + 2 * pair + 1, mask=is_pair, other=0.0).to(tl.float32)
        tl.store(kept + LATENT + pair, (first * cosine - second * sine).to(element), mask=is_pair)
        tl.store(kept + LATENT + PAIRS + pair, (second * cosine + first * sine).to(element), mask=is_pair)


@triton.jit(do_not_specialize=["layer", "num_rows", "table_width"])
def attend_latent(context, partial, sums, query, turned, caches, tables, sequences, positions, layer, num_rows,
                  table_width, scale, softcap, window, NUM_HEADS: tl.constexpr, ROTARY: tl.constexpr,
                  LATENT: tl.constexpr, BLOCK_TOKENS: tl.constexpr, SPLITS: tl.constexpr, HAS_CAP: tl.constexpr,
                  HAS_WINDOW: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, TURNING: tl.constexpr,
                  WIDTH: tl.constexpr):  # fmt: skip
    """Attend to the compressed vectors of each row's own sequence, up to the row itself.

    A program computes some heads of a row over one share of the keys, and reads each key once for all of them. The
    shares are brought together by ``kernels.combine``.

    Args:
        context: Takes the result if ``SPLITS`` is 1, ``[NUM_HEADS, rows, LATENT]``.
        partial: Takes each share's result otherwise, ``[splits, NUM_HEADS, rows, LATENT]`` fp32.
        sums: Takes each share's largest score and sum of exponentials, ``[2, splits, NUM_HEADS, rows]`` fp32.
        query: Queries of compressed keys, as ``context``.
        turned: Rotated part of each query, ``[rows, NUM_HEADS, ROTARY]``.
        caches: As for ``store_latent``; likewise the next three.
        tables: Blocks of each sequence.
        sequences: Sequence of each row.
        positions: Position of each row in its sequence.
        layer: Which layer's cache.
        num_rows: Rows.
        table_width: Blocks in a row of the table.
        scale: Factor on the scores.
        softcap: Scores s become cap * tanh(s / cap), with ``HAS_CAP``.
        window: Tokens that each row sees, itself included, with ``HAS_WINDOW``.
        NUM_HEADS: Heads on this rank.
        ROTARY: Dims that turn.
        LATENT: Width of the compressed keys and values.
        BLOCK_TOKENS: Tokens of a block.
        SPLITS: Shares of the keys.
        HAS_CAP: Whether scores are capped.
        HAS_WINDOW: Whether rows see a window.
        HEADS: Heads of a program; a power of 2, at least 16.
        KEYS: Keys at a time; a power of 2, at least 16.
        TURNING: Power of 2, at least 16 and ``ROTARY``.
        WIDTH: Power of 2, at least 16 and ``LATENT``.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    end = tl.load(positions + row) + 1
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < NUM_HEADS
    at, turning = tl.arange(0, WIDTH), tl.arange(0, TURNING)
    is_at, is_turning = at < LATENT, turning < ROTARY
    mine = head * num_rows.to(tl.int64) + row
    is_mine = is_head[:, None] & is_at[None, :]
    q = tl.load(query + mine[:, None] * LATENT + at[None, :], mask=is_mine, other=0.0)
    from_turned = turned + (row * NUM_HEADS + head)[:, None] * ROTARY + turning[None, :]
    q_turned = tl.load(from_turned, mask=is_head[:, None] & is_turning[None, :], other=0.0)
    element = query.dtype.element_ty
    cache = found_at(caches + 2 * layer, element)
    table = tables + tl.load(sequences + row) * table_width
    begin = end * 0
    if HAS_WINDOW:
        begin = tl.maximum(end - window, 0)
    per_split = tl.cdiv(tl.cdiv(end - begin, KEYS), SPLITS)
    start = begin + split * per_split * KEYS
    stop = tl.minimum(start + per_split * KEYS, end)
    largest = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    result = tl.zeros([HEADS, WIDTH], tl.float32)
    for base in range(start, stop, KEYS):
        key_at = base + tl.arange(0, KEYS)
        is_key = key_at < stop
        block = tl.load(table + key_at // BLOCK_TOKENS, mask=is_key, other=0).to(tl.int64)
        kept = cache + ((block * BLOCK_TOKENS + key_at % BLOCK_TOKENS) * (LATENT + ROTARY))[:, None]
        latent = tl.load(kept + at[None, :], mask=is_key[:, None] & is_at[None, :], other=0.0)
        k = tl.load(kept + LATENT + turning[None, :], mask=is_key[:, None] & is_turning[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
        scores += tl.dot(q_turned, tl.trans(k), input_precision="ieee")
        scores = scores * scale
        if HAS_CAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        scores = tl.where(is_key[None, :], scores, -float("inf"))
        top = tl.maximum(largest, tl.max(scores, 1))
        factor = tl.exp(largest - top)
        weights = tl.exp(scores - top[:, None])
        total = total * factor + tl.sum(weights, 1)
        result = result * factor[:, None] + tl.dot(weights.to(element), latent, input_precision="ieee")
        largest = top
    if SPLITS == 1:
        result = result / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(context + mine[:, None] * LATENT + at[None, :], result.to(element), mask=is_mine)
    else:
        num_parts = num_rows.to(tl.int64) * NUM_HEADS
        part = split * num_parts + mine
        tl.store(partial + part[:, None] * LATENT + at[None, :], result, mask=is_mine)
        tl.store(sums + part, largest, mask=is_head)
        tl.store(sums + SPLITS * num_parts + part, total, mask=is_head)
