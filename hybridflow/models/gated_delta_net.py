"""Linear attention by the gated delta rule: a state of fixed size for each value head in the place of keys and values.

Tensors are named as in megatron-core, whose own module takes neither packing nor slots of ours. Rows of the projection
are grouped by key head, so that tensor parallelism cuts whole groups: the head's query and key, then of its value heads
the values, gates, betas and decays.

Paper: arXiv 2412.06464 (Gated DeltaNet).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm, silu, softplus

from hybridflow.families.model import ModelConfig
from hybridflow.models.attention import AttentionPlan
from hybridflow.models.delta_rule import Recurrence


class GatedDeltaNet(MegatronModule):
    """A layer's linear attention.

    Args:
        config: megatron-core's.
        layer_number: Number of the layer, counted from 1.
        model: Heads and their widths.
        pg_collection: This rank's process groups.

    Attributes:
        local_layer: Index of its layer among those of this stage.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, model: ModelConfig, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__(config=config)
        self.layer_number, self.local_layer = layer_number, 0
        self._group, tp = pg_collection.tp, pg_collection.tp.size()
        keys, values, size = model.linear_key_heads, model.linear_value_heads, model.linear_value_head_dim
        assert keys and values and size and model.linear_key_head_dim and model.linear_conv_kernel, "see check_model"
        self._key_heads, self._value_heads = keys // tp, values // tp
        self._key_size, self._value_size = model.linear_key_head_dim, size
        cut: dict[str, Any] = dict(config=config, init_method=config.init_method, bias=False, tp_group=self._group)
        self.in_proj = ColumnParallelLinear(
            config.hidden_size, model.linear_rows, gather_output=False, skip_bias_add=False, **cut
        )
        self.conv1d = _Weight(_cut_parameter(config, model.linear_channels // tp, model.linear_conv_kernel))
        self.dt_bias, self.A_log = _cut_parameter(config, values // tp), _cut_parameter(config, values // tp)
        self.out_norm = _Weight(nn.Parameter(torch.empty(size, dtype=config.params_dtype)))
        self.out_proj = RowParallelLinear(
            model.linear_values, config.hidden_size, input_is_parallel=True, skip_bias_add=True, **cut
        )

    @property
    def local_sizes(self) -> tuple[int, int, int, int]:
        """Return this rank's key heads, the value heads of each, and the widths of keys and values."""
        return self._key_heads, self._value_heads // self._key_heads, self._key_size, self._value_size

    def recurrence(self) -> Recurrence:
        """Return the weights of this rank's convolution, queries before keys before values, and its heads."""
        # [kernel, channels], as tokens have them.
        conv = self._ungrouped(self.conv1d.weight.t().unflatten(1, (self._key_heads, -1))).t()
        return Recurrence(conv, self._key_heads, self._value_heads, self._key_size, self._value_size)

    def grouped_rows(self) -> tuple[int, dict[str, int]]:
        """Return the groups of this rank's rows of the projection, and the rows of each group's parts."""
        per_key = self._value_heads // self._key_heads
        values = per_key * self._value_size
        return self._key_heads, {"qkv": 2 * self._key_size + values, "z": values, "b": per_key, "a": per_key}

    def forward(
        self, hidden: Tensor, attention_mask: None, *, attention_bias: AttentionPlan, **_: object
    ) -> tuple[Tensor, None]:
        """Map ``[tokens, 1, hidden]`` to the same shape, slices of the tokens to slices. Collective: tp.

        Args:
            hidden: Normalized input of the layer.
            attention_mask: Not used.
            attention_bias: Which tokens make a sequence.
        """
        rows, num_tokens = self.in_proj(hidden)[0][:, 0], len(attention_bias.positions)
        # What stands behind the tokens is of no sequence.
        recur, num_padded = functools.partial(attention_bias.recur, self.local_layer), len(rows) - num_tokens
        context = self.context(rows[:num_tokens], recur)
        output: Tensor = self.out_proj(pad(context, (0, 0, 0, num_padded))[:, None])[0]
        return output, None

    def context(self, rows: Tensor, recur: Callable[[Tensor, Tensor, Tensor, Recurrence], Tensor]) -> Tensor:
        """Return what the last projection takes, ``[tokens, values/tp]``.

        Args:
            rows: Output of the first projection, ``[tokens, rows/tp]``.
            recur: As ``AttentionPlan.recur`` of this layer.
        """
        grouped = rows.unflatten(-1, (self._key_heads, -1))
        channels, *others = grouped.split([*self.grouped_rows()[1].values()], dim=-1)
        gate, beta, decay = (part.flatten(1) for part in others)
        # A rank steps its own heads; A may be so large that 16 bits do not hold it.
        decay = -self.A_log.float().exp() * softplus(decay.float() + self.dt_bias.float())
        mixed = self._ungrouped(channels)
        found = recur(mixed, decay, beta.sigmoid(), self.recurrence())
        return self._normed(found, gate.unflatten(-1, (-1, self._value_size))).flatten(1)

    def _ungrouped(self, channels: Tensor) -> Tensor:
        """Lay ``[n, key heads, channels of one]`` out as ``[n, channels]``: queries, then keys, then values."""
        sizes = [self._key_size, self._key_size, channels.shape[-1] - 2 * self._key_size]
        return torch.cat([part.flatten(1) for part in channels.split(sizes, dim=-1)], dim=-1)

    def _normed(self, found: Tensor, gate: Tensor) -> Tensor:
        """Normalize ``[tokens, value heads/tp, value]`` head by head, times the activated gate."""
        # Every rank has the weight of all heads, and a part of its gradient from its own.
        weight: Tensor = copy_to_tensor_model_parallel_region(self.out_norm.weight, group=self._group)
        normed = rms_norm(found.float(), found.shape[-1:], eps=self.config.layernorm_epsilon).to(gate.dtype)
        return (weight * normed * silu(gate.float())).to(gate.dtype)


class _Weight(nn.Module):
    """Gives a parameter the name that a module of megatron-core would."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def _cut_parameter(config: TransformerConfig, *shape: int) -> nn.Parameter:
    """Return a parameter whose first dim the tensor-parallel ranks share."""
    parameter = nn.Parameter(torch.empty(*shape, dtype=config.params_dtype))
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
    return parameter
