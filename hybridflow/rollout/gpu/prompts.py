"""Prompts of latent attention on a GPU: many rows see a key, so that it pays to make those of each head."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from hybridflow.models.cuda_attention import Chunks
from hybridflow.models.latent_attention import LatentSelfAttention
from hybridflow.models.scoring import Scoring
from hybridflow.parallel.copies import to_device
from hybridflow.rollout.blocks import BLOCK_TOKENS, MOST_PROMPT_KEYS


class LatentPrompts(NamedTuple):
    """Rows of sequences that have several of them, each of which sees its own sequence up to itself.

    Attributes:
        rows: The rows, ``[rows]`` int64, those of a sequence side by side.
        others: Rows that attend to compressed vectors as in a step of decoding, ``[others]`` int64.
        vectors: Gives the compressed vectors of a local layer, ``[places, latent + rotary]``.
        places: Where those of each sequence are, ``[keys]`` int64.
        chunks: Rows and keys of each sequence.
    """

    rows: Tensor
    others: Tensor
    vectors: Callable[[int], Tensor]
    places: Tensor
    chunks: Chunks

    def attend(
        self, layer: int, latent: LatentSelfAttention, query: Tensor, turned: Tensor, scoring: Scoring
    ) -> Tensor:
        """Compute as ``LatentSelfAttention`` does in training.

        Args:
            layer: Local layer index.
            latent: Its attention.
            query: Plain dims of queries, ``[rows, heads, plain]``.
            turned: Their other dims, turned, ``[rows, heads, rotary]``.
            scoring: How scores are made.

        Returns:
            ``[rows, heads, value]``.
        """
        heads, plain = query.shape[1:]
        vectors = self.vectors(layer).index_select(0, self.places)
        narrow, shared = vectors[:, : latent.kv_lora_rank], vectors[:, latent.kv_lora_rank :]
        both = linear(narrow, latent.linear_kv_up_proj.weight).view(len(vectors), heads, -1)
        key = torch.cat([both[..., :plain], shared[:, None].expand(-1, heads, -1)], dim=2)
        value, queries = both[..., plain:], torch.cat([query, turned], dim=2)
        # The kernels want values as wide as keys.
        width = max(key.shape[2], value.shape[2])
        queries, key, wide = (_widened(each, width) for each in (queries, key, value))
        backend = self.chunks.backend(queries, scoring) if queries.is_cuda else "triton"
        # Other than training this has a kernel for fp32 too.
        context = self.chunks.attend(queries, key, wide, scoring, "varlen" if backend == "varlen" else "triton")
        return context[..., : value.shape[2]]


def _widened(heads: Tensor, width: int) -> Tensor:
    return heads if heads.shape[2] == width else pad(heads, (0, width - heads.shape[2]))


def plan_prompts(
    vectors: Callable[[int], Tensor],
    tables: np.ndarray,
    sequences: np.ndarray,
    positions: np.ndarray,
    device: torch.device,
) -> LatentPrompts | None:
    """Return the plan for rows of which some are of one sequence; None: all attend as in a step of decoding.

    Args:
        vectors: See ``GpuCache.vectors``.
        tables: Blocks of each sequence, ``[sequences, blocks]``.
        sequences: Sequence of each row, ``[rows]``, rows of one sequence side by side.
        positions: Position of each row in its sequence, ``[rows]``, rising by 1 within a sequence.
        device: Where the rows are.
    """
    starts = np.flatnonzero(np.diff(sequences, prepend=-1))
    counts = np.diff(starts, append=len(sequences))
    keys = positions[starts + counts - 1] + 1
    # Keys of all heads take memory.
    is_prompt = (counts > 1) & (np.cumsum(np.where(counts > 1, keys, 0)) <= MOST_PROMPT_KEYS)
    if not is_prompt.any():
        return None
    is_row, keys = np.repeat(is_prompt, counts), keys[is_prompt]
    at = np.arange(keys.sum()) - np.repeat(keys.cumsum() - keys, keys)
    of = np.repeat(sequences[starts][is_prompt], keys)
    places = tables[of, at // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS + at % BLOCK_TOKENS
    rows, others, where = (
        to_device(torch.from_numpy(each), device) for each in (np.flatnonzero(is_row), np.flatnonzero(~is_row), places)
    )
    chunks = Chunks(counts[is_prompt].tolist(), keys.tolist(), None, device)
    return LatentPrompts(rows, others, vectors, where, chunks)
