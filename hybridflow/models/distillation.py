"""On-policy distillation: a teacher's likeliest tokens, and the reverse KL to it, from vocabulary-parallel logits.

What is compared is a distribution over events. They are the tokens of the vocabulary; or, of the teacher's ``k``
likeliest tokens, these and one event more: any other token. The second KL is that of coarser distributions, so it is
never negative, and never above the first. Logits are never gathered, but for the chunk of a teacher that tells all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.models.log_probs import Columns, row_chunks
from hybridflow.models.shapes import CHUNK_TOKENS
from hybridflow.parallel.copies import to_device


@torch.no_grad()
def top_log_probs(
    logits: Tensor, top_k: int, *, group: dist.ProcessGroup, vocab_size: int, temperature: float = 1.0
) -> tuple[Tensor, ...]:
    """Return log-probabilities of events under a teacher, ``softmax(logits / temperature)``.

    Collective: tp.

    Args:
        logits: This rank's columns, ``[tokens, padded_vocab/tp]``, any floating type.
        top_k: Number of likeliest tokens, below ``vocab_size``; 0: all tokens.
        group: The tensor-parallel group, in the order of the columns.
        vocab_size: True vocabulary; columns from there on are padding and have probability zero.
        temperature: Divides the logits first.

    Returns:
        The same on every rank of the group. With ``top_k`` 0 the log-probabilities of all tokens, ``[tokens,
        vocab_size]`` fp32, alone, in host memory. Else on the logits' device those of the likeliest, in descending
        order, and of any other token, ``[tokens, top_k + 1]`` fp32; and the ids of the likeliest, ``[tokens, top_k]``
        int64.
    """
    columns = Columns(logits.shape[-1], group, vocab_size)
    found = [_top(columns, columns.scaled(rows, temperature), top_k, vocab_size) for rows in logits.split(CHUNK_TOKENS)]
    return tuple(torch.cat(chunks) for chunks in zip(*found, strict=True))


def _top(columns: Columns, scaled: Tensor, top_k: int, vocab_size: int) -> tuple[Tensor, ...]:
    """Do as ``top_log_probs`` for one chunk of scaled logits. Collective: tp."""
    normalizer = columns.logsumexp(scaled)
    if top_k == 0:
        return ((columns.gather(scaled)[:, :vocab_size] - normalizer[:, None]).cpu(),)
    own, places = scaled.topk(min(top_k, scaled.shape[1]))
    candidates, ids = columns.gather(own), columns.gather(places + columns.first)
    likeliest, chosen = candidates.topk(top_k)
    ids = ids.gather(1, chosen)
    others = columns.logsumexp(_without(columns, scaled, ids))
    return torch.cat([likeliest, others[:, None]], dim=1) - normalizer[:, None], ids


def _without(columns: Columns, scaled: Tensor, ids: Tensor) -> Tensor:
    """Return the logits with some tokens, ``[tokens, some]``, set to minus infinity."""
    is_taken = torch.zeros_like(scaled)
    columns.add_at(is_taken, ids, torch.ones_like(ids, dtype=scaled.dtype))
    return scaled.masked_fill(is_taken > 0, -torch.inf)


def vocab_parallel_reverse_kl(
    logits: Tensor,
    teacher: Tensor,
    ids: Tensor | None,
    *,
    group: dist.ProcessGroup,
    vocab_size: int,
    temperature: float = 1.0,
) -> Tensor:
    """Compute ``sum_e p_e (log p_e - log t_e)`` over events ``e``, of a student ``p`` and its teacher ``t``.

    The gradient is that of all of the student's probabilities. With ``e(v)`` the event that a token is in,
    ``d KL / d z_v = p_v (log p_e(v) - log t_e(v) - KL)``.

    Collective: tp, forward only.

    Args:
        logits: This rank's columns of the student's, ``[tokens, padded_vocab/tp]``, any floating type; ``p`` is
            ``softmax(logits / temperature)``.
        teacher: The teacher's log-probabilities, from ``top_log_probs``: ``[tokens, events]`` fp32, on any device.
        ids: The tokens that are events of their own, ``[tokens, events - 1]`` int64; None: all are.
        group: The tensor-parallel group, in the order of the columns.
        vocab_size: True vocabulary.
        temperature: Divides the student's logits first.

    Returns:
        ``[tokens]`` fp32, the same on every rank of the group, differentiable.

    Paper: on-policy distillation by the reverse KL arXiv 2306.08543 and 2306.13649. The event of all other tokens is
        ours: without it the sum over likely tokens is no KL, and may fall below 0.
    """
    found: Tensor = _ReverseKL.apply(logits, teacher, ids, group, vocab_size, temperature)
    return found


class _ReverseKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        teacher: Tensor,
        ids: Tensor | None,
        group: dist.ProcessGroup,
        vocab_size: int,
        temperature: float,
    ) -> Tensor:
        columns = Columns(logits.shape[-1], group, vocab_size)
        empty = logits.new_empty(0, dtype=torch.float32)
        kls, normalizers, excesses = [empty], [empty], []
        for part, rows in row_chunks(logits):
            scaled = columns.scaled(rows, temperature)
            if ids is None:
                kl, normalizer = _of_tokens(columns, scaled, _own(columns, teacher[part], logits))
            else:
                at = to_device(ids[part], logits.device)
                kl, normalizer, excess = _of_events(columns, scaled, to_device(teacher[part], logits.device), at)
                excesses.append(excess)
            kls.append(kl)
            normalizers.append(normalizer)
        kl = torch.cat(kls)
        # The whole vocabulary's excesses are computed once more: they would be as large as the logits.
        kept = teacher if ids is None else torch.cat(excesses) if excesses else empty
        ctx.save_for_backward(logits, torch.cat(normalizers), kl, kept, ids)
        ctx.columns, ctx.temperature = columns, temperature
        return kl

    @staticmethod
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        logits, normalizer, kl, kept, ids = ctx.saved_tensors
        columns, grad = ctx.columns, torch.empty_like(logits)
        for part, rows in row_chunks(logits):
            log_p = columns.scaled(rows, ctx.temperature) - normalizer[part, None]
            if ids is None:
                excess = torch.zeros_like(log_p)
                own = _own(columns, kept[part], logits)
                excess[:, : columns.num_real] = log_p[:, : columns.num_real] - own
            else:
                others = kept[part, -1:]
                excess = others.expand_as(log_p).clone()
                columns.add_at(excess, to_device(ids[part], logits.device), kept[part, :-1] - others)
            piece = log_p.exp() * (excess - kl[part, None]) * grad_kl[part, None]
            grad[part] = (piece / ctx.temperature).to(grad.dtype)
        return grad, None, None, None, None, None


def _own(columns: Columns, teacher: Tensor, logits: Tensor) -> Tensor:
    """Return this rank's columns of the teacher's log-probabilities of all tokens, without padding."""
    return teacher[:, columns.first : columns.first + columns.num_real].to(logits.device)


def _of_tokens(columns: Columns, scaled: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL and normalizer of each row where each token is an event. Collective: tp."""
    largest = columns.max(scaled.amax(-1))
    shifted = scaled - largest[:, None]
    exp = shifted.exp()
    # Padding has no part in it: its probability is 0, its logarithm infinite.
    weighted = (exp[:, : columns.num_real] * (shifted[:, : columns.num_real] - own)).sum(-1)
    total, weighted = columns.sum(torch.stack([exp.sum(-1), weighted])).unbind()
    return weighted / total - total.log(), largest + total.log()


def _of_events(columns: Columns, scaled: Tensor, teacher: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return KL, normalizer, and ``log p - log t`` of each event, ``[tokens, events]``. Collective: tp."""
    rest = _without(columns, scaled, ids)
    largest = columns.max(torch.stack([scaled.amax(-1), rest.amax(-1)], dim=1))
    # A rank whose tokens are all taken has none of the rest.
    sums = torch.stack([(scaled - largest[:, :1]).exp().sum(-1), (rest - largest[:, 1:]).exp().sum(-1)], dim=1)
    found = columns.sum(torch.cat([sums, columns.pick(scaled, ids)], dim=1))
    normalizer, others = (largest + found[:, :2].log()).unbind(1)
    log_p = torch.cat([found[:, 2:], others[:, None]], dim=1) - normalizer[:, None]
    excess = log_p - teacher
    return (log_p.exp() * excess).sum(-1), normalizer, excess
