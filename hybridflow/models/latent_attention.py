"""Multi-head latent attention (MLA): queries, keys and values by way of narrow, compressed vectors.

Tensors are named as in megatron-core, whose own module takes neither packing nor process groups of ours. Tensor
parallelism cuts the heads. Every rank has the projections to the compressed vectors.

Paper: arXiv 2405.04434 (DeepSeek-V2).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from hybridflow.families.model import ModelConfig
from hybridflow.models.attention import AttentionPlan, SdpaCoreAttention
from hybridflow.models.lora import merged_weight
from hybridflow.models.norm import RmsNorm
from hybridflow.models.rotary import rotary_factor

_EPS = 1e-6
"""Of the norms of compressed vectors, whatever that of the other norms is: as in the models that have them."""


class DownProjection(nn.Module):
    """A linear layer to a compressed vector, the same on all tensor-parallel ranks.

    Args:
        config: megatron-core's.
        outputs: Width of the compressed vector.
    """

    def __init__(self, config: TransformerConfig, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[tokens, 1, hidden]`` to ``[tokens, 1, outputs]``."""
        return nn.functional.linear(hidden, self.weight)


class LatentSelfAttention(MegatronModule):
    """Self-attention whose keys and values are made of one compressed vector for each token.

    A cache that holds the compressed vectors is attended to as one key for all heads: each head's query is taken
    through the projection that its keys would be made by, and its context through that of its values.

    Args:
        config: megatron-core's.
        layer_number: Number of the layer, counted from 1.
        model: Sizes of the compressed vectors and of the parts of heads.
        pg_collection: This rank's process groups.

    Attributes:
        kv_lora_rank: Width of the compressed keys and values.
        sequence_parallel: Whether this rank is given a slice of the tokens.
        rotation: As of ``GroupedSelfAttention``: all dims of the rotary embedding are its own.
        scaled_part: Likewise; the dims that turn, here behind the plain ones.
        compressed_size: Numbers of a token that a cache holds: compressed keys and values, and the part of the keys
            that turns with the position.
    """

    sequence_parallel = False
    rotation = None

    def __init__(
        self, config: TransformerConfig, layer_number: int, model: ModelConfig, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__(config=config)
        assert model.kv_lora_rank is not None, "see gpt._block_spec"
        self._group = pg_collection.tp
        self.kv_lora_rank, self._rotary, self._value = model.kv_lora_rank, model.rotary_size, model.value_size
        self._plain, self.scaled_part = model.head_size - model.rotary_size, (self._rotary, rotary_factor(model))
        self.compressed_size = self.kv_lora_rank + self._rotary
        heads = model.num_attention_heads
        cut: dict[str, Any] = dict(
            config=config,
            init_method=config.init_method,
            bias=False,
            skip_bias_add=False,
            tp_group=self._group,
        )
        if model.q_lora_rank is None:
            self.linear_q_proj = ColumnParallelLinear(
                config.hidden_size, heads * model.head_size, gather_output=False, **cut
            )
        else:
            self.linear_q_down_proj = DownProjection(config, model.q_lora_rank)
            self.q_layernorm = RmsNorm(config, model.q_lora_rank, _EPS)
            self.linear_q_up_proj = ColumnParallelLinear(
                model.q_lora_rank, heads * model.head_size, gather_output=False, **cut
            )
        self.linear_kv_down_proj = DownProjection(config, self.compressed_size)
        self.kv_layernorm = RmsNorm(config, self.kv_lora_rank, _EPS)
        self.linear_kv_up_proj = ColumnParallelLinear(
            self.kv_lora_rank, heads * (self._plain + self._value), gather_output=False, **cut
        )
        for name, parameter in self.named_parameters():
            if name.endswith(("down_proj.weight", "layernorm.weight")):
                # Where each rank has a slice of the tokens its gradient is a part of the whole.
                parameter.sequence_parallel = True
        self.core_attention = SdpaCoreAttention(config, layer_number, softmax_scale=config.softmax_scale)
        self.linear_proj = RowParallelLinear(
            heads * self._value, config.hidden_size, input_is_parallel=True, **{**cut, "skip_bias_add": True}
        )

    def forward(
        self,
        hidden: Tensor,
        attention_mask: None,
        *,
        rotary_pos_emb: Tensor,
        attention_bias: AttentionPlan,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Map ``[tokens, 1, hidden]`` to the same shape, slices of the tokens to slices. Collective: tp.

        Args:
            hidden: Normalized input of the layer.
            attention_mask: Not used.
            rotary_pos_emb: Angles of each token of all ranks, ``[tokens, 1, 1, rotary]``, twice the same half.
            attention_bias: Which token sees which.
        """
        angles = rotary_pos_emb[..., : self._rotary // 2]
        factor = self.scaled_part[1]
        turn = angles.cos() * factor, angles.sin() * factor
        plain, turning = self._query(hidden).split([self._plain, self._rotary], dim=-1)
        query = plain, _turned(turning, *turn)
        latent, turning = self.linear_kv_down_proj(hidden).split([self.kv_lora_rank, self._rotary], dim=-1)
        if self.sequence_parallel:
            turning = gather_from_sequence_parallel_region(turning, group=self._group)
        elif not attention_bias.is_compressed:
            # Each rank has a part of its gradient, from its own heads.
            turning = copy_to_tensor_model_parallel_region(turning, group=self._group)
        latent, shared = self.kv_layernorm(latent), _turned(turning[:, :, None], *turn)
        attend = self._attend_compressed if attention_bias.is_compressed else self._attend
        output: Tensor = self.linear_proj(attend(query, latent, shared, attention_bias))[0]
        return output, None

    @property
    def last_query_projection(self) -> nn.Module:
        """Return the module that gives the queries of all heads here, from hidden states or from what is narrower."""
        found: nn.Module = getattr(self, "linear_q_proj", None) or self.linear_q_up_proj
        return found

    def up_projections(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the weight that compressed vectors are multiplied by, for the plain dims of keys and values.

        They are ``[heads/tp, plain, kv_lora_rank]`` and ``[heads/tp, value, kv_lora_rank]``.
        """
        of_keys, of_values = weight.unflatten(0, (-1, self._plain + self._value)).split([self._plain, self._value], 1)
        return of_keys, of_values

    def _query(self, hidden: Tensor) -> Tensor:
        """Return ``[tokens, 1, heads/tp, head]``."""
        if hasattr(self, "linear_q_down_proj"):
            hidden = self.q_layernorm(self.linear_q_down_proj(hidden))
        query: Tensor = self.last_query_projection(hidden)[0]
        heads: Tensor = query.unflatten(-1, (-1, self._plain + self._rotary))
        return heads

    def _attend(self, query: tuple[Tensor, Tensor], latent: Tensor, shared: Tensor, plan: AttentionPlan) -> Tensor:
        """Attend with keys and values of each head, ``[tokens, 1, heads/tp * value]``."""
        both = self.linear_kv_up_proj(latent)[0].unflatten(-1, (-1, self._plain + self._value))
        plain, value = both.split([self._plain, self._value], dim=-1)
        key = torch.cat([plain, shared.expand(*plain.shape[:3], -1)], dim=-1)
        found: Tensor = self.core_attention(torch.cat(query, dim=-1), key, value, None, attention_bias=plan)
        return found

    def _attend_compressed(
        self, query: tuple[Tensor, Tensor], latent: Tensor, shared: Tensor, plan: AttentionPlan
    ) -> Tensor:
        """Attend with one compressed key and value for all heads, ``[tokens, 1, heads/tp * value]``."""
        assert not torch.is_grad_enabled(), "only the rollout has a cache"
        of_keys, of_values = self.up_projections(merged_weight(self.linear_kv_up_proj))
        plain, turned = query
        query_of_latent = torch.einsum("tbhd,hdr->tbhr", plain, of_keys)
        context = self.core_attention(
            torch.cat([query_of_latent, turned], dim=-1),
            torch.cat([latent[:, :, None], shared], dim=-1),
            latent[:, :, None],
            None,
            attention_bias=plan,
        )
        context = context.unflatten(-1, (-1, self.kv_lora_rank))
        return torch.einsum("tbhr,hdr->tbhd", context, of_values).flatten(2)


def _turned(part: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn ``[tokens, 1, heads, rotary]``, whose pairs of dims stand side by side; the result has them apart."""
    cosine, sine = cosine.to(part.dtype), sine.to(part.dtype)
    first, second = part[..., 0::2], part[..., 1::2]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
