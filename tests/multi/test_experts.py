"""A mixture of experts computes the same in every layout, from weights cut as the description says."""

from __future__ import annotations

from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils

from hybridflow.families.model import ModelConfig
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.attention import PackedAttention
from hybridflow.models.shapes import model_spec
from hybridflow.models.specs import logical_tensors
from hybridflow.models.weights import local_shards
from tests.multi.jobs import inner_of, outer_of
from tests.support.megatron_models import make_chunks, make_collection, ranks_of_groups
from tests.support.ranks import run_ranks

SHAPE = ModelConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=24,
    num_attention_heads=8,
    num_query_groups=2,
    head_dim=6,
    max_context=32,
    vocab_size=24,
    num_experts=8,
    shared_ffn_hidden_size=16,
    router_bias=True,
    qk_norm=True,
)
LAYOUTS = ["dp4.ep2", "dp4.ep4", "tp2.dp2.ep2", "tp2.dp2.ep4.etp1", "tp4.ep2.etp2", "tp2.dp2.ep1.etp4"]


def logits_differ(world, texts: list[str]) -> dict[str, float]:
    """Layout -> largest difference of a logit of this rank from the uncut model's, on its own replica's tokens."""
    # megatron-core gathers the experts' tokens in a global buffer of its own.
    parallel_state._set_global_memory_buffer()
    # Without Transformer Engine megatron-core 0.16.1 leaves this name undefined.
    with mock.patch.object(moe_utils, "te_general_gemm", None, create=True), torch.no_grad():
        return {text: _difference(world, ParallelLayout.parse(text)) for text in texts}


def _difference(world, layout: ParallelLayout) -> float:
    groups = [tuple(ranks) for rank in range(world.size) for ranks in ranks_of_groups(layout, rank).values()]
    world.make_groups(sorted({*groups, *((rank,) for rank in range(world.size))}))
    alone = make_collection(ParallelLayout(), 0, lambda _: world.group((world.rank,)))
    (whole,) = make_chunks(SHAPE, groups=alone)
    values = logical_tensors(whole)
    generator = torch.Generator().manual_seed(5)
    for value in values.values():
        value.copy_(0.4 * torch.randn(value.shape, generator=generator))
    (cut,) = make_chunks(SHAPE, layout, world.rank, groups=make_collection(layout, world.rank, world.group))
    mesh = DeviceMesh(name="mesh", layout=layout, ranks=tuple(range(world.size)), ranks_per_node=world.size)
    spec = model_spec(SHAPE)
    whole_shapes = {tensor.name: tensor.shape for tensor in spec.tensors}
    for name, (local, part) in local_shards(cut, spec, mesh, world.rank).items():
        local[inner_of(part)] = values[name].view(whole_shapes[name])[outer_of(part)]
    place = mesh.coordinate(world.rank)
    tokens = torch.randint(0, SHAPE.vocab_size, (9,), generator=generator.manual_seed(place.dp))
    expected, found = (model.eval()(tokens, PackedAttention([4, 5], torch.device("cpu"))) for model in (whole, cut))
    assert float(expected.std()) > 0.5, "logits are too alike to tell anything"
    return float((found - expected.chunk(layout.tp, dim=-1)[place.tp]).abs().max())


def test_experts_compute_the_same_in_every_layout():
    ranks = run_ranks(logits_differ, 4, LAYOUTS)
    worst = {text: max(found[text] for found in ranks) for text in LAYOUTS}
    assert all(difference <= 1e-4 for difference in worst.values()), worst
