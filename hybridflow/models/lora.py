"""LoRA adapters on the linear layers of a model in training (arXiv 2106.09685), in any layout.

A layer with an adapter gives W x + scale * B A x. Under tensor parallelism the factors are cut as their weight is: of a
column-parallel layer B by rows, of a row-parallel one A by columns; the other factor is whole on every rank. The parts
of a fused layer (query, key, value; gate, up) have factors of their own, as in PEFT, and one product with all their A.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.nn.functional import pad

from hybridflow.config.roles import LoRAConfig
from hybridflow.models.adapters import parts_of
from hybridflow.models.attention import AttentionPlan, PackedAttention
from hybridflow.models.hf_model import TransformersActor
from hybridflow.models.layers import Chunks, chunks_of
from hybridflow.models.user_model import Uncut

_ROW_PARALLEL = frozenset({"self_attention.linear_proj", "self_attention.out_proj", "mlp.linear_fc2"})
_GOLDEN = -7046029254386353131
_MIX = (-4658895280553007687, -7723592293110705685)
_KEPT_BITS = 24
_DRAWN_AT_ONCE = 1 << 22
"""Elements of a dropout mask that are drawn at one time, by way of up to three int64 tensors of this size: 96 MiB."""


class Dropout:
    """Which inputs of the adapters are dropped: a function of (seed, update, layer, tokens so far, column).

    So it is the same in every layout, order and micro-batch. A token is told by itself and those before it in its
    sequence: equal beginnings of two samples are dropped alike within one update. The parts of a fused layer share a
    mask, where PEFT has one for each.

    Args:
        share: Share of the inputs that are dropped; the others are divided by what is left.
        seed: Seed of the run.

    Attributes:
        update: Updates so far.
    """

    def __init__(self, share: float, seed: int) -> None:
        self.update = 0
        self._share, self._seed = share, seed
        self._keys: Tensor | None = None

    def begin(self, tokens: Tensor, attention: AttentionPlan) -> None:
        """Take up a micro-batch, ``[tokens]``; without gradients nothing is dropped."""
        self._keys = None
        if torch.is_grad_enabled():
            assert isinstance(attention, PackedAttention), "only training has gradients"
            self._keys = _mixed(attention.sums_so_far(_mixed(tokens * _GOLDEN + attention.positions)))

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return what surrounds a layer's forward pass, and the same pass done anew: with the same tokens' masks.

        By then other micro-batches may have begun.
        """
        return contextlib.nullcontext(), self._back_at(self._keys)

    @contextlib.contextmanager
    def _back_at(self, keys: Tensor | None) -> Iterator[None]:
        later, self._keys = self._keys, keys
        try:
            yield
        finally:
            self._keys = later

    def __call__(self, inputs: Tensor, name: str, first_column: int, first_row: int = 0) -> Tensor:
        """Drop some of ``[tokens, 1, columns]``.

        Args:
            inputs: Of these tokens.
            name: The layer's.
            first_column: Number of the first column in the uncut layer.
            first_row: Number of the first token in the micro-batch.
        """
        if self._keys is None:
            return inputs
        keys = self._keys[first_row : first_row + len(inputs)]
        # Padding stands behind the tokens.
        keys = pad(keys, (0, len(inputs) - len(keys)))
        digest = hashlib.sha256(f"{self._seed}:{self.update}:{name}".encode()).digest()
        salt = int.from_bytes(digest[:8], "little", signed=True)
        columns = torch.arange(first_column, first_column + inputs.shape[-1], device=inputs.device)
        mixed_columns = _mixed(columns * _GOLDEN + salt)
        mask = torch.empty_like(inputs)
        num_rows = max(1, _DRAWN_AT_ONCE // inputs.shape[-1])
        for part, of_tokens in zip(mask.split(num_rows), keys.split(num_rows), strict=True):
            part.copy_(self._factors(of_tokens[:, None, None] + mixed_columns))
        return inputs * mask

    def _factors(self, values: Tensor) -> Tensor:
        """Return by what inputs are multiplied, fp32, from a number for each."""
        is_kept = (_mixed(values) & ((1 << _KEPT_BITS) - 1)) >= self._share * (1 << _KEPT_BITS)
        return is_kept / (1 - self._share)


def _mixed(values: Tensor) -> Tensor:
    """Apply the finalizer of SplitMix64, on int64 that wraps around."""
    for shift, factor in zip((30, 27), _MIX, strict=True):
        values = (values ^ (values >> shift & ((1 << 64 - shift) - 1))) * factor
    return values ^ (values >> 31 & ((1 << 33) - 1))


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """How a layer's local rows are dealt to its parts: ``blocks`` times the rows of each part, one after the other."""

    blocks: int
    sizes: Mapping[str, int]


class Adapter(nn.Module):
    """The factors of one linear layer, on this rank.

    Args:
        linear: The layer.
        name: What megatron-core calls it within a transformer layer.
        layer: Its transformer layer's index in the whole model.
        parts: The parts that have factors.
        lora: Rank and scale.
        dropout: Dropout on its input; None: none.
        groups: This rank's.
        rows: How the parts share the layer's rows.

    Attributes:
        is_on: Whether it adds anything.
    """

    def __init__(
        self,
        linear: nn.Module,
        name: str,
        layer: int,
        parts: Sequence[str],
        lora: LoRAConfig,
        dropout: Dropout | None,
        groups: ProcessGroupCollection,
        rows: _Rows,
    ) -> None:
        super().__init__()
        self.is_on = True
        self.scale = lora.scale
        self._name = f"decoder.layers.{layer}.{name}"
        self._is_row_parallel = name in _ROW_PARALLEL
        self._group, self._rows = groups.tp, rows
        # Not a module, and the same for all layers.
        self._dropout = dropout
        self._parts = tuple(parts)
        weight = _weight_of(linear)
        out, width = weight.shape
        for part in parts:
            if part:
                self.add_module(part, nn.Module())
            # The sole part of a layer is the adapter itself.
            owner, size = self.get_submodule(part), rows.blocks * rows.sizes[part] if part else out
            owner.A = _factor((lora.rank, width), weight.dtype, 1 if self._is_row_parallel else None)
            owner.B = _factor((size, lora.rank), weight.dtype, None if self._is_row_parallel else 0)
            # With sequence parallelism the factor that is whole sees a slice of the tokens.
            whole = owner.B if self._is_row_parallel else owner.A
            whole.sequence_parallel = True  # type: ignore[attr-defined]

    def factors(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        """Return part -> its A and B on this rank; "" is all of the layer."""
        owners = {part: self.get_submodule(part) for part in self._parts}
        return {part: (owner.get_parameter("A"), owner.get_parameter("B")) for part, owner in owners.items()}

    def forward(self, inputs: Tensor, *, is_split: bool = False) -> Tensor:
        """Return the addition to the layer's output, from its input ``[tokens, 1, in]``.

        With ``is_split`` the whole inputs of column-parallel layers and the whole outputs of row-parallel ones are this
        rank's slice of the tokens.

        Collective: tp.
        """
        if self._dropout is not None:
            rank = self._group.rank()
            column = inputs.shape[-1] * rank if self._is_row_parallel else 0
            row = len(inputs) * rank if is_split and not self._is_row_parallel else 0
            inputs = self._dropout(inputs, self._name, column, row)
        factors = self.factors()
        inner = nn.functional.linear(inputs, torch.cat([a for a, _ in factors.values()]))
        exchange = _EXCHANGES[self._is_row_parallel, is_split]
        inner = exchange(inner, group=self._group)
        shares = dict(zip(factors, inner.chunk(len(factors), dim=-1), strict=True))
        added = {part: nn.functional.linear(shares[part], b) for part, (_, b) in factors.items()}
        return self.scale * (added[""] if "" in added else self._interleaved(added))

    def _interleaved(self, added: Mapping[str, Tensor]) -> Tensor:
        """Join ``[tokens, 1, rows of the part]`` of all parts in the order of the layer's rows; zeros if missing."""
        blocks, sizes = self._rows.blocks, self._rows.sizes
        head = next(iter(added.values()))
        whole = [
            added[part].unflatten(-1, (blocks, size))
            if part in added
            else head.new_zeros(*head.shape[:-1], blocks, size)
            for part, size in sizes.items()
        ]
        return torch.cat(whole, dim=-1).flatten(-2)

    @torch.no_grad()
    def joined(self) -> tuple[Tensor, Tensor]:
        """Return one pair of factors for all parts: new memory.

        Returns:
            A ``[ranks, in]``, the factors of all parts. B ``[ranks, out]`` with a column for each row of the layer,
            which is 0 in the ranks of other parts. The adapter adds ``scale * x A^T B``, before any sum over ranks.
        """
        factors = self.factors()
        columns = [self._interleaved({part: b.t()}) if part else b.t() for part, (_, b) in factors.items()]
        return torch.cat([a for a, _ in factors.values()]), torch.cat(columns)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return the local weight with the update in it, summed in fp32: new memory."""
        whole = weight.detach().float().clone()
        blocks = whole.view(self._rows.blocks, -1, whole.shape[-1])
        starts, start = {"": 0}, 0
        for part, size in self._rows.sizes.items():
            starts[part] = start
            start += size
        for part, (a, b) in self.factors().items():
            if part:
                size = self._rows.sizes[part]
                rows = blocks[:, starts[part] : starts[part] + size]
                rows += self.scale * (b.float() @ a.float()).view(self._rows.blocks, size, -1)
            else:
                whole += self.scale * (b.float() @ a.float())
        return whole.to(weight.dtype)


_EXCHANGES = {
    (False, False): copy_to_tensor_model_parallel_region,
    (False, True): gather_from_sequence_parallel_region,
    (True, False): reduce_from_tensor_model_parallel_region,
    (True, True): reduce_scatter_to_sequence_parallel_region,
}
"""(Is the layer row-parallel, are its tokens split) -> what happens between the two factors."""


def _factor(shape: tuple[int, int], dtype: torch.dtype, partition_dim: int | None) -> nn.Parameter:
    factor = nn.Parameter(torch.empty(shape, dtype=dtype))
    if partition_dim is not None:
        # As megatron-core marks what it cuts: its gradient norm and ``specs`` read it.
        factor.tensor_model_parallel = True  # type: ignore[attr-defined]
        factor.partition_dim = partition_dim  # type: ignore[attr-defined]
        factor.partition_stride = 1  # type: ignore[attr-defined]
    return factor


def _weight_of(linear: nn.Module) -> Tensor:
    weight = linear.weight
    assert isinstance(weight, Tensor), "a linear layer has a weight"
    return weight


def _adapter_of(linear: nn.Module) -> Adapter:
    adapter = linear.lora
    assert isinstance(adapter, Adapter), "attach gave the layer its adapter"
    return adapter


def attach(layer: TransformerLayer, lora: LoRAConfig, dropout: Dropout | None, groups: ProcessGroupCollection) -> None:
    """Give the linear layers of a transformer layer their adapters."""
    modules = dict(layer.named_modules())
    for name, parts in parts_of(lora.targets).items():
        if name not in modules:
            # Layers with linear attention have other modules than those with attention.
            continue
        linear = modules[name]
        rows = _rows(layer, name, linear)
        # Where keys are the values, there is no projection to these.
        parts = tuple(part for part in parts if not part or part in rows.sizes)
        if not parts:
            continue
        linear.lora = Adapter(linear, name, layer.layer_number - 1, parts, lora, dropout, groups, rows)
        linear.register_forward_hook(_add)


def _rows(layer: TransformerLayer, name: str, linear: nn.Module) -> _Rows:
    out = _weight_of(linear).shape[0]
    if name == "mlp.linear_fc1":
        return _Rows(blocks=1, sizes={"gate": out // 2, "up": out // 2})
    if name == "self_attention.in_proj":
        blocks, sizes = layer.self_attention.grouped_rows()
        return _Rows(blocks=blocks, sizes=sizes)
    if name == "self_attention.linear_qkv":
        attention = layer.self_attention
        config, head = attention.config, attention.hidden_size_per_attention_head
        heads = config.num_attention_heads // config.num_query_groups * (1 + config.attention_output_gate)
        sizes = {"q": heads * head, "k": head} | ({} if attention.keys_are_values else {"v": head})
        # With fewer query groups than ranks this is 0, and only the layer as a whole can have factors.
        return _Rows(blocks=out // sum(sizes.values()), sizes=sizes)
    return _Rows(blocks=1, sizes={})


def _add(linear: nn.Module, arguments: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> object:
    result, bias = output
    adapter = _adapter_of(linear)
    is_split = bool(getattr(linear, "sequence_parallel", False))
    return (result + adapter(arguments[0], is_split=is_split), bias) if adapter.is_on else output


def adapted(transformer: GPTModel | Chunks) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear layers of this rank that have an adapter, with the logical names of their weights."""
    for layer in [layer for chunk in chunks_of(transformer) for layer in chunk.decoder.layers]:
        for name, module in layer.named_modules():
            if adapter_of(module) is not None:
                yield f"decoder.layers.{layer.layer_number - 1}.{name}.weight", module


@contextlib.contextmanager
def adapters_off(transformer: GPTModel | Chunks | Uncut) -> Iterator[None]:
    """Switch the adapters off for the duration."""
    if isinstance(transformer, Uncut):
        with actor_of(transformer).adapters_off():
            yield
        return
    adapters = [_adapter_of(linear) for _, linear in adapted(transformer)]
    for adapter in adapters:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_on = True


def actor_of(transformer: Uncut) -> TransformersActor:
    """Return the module of a whole model with adapters: no class of one's own has any."""
    assert isinstance(transformer.module, TransformersActor), "refused by check_objects"
    return transformer.module


def adapter_of(linear: nn.Module) -> Adapter | None:
    """Return the adapter of a linear layer, if it has one."""
    found = getattr(linear, "lora", None)
    return found if isinstance(found, Adapter) else None


def merged_weight(linear: nn.Module) -> Tensor:
    """Return the weight of a linear layer with its adapter's update; the weight itself where there is no adapter."""
    adapter = adapter_of(linear)
    weight = _weight_of(linear).detach()
    return weight if adapter is None else adapter.merged(weight)


@torch.no_grad()
def merge(transformer: GPTModel | Chunks | Uncut) -> None:
    """Put the updates of the adapters into the weights, one layer at a time. The adapters are as they were."""
    if isinstance(transformer, Uncut):
        for weight, update in actor_of(transformer).updates():
            weight.add_(update)
        return
    for _, linear in adapted(transformer):
        _weight_of(linear).copy_(merged_weight(linear))
