"""Core attention on packed tokens, for training and rollout alike.

Activations are laid out ``[tokens, 1, hidden]``: all sequences of a micro-batch one after the other, without padding.
Which tokens see which is told by an attention plan, an object that travels through megatron-core as
``attention_bias``. Training uses ``PackedAttention``, the rollout ``PagedAttention``; all else of the model is the same
code, so that the two agree on log-probabilities.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import embedding, pad, rms_norm, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from hybridflow.families.model import ModelConfig
from hybridflow.models import cuda_attention, delta_rule
from hybridflow.models.delta_rule import Recurrence
from hybridflow.models.images import ImageRows
from hybridflow.models.norm import ProjectionNorm
from hybridflow.models.scoring import Scoring
from hybridflow.models.shapes import DELTA_TOKENS
from hybridflow.parallel.copies import to_device

_WIDENING, _NARROW = 1.3, 64
"""A rectangle of sequences is at most so many times as wide as its shortest; or so many tokens wide."""


class PackedAttention:
    """Each token sees itself and the tokens before it in its own sequence.

    Sequences may have tokens in common at their beginning, such as samples of one prompt: these are there once, and are
    computed once. On a GPU ``cuda_attention`` chooses what computes it; else it is done in rectangles.

    Args:
        lengths: Tokens of each sequence.
        device: Where the activations live.
        places: Which token of the micro-batch each token of each sequence is, ``[sum of lengths]`` int64 in host
            memory; None: they come one after the other, and none is shared.

    Attributes:
        positions: Place of each token in its sequence, ``[tokens]`` int64.
        routing: What routers of a mixture are told, a ``routing.Routing``; None: nothing.
        images: The tokens of images; None: there are none.
        can_split: Whether sequence parallelism may split the tokens; not beside ranks that decode.
    """

    is_compressed = False
    routing: Any = None
    images: ImageRows | None = None
    can_split = True

    def __init__(self, lengths: list[int], device: torch.device, places: Tensor | None = None) -> None:
        counts = torch.tensor(lengths, dtype=torch.int64)
        total, starts = int(counts.sum()), torch.cumsum(counts, 0) - counts
        within = torch.arange(total) - torch.repeat_interleave(starts, counts)
        if places is None:
            places = torch.arange(total)
        num_tokens = int(places.max()) + 1 if total else 0
        self._lengths, self._host_places, self._device = lengths, places, device
        self._places = to_device(places, device)
        self._starts = to_device(torch.arange(total) - within, device)
        self._host_positions = torch.empty(num_tokens, dtype=torch.int64).index_copy_(0, places, within)
        self.positions = to_device(self._host_positions, device)

    def sums_so_far(self, values: Tensor) -> Tensor:
        """Sum ``[tokens]`` int64 values over each token's sequence, from the first token to the token itself."""
        laid_out = values[self._places]
        sums = laid_out.cumsum(0)
        sums = sums - (sums - laid_out)[self._starts]
        return torch.empty_like(values).index_copy_(0, self._places, sums)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Compute the attention of one layer.

        Args:
            layer: Local layer index.
            query: ``[tokens, heads/tp, head]``.
            key: ``[tokens, groups/tp, head]``.
            value: ``[tokens, groups/tp, width]``.
            scoring: How scores are made of them.

        Returns:
            ``[tokens, heads/tp, width]``.
        """
        width = value.shape[2]
        if query.is_cuda and width < query.shape[2]:
            # The kernels want values as wide as keys.
            value = pad(value, (0, query.shape[2] - width))
            return self.attend(layer, query, key, value, scoring)[..., :width]
        if query.is_cuda:
            backend = self._sequences.backend(query, scoring)
            if backend != "rectangles":
                return self._sequences.attend(query, key, value, scoring, backend)
        return self._rectangles.attend(query, key, value, scoring)

    def recur(self, layer: int, mixed: Tensor, decay: Tensor, beta: Tensor, recurrence: Recurrence) -> Tensor:
        """Compute the linear attention of one layer; every sequence begins without a state.

        Args:
            layer: Local layer index.
            mixed: Queries, keys and values before the convolution, ``[tokens, channels]``.
            decay: Logarithm of what states are multiplied by, ``[tokens, value heads/tp]`` fp32.
            beta: Share of a value that replaces another, ``[tokens, value heads/tp]``.
            recurrence: Weights and sizes.

        Returns:
            ``[tokens, value heads/tp, value]``.
        """
        return self._rectangles.recur(mixed, decay, beta, recurrence)

    @functools.cached_property
    def _sequences(self) -> cuda_attention.Sequences:
        return cuda_attention.Sequences(self._lengths, self._host_places, self._device)

    @functools.cached_property
    def _rectangles(self) -> _Rectangles:
        return _Rectangles(self._lengths, self._host_places, self._device)


class _Rectangles:
    """Sequences of like length side by side, each rectangle as wide as its longest.

    Padding stands behind a sequence's own tokens, which never look there.

    Args:
        lengths: Tokens of each sequence.
        places: Which token of the micro-batch each token of each sequence is, ``[sum of lengths]`` int64 in host
            memory.
        device: Where the activations live.
    """

    def __init__(self, lengths: list[int], places: Tensor, device: torch.device) -> None:
        counts = torch.tensor(lengths, dtype=torch.int64)
        total, starts = int(counts.sum()), torch.cumsum(counts, 0) - counts
        within = torch.arange(total) - torch.repeat_interleave(starts, counts)
        num_tokens = int(places.max()) + 1 if total else 0
        self._shapes: list[tuple[int, int]] = []
        pieces, first_cells, num_cells = [], torch.empty(len(lengths), dtype=torch.int64), 0
        for samples in of_like_length(lengths):
            width = lengths[samples[-1]]
            chosen = torch.tensor(samples)
            # Padding repeats a sequence's last token.
            cells = starts[chosen][:, None] + torch.arange(width).minimum(counts[chosen][:, None] - 1)
            pieces.append(places[cells.flatten()])
            first_cells[chosen] = num_cells + width * torch.arange(len(samples))
            self._shapes.append((len(samples), width))
            num_cells += len(samples) * width
        cells = torch.repeat_interleave(first_cells, counts) + within
        # A shared token's output is the same in all sequences: one of them gives it.
        given = torch.empty(num_tokens, dtype=torch.int64).index_copy_(0, places, cells)
        self._cells = to_device(given, device)
        taken = torch.cat(pieces) if pieces else places
        # Sequences of one length that share nothing are already a rectangle: nothing to gather.
        self._is_rectangle = torch.equal(taken, torch.arange(num_tokens))
        self._taken = to_device(taken, device)
        widest = max(lengths, default=0)
        self._sight = _Sight(torch.arange(widest, device=device), widest)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attend as ``PackedAttention.attend`` does."""
        if not self._is_rectangle:
            query, key, value = (_rows(each, self._taken) for each in (query, key, value))
        found = []
        # Taken apart at once: the gradient of a slice is as large as the whole, and zeros but for its own.
        sizes = [samples * width for samples, width in self._shapes]
        parts = zip(*(each.split(sizes) for each in (query, key, value)), strict=True)
        for (samples, width), part in zip(self._shapes, parts, strict=True):
            queries, keys, values = (each.unflatten(0, (samples, width)).transpose(1, 2) for each in part)
            # Padding stands behind the tokens, where a causal query never looks.
            is_plain = scoring.softcap is None and scoring.sinks is None
            is_plain = is_plain and (scoring.window is None or scoring.window >= width)
            seen = None if is_plain else self._sight.through(scoring.window)[:width, :width]
            found.append(attend(queries, keys, values, seen, scoring).transpose(1, 2).flatten(0, 1))
        if not found:
            return query.new_empty(*query.shape[:2], value.shape[2])
        context = found[0] if len(found) == 1 else torch.cat(found)
        return context if self._is_rectangle else _rows(context, self._cells)

    def recur(self, mixed: Tensor, decay: Tensor, beta: Tensor, recurrence: Recurrence) -> Tensor:
        """Recur as ``PackedAttention.recur`` does."""
        if not len(mixed):
            return mixed.new_empty(0, recurrence.value_heads, recurrence.value_size)
        compute: Callable[..., Tensor] = _recur
        if torch.is_grad_enabled():
            # A token has more numbers in the rule than in all else of a layer. They are computed anew, part by part.
            compute = functools.partial(checkpoint, _recur, use_reentrant=False, preserve_rng_state=False)
        found, start = [], 0
        for samples, width in self._shapes:
            stop = start + samples * width
            for taken in self._taken[start:stop].view(samples, width).split(max(1, DELTA_TOKENS // width)):
                found.append(compute(mixed, decay, beta, recurrence, taken))
            start = stop
        return _rows(torch.cat(found), self._cells)


def _recur(mixed: Tensor, decay: Tensor, beta: Tensor, recurrence: Recurrence, taken: Tensor) -> Tensor:
    """Return the outputs of some sequences' tokens, ``[samples * tokens, value heads/tp, value]``.

    Args:
        mixed: As for ``PackedAttention.recur``, of the micro-batch.
        decay: Likewise.
        beta: Likewise.
        recurrence: Likewise.
        taken: The tokens, ``[samples, tokens]``.
    """
    own = [_rows(each, taken.flatten()).unflatten(0, taken.shape) for each in (mixed, decay, beta)]
    return delta_rule.recur(own[0], own[1], own[2], recurrence)[0].flatten(0, 1)


def of_like_length(lengths: list[int]) -> list[list[int]]:
    """Group indices of sequences with similar lengths, from short to long; those without tokens are left out."""
    found: list[list[int]] = []
    shortest = 0
    for index in sorted(filter(lengths.__getitem__, range(len(lengths))), key=lambda each: (lengths[each], each)):
        # Of short ones there are not so many that a rectangle of their own would pay.
        if not found or lengths[index] > max(_NARROW, shortest * _WIDENING):
            found.append([])
            shortest = lengths[index]
        found[-1].append(index)
    return found


def _rows(packed: Tensor, rows: Tensor) -> Tensor:
    """Pick ``[rows, …]`` from ``[tokens, …]`` by an embedding, whose gradient has one order of sums on every device."""
    found: Tensor = embedding(rows, packed.flatten(1)).unflatten(1, packed.shape[1:])
    return found


class _Sight:
    """Which of the places before it each query's place sees; layers with one window share a mask.

    Args:
        queries: Places of the queries, ``[queries]``.
        width: Places that there are.
    """

    def __init__(self, queries: Tensor, width: int) -> None:
        self._queries = queries
        self._width = width
        self._masks: dict[int | None, Tensor] = {}

    def through(self, window: int | None) -> Tensor:
        """Return the mask, ``[queries, width]`` bool."""
        if window not in self._masks:
            # Only here, since it is as large as all scores of a head, and plain attention needs none of it.
            queries, keys = self._queries[:, None], torch.arange(self._width, device=self._queries.device)
            seen = keys <= queries
            self._masks[window] = seen if window is None else seen & (keys > queries - window)
        return self._masks[window]


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scoring: Scoring) -> Tensor:
    """Compute scaled dot-product attention, with soft-capped scores and sinks where they are wanted.

    Args:
        query: ``[samples, heads/tp, queries, head]``.
        key: ``[samples, groups/tp, keys, head]``.
        value: ``[samples, groups/tp, keys, width]``.
        seen: Which key each query sees, ``[queries, keys]`` or ``[samples, 1, queries, keys]``; None: causal.
        scoring: How scores are made.
    """
    is_plain = scoring.softcap is None and scoring.sinks is None
    if is_plain and query.is_cuda:
        return cuda_attention.plain_attention(query, key, value, seen, scoring.scale)
    if is_plain:
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=seen,
            is_causal=seen is None,
            scale=scoring.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    assert seen is not None, "only plain attention is causal without a mask"
    # The heads of a query group side by side: [samples, groups/tp, heads/groups, queries, head].
    query = query.unflatten(1, (key.shape[1], -1))
    scores = query @ key[:, :, None].transpose(-1, -2) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    seen = seen if seen.dim() == 2 else seen[:, :, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(scores.dtype).view(key.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)[..., : key.shape[2]]
    return (weights @ value[:, :, None]).flatten(1, 2)


class AttentionPlan(Protocol):
    """Which tokens see which.

    Attributes:
        positions: Place of each token in its sequence, ``[tokens]`` int64.
        is_compressed: Whether keys and values of latent attention are compressed.
        images: The tokens of images; None: there are none.
    """

    positions: Tensor
    is_compressed: bool
    images: ImageRows | None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Compute the attention of one layer, as ``PackedAttention.attend`` does."""

    def recur(self, layer: int, mixed: Tensor, decay: Tensor, beta: Tensor, recurrence: Recurrence) -> Tensor:
        """Compute the linear attention of one layer, as ``PackedAttention.recur`` does."""


class SdpaCoreAttention(MegatronModule):
    """megatron-core's core attention slot, filled with PyTorch's scaled dot-product attention.

    Takes the place of ``DotProductAttention`` (which knows neither packing nor a cache of ours) and of Transformer
    Engine's attention, so that rollout and training share one path on every machine.

    Attributes:
        local_layer: Index of its layer among those of this stage.
        scoring: How it scores; megatron-core tells the scale alone, the rest is set after construction.
        softmax_offset: Sinks of this rank's heads, ``[heads/tp]``; None: there are none.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        self.local_layer = 0
        self.softmax_offset: nn.Parameter | None = None
        self.scoring = Scoring(scale=softmax_scale if softmax_scale is not None else config.kv_channels**-0.5)

    def add_sinks(self) -> None:
        """Give each head a sink."""
        heads = self.config.num_attention_heads // self.config.tensor_model_parallel_size
        self.softmax_offset = nn.Parameter(torch.empty(heads, dtype=self.config.params_dtype))
        set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

    @property
    def whole_scoring(self) -> Scoring:
        """Return how scores are made, sinks included."""
        return self.scoring if self.softmax_offset is None else replace(self.scoring, sinks=self.softmax_offset)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        /,
        *,
        attention_bias: AttentionPlan,
        attn_mask_type: Any = None,
        packed_seq_params: None = None,
    ) -> Tensor:
        """Map ``[tokens, 1, heads/tp, head]`` each (groups for key and value) to ``[tokens, 1, heads/tp * head]``.

        In latent attention ``head`` is another number for values, and so for what is returned.
        """
        num_tokens, num_padded = len(attention_bias.positions), len(query)
        # What stands behind the tokens sees nothing and is not seen.
        query, key, value = (each[:num_tokens, 0] for each in (query, key, value))
        context = attention_bias.attend(self.local_layer, query, key, value, self.whole_scoring)
        context = context.flatten(1)[:, None]
        return context if num_padded == num_tokens else pad(context, (0, 0, 0, 0, 0, num_padded - num_tokens))


class GroupedSelfAttention(SelfAttention):
    """megatron-core's self-attention, also with fewer query groups than tensor-parallel ranks.

    There megatron-core 0.16.1 looks for the tensor-parallel group in its globals, which are never set here.

    Args:
        config: megatron-core's, of all layers.
        submodules: Its submodules.
        layer_number: Number of the layer, counted from 1.
        model: Settings of this layer; None: its heads are those of the configuration.
        known: Further arguments of megatron-core's.

    Attributes:
        rotation: First dim of its rotary embedding, and the one behind its last; None: all are its own.
        scaled_part: Dims at the beginning of each query and key head, and the factor on them that goes with stretched
            frequencies; None: it is on the scores.
        keys_are_values: Whether values are keys as they were projected.
        has_value_norm: Whether values are normalized, without a weight.
    """

    rotation: tuple[int, int] | None = None
    scaled_part: tuple[int, float] | None = None
    _table: Tensor | None = None
    keys_are_values = has_value_norm = False

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        *args: Any,
        model: ModelConfig | None = None,
        **known: Any,
    ) -> None:
        if model is not None:
            config = copy.copy(config)
            config.kv_channels, config.num_query_groups = model.head_size, model.query_groups
        super().__init__(config, submodules, layer_number, *args, **known)
        if model is None:
            return
        self.has_value_norm, self.keys_are_values = model.value_norm, model.keys_as_values
        if self.keys_are_values:
            self.linear_qkv = submodules.linear_qkv(
                *(config.hidden_size, model.query_rows + model.key_value_rows),
                config=config,
                init_method=config.init_method,
                gather_output=False,
                bias=False,
                skip_bias_add=False,
                is_expert=False,
                tp_comm_buffer_name="qkv",
                tp_group=self.pg_collection.tp,
            )

    def forward(
        self, hidden_states: Tensor, attention_mask: None, *args: Any, rotary_pos_emb: Tensor, **kwargs: Any
    ) -> Any:
        """Map ``[tokens, 1, hidden]`` to the same shape, and a bias; angles are ``[tokens, 1, 1, dims * kinds]``.

        On a GPU they are cosines and sines, see ``Transformer``.
        """
        angles = rotary_pos_emb if self.rotation is None else rotary_pos_emb[..., slice(*self.rotation)]
        self._table = angles[:, 0, 0] if angles.is_cuda else None
        left = None if angles.is_cuda else angles
        return super().forward(hidden_states, attention_mask, *args, rotary_pos_emb=left, **kwargs)

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: None = None, output_gate: bool = False, split_qkv: bool = True
    ) -> Any:
        """Project ``[tokens, 1, hidden]`` to query, key and value; on a GPU these are turned by their positions.

        The query is ``[tokens, 1, heads/tp, head]``, key and value are ``[tokens, 1, groups, head]``. Gates of outputs,
        where there are any, come fourth, in the shape of the query.

        Collective: tp. ``groups`` are this rank's query groups, 1 where several ranks share one.
        """
        query, key, value, *gate = self._project(hidden_states, key_value_states, output_gate, split_qkv)
        if self.has_value_norm:
            value = rms_norm(value.float(), value.shape[-1:], eps=self.config.layernorm_epsilon).to(value.dtype)
        if self.scaled_part is not None:
            num_dims, factor = self.scaled_part
            query, key = (
                torch.cat([each[..., :num_dims] * factor, each[..., num_dims:]], dim=-1) for each in (query, key)
            )
        if self._table is not None:
            from hybridflow.models.layer_kernels import turned

            query, key = (
                turned(each[:, 0], self._table, 1.0, self.config.rotary_interleaved)[:, None] for each in (query, key)
            )
        return query, key, value, *gate

    def _project(self, hidden_states: Tensor, key_value_states: None, output_gate: bool, split_qkv: bool) -> Any:
        num_groups, head = self.config.num_query_groups, self.hidden_size_per_attention_head
        if num_groups >= self.world_size and not output_gate and not self.keys_are_values:
            return super().get_query_key_value_tensors(hidden_states, key_value_states, output_gate, split_qkv)
        assert split_qkv, "no fused rotary embeddings here"
        mixed = self.linear_qkv(hidden_states)[0]
        if num_groups >= self.world_size:
            query, key, value = self._parts(mixed, num_groups // self.world_size, head)
            gates = []
            if output_gate:
                query, gate = query.unflatten(2, (-1, 2)).unbind(3)
                gates = [gate]
            return _normed(query, self.q_layernorm), _normed(key, self.k_layernorm), value, *gates
        # A rank's rows of the fused weight are a part of one group: "q1 q2 k v" or a piece of that.
        sharers = self.world_size // num_groups
        tp_rank = self.tp_group.rank()
        mixed = all_gather_last_dim_from_tensor_parallel_region(mixed, group=self.tp_group)
        query, key, value = self._parts(mixed, num_groups, head)
        gates = []
        if output_gate:
            query, gate = query.unflatten(2, (-1, 2)).unbind(3)
            gates = [gate.chunk(self.world_size, dim=2)[tp_rank]]
        group = slice(tp_rank // sharers, tp_rank // sharers + 1)
        is_wide = isinstance(self.q_layernorm, ProjectionNorm)
        if is_wide:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        query, key, value = query.chunk(self.world_size, dim=2)[tp_rank], key[:, :, group], value[:, :, group]
        if not is_wide:
            query, key = _normed(query, self.q_layernorm), _normed(key, self.k_layernorm)
        return query, key, value, *gates

    def _parts(self, mixed: Tensor, num_groups: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
        """Split ``[tokens, 1, rows]``, grouped by query group, into heads of queries, with gates, keys and values."""
        heads = mixed.unflatten(-1, (num_groups, -1, head))
        num_kept = 1 if self.keys_are_values else 2
        query, kept = heads.split([heads.shape[3] - num_kept, num_kept], dim=3)
        return query.flatten(2, 3), kept[:, :, :, 0], kept[:, :, :, -1]

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """Multiply ``[tokens, 1, heads/tp * head]`` by the sigmoid of the gate; megatron-core's compiles that."""
        return (x * torch.sigmoid(gate.flatten(2).float())).to(x.dtype)


def _normed(heads: Tensor, norm: nn.Module | None) -> Tensor:
    found: Tensor = heads if norm is None else norm(heads)
    return found
