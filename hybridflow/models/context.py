"""Context parallelism: which tokens of a micro-batch each rank of a context-parallel group has, and how they meet.

Each sequence is split in zig-zag order: of ``2 * cp`` chunks rank ``r`` has chunks ``r`` and ``2 * cp - 1 - r``, so
that causal work is even. Attention gathers keys and values over the group; their gradients are scattered as they are
summed.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from hybridflow.models import cuda_attention
from hybridflow.models.attention import PackedAttention, attend
from hybridflow.models.flash import flash_attention, flash_gradient, is_flash
from hybridflow.models.scoring import Scoring
from hybridflow.parallel.copies import to_device

Chunk = tuple[int, int, int]
"""Piece, and where it starts and ends among all tokens."""


def zigzag(counts: list[int], size: int) -> list[list[Chunk]]:
    """Deal pieces of a micro-batch to ranks; of pieces too short for all ranks each begins with another rank.

    Args:
        counts: Tokens of each piece. The pieces stand one after the other.
        size: Ranks.

    Returns:
        The chunks of each rank, in the order of tokens.
    """
    dealt: list[list[Chunk]] = [[] for _ in range(size)]
    first = 0
    for piece, count in enumerate(counts):
        bounds = [first + count * number // (2 * size) for number in range(2 * size + 1)]
        for number, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
            if start < stop:
                dealt[(min(number, 2 * size - 1 - number) + piece) % size].append((piece, start, stop))
        first += count
    return dealt


class Dealt:
    """Rows of a whole that are dealt to the ranks of a group.

    Args:
        orders: Which rows each rank has, ``[its rows]`` int64 in host memory.
        group: The ranks.
        device: Where the rows live.

    Attributes:
        mine: Which rows this rank has, ``[local rows]`` int64, on the device; ``host_mine`` in host memory.
        index: Where each row of the whole is among the gathered, ``[rows]`` int64, on the device; ``host_index`` in
            host memory.
    """

    def __init__(self, orders: list[Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._width = max(len(order) for order in orders)
        index = torch.empty(sum(len(order) for order in orders), dtype=torch.int64)
        for rank, order in enumerate(orders):
            index[order] = rank * self._width + torch.arange(len(order))
        self.host_index, self.host_mine = index, orders[group.rank()]
        self.index, self.mine = to_device(self.host_index, device), to_device(self.host_mine, device)

    def exchange(self, values: Tensor) -> Tensor:
        """Gather ``[local rows, …]`` of all ranks as ``index`` finds them, with padding. Collective: cp."""
        gathered = values.new_empty(self._width * self._group.size(), *values.shape[1:])
        dist.all_gather_into_tensor(gathered, self._padded(values), group=self._group)
        return gathered

    def sum_back(self, gathered: Tensor) -> Tensor:
        """Sum what all ranks have as ``exchange`` leaves it, and return this rank's rows. Collective: cp."""
        mine = gathered.new_empty(self._width, *gathered.shape[1:])
        dist.reduce_scatter_tensor(mine, gathered.contiguous(), group=self._group)
        return mine[: len(self.mine)]

    def gather(self, values: Tensor) -> Tensor:
        """Gather ``[local rows, …]`` to ``[rows, …]``; the gradient of a rank's rows is that of its own whole.

        Collective: cp, forward only.
        """
        found: Tensor = _Gather.apply(values, self)
        return found

    def _padded(self, values: Tensor) -> Tensor:
        missing = self._width - len(values)
        return pad(values, (0, 0) * (values.dim() - 1) + (0, missing)) if missing else values.contiguous()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, dealt: Dealt) -> Tensor:
        ctx.dealt = dealt
        return dealt.exchange(values)[dealt.index]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[ctx.dealt.mine], None


