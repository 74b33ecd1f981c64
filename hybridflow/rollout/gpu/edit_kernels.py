"""Triton kernels for what requests ask to be changed about logits: penalties, biases, and tokens that are forbidden.

A table counts the tokens of each row: 2 for each time that one was sampled, and 1 if it stands in the prompt or the
response at all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridflow.rollout.gpu.sampling_kernels import value_of


@triton.jit
def count(seen, known, lengths, num_prompt, first_id, num_real, stride, capacity, BLOCK: tl.constexpr):
    """Count the known tokens of each row; a program for each row and ``BLOCK`` tokens.

    Args:
        seen: Takes the counts, ``[rows, stride]`` int32; zeros before.
        known: Tokens of each sequence, ``[rows, capacity]`` int32.
        lengths: How many are known, ``[rows]`` int64.
        num_prompt: How many of them are the prompt, ``[rows]`` int64.
        first_id: Id of this rank's first column.
        num_real: This rank's columns that are no padding.
        stride: Columns.
        capacity: Most tokens of a sequence.
        BLOCK: Power of 2.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_known = place < tl.load(lengths + row)
    local = tl.load(known + row * capacity + place, mask=is_known, other=-1) - first_id
    is_mine = is_known & (local >= 0) & (local < num_real)
    target = seen + row * stride + local
    tl.atomic_or(target, 1, mask=is_mine)
    tl.atomic_add(target, 2, mask=is_mine & (place >= tl.load(num_prompt + row)))


@triton.jit
def penalize(edited, logits, seen, repetition, presence, frequency, num_real, stride, softcap, HAS_CAP: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    """Copy logits, less the penalties of the tokens that are there; a program for each row and ``BLOCK`` columns.

    Args:
        edited: Takes the logits, ``[rows, stride]`` fp32; minus infinity where there is padding.
        logits: This rank's columns, ``[rows, stride]``.
        seen: From ``count``.
        repetition: Divides positive logits of what was seen, and multiplies negative ones, ``[rows]`` fp32.
        presence: Taken from logits of what was sampled, ``[rows]`` fp32.
        frequency: Taken from them for each time, ``[rows]`` fp32.
        num_real: Columns that are no padding.
        stride: Columns.
        softcap: Logits z become cap * tanh(z / cap) before, with ``HAS_CAP``.
        HAS_CAP: Whether logits are capped.
        BLOCK: Power of 2.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = value_of(logits + row * stride, column, num_real, softcap, HAS_CAP)
    noted = tl.load(seen + row * stride + column, mask=column < num_real, other=0)
    times = (noted >> 1).to(tl.float32)
    factor = tl.load(repetition + row)
    lower = tl.where(value > 0.0, tl.div_rn(value, factor), value * factor)
    lower = lower - tl.load(presence + row) * (times > 0.0).to(tl.float32) - tl.load(frequency + row) * times
    tl.store(edited + row * stride + column, tl.where(noted > 0, lower, value), mask=column < stride)


@triton.jit
def add_rules(edited, rules, amounts, known, lengths, no_stop_before, stops, first_id, num_real, stride, num_rules,
              width, capacity, STOPS: tl.constexpr, STOPS_BLOCK: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Add biases, and minus infinity to what may not be sampled now; one program for each row.

    A token of several rules gets the sum of all. Additions are atomic; a row has one finite bias for a token at most,
    so that their order does not matter.

    Args:
        edited: From ``penalize``; written.
        rules: Tokens of each rule, ``[rows, num_rules, width]`` int32, filled with -1: the first is the one that gets
            the amount, if the others are the last that are known, the last first.
        amounts: ``[rows, num_rules]`` fp32.
        known: As for ``count``.
        lengths: Place of the token to be chosen in its sequence, ``[rows]`` int64.
        no_stop_before: Least length at which a stop token counts; it is not sampled before, ``[rows]`` int64.
        stops: Stop tokens of each row, ``[rows, STOPS]`` int32, filled with -1.
        first_id: As for ``count``.
        num_real: As for ``count``.
        stride: Columns.
        num_rules: Rules of each row.
        width: Tokens of each rule.
        capacity: As for ``count``.
        STOPS: Stop tokens of each row.
        STOPS_BLOCK: Power of 2, at least ``STOPS``.
        BLOCK: Rules at a time; a power of 2.
    """
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row)
    target = edited + row * stride
    for start in range(0, num_rules, BLOCK):
        rule = row * num_rules + start + tl.arange(0, BLOCK)
        is_there = start + tl.arange(0, BLOCK) < num_rules
        local = tl.load(rules + rule * width, mask=is_there, other=-1) - first_id
        applies = is_there & (local >= 0) & (local < num_real)
        for back in range(1, width):
            wanted = tl.load(rules + rule * width + back, mask=is_there, other=-1)
            found = tl.load(known + row * capacity + length - back, mask=length >= back, other=-2)
            applies = applies & ((wanted < 0) | (wanted == found))
        tl.atomic_add(target + local, tl.load(amounts + rule, mask=is_there, other=0.0), mask=applies)
    if length + 1 < tl.load(no_stop_before + row):
        at = tl.arange(0, STOPS_BLOCK)
        local = tl.load(stops + row * STOPS + at, mask=at < STOPS, other=-1) - first_id
        never = tl.full([STOPS_BLOCK], -float("inf"), tl.float32)
        tl.atomic_add(target + local, never, mask=(at < STOPS) & (local >= 0) & (local < num_real))


@triton.jit
def remember(seen, known, tokens, lengths, positions, first_id, num_real, stride, capacity):
    """Write down the chosen tokens before ``advance`` takes them up; one program for each row.

    Args:
        seen: As from ``count``; written.
        known: As for ``count``; written.
        tokens: From ``settle``.
        lengths: Place of the token in its sequence, ``[rows]`` int64.
        positions: -1 for rows that have ended, ``[rows]`` int64.
        first_id: As for ``count``.
        num_real: As for ``count``.
        stride: Columns.
        capacity: As for ``count``.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    if (tl.load(positions + row) >= 0) & (token >= 0):
        tl.store(known + row * capacity + tl.load(lengths + row), token.to(tl.int32))
        local = token - first_id
        if (local >= 0) & (local < num_real):
            place = seen + row * stride + local
            tl.store(place, (tl.load(place) | 1) + 2)
