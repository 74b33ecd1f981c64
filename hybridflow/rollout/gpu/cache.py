"""The key-value cache on a GPU, and attention over it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from hybridflow.models.gpt import Transformer
from hybridflow.models.images import ImageRows
from hybridflow.models.scoring import Scoring
from hybridflow.rollout.blocks import BLOCK_TOKENS
from hybridflow.rollout.gpu import ops
from hybridflow.rollout.gpu.prompts import LatentPrompts
from hybridflow.rollout.gpu.recurrence import GpuRecurrence
from hybridflow.rollout.paged import cache_shapes, copy_states, empty_states


class GpuCache:
    """Keys and values of the layers of this stage, page-major: a block's tokens side by side; states by slot.

    Latent attention has one compressed vector for each token.

    What was not written by a block's present owner may be anything, and is not read.

    Attributes:
        addresses: Where each layer's keys and values are, or its last inputs and matrices, ``[layers, 2]`` int64 on the
            device: kernels read them from there, so that captured graphs go on with another cache.
        states: Of each local layer with linear attention, ``[slots, …]`` each.
        num_bytes: Memory of all layers.
    """

    def __init__(self, model: Transformer, num_blocks: int, device: torch.device, num_slots: int = 0) -> None:
        before = 1 if model.has_latent_attention else 2, num_blocks, BLOCK_TOKENS
        self.states, dtype = empty_states(model, num_slots), model.config.params_dtype
        shapes = cache_shapes(model)
        pairs = {layer: torch.empty(*before, *shapes[layer], dtype=dtype, device=device) for layer in shapes}
        self._layers = list(pairs.values())
        both: dict[int, Iterable[Tensor]] = {**pairs, **self.states}
        self.num_bytes = sum(each.nbytes for pair in both.values() for each in pair)
        found = [[each.data_ptr() for each in both[layer]] for layer in range(len(both))]
        table = torch.tensor(found, dtype=torch.int64)
        self.addresses = table.expand(-1, 2).contiguous().to(device)

    def vectors(self, layer: int) -> Tensor:
        """Return the compressed vectors of a local layer, ``[blocks * BLOCK_TOKENS, width]``."""
        return self._layers[layer].flatten(0, 3)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy blocks, ``[copies]`` int64 each; no block is both source and target."""
        for layer in self._layers:
            layer[:, targets] = layer[:, sources]

    def copy_states(self, sources: Tensor, targets: Tensor) -> None:
        """Copy states of slots, ``[copies]`` int64 each; all are read before any is written."""
        copy_states(self.states, sources, targets)