class ContextShare:
    """This rank's tokens of a micro-batch.

    Args:
        counts: Tokens of each piece: of each sequence those that no sequence before it has.
        group: The context-parallel group.
        device: Where the activations live.

    Attributes:
        chunks: This rank's chunks, in the order of its tokens.
        tokens: How all tokens are dealt.
    """

    def __init__(self, counts: list[int], group: dist.ProcessGroup, device: torch.device) -> None:
        chunks = zigzag(counts, group.size())
        none = torch.empty(0, dtype=torch.int64)
        orders = [torch.cat([none, *(torch.arange(start, stop) for _, start, stop in each)]) for each in chunks]
        self.chunks = chunks[group.rank()]
        self.tokens = Dealt(orders, group, device)
        self._owners = torch.empty(sum(counts), dtype=torch.int64)
        for rank, order in enumerate(orders):
            self._owners[order] = rank
        self._local = torch.empty(sum(counts), dtype=torch.int64)
        self._local[orders[group.rank()]] = torch.arange(len(orders[group.rank()]))
        self._group, self._device = group, device

    def rows(self, places: Tensor) -> tuple[Tensor, Dealt]:
        """Return this rank's of some rows, as places among its tokens, and how the rows are dealt.

        Args:
            places: Places of the rows among all tokens, ``[rows]`` int64 in host memory.
        """
        owners = self._owners[places]
        orders = [(owners == rank).nonzero()[:, 0] for rank in range(self._group.size())]
        return to_device(self._local[places[orders[self._group.rank()]]], self._device), Dealt(
            orders, self._group, self._device
        )


class ContextAttention(PackedAttention):
    """``PackedAttention`` of a rank that has some of the tokens of each sequence.

    Args:
        lengths: Tokens of each sequence, on all ranks together.
        device: Where the activations live.
        places: Which token of the micro-batch each token of each sequence is, as for ``PackedAttention``.
        share: The tokens of this rank.

    Attributes:
        positions: Place of each of this rank's tokens in its sequence, ``[local tokens]`` int64.
    """

    def __init__(self, lengths: list[int], device: torch.device, places: Tensor, share: ContextShare) -> None:
        super().__init__(lengths, device, places)
        self._share = share
        self._sequence_places = places.split(lengths)
        self.positions = self.positions[share.tokens.mine]
        self._views: dict[int | None, _View] = {}

    def sums_so_far(self, values: Tensor) -> Tensor:
        """Sum as ``PackedAttention`` does, of this rank's tokens. Collective: cp."""
        return super().sums_so_far(self._share.tokens.gather(values))[self._share.tokens.mine]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attend as ``PackedAttention`` does, of this rank's tokens. Collective: cp, backward passes too."""
        view = self._view(scoring.window)
        found: Tensor = _Attend.apply(query, key, value, scoring.sinks, self._share.tokens, view, scoring)
        return found

    def _view(self, window: int | None) -> _View:
        if window not in self._views:
            chunks, index = [], self._share.tokens.host_index
            for piece, start, stop in self._share.chunks:
                last = int(self._host_positions[stop - 1])
                first = 0 if window is None else max(0, int(self._host_positions[start]) - window + 1)
                chunks.append((stop - start, index[self._sequence_places[piece][first : last + 1]]))
            self._views[window] = _View(chunks, window, self._device)
        return self._views[window]


