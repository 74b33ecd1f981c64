"""PyTorch's flash attention on a CPU, of queries that are the last of their keys, with the backward pass in parts.

The gradient of attention to some of the keys needs of the others no more than the sum of exponentials and the context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.models.scoring import Scoring

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def is_flash(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> bool:
    """Return whether it computes attention of such tensors."""
    is_plain = scoring.softcap is None and scoring.sinks is None
    return query.device.type == "cpu" and is_plain and key.shape[-1] == value.shape[-1]


def flash_attention(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Attend; the queries are the last of the keys' tokens.

    Args:
        query: ``[queries, heads, head]``.
        key: ``[keys, groups, head]``.
        value: As ``key``.
        scoring: Without a cap and sinks.

    Returns:
        The context, ``[queries, heads, head]``, and the logarithms of the sums of exponentials, ``[queries, heads]``
        fp32.
    """
    queries, keys, values = _by_head(query, key, value)
    found: list[tuple[Tensor, Tensor]] = []
    for part, is_causal, mask in _parts(query, key, scoring):
        context, normalizer = _forward(
            queries, keys[:, :, part], values[:, :, part], 0.0, is_causal, attn_mask=mask, scale=scoring.scale
        )
        found.append((context, normalizer))
    context, normalizer = found[0]
    for other, others in found[1:]:
        both = torch.logaddexp(normalizer, others)
        shares = [(each - both).exp()[..., None].to(context.dtype) for each in (normalizer, others)]
        context, normalizer = shares[0] * context + shares[1] * other, both
    return context[0].transpose(0, 1), normalizer[0].transpose(0, 1)


def flash_gradient(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: Tensor,
    normalizers: Tensor,
    scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value; ``gradient`` is that of the context, the rest as of the forward."""
    queries, keys, values = _by_head(query, key, value)
    grad, result = (each.transpose(0, 1)[None] for each in (gradient, context))
    normalizer = normalizers.transpose(0, 1)[None].contiguous()
    of_query, of_keys, of_values = torch.zeros_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
    for part, is_causal, mask in _parts(query, key, scoring):
        found = _backward(
            grad,
            queries,
            keys[:, :, part],
            values[:, :, part],
            result,
            normalizer,
            0.0,
            is_causal,
            attn_mask=mask,
            scale=scoring.scale,
        )
        of_query += found[0]
        of_keys[:, :, part], of_values[:, :, part] = found[1:]
    sharers = query.shape[1] // key.shape[1]
    of_key, of_value = (each[0].unflatten(0, (-1, sharers)).sum(1).transpose(0, 1) for each in (of_keys, of_values))
    return of_query[0].transpose(0, 1), of_key, of_value


def _by_head(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Return ``[1, heads, tokens, head]`` each."""
    sharers = query.shape[1] // key.shape[1]
    queries, keys, values = (each.transpose(0, 1)[None] for each in (query, key, value))
    if sharers == 1:
        return [queries, keys, values]
    return [queries, keys.repeat_interleave(sharers, 1), values.repeat_interleave(sharers, 1)]


def _parts(query: Tensor, key: Tensor, scoring: Scoring) -> list[tuple[slice, bool, Tensor | None]]:
    """Return parts of the keys, with whether the queries see them causally, and else a mask, or all of them."""
    before = len(key) - len(query)
    if scoring.window is not None and scoring.window < len(key):
        at, to = torch.arange(len(query))[:, None] + before, torch.arange(len(key))
        unseen = (to > at) | (to <= at - scoring.window)
        return [(slice(None), False, torch.zeros(unseen.shape, dtype=query.dtype).masked_fill_(unseen, -torch.inf))]
    own = (slice(before, None), True, None)
    return [own] if before == 0 else [(slice(before), False, None), own]
