"""Triton kernels of the gated delta rule over all tokens of some sequences, in training and in prompts.

A program has some columns of a head's state in registers and goes through the tokens with them. So memory is read and
written for what a token has, and not for states. All is fp32. ``models.delta_rule`` has the mathematics. With
S' = exp(g_t) S_t-1, r = v_t - S'^T k_t and w = beta_t r, the state S_t is S' + k_t w^T.

The forward pass keeps r. The backward pass goes through the tokens twice, with the gradient do_t of their outputs:

- From the last to the first it has D, the gradient of S_t but for what t's own output adds, q_t do_t^T. With both come
  ``dv_t = beta_t (D + q_t do_t^T)^T k_t``, the gradient of beta_t, and a part of that of k_t. The next D is
  ``exp(g_t) (D + q_t do_t^T - k_t dv_t^T)``.
- From the first to the last it makes the states again, and with them the gradient of q_t and the rest of that of k_t.
  The gradient of g_t is the sum of S' times its own gradient. It is known before the first token. From t to the next
  token it grows by ``w . D^T k_t - q_t . S' do_t + k_t . S' dv_t``: no large numbers are taken from each other where
  decays are strong.
"""

# torch reads the annotations of an operator, so they are no strings here.
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 64
"""Columns of a state that a program has."""

_NUMBERS_OF_A_WARP = 1024