class _View:
    """Which of the gathered keys the queries of each chunk see: the chunk's own are the last of them.

    Args:
        chunks: Queries of each chunk, and where its keys are, ``[keys]`` int64 in host memory.
        window: Tokens that each token sees; None: all before it.
        device: Where the activations live.
    """

    def __init__(self, chunks: list[tuple[int, Tensor]], window: int | None, device: torch.device) -> None:
        self.counts = [count for count, _ in chunks]
        self.taken = [to_device(taken, device) for _, taken in chunks]
        self._window, self._device = window, device

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attend with gathered keys and values; differentiable."""
        if not len(query):
            # Empty, but with a graph: the other ranks wait for this one's backward pass.
            return query.sum(-1, keepdim=True).expand(-1, -1, value.shape[2])
        width = value.shape[2]
        if query.is_cuda and width < query.shape[2]:
            # The kernels want values as wide as keys.
            return self.attend(query, key, pad(value, (0, query.shape[2] - width)), scoring)[..., :width]
        if query.is_cuda:
            backend = self._sequences.backend(query, scoring)
            if backend != "rectangles":
                return self._sequences.attend(query, key, value, scoring, backend)
        found = []
        for queries, taken in zip(query.split(self.counts), self.taken, strict=True):
            one, keys, values = (each.transpose(0, 1)[None] for each in (queries, key[taken], value[taken]))
            found.append(attend(one, keys, values, self.seen(len(queries), len(taken)), scoring)[0].transpose(0, 1))
        return torch.cat(found)

    def seen(self, queries: int, keys: int) -> Tensor:
        """Return which keys each query sees, ``[queries, keys]`` bool."""
        at, to = torch.arange(queries, device=self._device) + keys - queries, torch.arange(keys, device=self._device)
        seen = to <= at[:, None]
        return seen if self._window is None else seen & (to > at[:, None] - self._window)

    @functools.cached_property
    def _sequences(self) -> cuda_attention.Chunks:
        return cuda_attention.Chunks(
            self.counts, [len(each) for each in self.taken], torch.cat(self.taken), self._device
        )


class _Attend(torch.autograd.Function):
    """Attention of a rank's queries with all ranks' keys and values, of which only its own are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        tokens: Dealt,
        view: _View,
        scoring: Scoring,
    ) -> Tensor:
        ctx.tokens, ctx.view, ctx.scoring = tokens, view, scoring
        keys, values = _exchanged(tokens, key, value)
        if not is_flash(query, key, value, scoring):
            # What lies between is computed once more in the backward pass.
            ctx.save_for_backward(query, key, value)
            return view.attend(query, keys, values, scoring)
        context, normalizers = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
        start = 0
        for count, taken in zip(view.counts, view.taken, strict=True):
            part = slice(start, start + count)
            context[part], normalizers[part] = flash_attention(query[part], keys[taken], values[taken], scoring)
            start += count
        ctx.save_for_backward(query, key, value, context, normalizers)
        return context

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *kept = ctx.saved_tensors
        keys, values = _exchanged(ctx.tokens, key, value)
        of_sinks: Tensor | None = None
        if kept:
            of_query, of_keys, of_values = _flash_gradients(ctx, gradient, query, keys, values, *kept)
        else:
            with torch.enable_grad():
                given = (query, keys, values, *([] if ctx.scoring.sinks is None else [ctx.scoring.sinks]))
                inputs = [each.detach().requires_grad_() for each in given]
                scoring = replace(ctx.scoring, sinks=inputs[3] if len(inputs) > 3 else None)
                context = ctx.view.attend(*inputs[:3], scoring)
            of_query, of_keys, of_values, *others = torch.autograd.grad(
                context, inputs, gradient, allow_unused=True, materialize_grads=True
            )
            of_sinks = others[0] if others else None
        together = torch.cat([of_keys.flatten(1), of_values.flatten(1)], dim=1)
        of_key, of_value = _apart(ctx.tokens.sum_back(together), key, value)
        return of_query, of_key, of_value, of_sinks, None, None, None


def _exchanged(tokens: Dealt, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Gather keys and values in one message. Collective: cp."""
    return _apart(tokens.exchange(torch.cat([key.flatten(1), value.flatten(1)], dim=1)), key, value)


def _apart(together: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Split rows of keys and values beside each other into ``[rows, groups, head]`` each."""
    keys, values = together.split([math.prod(key.shape[1:]), math.prod(value.shape[1:])], dim=1)
    return keys.unflatten(1, key.shape[1:]), values.unflatten(1, value.shape[1:])


def _flash_gradients(
    ctx: Any, gradient: Tensor, query: Tensor, keys: Tensor, values: Tensor, context: Tensor, normalizers: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the queries and of gathered keys and values."""
    of_query, of_keys, of_values = torch.empty_like(query), torch.zeros_like(keys), torch.zeros_like(values)
    start = 0
    for count, taken in zip(ctx.view.counts, ctx.view.taken, strict=True):
        part = slice(start, start + count)
        of_query[part], of_key, of_value = flash_gradient(
            gradient[part], query[part], keys[taken], values[taken], context[part], normalizers[part], ctx.scoring
        )
        of_keys.index_add_(0, taken, of_key)
        of_values.index_add_(0, taken, of_value)
        start += count
    return of_query, of_keys, of_values
