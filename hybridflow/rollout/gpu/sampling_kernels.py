"""Triton kernels that choose the next token: one read of the logits, with the noise of ``rollout.sampling``."""

from __future__ import annotations

import triton
import triton.language as tl

NUM_TERMS, NUM_EDITED_TERMS = 5, 7
"""Terms of a part: best score, its scaled logit, largest scaled logit, sum of exponentials below that, and the same sum
over what may be sampled. With edits two more: the edited scaled logit of the best, and the largest of them, below which
that last sum then is."""


@triton.jit
def _mixed(value):
    """Apply the finalizer of SplitMix64 to uint64."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _log(value):
    """Compute the natural logarithm of normal fp32 numbers, within 2 units in the last place.

    The device's own is quick, and too coarse near 1. Polynomial: Cephes, logf.
    """
    bits = value.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) - 126).to(tl.float32)
    mantissa = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    is_low = mantissa < 0.70710678
    exponent = tl.where(is_low, exponent - 1.0, exponent)
    rest = tl.where(is_low, mantissa + mantissa, mantissa) - 1.0
    series = 7.0376836292e-2 * rest - 1.1514610310e-1
    series = series * rest + 1.1676998740e-1
    series = series * rest - 1.2420140846e-1
    series = series * rest + 1.4249322787e-1
    series = series * rest - 1.6668057665e-1
    series = series * rest + 2.0000714765e-1
    series = series * rest - 2.4999993993e-1
    series = series * rest + 3.3333331174e-1
    square = rest * rest
    small = series * rest * square - 2.12194440e-4 * exponent - 0.5 * square
    return rest + small + 0.693359375 * exponent


@triton.jit
def gumbel(key, ids):
    """Return the noise of vocabulary ids under the key of a token, as ``rollout.sampling.gumbel_noise`` does."""
    bits = _mixed(key + (ids + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    uniform = tl.minimum(((bits >> 32).to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)
    # log(1 - u) without the digits that 1 - u has lost (Kahan).
    left = 1.0 - uniform
    lost = left - 1.0
    exact = _log(left) * (uniform / tl.where(lost == 0.0, -1.0, lost))
    exponential = tl.where(lost == 0.0, uniform, exact)
    return -_log(exponential)


@triton.jit
def _order(value):
    """Map fp32 to int32 in the same order."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(row_logits, column, num_real, softcap, HAS_CAP: tl.constexpr):
    """Return some columns of a row, capped, in fp32; minus infinity from ``num_real`` on."""
    value = tl.load(row_logits + column, mask=column < num_real, other=-float("inf")).to(tl.float32)
    if HAS_CAP:
        value = tl.where(column < num_real, softcap * (2.0 * tl.sigmoid(2.0 * value / softcap) - 1.0), -float("inf"))
    return value


@triton.jit
def _scaled(row_logits, column, num_real, temperature, softcap, HAS_CAP: tl.constexpr):
    """Return ``value_of`` some columns over the temperature."""
    return tl.div_rn(value_of(row_logits, column, num_real, softcap, HAS_CAP), temperature)


