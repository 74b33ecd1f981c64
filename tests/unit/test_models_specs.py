"""How tensors are described is how megatron-core cuts them: its own models, built at every coordinate, say so."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    _initialize_affine_weight_cpu,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import Tensor, nn

from hybridflow.errors import ReshardError
from hybridflow.models.shapes import ModelShape
from hybridflow.models.specs import describe, logical_parameters, logical_tensors, pipeline_layers
from hybridflow.models.weights import local_shards
from hybridflow.parallel.layout import ParallelLayout
from hybridflow.parallel.mesh import DeviceMesh
from hybridflow.reshard.holdings import WeightHoldings
from hybridflow.reshard.spec import Shard, stage_of
from tests.megatron_models import count_up, make_chunks, make_config, make_whole

PLAIN = ModelShape(
    num_layers=4,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=8,
    num_query_groups=4,
    head_dim=4,
    vocab_size=29,
    vocab_divisible_by=3,
    dtype="fp32",
)
MIXED = dataclasses.replace(
    PLAIN, num_query_groups=2, head_dim=2, tied_embeddings=True, qkv_bias=True, qk_norm=True, vocab_divisible_by=5
)
EXPERTS = dataclasses.replace(
    PLAIN, num_experts=4, shared_ffn_hidden_size=8, shared_gate=True, expert_bias=True, qk_norm=True
)
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
COUNTED = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
# A layout, and how megatron-core is told where its stages are uneven.
CASES: list[tuple[ModelShape, str, dict[str, Any]]] = [
    *((PLAIN, text, {}) for text in ("tp2.pp2.dp2", "tp4.cp2", "tp2.pp2.vpp2", "pp4")),
    (PLAIN, "tp2.pp2.layers1-3", {FIRST: 1, LAST: 3}),
    (PLAIN, "pp3.layers1-2-1", COUNTED),
    (dataclasses.replace(PLAIN, num_layers=8), "pp2.vpp2.layers1-3-1-3", {FIRST: 2, LAST: 6}),
    (dataclasses.replace(PLAIN, num_layers=6), "pp2.vpp2.layers1-2-2-1", COUNTED),
    *((MIXED, text, {}) for text in ("tp4", "tp8.pp2", "tp2.pp4", "tp4.pp2.vpp2")),
    *((EXPERTS, text, {}) for text in ("tp2", "dp2.ep2", "tp2.dp2.ep2", "tp2.dp2.ep4.etp1", "tp4.ep2.etp2")),
    *(
        (EXPERTS, text, {})
        for text in ("tp2.dp4.ep2.etp4", "cp2.dp2.ep4", "tp2.pp2.dp2.vpp2.ep2.etp2", "tp2.pp2.ep2.etp1")
    ),
]


def expected_part(whole: Tensor, spec: Any, part: Shard) -> Tensor:
    """The elements of a part, cut from the whole tensor."""
    return whole.view(spec.shape)[tuple(slice(start, stop) for start, stop in part.box)]


def inner(part: Shard) -> tuple[slice, ...]:
    return tuple(slice(0, stop - start) for start, stop in part.box)


@pytest.mark.parametrize(("shape", "text", "stages"), CASES, ids=[text for _, text, _ in CASES])
def test_every_rank_holds_what_megatron_core_gives_it(shape, text, stages):
    layout = ParallelLayout.parse(text)
    if stages:
        assert pipeline_layers(make_config(shape, layout, **stages)) == layout.layers
    whole = make_whole(shape, "cpu")
    # Norms and the like begin alike everywhere; what megatron-core cuts has a number for each element.
    spec, values = describe(whole, vocab_divisible_by=shape.vocab_divisible_by), logical_tensors(whole)
    mesh = DeviceMesh(name=text, layout=layout, ranks=tuple(range(layout.world_size)), ranks_per_node=4)
    holdings = WeightHoldings(spec, mesh)
    for rank in mesh.ranks:
        tensors = logical_tensors(make_chunks(shape, layout, rank, **stages))
        expected = {tensor.name: (tensor, part) for tensor in spec.tensors for part in holdings.regions(tensor, rank)}
        assert tensors.keys() == expected.keys()
        for name, (tensor, part) in expected.items():
            assert tensors[name].numel() == math.prod(part.local_shape), (rank, name, part)
            mine = tensors[name].view(part.local_shape)[inner(part)]
            assert torch.equal(mine, expected_part(values[name], tensor, part)), (rank, name)
