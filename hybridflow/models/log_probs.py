"""Log-probabilities and entropy from vocabulary-parallel logits, which are never gathered.

Each tensor-parallel rank holds some columns of the logits. Three sums over the group are enough: the largest logit,
the sum of exponentials, and the target's own logit (one rank has it); the entropy needs a fourth. The backward pass
recomputes the softmax of its columns, chunk by chunk, so that no fp32 copy of the logits is kept.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.models.shapes import CHUNK_TOKENS


def vocab_parallel_log_probs(
    logits: Tensor, targets: Tensor, *, group: dist.ProcessGroup, vocab_size: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of each target and the entropy of each row, of ``softmax(logits / temperature)``.

    Collective: tp, forward only.

    Args:
        logits: This rank's columns, ``[tokens, padded_vocab/tp]``, any floating type.
        targets: Token ids, ``[tokens]`` int64; the same on every rank of the group.
        group: The tensor-parallel group; the rank with group index ``i`` holds columns ``[i, i + 1) *
            padded_vocab/tp``.
        vocab_size: True vocabulary; columns from there on are padding and have probability zero.
        temperature: Divides the logits first.

    Returns:
        ``log_probs`` and ``entropy``, ``[tokens]`` fp32, the same on every rank of the group, both differentiable.
    """
    found: tuple[Tensor, Tensor] = _VocabParallelLogProbs.apply(logits, targets, group, vocab_size, temperature)
    return found


def uses_kernels(logits: Tensor) -> bool:
    """Return whether Triton computes it: on CUDA, where torch comes with Triton."""
    return logits.is_cuda


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup, vocab_size: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        columns = Columns(logits.shape[-1], group, vocab_size)
        ctx.columns, ctx.temperature = columns, temperature
        if uses_kernels(logits):
            log_prob, entropy, normalizer = _from_kernels(logits, targets, columns, temperature)
            ctx.save_for_backward(logits, targets, normalizer, entropy)
            return log_prob, entropy
        log_probs, entropies, normalizers = [], [], []
        for part, rows in row_chunks(logits):
            scaled = columns.scaled(rows, temperature)
            largest = columns.max(scaled.amax(-1))
            exp = (scaled - largest[:, None]).exp()
            # Padding columns are -inf: their product with probability zero must count as zero.
            weighted = (exp * scaled.clamp(min=torch.finfo(scaled.dtype).min)).sum(-1)
            total, weighted, target = columns.sum(
                torch.stack([exp.sum(-1), weighted, columns.pick(scaled, targets[part])])
            ).unbind()
            normalizer = largest + total.log()
            log_probs.append(target - normalizer)
            entropies.append(normalizer - weighted / total)
            normalizers.append(normalizer)
        empty = logits.new_empty(0, dtype=torch.float32)
        log_prob = torch.cat(log_probs) if log_probs else empty
        entropy = torch.cat(entropies) if entropies else empty
        ctx.save_for_backward(logits, targets, torch.cat(normalizers) if normalizers else empty, entropy)
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, targets, normalizer, entropy = ctx.saved_tensors
        if uses_kernels(logits):
            from hybridflow.models.vocab_kernels import vocab_gradient

            wanted = grad_log_prob.contiguous(), grad_entropy.contiguous()
            columns = ctx.columns.first, ctx.columns.num_real
            return vocab_gradient(logits, targets, normalizer, entropy, *wanted, *columns, ctx.temperature), *(
                None,
            ) * 4
        grad = torch.empty_like(logits)
        for part, rows in row_chunks(logits):
            scaled = ctx.columns.scaled(rows, ctx.temperature)
            log_p = scaled - normalizer[part, None]
            p = log_p.exp()
            # d log p_t / d z = 1[t] - p;  d H / d z = -p (log p + H).
            log_p = log_p.clamp(min=torch.finfo(log_p.dtype).min)
            piece = -p * (grad_log_prob[part, None] + grad_entropy[part, None] * (log_p + entropy[part, None]))
            ctx.columns.add_at(piece, targets[part], grad_log_prob[part])
            grad[part] = (piece / ctx.temperature).to(grad.dtype)
        return grad, None, None, None, None


