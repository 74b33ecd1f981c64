"""The gated delta rule of linear attention, and the convolution before it.

A value head has a state S, ``[key, value]``. Token t makes of it, with q and k of length 1, the decay g and beta:
S_t = exp(g_t) S_t-1, then S_t += k_t beta_t (v_t - S_t^T k_t)^T; its output is S_t^T q_t / sqrt(key). On a CPU tokens
are taken in chunks: within one the corrections are the solution of a triangular system, and states go from chunk to
chunk. So memory grows with the tokens, not with their square. On a GPU ``models.recurrence_kernels`` takes them one by
one.

Paper: arXiv 2412.06464; the chunks are those of arXiv 2406.06484.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from hybridflow.models.shapes import DELTA_CHUNK

_EPS = 1e-6
"""Added to the squares of queries and keys, within the root."""


class Recurrence(NamedTuple):
    """What a layer with linear attention gives its plan: weights of this rank's heads.

    Attributes:
        conv: Of the convolution, ``[channels, kernel]``. Channels are all queries, then all keys, then all values.
        key_heads: Query and key heads of this rank.
        value_heads: Value heads of this rank, a multiple of these.
        key_size: Width of each query and key head.
        value_size: Width of each value head.
    """

    conv: Tensor
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int


class State(NamedTuple):
    """What is left of the tokens of some sequences.

    Attributes:
        inputs: Last inputs of the convolution, ``[samples, kernel - 1, channels]`` fp32.
        matrix: S of each head, ``[samples, value_heads, key_size, value_size]`` fp32.
    """

    inputs: Tensor
    matrix: Tensor


def empty_state(samples: int, recurrence: Recurrence) -> State:
    """Return the state before the first token of each of some sequences."""
    conv, _, heads, key, value = recurrence
    zeros = conv.new_zeros
    return State(
        zeros(samples, conv.shape[1] - 1, len(conv), dtype=torch.float32),
        zeros(samples, heads, key, value, dtype=torch.float32),
    )


def recur(
    mixed: Tensor,
    decay: Tensor,
    beta: Tensor,
    recurrence: Recurrence,
    state: State | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Go through tokens of some sequences.

    Args:
        mixed: Queries, keys and values before the convolution, ``[samples, tokens, channels]``.
        decay: Logarithm of what the state is multiplied by, ``[samples, tokens, value_heads]`` fp32.
        beta: Share of a value that replaces what the state has for its key, ``[samples, tokens, value_heads]``.
        recurrence: Weights and sizes.
        state: What the tokens before have left; None: there are none.
        lengths: Tokens of each sequence, ``[samples]`` int64; what is behind these is filling. None: all are.

    Returns:
        ``[samples, tokens, value_heads, value_size]``, and the state behind the last token of each.
    """
    state = empty_state(len(mixed), recurrence) if state is None else state
    whole = torch.cat([state.inputs, mixed.float()], dim=1)
    last = whole[:, mixed.shape[1] :]
    if lengths is not None:
        # Without decay and with a beta of 0 a token leaves the state alone.
        is_filling = torch.arange(mixed.shape[1], device=mixed.device) >= lengths[:, None]
        decay, beta = (each.masked_fill(is_filling[..., None], 0) for each in (decay, beta))
        places = lengths[:, None] + torch.arange(last.shape[1], device=mixed.device)
        last = whole.gather(1, places[..., None].expand_as(last))
    query, key, value = _convolved(whole, recurrence, mixed.dtype)
    compute = _through_kernel if mixed.is_cuda else _through_chunks
    found, matrix = compute(query, key, value, decay.float(), beta.float(), state.matrix)
    return found.to(mixed.dtype), State(last, matrix)


def step(mixed: Tensor, decay: Tensor, beta: Tensor, recurrence: Recurrence, state: State, slots: Tensor) -> Tensor:
    """Take a token of each of some sequences into its state, where that is.

    Args:
        mixed: As for ``recur``, ``[samples, channels]``.
        decay: As for ``recur``, ``[samples, value_heads]``.
        beta: As for ``recur``, ``[samples, value_heads]``.
        recurrence: Weights and sizes.
        state: States of all slots.
        slots: Slot of each sequence, ``[samples]`` int64.

    Returns:
        ``[samples, value_heads, value_size]``.
    """
    whole = torch.cat([state.inputs[slots], mixed[:, None].float()], dim=1)
    state.inputs[slots] = whole[:, 1:]
    query, key, value = (each[:, 0] for each in _convolved(whole, recurrence, mixed.dtype))
    sharers = recurrence.value_heads // recurrence.key_heads
    both = torch.stack([key, query], dim=2).repeat_interleave(sharers, dim=1)
    keys, overlap = both[:, :, 0, :, None], (query * key).sum(-1, keepdim=True).repeat_interleave(sharers, dim=1)
    kept, beta = decay.float().exp()[..., None, None], beta.float()[..., None]
    found = torch.empty_like(value)
    # A sequence's matrices stay in the processor's cache from the first of these to the last.
    for row, slot in enumerate(slots.tolist()):
        matrix = state.matrix[slot].mul_(kept[row])
        old, seen = (both[row] @ matrix).unbind(1)
        written = beta[row] * (value[row] - old)
        matrix.baddbmm_(keys[row], written[:, None])
        found[row] = torch.addcmul(seen, overlap[row], written)
    return found.to(mixed.dtype)


