"""The arithmetic of optimizer ranges against the buffers that megatron-core makes, at every coordinate.

Buffers ask their process groups for sizes and ranks alone, so one process can make those of every rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from unittest import mock

import pytest
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from hybridflow.families.model import ModelConfig
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.specs import describe, logical_parameters
from hybridflow.reshard.optimizer import OptimizerHoldings, flat_ranges
from hybridflow.reshard.spec import ModelSpec
from tests.support.megatron_models import PLAIN, make_chunks, make_collection, make_whole

TIED = dataclasses.replace(PLAIN, num_query_groups=2, tied_embeddings=True, qkv_bias=True, qk_norm=True, dtype="bf16")
EXPERTS = dataclasses.replace(PLAIN, num_experts=4, shared_ffn_hidden_size=8, router_bias=True, qk_norm=True)
UNEVEN = {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 3}
CASES = [
    *((PLAIN, text, {}) for text in ("dp3", "tp2.pp2.dp2", "tp4.cp2", "pp2.vpp2.dp4", "cp2.dp2")),
    (PLAIN, "pp2.layers1-3.dp2", UNEVEN),
    *((TIED, text, {}) for text in ("dp2", "tp4.dp2", "pp2.dp4", "pp2.vpp2.dp3", "tp2.pp4.dp2")),
    *((EXPERTS, text, {}) for text in ("dp2", "tp2.dp2.ep2", "tp2.dp4.ep2.etp1", "tp2.dp4.ep2.etp4", "cp2.dp4.ep4")),
    (EXPERTS, "tp2.pp2.dp2.vpp2.ep2.etp1", {}),
]
IN_BUCKETS = [
    (PLAIN, "tp2.pp2.dp2", {}),
    (PLAIN, "dp3", {}),
    (TIED, "pp2.dp4", {}),
    (TIED, "pp2.vpp2.dp3", {}),
    (EXPERTS, "dp2", {}),
    (EXPERTS, "tp2.dp4.ep2.etp1", {}),
    (EXPERTS, "tp2.pp2.dp2.vpp2.ep2.etp1", {}),
]
BUCKET_SIZE = 700
ALL = [*((*case, None) for case in CASES), *((*case, BUCKET_SIZE) for case in IN_BUCKETS)]


def ranges_of(
    shape: ModelConfig, layout: ParallelLayout, rank: int, other: dict, bucket_size: int | None
) -> Iterator[tuple[str, int, int]]:
    """Tensor, start and stop of what megatron-core deals to a rank."""
    groups = make_collection(layout, rank)
    for chunk in make_chunks(shape, layout, rank, calculate_per_token_loss=True, **other):
        names = {id(parameter): name for name, parameter in logical_parameters(chunk).items()}
        ddp = DistributedDataParallel(
            chunk.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=True,
                overlap_grad_reduce=bucket_size is not None,
                bucket_size=bucket_size,
            ),
            chunk,
            pg_collection=groups,
        )
        for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers):
            (buckets,) = DistributedOptimizer._build_gbuf_range_map(buffer).values()
            for bucket in buckets:
                for parameter, found in bucket["param_map"].items():
                    yield names[id(parameter)], found["param"].start, found["param"].end


@pytest.mark.parametrize(
    ("shape", "text", "other", "bucket_size"),
    ALL,
    ids=[text if size is None else f"{text} in buckets" for _, text, _, size in ALL],
)
def test_ranges_are_those_of_megatron_core(shape: ModelConfig, text: str, other: dict, bucket_size: int | None) -> None:
    layout = ParallelLayout.parse(text)
    mesh = DeviceMesh(name=text, layout=layout, ranks=tuple(range(layout.world_size)), ranks_per_node=8)
    whole = make_whole(shape)
    described, trained = describe(whole, vocab_divisible_by=shape.vocab_divisible_by), logical_parameters(whole)
    tensors = tuple(tensor for tensor in described.tensors if tensor.name in trained)
    model = ModelSpec(tensors=tensors, num_layers=shape.num_layers)
    holdings = OptimizerHoldings(model, mesh, bucket_size)
    assert bucket_size is None or flat_ranges(model, layout, bucket_size) != flat_ranges(model, layout)
    for rank in mesh.ranks:
        with mock.patch.multiple(
            dist, is_initialized=mock.Mock(return_value=True), get_rank=mock.Mock(return_value=rank)
        ):
            found = {name: (start, stop) for name, start, stop in ranges_of(shape, layout, rank, other, bucket_size)}
        dealt = {tensor.name: holdings.flat_range(tensor, rank) for tensor in tensors}
        assert {name: (one.start, one.stop) for name, one in dealt.items() if one is not None} == found, rank
