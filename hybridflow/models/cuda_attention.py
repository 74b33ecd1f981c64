"""Attention on packed tokens on a GPU: which code computes it, and what that code is told of the sequences."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import embedding, pad, scaled_dot_product_attention

from hybridflow.models.scoring import Scoring
from hybridflow.parallel.copies import to_device

Backend = Literal["varlen", "triton", "rectangles"]
"""``varlen``: torch's own, on packed tokens. ``triton``: ours, also with caps and sinks. ``rectangles``: sequences of
like length side by side, through torch's scaled dot-product attention."""

_LARGEST_HEAD = 256
_FRUGAL = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


@functools.cache
def backend(
    dtype: torch.dtype, head: int, capability: tuple[int, int], *, has_cap: bool = False, has_window: bool = False
) -> Backend:
    """Choose what computes attention.

    Args:
        dtype: Format of queries, keys and values.
        head: Width of a head.
        capability: The GPU's compute capability.
        has_cap: Whether scores are capped, or have sinks.
        has_window: Whether tokens see a window that is shorter than the longest sequence.
    """
    is_half = dtype in (torch.bfloat16, torch.float16)
    # The backward pass of wide heads needs the shared memory of the larger GPUs.
    widest = _LARGEST_HEAD if capability == (8, 0) or capability[0] in (9, 10) else 192
    if is_half and not has_cap and capability >= (8, 0) and head % 8 == 0 and head <= widest:
        return "varlen"
    # Through torch these would need masks or scores as large as the square of the longest sequence.
    return "triton" if (has_cap or has_window) and head <= _LARGEST_HEAD else "rectangles"


@functools.cache
def _is_told_of_groups(attention: Callable[..., Any]) -> bool:
    """Return whether torch's attention on packed tokens asks if keys have query groups; torch 2.11's does not."""
    return "enable_gqa" in inspect.signature(attention).parameters


class Chunks:
    """Queries one after the other, and for each chunk of them keys, the last of which are the queries' own tokens.

    Args:
        queries: Queries of each chunk.
        keys: Keys of each chunk.
        taken: Where the keys of all chunks are, ``[sum of keys]`` int64, on their device; None: one after the other.
        device: Where the activations live.
    """

    def __init__(self, queries: list[int], keys: list[int], taken: Tensor | None, device: torch.device) -> None:
        self.most_queries, self.most_keys = max(queries, default=0), max(keys, default=0)
        self._taken = taken
        self._order: tuple[Tensor, Tensor] | None = None
        self.query_starts, self.key_starts = (to_device(_starts(each), device) for each in (queries, keys))

    def _of_sequences(self, packed: Tensor) -> Tensor:
        """Return the keys or values of all chunks from those of ``[tokens, groups, head]``, which some share."""
        assert self._taken is not None, "asked before"
        if not (packed.is_cuda and packed.requires_grad):
            copies: Tensor = embedding(self._taken, packed.flatten(1)).unflatten(1, packed.shape[1:])
            return copies
        from hybridflow.models.layer_kernels import order_of, taken_rows

        if self._order is None:
            self._order = order_of(self._taken, len(packed))
        copies = taken_rows(packed.flatten(1), self._taken, *self._order).unflatten(1, packed.shape[1:])
        return copies

    def backend(self, query: Tensor, scoring: Scoring) -> Backend:
        """Choose what computes attention of ``[tokens, heads, head]``."""
        has_cap = scoring.softcap is not None or scoring.sinks is not None
        caps = dict(has_cap=has_cap, has_window=self._window(scoring) is not None)
        return backend(query.dtype, query.shape[2], _capability(query.device), **caps)

    def _window(self, scoring: Scoring) -> int | None:
        """Return the window, if not all sequences fit into it."""
        return scoring.window if scoring.window is not None and scoring.window < self.most_keys else None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, backend: Backend) -> Tensor:
        """Attend as ``PackedAttention.attend`` does, with another backend than rectangles."""
        if not len(query):
            return torch.empty_like(query)
        if self._taken is not None:
            key, value = self._of_sequences(key), self._of_sequences(value)
        where = self.query_starts, self.key_starts, self.most_queries, self.most_keys
        seen = self._window(scoring)
        if backend == "varlen":
            # Takes a second to import, for what a CPU does not need.
            from torch.nn.attention.varlen import varlen_attn

            groups: dict[str, Any] = (
                {"enable_gqa": query.shape[1] != key.shape[1]} if _is_told_of_groups(varlen_attn) else {}
            )
            window = (-1 if seen is None else seen - 1, 0)
            found = varlen_attn(query, key, value, *where, scale=scoring.scale, window_size=window, **groups)
            assert isinstance(found, Tensor), "nothing else was asked for"
            return found
        from hybridflow.models.attention_kernels import packed_attention, packed_attention_with_sinks

        inputs = *(query, key, value, *where), scoring.scale, scoring.softcap or 0.0, seen or 0
        if scoring.sinks is not None:
            return packed_attention_with_sinks(scoring.sinks, *inputs)
        context: Tensor = packed_attention(*inputs)[0]
        return context


