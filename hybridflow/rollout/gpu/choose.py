"""Choosing tokens with the kernels, for a captured step and for ``rollout.sampling``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.models.log_probs import Columns
from hybridflow.rollout.edits import gather_over, joined_columns
from hybridflow.rollout.gpu import ops
from hybridflow.rollout.gpu.sampling_kernels import NUM_EDITED_TERMS, NUM_TERMS


def _parts(
    logits: Tensor,
    keys: Tensor,
    lengths: Tensor | None,
    temperatures: Tensor,
    is_quiet: Tensor,
    columns: Columns,
    edited: Tensor | None = None,
    floors: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return each part's terms, ``[terms, rows, parts]`` fp32, and candidate, ``[rows, parts]`` int32."""
    rows, parts = len(logits), ops.num_parts(logits.shape[1])
    num_terms = NUM_TERMS if edited is None else NUM_EDITED_TERMS
    terms = logits.new_empty(num_terms, rows, parts, dtype=torch.float32)
    ids = logits.new_empty(rows, parts, dtype=torch.int32)
    if rows:
        where = columns.first, columns.num_real, softcap
        ops.sample_part(terms, ids, logits, edited, keys, lengths, temperatures, is_quiet, floors, *where)
    return terms, ids


def choose(
    logits: Tensor,
    keys: Tensor,
    lengths: Tensor,
    temperatures: Tensor,
    is_quiet: Tensor,
    group: dist.ProcessGroup,
    vocab_size: int,
    softcap: float,
    cuts: tuple[Tensor, Tensor, Tensor] | None = None,
    edited: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose one token for each row, without asking the host; 2 launches on one rank, 3 with cuts.

    Where each of several ranks has some of the columns, cuts have all logits gathered.

    Collective: tp.

    Args:
        logits: This rank's columns, ``[rows, padded_vocab/tp]``.
        keys: Key of each row's sequence, ``[rows]`` int64.
        lengths: Place of the token to be chosen in its sequence, ``[rows]`` int64.
        temperatures: ``[rows]`` fp32.
        is_quiet: Rows without noise, ``[rows]`` uint8.
        group: Tensor-parallel ranks.
        vocab_size: True vocabulary.
        softcap: Cap on the logits; 0: none.
        cuts: Top k, top p and min p, ``[rows]`` each; None: nothing is cut.
        edited: What is sampled from instead of the logits, capped, ``[rows, padded_vocab/tp]`` fp32; None: the logits.

    Returns:
        As ``rollout.sampling.Sampled``: tokens, log-probabilities, and those of the distribution sampled from.
    """
    columns = Columns(logits.shape[1], group, vocab_size)
    floors = None
    if cuts is not None:
        floors = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        source, cap = (logits, softcap) if edited is None else (edited, 0.0)
        if group.size() > 1:
            # Padding stands behind the last rank's columns.
            source = joined_columns(group, source)
        ops.find_floors(floors, source, temperatures, *cuts, vocab_size, cap)
    terms, ids = _parts(logits, keys, lengths, temperatures, is_quiet, columns, edited, floors, softcap)
    if group.size() > 1:
        terms = gather_over(group, terms).permute(1, 2, 0, 3).flatten(2).contiguous()
        ids = gather_over(group, ids).transpose(0, 1).flatten(1).contiguous()
    tokens = keys.new_empty(len(logits))
    log_probs, sampled = terms.new_empty(len(logits)), terms.new_empty(len(logits))
    ops.settle(tokens, log_probs, sampled, terms, ids, is_quiet)
    return tokens, log_probs, sampled


def find(logits: Tensor, keys: Tensor, temperatures: Tensor, is_quiet: Tensor, columns: Columns) -> Tensor:
    """Return this rank's candidates as ``rollout.sampling`` takes them, ``[6, rows]`` fp64; keys are of tokens."""
    (best, chosen, largest, total, _), ids = _parts(logits.contiguous(), keys, None, temperatures, is_quiet, columns)
    place = best.argmax(-1, keepdim=True)
    top = largest.amax(-1, keepdim=True)
    shares = torch.where(total == 0, torch.zeros_like(total), (largest - top).exp())
    whole = (total * shares).sum(-1)
    picked = (each.gather(1, place)[:, 0] for each in (best, ids, chosen))
    return torch.stack([each.double() for each in (*picked, top[:, 0], whole, whole)])
