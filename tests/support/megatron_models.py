"""megatron-core's own models, any stage and shard of them, for tests of how tensors are described."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.parallel_state import RankGenerator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.attention import GroupedSelfAttention, SdpaCoreAttention
from hybridflow.models.gpt import Transformer
from hybridflow.models.rotary import rotated_pairs
from hybridflow.reshard.views import TORCH_DTYPES

PLAIN = ModelConfig(
    num_layers=4,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=8,
    num_query_groups=4,
    head_dim=4,
    max_context=32,
    vocab_size=29,
    vocab_divisible_by=3,
)
"""Small, with grouped queries and a vocabulary that has to be padded."""

WHOLE = ParallelLayout()
DENSE = {"tp": "tp", "pp": "pp", "cp": "cp", "dp": "dp", "mp": "tp-pp", "tp_cp": "tp-cp", "dp_cp": "dp-cp"}
DENSE |= {"tp_dp_cp": "tp-dp-cp", "intra_dp_cp": "dp-cp"}
EXPERT = {"ep": "ep", "expt_tp": "tp", "tp_ep": "tp-ep", "tp_ep_pp": "tp-ep-pp", "expt_dp": "dp", "intra_expt_dp": "dp"}
"""Group of a ``ProcessGroupCollection`` -> the axes that its ranks differ along, for dense tensors and for experts."""


class Stand:
    """Stands where a process group is only asked for its size and this rank's place."""

    def __init__(self, ranks: tuple[int, ...], rank: int) -> None:
        self._ranks, self._rank = ranks, rank

    def rank(self) -> int:
        return self._ranks.index(self._rank)

    def size(self) -> int:
        return len(self._ranks)


def ranks_of_groups(layout: ParallelLayout, rank: int) -> dict[str, tuple[int, ...]]:
    """Name of a group -> its ranks, as megatron-core's own rank generators deal them."""
    tp, cp, ep, dp, pp, etp = layout.tp, layout.cp, layout.ep, layout.dp, layout.pp, layout.expert_tp
    order = "tp-cp-ep-dp-pp"
    generators = [
        (DENSE, RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)),
        (EXPERT, RankGenerator(tp=etp, ep=ep, dp=tp * cp * dp // (etp * ep), pp=pp, cp=1, order=order)),
    ]
    return {
        name: next(tuple(ranks) for ranks in generator.get_ranks(axes) if rank in ranks)
        for groups, generator in generators
        for name, axes in groups.items()
    }


def make_collection(
    layout: ParallelLayout, rank: int, make: Callable[[tuple[int, ...]], Any] | None = None
) -> ProcessGroupCollection:
    """The groups of a rank: stands, or what ``make`` gives for their ranks."""
    groups = {
        name: Stand(ranks, rank) if make is None else make(ranks)
        for name, ranks in ranks_of_groups(layout, rank).items()
    }
    return ProcessGroupCollection(**groups, embd=None, pos_embd=None)


def count_up(weight: Tensor) -> Tensor:
    """Every element its own number: the index of the element in the whole weight, which megatron-core then cuts."""
    with torch.no_grad():
        return weight.copy_(torch.arange(weight.numel(), device=weight.device).view(weight.shape))


def make_config(shape: ModelConfig, layout: ParallelLayout = WHOLE, **other: Any) -> TransformerConfig:
    """megatron-core's description of a shape in a layout."""
    moe: dict[str, Any] = {}
    if shape.num_experts is not None:
        moe = dict(
            num_moe_experts=shape.num_experts,
            moe_ffn_hidden_size=shape.ffn_hidden_size,
            moe_router_topk=2,
            moe_router_load_balancing_type="none",
            moe_shared_expert_intermediate_size=shape.shared_ffn_hidden_size,
            moe_shared_expert_gate=shape.shared_expert_gate,
            moe_router_enable_expert_bias=shape.router_bias,
            moe_router_score_function="sigmoid" if shape.router_bias else "softmax",
            moe_token_dispatcher_type="allgather",
        )
    dtype = TORCH_DTYPES[shape.dtype]
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.query_groups,
        kv_channels=shape.head_size,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=other.pop("add_bias_linear", False),
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        init_method=count_up,
        output_layer_init_method=count_up,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        **moe,
        **other,
    )


def make_chunks(
    shape: ModelConfig,
    layout: ParallelLayout = WHOLE,
    rank: int = 0,
    *,
    device: str = "cpu",
    groups: ProcessGroupCollection | None = None,
    **other: Any,
) -> list[Transformer]:
    """The model chunks of a rank, without padding of the vocabulary in the layout of one rank.

    Args:
        shape: The model.
        layout: How it is cut.
        rank: Whose part.
        device: ``meta`` for shapes alone.
        groups: Real process groups; None: only ranks and sizes, enough to build a model.
        other: Further settings of ``TransformerConfig``.
    """
    if groups is None:
        # megatron-core asks a group for its size and rank only where torch.distributed runs.
        with mock.patch.object(dist, "is_initialized", lambda: True), mock.patch.object(dist, "get_rank", lambda: rank):
            groups = make_collection(layout, rank)
            return make_chunks(shape, layout, rank, device=device, groups=groups, **other)
    config = make_config(shape, layout, **other)
    multiple = 1 if layout == WHOLE else shape.vocab_divisible_by * layout.tp
    stage = groups.pp.rank()
    layers = get_gpt_layer_local_spec(
        num_experts=shape.num_experts, qk_layernorm=shape.qk_norm, normalization="RMSNorm"
    )
    layers.submodules.self_attention.module = GroupedSelfAttention
    layers.submodules.self_attention.submodules.core_attention = SdpaCoreAttention
    chunks = []
    for chunk in range(layout.vpp):
        with torch.device(device):
            model = Transformer(
                config=config,
                transformer_layer_spec=layers,
                vocab_size=-(-shape.known_vocab_size // multiple) * multiple,
                max_sequence_length=shape.max_context,
                pre_process=stage == 0 and chunk == 0,
                post_process=stage == layout.pp - 1 and chunk == layout.vpp - 1,
                share_embeddings_and_output_weights=shape.tied_embeddings,
                position_embedding_type="rope",
                pg_collection=groups,
                vp_stage=chunk if layout.vpp > 1 else None,
            )
        model.rotated_pairs = rotated_pairs(shape)
        # Norms come in fp32; Float16Module casts them in megatron-core's own training. Buffers stay.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(TORCH_DTYPES[shape.dtype])
        chunks.append(model)
    return chunks


def make_whole(shape: ModelConfig, device: str = "meta", **other: Any) -> Transformer:
    """The uncut model."""
    (whole,) = make_chunks(shape, device=device, **other)
    return whole
