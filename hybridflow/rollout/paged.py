"""The key-value cache in blocks, states by slot, and attention over them."""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.models import delta_rule
from hybridflow.models.attention import attend
from hybridflow.models.delta_rule import Recurrence, State
from hybridflow.models.gated_delta_net import GatedDeltaNet
from hybridflow.models.gpt import Transformer
from hybridflow.models.images import ImageRows
from hybridflow.models.latent_attention import LatentSelfAttention
from hybridflow.models.routing import choice_dtype, unknown_choice
from hybridflow.models.scoring import Scoring
from hybridflow.rollout.blocks import BLOCK_TOKENS

_LARGE_PAGE_BYTES = 2 << 20


class PagedCache:
    """Keys and values of the layers of this stage, in blocks that any sequence may own.

    A block's keys lie token by token for each dim, its values dim by dim for each token: as ``kernels.c`` reads them.
    What was not written by a block's present owner may be anything, and is not read.

    Latent attention has its keys and values compressed, one vector for all heads and the same on all tensor-parallel
    ranks. The values are a part of the keys.

    Layers with linear attention have states in their place, one for each slot that a sequence may have.

    Args:
        model: This rank's stage and shard.
        num_blocks: Blocks.
        device: Where they are.
        num_slots: Slots; a model without linear attention needs none.
        keeps_choices: Whether choices of experts are kept.

    Attributes:
        is_compressed: Whether they are of latent attention.
        keys: One tensor for each local layer that has keys, ``[blocks, groups/tp, head, BLOCK_TOKENS]``.
        values: As ``keys``, ``[blocks, groups/tp, BLOCK_TOKENS, head]``.
        choices: Experts that each token was sent to, ``[blocks, BLOCK_TOKENS, layers, experts_per_token]``, of all
            layers of the model; None: they are not kept.
        states: Of each local layer with linear attention, ``[slots, …]`` each.
        stride: Elements from a layer's keys to its values, and from there to the next layer's keys, where layers are
            alike.
        num_bytes: Memory of all.
    """

    def __init__(
        self,
        model: Transformer,
        num_blocks: int,
        device: torch.device,
        *,
        num_slots: int = 0,
        keeps_choices: bool = False,
    ) -> None:
        config = model.config
        self.choices: Tensor | None = None
        if keeps_choices:
            dtype = choice_dtype(config.num_moe_experts)
            shape = num_blocks, BLOCK_TOKENS, config.num_layers, config.moe_router_topk
            # Other stages know of other layers.
            self.choices = torch.full(shape, unknown_choice(dtype), dtype=dtype, device=device)
        latent = _latent(model)
        self.is_compressed = latent is not None
        per_layer, shapes = 1 if self.is_compressed else 2, cache_shapes(model)
        self._places = {layer: place for place, layer in enumerate(shapes)}
        sizes = [
            num_blocks * groups * head * BLOCK_TOKENS for groups, head in shapes.values() for _ in range(per_layer)
        ]
        pool = _empty_pool((sum(sizes),), config.params_dtype, device)
        self.states = empty_states(model, num_slots)
        self.stride, self.num_bytes = sizes[0] if sizes else 0, pool.nbytes + _num_bytes(self.states)
        parts = torch.split(pool, sizes)
        self.keys = [
            part.view(num_blocks, groups, head, BLOCK_TOKENS)
            for part, (groups, head) in zip(parts[::per_layer], shapes.values(), strict=True)
        ]
        if latent is not None:
            self.values = [keys[:, :, : latent.kv_lora_rank].transpose(2, 3) for keys in self.keys]
            return
        self.values = [
            part.view(num_blocks, groups, BLOCK_TOKENS, head)
            for part, (groups, head) in zip(parts[1::2], shapes.values(), strict=True)
        ]

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a local layer."""
        place = self._places[layer]
        return self.keys[place], self.values[place]

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy blocks, ``[copies]`` int64 each; no block is both source and target."""
        own = self.keys if self.is_compressed else (*self.keys, *self.values)
        for blocks in (*own, *(() if self.choices is None else (self.choices,))):
            blocks[targets] = blocks[sources]

    def copy_states(self, sources: Tensor, targets: Tensor) -> None:
        """Copy states of slots, ``[copies]`` int64 each; all are read before any is written."""
        copy_states(self.states, sources, targets)

    def choices_of(self, blocks: Tensor, num_tokens: int) -> Tensor:
        """Return the choices of a sequence's first tokens, ``[tokens, layers, experts_per_token]``."""
        assert self.choices is not None, "kept from the start"
        return self.choices[blocks[: -(-num_tokens // BLOCK_TOKENS)].long()].flatten(0, 1)[:num_tokens]


def _empty_pool(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor, on a CPU in large pages if the system has them.

    A step reads blocks from all over the pool, and with small pages it waits for address translation.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < _LARGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes + _LARGE_PAGE_BYTES)
    # A system that was built without large pages refuses, and is as good with small ones.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    everything = torch.frombuffer(memory, dtype=dtype)
    first = -everything.data_ptr() % _LARGE_PAGE_BYTES // dtype.itemsize
    return everything[first : first + math.prod(shape)].view(shape)


def cache_shapes(model: Transformer) -> dict[int, tuple[int, int]]:
    """Return of each local layer that has keys the query groups that this rank caches, and the width of a key.

    Latent attention has one key, compressed.
    """
    attentions = [layer.self_attention for layer in model.decoder.layers]
    if (latent := _latent(model)) is not None:
        return dict.fromkeys(range(len(attentions)), (1, latent.compressed_size))
    return {
        layer: (attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head)
        for layer, attention in enumerate(attentions)
        if not isinstance(attention, GatedDeltaNet)
    }


def block_bytes(model: Transformer) -> int:
    """Return the memory of one block in all layers of this stage, in bytes."""
    element = torch.empty(0, dtype=model.config.params_dtype).element_size()
    per_layer = 2 if _latent(model) is None else 1
    return per_layer * sum(groups * head for groups, head in cache_shapes(model).values()) * BLOCK_TOKENS * element


def state_bytes(model: Transformer) -> int:
    """Return the memory of a sequence's states in all layers of this stage with linear attention, in bytes."""
    return _num_bytes(empty_states(model, 1))


def empty_states(model: Transformer, num_slots: int) -> dict[int, State]:
    """Return the states of so many slots in each local layer with linear attention."""
    attentions = [layer.self_attention for layer in model.decoder.layers]
    return {
        layer: delta_rule.empty_state(num_slots, attention.recurrence())
        for layer, attention in enumerate(attentions)
        if isinstance(attention, GatedDeltaNet)
    }


def copy_states(states: dict[int, State], sources: Tensor, targets: Tensor) -> None:
    """Copy states of slots in each layer, ``[copies]`` int64 each; all are read before any is written."""
    for state in states.values():
        for each in state:
            each[targets] = each[sources]


def _num_bytes(states: dict[int, State]) -> int:
    return sum(each.nbytes for state in states.values() for each in state)


def _latent(model: Transformer) -> LatentSelfAttention | None:
    attention = model.decoder.layers[0].self_attention
    return attention if isinstance(attention, LatentSelfAttention) else None


class PagedAttention:
    """Tokens of several sequences, each of which sees the cached tokens of its own sequence, and those before it here.

    Args:
        cache: Keys, values and states; those of the tokens are added.
        tables: Blocks of each sequence, ``[sequences, blocks]`` int32, on the device.
        sequences: Sequence of each token, ``[tokens]`` int64, tokens of one sequence side by side.
        positions: Position of each token in its sequence, ``[tokens]`` int64, rising within a sequence. With linear
            attention a sequence goes on behind the token that was computed last in its slot, or begins anew with 0.
        first_slot: Slot of the first of the sequences in ``tables``; the others follow it.

    Attributes:
        images: The tokens of images; None: there are none.
    """

    images: ImageRows | None = None

    def __init__(
        self, cache: PagedCache, tables: Tensor, sequences: Tensor, positions: Tensor, first_slot: int = 0
    ) -> None:
        self.cache = cache
        self.is_compressed = cache.is_compressed
        self.tables = tables
        self.sequences = sequences
        self.positions = positions
        self._first_slot = first_slot

    @property
    def routing(self) -> _Recording | None:
        """Return what routers of a mixture are told; None: nothing."""
        return None if self.cache.choices is None else _Recording(self.cache.choices, self._places())

    def _places(self) -> tuple[Tensor, Tensor]:
        """Return the block of each token, and its place there, ``[tokens]`` each."""
        return self.tables[self.sequences, self.positions // BLOCK_TOKENS].long(), self.positions % BLOCK_TOKENS

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attend as ``PackedAttention.attend`` does."""
        keys, values = self.cache.of_layer(layer)
        block, token = self._places()
        keys[block, :, :, token] = key
        if not self.is_compressed:
            values[block, :, token] = value
        context = query.new_empty(*query.shape[:2], value.shape[2])
        for part in self._parts:
            context[part.rows] = part.attend(query[part.rows], keys[part.tables], values[part.tables], scoring)
        return context

    def recur(self, layer: int, mixed: Tensor, decay: Tensor, beta: Tensor, recurrence: Recurrence) -> Tensor:
        """Recur as ``PackedAttention.recur`` does, from the states that the tokens before have left."""
        states = self.cache.states[layer]
        found = mixed.new_empty(len(mixed), recurrence.value_heads, recurrence.value_size)
        for part in self._parts:
            slots, shape = self._first_slot + part.sequences, part.positions.shape
            if part.begin is not None:
                # Another sequence has left its state there, or nobody has.
                for each in states:
                    each[slots[part.begin]] = 0
            given = mixed[part.rows], decay[part.rows], beta[part.rows]
            if shape[1] == 1 and mixed.device.type == "cpu":
                found[part.rows] = delta_rule.step(*given, recurrence, states, slots)
                continue
            channels, decays, betas = (each.unflatten(0, shape) for each in given)  # type: ignore[no-untyped-call]
            before = State(*(each[slots] for each in states))
            output, after = delta_rule.recur(channels, decays, betas, recurrence, before)
            found[part.rows] = output.flatten(0, 1)
            for kept, new in zip(states, after, strict=True):
                kept[slots] = new
        return found

    @functools.cached_property
    def _parts(self) -> list[_Part]:
        return list(self._split())

    def _split(self) -> Iterator[_Part]:
        """Yield the sequences with one token here together, and each of the others alone."""
        sequences, counts = torch.unique_consecutive(self.sequences, return_counts=True)
        starts = counts.cumsum(0) - counts
        is_single = counts == 1
        if bool(is_single.any()):
            yield self._part(starts[is_single], sequences[is_single])
        for start, count, sequence in zip(
            starts[~is_single].tolist(), counts[~is_single].tolist(), sequences[~is_single], strict=True
        ):
            rows = torch.arange(start, start + count, device=self.positions.device)
            yield self._part(rows, sequence[None])

    def _part(self, rows: Tensor, sequences: Tensor) -> _Part:
        positions = self.positions[rows].unflatten(0, (len(sequences), -1))  # type: ignore[no-untyped-call]
        tables = self.tables[sequences, : int(positions.max()) // BLOCK_TOKENS + 1].long()
        return _Part(rows, sequences, tables, positions)


@dataclass(frozen=True)
class _Recording:
    """Writes down which experts are chosen, see ``models.routing.Routing``."""

    choices: Tensor
    places: tuple[Tensor, Tensor]

    def settle(self, layer: int, chosen: Tensor, first: int) -> Tensor:
        """See ``Routing``."""
        block, token = (each[first : first + len(chosen)] for each in self.places)
        self.choices[block, token, layer] = chosen.to(self.choices.dtype)
        return chosen

    def observe(
        self, layer: int, logits: Tensor, scores: Tensor, chosen: Tensor, weights: Tensor, first: int
    ) -> Tensor:
        """See ``Routing``."""
        return weights


@dataclass(frozen=True)
class _Part:
    """As many tokens of each of some sequences: ``[sequences * tokens]`` rows, positions ``[sequences, tokens]``."""

    rows: Tensor
    sequences: Tensor
    tables: Tensor
    positions: Tensor

    @functools.cached_property
    def begin(self) -> Tensor | None:
        """Return which of the sequences begin here, ``[sequences]`` bool; None: none does."""
        found = self.positions[:, 0] == 0
        return found if bool(found.any()) else None

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        """Return the context, ``[rows, heads, width]``, from keys and values of ``[sequences, blocks, …]``."""
        places = torch.arange(keys.shape[1] * BLOCK_TOKENS, device=query.device)
        # Masked scores would not do: what was not written may be NaN, also after it is weighted with zero.
        is_unwritten = (places > self.positions[:, -1:]).unflatten(1, (-1, BLOCK_TOKENS))  # type: ignore[no-untyped-call]
        keys = keys.masked_fill(is_unwritten[:, :, None, None], 0)
        values = values.masked_fill(is_unwritten[:, :, None, :, None], 0)
        seen = places <= self.positions[:, :, None]
        if scoring.window is not None:
            seen &= places > self.positions[:, :, None] - scoring.window
        context = attend(
            query.unflatten(0, self.positions.shape).transpose(1, 2),  # type: ignore[no-untyped-call]
            keys.permute(0, 2, 1, 4, 3).flatten(2, 3),
            values.permute(0, 2, 1, 3, 4).flatten(2, 3),
            seen[:, None],
            scoring,
        )
        return context.transpose(1, 2).flatten(0, 1)