class Sequences(Chunks):
    """Where each sequence's queries and keys stand.

    The queries of a sequence are the tokens that no sequence before it has; they are its last ones, so that they are
    already packed. Its keys are all its tokens, which are gathered where some are shared.

    Args:
        lengths: Tokens of each sequence.
        places: Which token of the micro-batch each token of each sequence is, ``[sum of lengths]`` int64 in host
            memory.
        device: Where the activations live.
    """

    def __init__(self, lengths: list[int], places: Tensor, device: torch.device) -> None:
        counts = np.array(lengths, np.int64)
        ends = counts.cumsum()
        where = places.numpy()
        is_new = where > np.concatenate([[-1], np.maximum.accumulate(where)[:-1]]) if len(where) else where > -1
        # A sequence that is the beginning of another has no query of its own.
        queries = np.diff(np.concatenate([[0], is_new.cumsum()])[np.concatenate([[0], ends])])
        within = np.arange(len(where)) - np.repeat(ends - counts, counts)
        stands_last = within >= np.repeat(counts - queries, counts)
        assert (is_new == stands_last).all(), "what sequences share stands at their beginning"
        assert (where[is_new] == np.arange(is_new.sum())).all(), "tokens come in the order of sequences"
        some, taken = queries > 0, None
        if (queries != counts)[some].any():
            taken = to_device(places[torch.from_numpy(np.repeat(some, counts))], device)
        super().__init__(queries[some].tolist(), counts[some].tolist(), taken, device)


def _starts(counts: list[int]) -> Tensor:
    """Return where each part begins, and the end, ``[parts + 1]`` int32."""
    return torch.tensor([0, *counts]).cumsum(0).int()


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Return a GPU's compute capability."""
    found: tuple[int, int] = torch.cuda.get_device_capability(device)
    return found


def plain_attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    """Compute as ``attention.attend`` does without caps, on a GPU.

    Not by cuDNN, which builds a plan for each new shape. The kernels that make no scores of all pairs want as many
    heads of keys as of queries, and a width that is a multiple of 8. Without a mask torch may use no others from
    Ampere on; older GPUs have none for bf16.
    """
    head, width, sharers = query.shape[3], value.shape[3], query.shape[1] // key.shape[1]
    if sharers > 1:
        key, value = (each.repeat_interleave(sharers, 1) for each in (key, value))
    if head % 8:
        query, key, value = (pad(each, (0, -head % 8)) for each in (query, key, value))
    is_frugal = seen is None and _capability(query.device) >= (8, 0)
    with sdpa_kernel(_FRUGAL if is_frugal else [*_FRUGAL, SDPBackend.MATH]):
        found = scaled_dot_product_attention(query, key, value, attn_mask=seen, is_causal=seen is None, scale=scale)
    return found[..., :width]