@triton.jit
def _above(row_logits, edge, floor, largest, temperature, softcap, num_real, IS_COUNT: tl.constexpr,
           HAS_CAP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Return the number, or the weight, of a row's scaled logits that are neither below edge nor floor, in fp64."""
    found = tl.zeros([], tl.float64)
    for start in range(0, num_real, BLOCK):
        column = start + tl.arange(0, BLOCK)
        scaled = _scaled(row_logits, column, num_real, temperature, softcap, HAS_CAP)
        order = _order(scaled)
        is_above = (order >= edge) & (order >= floor) & (column < num_real)
        if IS_COUNT:
            found += tl.sum(is_above.to(tl.float64), 0)
        else:
            found += tl.sum(tl.where(is_above, tl.exp(scaled - largest), 0.0).to(tl.float64), 0)
    return found


@triton.jit
def find_floors(floors, logits, temperatures, top_k, top_p, min_p, num_real, stride, softcap, HAS_CAP: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """Find the least scaled logit of each row that may be sampled; one program for each row.

    Top k applies first, then top p of these, then min p. The edges are found bit by bit in the order of fp32 numbers:
    32 reads of the row for each of top k and top p, which rows without them are spared.

    Args:
        floors: Takes the place of the least one in the order of fp32 numbers, ``[rows]`` int32.
        logits: All columns, ``[rows, stride]``.
        temperatures: ``[rows]`` fp32.
        top_k: ``[rows]`` int64; 0: no cut.
        top_p: ``[rows]`` fp32; 1: no cut.
        min_p: ``[rows]`` fp32; 0: no cut.
        num_real: Columns that are no padding.
        stride: Columns.
        softcap: As for ``sample_part``.
        HAS_CAP: As for ``sample_part``.
        BLOCK: Columns at a time; a power of 2.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature, source = tl.load(temperatures + row), logits + row * stride
    most, share, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    lowest = tl.full([], -2147483648, tl.int32)
    floor = lowest
    if (most > 0) | (share < 1.0) | (least > 0.0):
        largest = tl.full([], -float("inf"), tl.float32)
        for start in range(0, num_real, BLOCK):
            column = start + tl.arange(0, BLOCK)
            scaled = _scaled(source, column, num_real, temperature, softcap, HAS_CAP)
            largest = tl.maximum(largest, tl.max(scaled, 0))
        if (most > 0) & (most < num_real):
            edge = lowest
            for bit in range(32):
                tried = edge + (tl.full([], 1, tl.int32) << (31 - bit))
                count = _above(source, tried, lowest, largest, temperature, softcap, num_real, True, HAS_CAP, BLOCK)
                edge = tl.where(count >= most, tried, edge)
            floor = edge
        if share < 1.0:
            whole = _above(source, lowest, floor, largest, temperature, softcap, num_real, False, HAS_CAP, BLOCK)
            wanted = share.to(tl.float64) * whole
            edge = lowest
            for bit in range(32):
                tried = edge + (tl.full([], 1, tl.int32) << (31 - bit))
                weight = _above(source, tried, floor, largest, temperature, softcap, num_real, False, HAS_CAP, BLOCK)
                edge = tl.where(weight >= wanted, tried, edge)
            floor = tl.maximum(floor, edge)
        if least > 0.0:
            floor = tl.maximum(floor, _order(largest + _log(least)))
    tl.store(floors + row, floor)


@triton.jit
def sample_part(terms, ids, logits, edited, keys, lengths, temperatures, is_quiet, floors, first_id, num_real, stride,
                softcap, PARTS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_LENGTHS: tl.constexpr,
                HAS_FLOORS: tl.constexpr, HAS_EDITS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Find the best candidate of a part of a row, and the terms of its log-probability.

    One program for each row and part of ``BLOCK`` columns.

    Args:
        terms: Takes ``NUM_TERMS`` or ``NUM_EDITED_TERMS`` numbers for each part, ``[terms, rows, parts]`` fp32.
        ids: Takes the candidate's id, ``[rows, parts]`` int32.
        logits: This rank's columns, ``[rows, stride]``.
        edited: What is sampled from instead, capped, ``[rows, stride]`` fp32, with ``HAS_EDITS``.
        keys: Key of each row's sequence, or without ``HAS_LENGTHS`` of its token, ``[rows]`` int64.
        lengths: Place of the token to be chosen in its sequence, ``[rows]`` int64.
        temperatures: ``[rows]`` fp32.
        is_quiet: Rows without noise, ``[rows]`` uint8.
        floors: From ``find_floors``, with ``HAS_FLOORS``.
        first_id: Id of the first column.
        num_real: Columns that are no padding.
        stride: Columns.
        softcap: Logits z become cap * tanh(z / cap), with ``HAS_CAP``.
        PARTS: Parts of a row.
        HAS_CAP: Whether logits are capped.
        HAS_LENGTHS: Whether the token's key is still to be made.
        HAS_FLOORS: Whether some columns may not be sampled.
        HAS_EDITS: Whether logits are edited.
        BLOCK: Columns of a part; a power of 2.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    scaled = _scaled(logits + row * stride, column, num_real, tl.load(temperatures + row), softcap, HAS_CAP)
    largest = tl.max(scaled, 0)
    shares = tl.exp(scaled - tl.maximum(largest, -3.4028234663852886e38))
    total = tl.sum(shares, 0)
    kept, wanted = total, scaled
    if HAS_EDITS:
        wanted = _scaled(edited + row * stride, column, num_real, tl.load(temperatures + row), 0.0, False)
        top = tl.max(wanted, 0)
        shares = tl.exp(wanted - tl.maximum(top, -3.4028234663852886e38))
        kept = tl.sum(shares, 0)
    scores = wanted
    if HAS_FLOORS:
        is_kept = _order(wanted) >= tl.load(floors + row)
        kept = tl.sum(tl.where(is_kept, shares, 0.0), 0)
        scores = tl.where(is_kept, wanted, -float("inf"))
    if tl.load(is_quiet + row) == 0:
        key = tl.load(keys + row).to(tl.uint64)
        if HAS_LENGTHS:
            key = _mixed(_mixed(key) + tl.load(lengths + row).to(tl.uint64))
        scores = scores + gumbel(key, first_id + column)
    best = tl.max(scores, 0)
    place = tl.argmax(scores, 0)
    chosen = tl.max(tl.where(tl.arange(0, BLOCK) == place, scaled, -float("inf")), 0)
    num = tl.num_programs(0) * PARTS
    mine = row * PARTS + part
    tl.store(terms + mine, best)
    tl.store(terms + num + mine, chosen)
    tl.store(terms + 2 * num + mine, largest)
    tl.store(terms + 3 * num + mine, total)
    tl.store(terms + 4 * num + mine, kept)
    if HAS_EDITS:
        tl.store(terms + 5 * num + mine, tl.max(tl.where(tl.arange(0, BLOCK) == place, wanted, -float("inf")), 0))
        tl.store(terms + 6 * num + mine, top)
    tl.store(ids + mine, (first_id + part * BLOCK + place).to(tl.int32))


@triton.jit
def settle(tokens, log_probs, sampled, terms, ids, is_quiet, PARTS: tl.constexpr, HAS_EDITS: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """Pick the best of a row's parts; one program for each row.

    Args:
        tokens: Takes the token, ``[rows]`` int64; -1: the logits are not finite, -2: no token is left.
        log_probs: Takes its log-probability under ``softmax(logits / temperature)``, ``[rows]`` fp32.
        sampled: The same under what was sampled from; 0 for the likeliest token, ``[rows]`` fp32.
        terms: As ``sample_part`` leaves it, of all ranks, ``[terms, rows, parts]``.
        ids: As ``sample_part`` leaves it, ``[rows, parts]``.
        is_quiet: Rows without noise, ``[rows]`` uint8.
        PARTS: Parts of a row.
        HAS_EDITS: As for ``sample_part``.
        BLOCK: Power of 2, at least ``PARTS``.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    is_there = at < PARTS
    num = tl.num_programs(0) * PARTS
    mine = row * PARTS + at
    best = tl.load(terms + mine, mask=is_there, other=-float("inf"))
    chosen = tl.load(terms + num + mine, mask=is_there, other=-float("inf"))
    largest = tl.load(terms + 2 * num + mine, mask=is_there, other=-float("inf"))
    total = tl.load(terms + 3 * num + mine, mask=is_there, other=0.0)
    kept = tl.load(terms + 4 * num + mine, mask=is_there, other=0.0)
    winner = tl.argmax(best, 0)
    is_winner = at == winner
    top = tl.max(largest, 0)
    shares = tl.where(total == 0.0, 0.0, tl.exp(largest - top))
    whole = tl.sum(total * shares, 0)
    is_finite = (whole > 0.0) & (whole < float("inf")) & (top > -float("inf")) & (top < float("inf"))
    logit = tl.max(tl.where(is_winner, chosen, -float("inf")), 0)
    log_prob = logit - (top + _log(tl.where(is_finite, whole, 1.0)))
    if HAS_EDITS:
        edited = tl.load(terms + 5 * num + mine, mask=is_there, other=-float("inf"))
        logit = tl.max(tl.where(is_winner, edited, -float("inf")), 0)
        largest = tl.load(terms + 6 * num + mine, mask=is_there, other=-float("inf"))
        top = tl.max(largest, 0)
        shares = tl.where(kept == 0.0, 0.0, tl.exp(largest - top))
    left = tl.sum(tl.where(kept == 0.0, 0.0, kept * shares), 0)
    of_kept = logit - (top + _log(tl.where(is_finite & (left > 0.0), left, 1.0)))
    token = tl.max(tl.where(is_winner, tl.load(ids + mine, mask=is_there, other=0), -1), 0).to(tl.int64)
    token = tl.where(tl.max(best, 0) == -float("inf"), -2, token)
    token = tl.where(is_finite, token, -1)
    tl.store(tokens + row, token)
    tl.store(log_probs + row, log_prob)
    tl.store(sampled + row, tl.where(tl.load(is_quiet + row) != 0, 0.0, of_kept))


@triton.jit
def advance(token_in, lengths, positions, counts, failures, history, log_probs_history, sampled_history, tokens,
            log_probs, sampled, ends, no_stop_before, stops, num_rows, STOPS: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """Take up a step's tokens: write them down, and end the rows that are done; one program for each row.

    Args:
        token_in: Input of the next step, ``[rows]`` int64; written.
        lengths: Known tokens of each sequence, ``[rows]`` int64; written.
        positions: Position of the next input, ``[rows]`` int64, -1 for rows that have ended; written.
        counts: Tokens of this row in the history, ``[rows]`` int64; written.
        failures: ``[rows]`` int64, 0 or what stood in the place of a token; written.
        history: Tokens so far, ``[steps, rows]`` int64; written.
        log_probs_history: ``[steps, rows]`` fp32; written.
        sampled_history: ``[steps, rows]`` fp32; written.
        tokens: From ``settle``.
        log_probs: From ``settle``.
        sampled: From ``settle``.
        ends: Longest length of each sequence, ``[rows]`` int64.
        no_stop_before: Least length at which a stop token counts, ``[rows]`` int64.
        stops: Stop tokens of each row, ``[rows, STOPS]`` int32, filled with -1.
        num_rows: Rows.
        STOPS: Stop tokens of each row.
        BLOCK: Power of 2, at least ``STOPS``.
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(positions + row) >= 0:
        token = tl.load(tokens + row)
        if token < 0:
            tl.store(failures + row, token)
            tl.store(positions + row, -1)
        else:
            count = tl.load(counts + row)
            tl.store(history + count * num_rows + row, token)
            tl.store(log_probs_history + count * num_rows + row, tl.load(log_probs + row))
            tl.store(sampled_history + count * num_rows + row, tl.load(sampled + row))
            length = tl.load(lengths + row) + 1
            at = tl.arange(0, BLOCK)
            wanted = tl.load(stops + row * STOPS + at, mask=at < STOPS, other=-1)
            is_stop = tl.max((wanted == token).to(tl.int32), 0) > 0
            is_over = (is_stop & (length >= tl.load(no_stop_before + row))) | (length >= tl.load(ends + row))
            tl.store(counts + row, count + 1)
            tl.store(lengths + row, length)
            tl.store(token_in + row, token)
            tl.store(positions + row, tl.where(is_over, -1, length - 1))