@triton.jit
def _places(tokens, HEADS: tl.constexpr, SHARERS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
            KEYS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Return where this program's state is, and what of it; and where its first token's numbers are.

    Those are: of its head, of its head's values, of its key head's keys; and of a gradient of keys, for each head and
    each block of columns, and of a gradient of a number likewise.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sample, head = row // HEADS, row % HEADS
    at_key, at = tl.arange(0, KEYS), block * BLOCK + tl.arange(0, BLOCK)
    is_key, is_value = at_key < KEY, at < VALUE
    state = row * KEY * VALUE + at_key[:, None] * VALUE + at[None, :]
    number = sample * tokens * HEADS + head
    key = (sample * tokens * (HEADS // SHARERS) + head // SHARERS) * KEY + at_key
    of_number = block * (tl.num_programs(0).to(tl.int64) * tokens) + number
    return (state, is_key[:, None] & is_value[None, :], number, number * VALUE + at, key, of_number * KEY + at_key,
            of_number, is_key, is_value)  # fmt: skip


@triton.jit
def _read(first, second, at, is_there):
    """Return what two tensors have for a token."""
    return tl.load(first + at, mask=is_there, other=0.0), tl.load(second + at, mask=is_there, other=0.0)


@triton.jit(do_not_specialize=["tokens"])
def _forward_kernel(found, missed, after, query, key, value, decay, beta, before, tokens, HEADS: tl.constexpr,
                    SHARERS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    place, is_there, number, value_at, key_at, _, _, is_key, is_value = _places(
        tokens, HEADS, SHARERS, KEY, VALUE, KEYS, BLOCK
    )
    state = tl.load(before + place, mask=is_there, other=0.0)
    # The numbers of a token are read while the one before is computed.
    q, k = _read(query, key, key_at, is_key)
    v = tl.load(value + value_at, mask=is_value, other=0.0)
    g, b = _read(decay, beta, number, tokens > 0)
    for token in range(tokens):
        is_next = token + 1 < tokens
        key_at += HEADS // SHARERS * KEY
        number += HEADS
        next_q, next_k = _read(query, key, key_at, is_key & is_next)
        next_v = tl.load(value + value_at + HEADS * VALUE, mask=is_value & is_next, other=0.0)
        next_g, next_b = _read(decay, beta, number, is_next)
        state *= tl.exp(g)
        r = v - tl.sum(state * k[:, None], 0)
        # What the new state has for the query, without another pass over it.
        of_query = tl.sum(state * q[:, None], 0) + tl.sum(q * k, 0) * b * r
        state += k[:, None] * (b * r)[None, :]
        tl.store(found + value_at, of_query, mask=is_value)
        tl.store(missed + value_at, r, mask=is_value)
        value_at += HEADS * VALUE
        q, k, v, g, b = next_q, next_k, next_v, next_g, next_b
    tl.store(after + place, state, mask=is_there)


@triton.jit(do_not_specialize=["tokens"])
def _backward_kernel(of_key, of_value, of_beta, gained, of_before, grad, of_after, missed, query, key, decay, beta,
                     tokens, HEADS: tl.constexpr, SHARERS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
                     KEYS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    place, is_there, number, value_at, key_at, of_key_at, of_number, is_key, is_value = _places(
        tokens, HEADS, SHARERS, KEY, VALUE, KEYS, BLOCK
    )
    last = (tokens - 1).to(tl.int64)
    number += last * HEADS
    of_number += last * HEADS
    value_at += last * HEADS * VALUE
    of_key_at += last * HEADS * KEY
    key_at += last * (HEADS // SHARERS) * KEY
    of_state = tl.load(of_after + place, mask=is_there, other=0.0)
    q, k = _read(query, key, key_at, is_key)
    r, given = _read(missed, grad, value_at, is_value)
    g, b = _read(decay, beta, number, tokens > 0)
    for token in range(tokens):
        is_next = token + 1 < tokens
        key_at -= HEADS // SHARERS * KEY
        number -= HEADS
        next_q, next_k = _read(query, key, key_at, is_key & is_next)
        next_r, next_given = _read(missed, grad, value_at - HEADS * VALUE, is_value & is_next)
        next_g, next_b = _read(decay, beta, number, is_next)
        written = b * r
        from_later = tl.sum(of_state * k[:, None], 0)
        dk = tl.sum(of_state * written[None, :], 1) + q * tl.sum(written * given, 0)
        of_written = from_later + tl.sum(q * k, 0) * given
        tl.store(of_key + of_key_at, dk, mask=is_key)
        tl.store(of_value + value_at, b * of_written, mask=is_value)
        tl.store(of_beta + of_number, tl.sum(of_written * r, 0))
        tl.store(gained + of_number, tl.sum(written * from_later, 0))
        of_state += q[:, None] * given[None, :] - k[:, None] * (b * of_written)[None, :]
        of_state *= tl.exp(g)
        value_at -= HEADS * VALUE
        of_key_at -= HEADS * KEY
        of_number -= HEADS
        q, k, r, given, g, b = next_q, next_k, next_r, next_given, next_g, next_b
    tl.store(of_before + place, of_state, mask=is_there)


@triton.jit(do_not_specialize=["tokens"])
def _again_kernel(of_query, of_key, of_decay, gained, grad, of_value, of_before, missed, query, key, decay, beta,
                  before, tokens, HEADS: tl.constexpr, SHARERS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
                  KEYS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    place, is_there, number, value_at, key_at, of_key_at, of_number, is_key, is_value = _places(
        tokens, HEADS, SHARERS, KEY, VALUE, KEYS, BLOCK
    )
    state = tl.load(before + place, mask=is_there, other=0.0)
    dg = tl.sum(state * tl.load(of_before + place, mask=is_there, other=0.0))
    q, k = _read(query, key, key_at, is_key)
    r, given = _read(missed, grad, value_at, is_value)
    dv = tl.load(of_value + value_at, mask=is_value, other=0.0)
    g, b = _read(decay, beta, number, tokens > 0)
    for token in range(tokens):
        is_next = token + 1 < tokens
        key_at += HEADS // SHARERS * KEY
        value_at += HEADS * VALUE
        number += HEADS
        next_q, next_k = _read(query, key, key_at, is_key & is_next)
        next_r, next_given = _read(missed, grad, value_at, is_value & is_next)
        next_dv = tl.load(of_value + value_at, mask=is_value & is_next, other=0.0)
        next_g, next_b = _read(decay, beta, number, is_next)
        state *= tl.exp(g)
        written = b * r
        seen = tl.sum(state * given[None, :], 1)
        lacking = tl.sum(state * dv[None, :], 1)
        tl.store(of_query + of_key_at, seen + k * tl.sum(written * given, 0), mask=is_key)
        tl.store(of_key + of_key_at, -lacking, mask=is_key)
        tl.store(of_decay + of_number, dg)
        dg += tl.load(gained + of_number) - tl.sum(q * seen, 0) + tl.sum(k * lacking, 0)
        state += k[:, None] * written[None, :]
        of_key_at += HEADS * KEY
        of_number += HEADS
        q, k, r, given, dv, g, b = next_q, next_k, next_r, next_given, next_dv, next_g, next_b


def _settings(key: Tensor, value: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid, and what the kernels are compiled for."""
    samples, _, heads, columns = value.shape
    keys, block = triton.next_power_of_2(key.shape[3]), min(triton.next_power_of_2(columns), _COLUMNS)
    known = dict(HEADS=heads, SHARERS=heads // key.shape[2], KEY=key.shape[3], VALUE=columns, KEYS=keys, BLOCK=block)
    warps = min(max(keys * block // _NUMBERS_OF_A_WARP, 1), 8)
    return (samples * heads, triton.cdiv(columns, block)), {**known, "num_warps": warps}


@torch.library.custom_op("hybridflow::recurred", mutates_args=())
def recurred(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, before: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Go through the tokens of some sequences by the gated delta rule, in one launch; differentiable. All in fp32.

    Args:
        query: ``[samples, tokens, key heads, key]``, of the length that the output wants.
        key: ``[samples, tokens, key heads, key]``, of length 1.
        value: ``[samples, tokens, value heads, value]``.
        decay: Logarithm of what the state is multiplied by, ``[samples, tokens, value heads]``.
        beta: Share of a value that replaces what the state has for its key, ``[samples, tokens, value heads]``.
        before: States before the first token, ``[samples, value heads, key, value]``.

    Returns:
        The outputs, and what each value had more than the state for its key, both as ``value``; and the states behind
        the last token.
    """
    query, key, value, decay, beta, before = (each.contiguous() for each in (query, key, value, decay, beta, before))
    found, missed, after = (torch.empty_like(each) for each in (value, value, before))
    if not value.numel():
        after.copy_(before)
        return found, missed, after
    grid, known = _settings(key, value)
    _forward_kernel[grid](found, missed, after, query, key, value, decay, beta, before, value.shape[1], **known)
    return found, missed, after


@recurred.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, before: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty(each.shape, device=each.device) for each in (value, value, before))


@torch.library.custom_op("hybridflow::recurred_gradients", mutates_args=())
def recurred_gradients(
    grad: Tensor,
    of_after: Tensor,
    missed: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    before: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of what ``recurred`` takes, given those of outputs and states; two launches, and sums."""
    grad, of_after, missed, query, key, value, decay, beta, before = (
        each.contiguous() for each in (grad, of_after, missed, query, key, value, decay, beta, before)
    )
    of_value, of_before = torch.empty_like(value), torch.empty_like(before)
    grid, known = _settings(key, value)
    # Of each value head and each block of its columns, to be summed; of keys each kernel gives a part.
    of_query, of_key, more_of_key = value.new_empty(3, grid[1], *value.shape[:3], key.shape[3])
    of_decay, of_beta, gained = value.new_empty(3, grid[1], *value.shape[:3])
    if value.numel():
        tokens, given = value.shape[1], (missed, query, key, decay, beta)
        back = of_key, of_value, of_beta, gained, of_before, grad, of_after, *given, tokens
        _backward_kernel[grid](*back, **known)
        again = of_query, more_of_key, of_decay, gained, grad, of_value, of_before, *given, before, tokens
        _again_kernel[grid](*again, **known)
    else:
        of_before.copy_(of_after)
    of_key += more_of_key
    of_query, of_key = (each.unflatten(3, (key.shape[2], -1)).sum((0, 4)) for each in (of_query, of_key))
    return of_query, of_key, of_value, of_decay.sum(0), of_beta.sum(0), of_before


@recurred_gradients.register_fake
def _(grad: Tensor, of_after: Tensor, missed: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty(each.shape, device=each.device) for each in given)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], *inputs)


def _gradients(ctx: Any, grad: Tensor, of_missed: Tensor, of_after: Tensor) -> Any:
    return recurred_gradients(grad, of_after, *ctx.saved_tensors)


recurred.register_autograd(_gradients, setup_context=_keep)