class GpuAttention:
    """Rows of several sequences, each of which sees the cached tokens of its own sequence, and those before it here.

    Args:
        addresses: ``GpuCache.addresses``.
        tables: Blocks of each sequence, ``[sequences, blocks]`` int32.
        sequences: Sequence of each row, ``[rows]`` int64, rows of one sequence side by side.
        positions: Position of each row in its sequence, ``[rows]`` int64, rising within a sequence; -1: padding.
        tiles: First row and number of rows of each tile, ``[2, tiles]`` int32, by the most rows of a tile, see
            ``rows_per_tile``; None: each row by itself.
        splits: Shares that the keys of a row are split into.
        recurrence: What layers with linear attention do; None: there are none.
        prompts: Rows that latent attention computes as in training; None: there are none.
        shifts: See ``kernels.store``, ``[rows]`` int64; None: each row turns by its position.

    Attributes:
        images: The tokens of images; None: there are none.
        recurrence: See above.
        prompts: See above.
        others: What the rows beside prompts attend by; None: there are no prompts, or no such rows.
    """

    images: ImageRows | None = None

    def __init__(
        self,
        addresses: Tensor,
        tables: Tensor,
        sequences: Tensor,
        positions: Tensor,
        tiles: Mapping[int, Tensor] | None = None,
        splits: int = 1,
        recurrence: GpuRecurrence | None = None,
        prompts: LatentPrompts | None = None,
        shifts: Tensor | None = None,
    ) -> None:
        self._shifts = shifts
        self._rotary: Tensor | None = None
        self.recurrence = recurrence
        self.prompts = prompts
        self.tables = tables
        self.sequences = sequences
        self.positions = positions
        self._addresses = addresses
        self._tiles = tiles
        self._splits = splits
        self.others: GpuAttention | None = None
        if prompts is not None and len(prompts.others):
            own = sequences[prompts.others], positions[prompts.others]
            self.others = GpuAttention(addresses, tables, *own, splits=splits)

    def turn_by(self, rotary: Tensor) -> None:
        """Let each row turn by cosines and sines of its own, ``[rows, 2, turned pairs]`` fp32."""
        self._rotary = rotary
        self._shifts = torch.arange(len(rotary), device=rotary.device) - self.positions

    def attend_mixed(
        self,
        layer: int,
        mixed: Tensor,
        rotary: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        scoring: Scoring,
        eps: float,
        centre: float,
        *,
        squares: Tensor | None = None,
        is_gated: bool = False,
        is_interleaved: bool = False,
        has_value_norm: bool = False,
    ) -> Tensor:
        """Rotate, cache and attend; 2 launches, or 3 where the keys are split, and one more with gates.

        Args:
            layer: Local layer index.
            mixed: ``[rows, groups, sharers + 2, head]``, queries, key and value of each query group.
            rotary: Cosines and sines of each position, ``[context, 2, turned pairs]`` fp32.
            norms: Weights of the norms of queries and keys, ``[head]`` each, or of all heads here where a norm is over
                all heads; None: they are not normalized.
            scoring: How scores are made.
            eps: Of the norms.
            centre: Of the norms.
            squares: Mean squares of queries and keys over all heads, ``[rows, 2]`` fp32; None: each head has its own.
            is_gated: Whether each query has a gate behind it, ``[rows, groups, 2 * sharers + 2, head]``.
            is_interleaved: Whether neighboring dims turn together.
            has_value_norm: Whether values are normalized, without a weight.

        Returns:
            ``[rows, groups * sharers * head]``.
        """
        rows, groups, width, head = mixed.shape
        query = mixed.new_empty(rows, groups, (width - 2) // (1 + is_gated), head)
        where = self._addresses, self.tables, self.sequences, self.positions
        how = layer, eps, centre, is_interleaved, has_value_norm, self._shifts
        rotary = rotary if self._rotary is None else self._rotary
        ops.store(query, mixed, *where, rotary, *(norms or (None, None)), squares, *how)
        context, partial, sums = torch.empty_like(query), None, None
        if self._splits > 1:
            partial = query.new_empty(self._splits, *query.shape, dtype=torch.float32)
            sums = query.new_empty(2, self._splits, *query.shape[:-1], dtype=torch.float32)
        most = 1 if self._tiles is None else rows_per_tile(query.dtype, query.shape[2], head)
        tiles = (None, None) if self._tiles is None else self._tiles[most]
        ops.attend(context, partial, sums, query, *where, *tiles, scoring.sinks, layer, most, *_scores(scoring))
        if partial is not None:
            ops.combine(context, partial, sums)
        if is_gated:
            ops.gate_heads(context, mixed)
        return context.flatten(1)

    def store_latent(
        self,
        layer: int,
        query: Tensor,
        compressed: Tensor,
        rotary: Tensor,
        norm: Tensor,
        eps: float,
        centre: float,
    ) -> Tensor:
        """Normalize, rotate and cache compressed vectors, and rotate queries; 1 launch.

        Args:
            layer: Local layer index.
            query: ``[rows, heads, plain + rotary]``, plain dims first.
            compressed: ``[rows, latent + rotary]``.
            rotary: As for ``attend_mixed``.
            norm: Weight of the norm of compressed vectors, ``[latent]``.
            eps: Of the norm.
            centre: Of the norm.

        Returns:
            The dims of queries that turn, ``[rows, heads, rotary]``.
        """
        turned = query.new_empty(*query.shape[:2], 2 * rotary.shape[2])
        where = self._addresses, self.tables, self.sequences, self.positions
        ops.store_latent(turned, query, compressed, *where, rotary, norm, layer, eps, centre)
        return turned

    def attend_latent(self, layer: int, query: Tensor, turned: Tensor, scoring: Scoring) -> Tensor:
        """Attend to compressed vectors; 1 launch, or 2 where the keys are split.

        Args:
            layer: Local layer index.
            query: Plain dims of queries, multiplied into the space of compressed vectors, ``[heads, rows, latent]``.
            turned: See ``store_latent``.
            scoring: How scores are made, without sinks.

        Returns:
            The sum of compressed vectors that each head sees, ``[heads, rows, latent]``.
        """
        context, partial, sums = torch.empty_like(query), None, None
        if self._splits > 1:
            partial = query.new_empty(self._splits, *query.shape, dtype=torch.float32)
            sums = query.new_empty(2, self._splits, *query.shape[:2], dtype=torch.float32)
        where = self._addresses, self.tables, self.sequences, self.positions
        ops.attend_latent(context, partial, sums, query, turned, *where, layer, *_scores(scoring))
        if partial is not None:
            ops.combine(context, partial, sums)
        return context


def _scores(scoring: Scoring) -> tuple[float, float, int]:
    """Return scale, cap and window as the kernels take them."""
    return scoring.scale, scoring.softcap or 0.0, scoring.window or 0


def rows_per_tile(dtype: torch.dtype, sharers: int, head: int) -> int:
    """Return the most rows of a sequence that a program of ``attend`` computes without spilling registers.

    Args:
        dtype: Format of queries, keys and values.
        sharers: Queries of a query group.
        head: Width of a head.
    """
    return max(1, (32 if dtype.itemsize == 2 and head <= 256 else 16) // sharers)


def tiles_of(sequences: np.ndarray, most: int) -> np.ndarray:
    """Cut rows into tiles of one sequence each.

    Args:
        sequences: Sequence of each row, ``[rows]``, rows of one sequence side by side.
        most: Most rows of a tile.

    Returns:
        First row and number of rows of each tile, ``[2, tiles]`` int32.
    """
    borders = np.flatnonzero(np.diff(sequences, prepend=-1, append=-1))
    starts, counts = borders[:-1], np.diff(borders)
    per_sequence = -(-counts // most)
    index = np.arange(per_sequence.sum()) - np.repeat(per_sequence.cumsum() - per_sequence, per_sequence)
    first = np.repeat(starts, per_sequence) + index * most
    return np.stack([first, np.minimum(np.repeat(counts, per_sequence) - index * most, most)]).astype(np.int32)


_MOST_SPLITS = 16

_PROGRAMS_PER_PROCESSOR = 2
"""On an H100, 64 rows of 224 tokens in 4 groups take 17.5 microseconds with one share of the keys, and 19.1 with 2."""


def splits_for(rows: int, groups: int, processors: int) -> int:
    """Return the shares of the keys with which all of a GPU's multiprocessors have work.

    Args:
        rows: Rows that attend.
        groups: Query groups on this rank.
        processors: Multiprocessors.
    """
    return max(1, min(_MOST_SPLITS, _PROGRAMS_PER_PROCESSOR * processors // max(rows * groups, 1)))


def processors_of(device: torch.device) -> int:
    """Return a GPU's multiprocessors; 1 for a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