def _convolved(whole: Tensor, recurrence: Recurrence, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of the tokens behind the first inputs, ``[samples, tokens, heads, size]`` fp32.

    Args:
        whole: Inputs of the convolution, ``[samples, kernel - 1 + tokens, channels]`` fp32.
        recurrence: Weights and sizes.
        dtype: Format that the convolution is rounded to.
    """
    summed: Tensor = _Convolution.apply(whole, recurrence.conv.float())
    keys = recurrence.key_heads * recurrence.key_size
    query, key, value = silu(summed).to(dtype).float().split([keys, keys, summed.shape[2] - 2 * keys], dim=-1)
    query, key = (_unit(each.unflatten(-1, (-1, recurrence.key_size))) for each in (query, key))
    return query * recurrence.key_size**-0.5, key, value.unflatten(-1, (-1, recurrence.value_size))


class _Convolution(torch.autograd.Function):
    """Sums of each channel's inputs times its weights, those of a token and of the tokens before it.

    By torch's own gradients, each slice of the inputs would be given back as large as all of them.
    """

    @staticmethod
    def forward(ctx: Any, whole: Tensor, conv: Tensor) -> Tensor:
        """Return ``[samples, tokens, channels]`` of ``[samples, kernel - 1 + tokens, channels]``."""
        ctx.save_for_backward(whole, conv)
        tokens = whole.shape[1] - conv.shape[1] + 1
        summed = whole[:, :tokens] * conv[:, 0]
        for shift in range(1, conv.shape[1]):
            summed.addcmul_(whole[:, shift : shift + tokens], conv[:, shift])
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of both."""
        whole, conv = ctx.saved_tensors
        (grad,) = grads
        tokens = grad.shape[1]
        of_whole, of_conv = torch.zeros_like(whole), []
        for shift in range(conv.shape[1]):
            part = slice(shift, shift + tokens)
            of_whole[:, part].addcmul_(grad, conv[:, shift])
            of_conv.append((grad * whole[:, part]).sum((0, 1)))
        return of_whole, torch.stack(of_conv, dim=1)


def _unit(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _EPS)


def _through_kernel(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, matrix: Tensor
) -> tuple[Tensor, Tensor]:
    """Return as ``_through_chunks``, on a GPU: one launch takes all tokens."""
    from hybridflow.models.recurrence_kernels import recurred

    found, _, after = recurred(query, key, value, decay, beta, matrix)
    return found, after


def _through_chunks(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, matrix: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs, and the states behind the last token.

    Args:
        query: ``[samples, tokens, key heads, key]`` fp32.
        key: Likewise.
        value: ``[samples, tokens, value heads, value]`` fp32.
        decay: As for ``recur``, in fp32.
        beta: Likewise.
        matrix: States before the first token.
    """
    # [samples, key heads, value heads of each, tokens, size]: value heads share a query and a key.
    split = query.shape[2], -1
    query, key = (each.movedim(1, 2)[:, :, None] for each in (query, key))
    value = value.unflatten(2, split).movedim(1, 3)
    decay, beta = (each.unflatten(-1, split).movedim(1, 3) for each in (decay, beta))
    matrix = matrix.unflatten(1, split)
    tokens, chunk = query.shape[3], min(DELTA_CHUNK, query.shape[3])
    # Tokens that are filled in leave the state alone: they do not decay it, and their beta is 0.
    missing = -tokens % chunk
    query, key, value = (pad(each, (0, 0, 0, missing)).unflatten(3, (-1, chunk)) for each in (query, key, value))
    decay, beta = (pad(each, (0, missing)).unflatten(3, (-1, chunk)) for each in (decay, beta))
    is_later = torch.ones(chunk, chunk, dtype=torch.bool, device=query.device).triu(1)
    # In fp64: far down, what two tokens differ by would be lost in fp32.
    since = decay.double().cumsum(-1)
    # Decay from each token to each behind it in its chunk.
    between = (since[..., :, None] - since[..., None, :]).float().masked_fill(is_later, -torch.inf).exp()
    to_end, since = (since[..., -1:] - since).float().exp(), since.float()
    system = (key @ key.transpose(-1, -2)) * between * beta[..., None]
    # Of the values without a state before the chunk, and of what a state has for the keys.
    wanted = torch.cat([value, key * since.exp()[..., None]], dim=-1) * beta[..., None]
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    new, old = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    scores = (query @ key.transpose(-1, -2)) * between
    query = query * since.exp()[..., None]
    key, whole = (key * to_end[..., None]).transpose(-1, -2), since[..., -1].exp()[..., None, None]
    found = []
    # Taken apart at once: the gradient of a chunk that is indexed is as large as all chunks, and zeros but for its own.
    for each in zip(*(part.unbind(3) for part in (new, old, query, scores, whole, key)), strict=True):
        new, old, query, scores, whole, key = each
        written = new - old @ matrix
        found.append(query @ matrix + scores @ written)
        matrix = whole * matrix + key @ written
    outputs = torch.stack(found, dim=3).flatten(3, 4)[:, :, :, :tokens]
    return outputs.movedim(3, 1).flatten(2, 3), matrix.flatten(1, 2)
