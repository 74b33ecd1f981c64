"""The likeliest tokens at some places, from vocabulary-parallel logits."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.models.log_probs import Columns, row_chunks
from hybridflow.rollout.edits import gather_over
from hybridflow.rollout.request import TopLogProbs


def likeliest(
    logits: Tensor,
    temperatures: Tensor,
    chosen: Tensor,
    log_probs: Tensor,
    *,
    count: int,
    group: dist.ProcessGroup,
    vocab_size: int,
) -> list[TopLogProbs]:
    """Return the likeliest tokens of each row under ``softmax(logits / temperature)``, the likeliest first.

    The row's own token has exactly the log-probability that is given, so that the two can be compared. A token without
    probability is left out.

    Collective: tp.

    Args:
        logits: This rank's columns, ``[rows, padded_vocab/tp]``.
        temperatures: ``[rows]`` fp32.
        chosen: The token that stands there, ``[rows]`` int64.
        log_probs: Its log-probability, ``[rows]`` fp32.
        count: Most tokens of a row.
        group: The tensor-parallel group.
        vocab_size: True vocabulary.
    """
    columns = Columns(logits.shape[-1], group, vocab_size)
    found: list[TopLogProbs] = []
    for part, chunk in row_chunks(logits):
        ids, values = _chunk(chunk, temperatures[part], chosen[part], log_probs[part], min(count, vocab_size), columns)
        rows = zip(ids.tolist(), values.isfinite().tolist(), values.tolist(), strict=True)
        found += [[(token, value) for token, is_finite, value in zip(*row, strict=True) if is_finite] for row in rows]
    return found


def _chunk(
    logits: Tensor, temperatures: Tensor, chosen: Tensor, log_probs: Tensor, count: int, columns: Columns
) -> tuple[Tensor, Tensor]:
    scaled = columns.scaled(logits, temperatures[:, None])
    # Here fp64 carries token ids, and fp32 numbers, exactly.
    values, places = scaled.topk(min(count, scaled.shape[1]), dim=-1)
    total = scaled.double().logsumexp(-1, keepdim=True)
    parts = gather_over(columns.group, torch.cat([total, values.double(), places.double() + columns.first], dim=1))
    num = values.shape[1]
    values, order = parts[..., 1 : 1 + num].transpose(0, 1).flatten(1).topk(count, dim=-1)
    ids = parts[..., 1 + num :].transpose(0, 1).flatten(1).gather(1, order).long()
    values = (values - parts[..., 0].logsumexp(0)[:, None]).float()
    return ids, torch.where(ids == chosen[:, None], log_probs[:, None], values)