def row_chunks(logits: Tensor) -> list[tuple[slice, Tensor]]:
    """Return the rows that are computed together, and their places."""
    starts = range(0, len(logits), CHUNK_TOKENS)
    return [(slice(start, start + CHUNK_TOKENS), logits[start : start + CHUNK_TOKENS]) for start in starts]


def _from_kernels(
    logits: Tensor, targets: Tensor, columns: Columns, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities, entropies and logarithms of the sums of exponentials, ``[tokens]`` fp32 each."""
    # Triton comes with torch's CUDA builds only.
    from hybridflow.models.vocab_kernels import vocab_terms

    terms = vocab_terms(logits, targets, columns.first, columns.num_real, temperature)
    own, total, weighted, target = terms.unbind()
    largest = columns.max(own.clone())
    # A rank may have no column of the vocabulary.
    share = (own - largest).exp()
    total, weighted, target = columns.sum(torch.stack([total * share, weighted * share, target])).unbind()
    normalizer = largest + total.log()
    return target - normalizer, normalizer - weighted / total, normalizer


class Columns:
    """Which columns of the vocabulary this rank holds, and sums over those of the whole group."""

    def __init__(self, width: int, group: dist.ProcessGroup, vocab_size: int) -> None:
        self.group = group
        self.first = dist.get_rank(group) * width
        self.num_real = max(0, min(width, vocab_size - self.first))

    def scaled(self, logits: Tensor, temperature: float | Tensor) -> Tensor:
        """Return fp32 logits over temperature, padding columns at minus infinity, ``[tokens, padded_vocab/tp]``."""
        scaled = logits.float() / temperature
        scaled[:, self.num_real :] = -torch.inf
        return scaled

    def max(self, value: Tensor) -> Tensor:
        """Return the largest value over the group. Collective: tp."""
        if dist.get_world_size(self.group) > 1:
            dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group)
        return value

    def sum(self, value: Tensor) -> Tensor:
        """Sum over the group. Collective: tp."""
        if dist.get_world_size(self.group) > 1:
            dist.all_reduce(value, group=self.group)
        return value

    def logsumexp(self, scaled: Tensor) -> Tensor:
        """Return the logarithm of the sum of exponentials over the group, ``[tokens]``. Collective: tp."""
        largest = self.max(scaled.amax(-1))
        return largest + self.sum((scaled - largest[:, None]).exp().sum(-1)).log()

    def gather(self, local: Tensor) -> Tensor:
        """Gather the columns of all ranks side by side, ``[tokens, some * tp]``. Collective: tp."""
        size = dist.get_world_size(self.group)
        if size == 1:
            return local
        parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(parts, local.contiguous(), group=self.group)
        return torch.cat(parts, dim=1)

    def pick(self, scaled: Tensor, targets: Tensor) -> Tensor:
        """Return the targets' logits where this rank holds them, else 0; targets ``[tokens]`` or ``[tokens, some]``."""
        local, mine = self._locate(targets, scaled.shape[1])
        picked = scaled.gather(1, local if local.dim() == 2 else local[:, None]).view(targets.shape)
        return torch.where(mine, picked, torch.zeros_like(picked))

    def add_at(self, columns: Tensor, targets: Tensor, amount: Tensor) -> None:
        """Add ``amount`` at the targets' columns where this rank holds them, in place; shapes as of ``pick``."""
        local, mine = self._locate(targets, columns.shape[1])
        added = torch.where(mine, amount, torch.zeros_like(amount))
        if local.dim() == 1:
            local, added = local[:, None], added[:, None]
        columns.scatter_add_(1, local, added)

    def _locate(self, targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return each target's place in this rank's ``width`` columns, clamped, and whether this rank has it."""
        local = targets - self.first
        return local.clamp(0, width - 1), (local >= 0) & (local < self.num_real)
