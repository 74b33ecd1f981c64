"""Triton kernel of a decode step of linear attention: a row reads its state once, and writes it once.

See ``models.delta_rule`` for the mathematics, and ``models.gated_delta_net`` for the order of the projection's rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridflow.rollout.gpu.kernels import found_at

_EPS = tl.constexpr(1e-6)
"""As in ``models.delta_rule``."""


@triton.jit
def _convolved(inputs, source, conv, at, is_there, is_first, stride, ELEMENT: tl.constexpr, TAPS: tl.constexpr,
               WINDOW: tl.constexpr):  # fmt: skip
    """Return the activated convolution of some channels at a token, and move their last inputs on by it.

    Args:
        inputs: Last inputs of the first of the channels, the oldest first, ``[TAPS - 1, stride]`` fp32.
        source: The token's own inputs.
        conv: Weights, ``[channels, TAPS]``.
        at: Places of the channels.
        is_there: Which of these there are.
        is_first: Whether the token is the first of its sequence: the last inputs are another's.
        stride: Channels of a token.
        ELEMENT: Format that the result is rounded to.
        TAPS: Tokens that the convolution sees.
        WINDOW: Power of 2, at least ``TAPS``.
    """
    tap = tl.arange(0, WINDOW)[:, None]
    is_old = (tap < TAPS - 1) & is_there[None, :]
    new = tl.load(source + at, mask=is_there, other=0.0).to(tl.float32)
    old = tl.load(inputs + tap * stride + at[None, :], mask=is_old & (is_first == 0), other=0.0)
    seen = tl.where(tap == TAPS - 1, new[None, :], old)
    is_seen = (tap < TAPS) & is_there[None, :]
    weight = tl.load(conv + at[None, :] * TAPS + tap, mask=is_seen, other=0.0).to(tl.float32)
    summed = tl.sum(seen * weight, 0)
    # Warps that have the same channels would read what another has moved.
    tl.debug_barrier()
    tl.store(inputs + (tap - 1) * stride + at[None, :], seen, mask=is_seen & (tap > 0))
    return (summed * tl.sigmoid(summed)).to(ELEMENT).to(tl.float32)


@triton.jit
def _softplus(value):
    """Return log(1 + exp(value)), exact also where the exponential is far below 1."""
    part = tl.exp(-tl.abs(value))
    whole = 1.0 + part
    return tl.maximum(value, 0.0) + tl.where(whole == 1.0, part, tl.log(whole) * part / (whole - 1.0))


@triton.jit(do_not_specialize=["layer"])
def delta_step(context, mixed, conv, bias, log, norm, states, slots, positions, layer, eps, KEY_HEADS: tl.constexpr,
               SHARERS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, TAPS: tl.constexpr, KEYS: tl.constexpr,
               BLOCK: tl.constexpr, WINDOW: tl.constexpr, HEADS: tl.constexpr, VALUES: tl.constexpr):  # fmt: skip
    """Take a token into the state of its slot, read the state, and normalize and gate what was found.

    One program for each row and key head, with all value heads of it. A row whose position is -1 is padding: it touches
    no state, and its context is 0. A row whose position is 0 begins with a state of 0, whatever its slot holds.

    Args:
        context: Takes the result, ``[rows, key heads, SHARERS, VALUE]``.
        mixed: Output of the fused projection, for each row and key head: query and key, ``KEY`` each, then of its value
            heads the values, the gates, ``VALUE`` each, the betas and the decays.
        conv: Weights of the convolution, grouped as queries, keys and values are in ``mixed``, ``[channels, TAPS]``.
        bias: Added to decays, ``[value heads]``.
        log: Logarithms of the factors on decays, ``[value heads]``.
        norm: Weight of the norm of the result, ``[VALUE]``.
        states: Addresses of each layer's last inputs and matrices, ``[layers, 2]`` int64, see ``models.delta_rule``.
        slots: Slot of each row, ``[rows]`` int64.
        positions: Position of each row in its sequence, ``[rows]`` int64; -1: padding.
        layer: Which layer's states.
        eps: Added to mean squares.
        KEY_HEADS: Key heads on this rank.
        SHARERS: Value heads of a key head.
        KEY: Width of queries and keys.
        VALUE: Width of values.
        TAPS: Tokens that the convolution sees.
        KEYS: Power of 2, at least ``KEY``.
        BLOCK: Columns of a matrix at a time, a power of 2.
        WINDOW: Power of 2, at least ``TAPS``.
        HEADS: Power of 2, at least ``SHARERS``.
        VALUES: Power of 2, at least ``VALUE``.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    element: tl.constexpr = context.dtype.element_ty
    channels: tl.constexpr = 2 * KEY + SHARERS * VALUE
    all_channels: tl.constexpr = KEY_HEADS * channels
    num_blocks: tl.constexpr = (VALUE + BLOCK - 1) // BLOCK
    context += (row * KEY_HEADS + head) * SHARERS * VALUE
    mixed += (row * KEY_HEADS + head) * (channels + SHARERS * (VALUE + 2))
    of_head, value_at = tl.arange(0, HEADS)[:, None], tl.arange(0, VALUES)[None, :]
    is_out, out_at = (of_head < SHARERS) & (value_at < VALUE), of_head * VALUE + value_at
    position = tl.load(positions + row)
    if position < 0:
        tl.store(context + out_at, tl.zeros([HEADS, VALUES], element), mask=is_out)
    else:
        is_first, slot = position == 0, tl.load(slots + row)
        conv += head * channels * TAPS
        inputs = found_at(states + 2 * layer, tl.float32) + slot * (TAPS - 1) * all_channels
        matrices = found_at(states + 2 * layer + 1, tl.float32) + (slot * KEY_HEADS + head) * SHARERS * KEY * VALUE
        key_at, at = tl.arange(0, KEYS), tl.arange(0, BLOCK)
        is_key, place = key_at < KEY, key_at[:, None] * VALUE + at[None, :]
        is_there = is_key[:, None] & (at < VALUE)[None, :]
        # A block is read while the one before is computed.
        ahead = tl.load(matrices + place, mask=is_there & (is_first == 0), other=0.0)
        query = _convolved(inputs + head * KEY, mixed, conv, key_at, is_key, is_first, all_channels,
                           element, TAPS, WINDOW)  # fmt: skip
        inputs += KEY_HEADS * KEY
        key = _convolved(inputs + head * KEY, mixed + KEY, conv + KEY * TAPS, key_at, is_key, is_first, all_channels,
                         element, TAPS, WINDOW)  # fmt: skip
        inputs += KEY_HEADS * KEY + head * SHARERS * VALUE
        query = query * tl.rsqrt(tl.sum(query * query, 0) + _EPS) * (KEY**-0.5)
        key = key * tl.rsqrt(tl.sum(key * key, 0) + _EPS)
        overlap = tl.sum(query * key, 0)
        mixed += 2 * KEY
        conv += 2 * KEY * TAPS
        numbers = mixed + 2 * SHARERS * VALUE
        for block in range(SHARERS * num_blocks):
            sharer, columns = block // num_blocks, block % num_blocks * BLOCK + at
            matrix, here, is_here = ahead, sharer * KEY * VALUE + block % num_blocks * BLOCK + place, is_there
            following = block + 1
            is_there = is_key[:, None] & (following % num_blocks * BLOCK + at < VALUE)[None, :]
            there = following // num_blocks * KEY * VALUE + following % num_blocks * BLOCK + place
            is_read = is_there & (is_first == 0) & (following < SHARERS * num_blocks)
            ahead = tl.load(matrices + there, mask=is_read, other=0.0)
            value = _convolved(inputs, mixed, conv, sharer * VALUE + columns, columns < VALUE, is_first, all_channels,
                               element, TAPS, WINDOW)  # fmt: skip
            beta = tl.sigmoid(tl.load(numbers + sharer).to(tl.float32)).to(element).to(tl.float32)
            decay = tl.load(numbers + SHARERS + sharer).to(tl.float32)
            decay = _softplus(decay + tl.load(bias + head * SHARERS + sharer).to(tl.float32))
            matrix *= tl.exp(-tl.exp(tl.load(log + head * SHARERS + sharer).to(tl.float32)) * decay)
            written = beta * (value - tl.sum(matrix * key[:, None], 0))
            # What the new matrix has for the query, without another pass over it.
            found = tl.sum(matrix * query[:, None], 0) + overlap * written
            tl.store(matrices + here, matrix + key[:, None] * written[None, :], mask=is_here)
            tl.store(context + sharer * VALUE + columns, found.to(element), mask=columns < VALUE)
        tl.debug_barrier()
        found = tl.load(context + out_at, mask=is_out, other=0.0).to(tl.float32)
        weight = tl.load(norm + value_at, mask=value_at < VALUE, other=0.0).to(tl.float32)
        gate = tl.load(mixed + SHARERS * VALUE + out_at, mask=is_out, other=0.0).to(tl.float32)
        normed = found * tl.rsqrt(tl.sum(found * found, 1) / VALUE + eps)[:, None]
        normed = (weight * normed.to(element).to(tl.float32)).to(element).to(tl.float32)
        # All have read before any writes.
        tl.debug_barrier()
        tl.store(context + out_at, (normed * gate * tl.sigmoid(gate)).to(element), mask=is_out)
