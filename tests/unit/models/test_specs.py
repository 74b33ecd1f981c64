"""How tensors are described is how megatron-core cuts them: its own models, built at every coordinate, say so."""

from __future__ import annotations

import dataclasses
import itertools
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
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from hybridflow.errors import ReshardError
from hybridflow.families.model import ModelConfig
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.specs import EMBEDDING, describe, logical_parameters, logical_tensors, pipeline_layers
from hybridflow.models.weights import local_shards
from hybridflow.reshard.holdings import WeightHoldings
from hybridflow.reshard.spec import Shard, stage_of
from tests.support.megatron_models import PLAIN, count_up, make_chunks, make_config, make_whole

MIXED = dataclasses.replace(
    PLAIN, num_query_groups=2, head_dim=2, tied_embeddings=True, qkv_bias=True, qk_norm=True, vocab_divisible_by=5
)
EXPERTS = dataclasses.replace(PLAIN, num_experts=4, shared_ffn_hidden_size=8, router_bias=True, qk_norm=True)
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
COUNTED = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
# A layout, and how megatron-core is told where its stages are uneven.
CASES: list[tuple[ModelConfig, str, dict[str, Any]]] = [
    *((PLAIN, text, {}) for text in ("tp2.pp2.dp2", "tp4.cp2", "tp2.pp2.vpp2", "pp4")),
    (PLAIN, "tp2.pp2.layers1-3", {FIRST: 1, LAST: 3}),
    (PLAIN, "pp3.layers1-2-1", COUNTED),
    (dataclasses.replace(PLAIN, num_layers=8), "pp3.vpp2.layers1-1-2-1-1-2", {FIRST: 2, LAST: 4}),
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
            if name == EMBEDDING and shape.tied_embeddings and mesh.coordinate(rank).pp > 0:
                continue  # megatron-core leaves it zero, to be copied from the first stage
            mine = tensors[name].view(part.local_shape)[inner(part)]
            assert torch.equal(mine, expected_part(values[name], tensor, part)), (rank, name)


def test_equal_stages_and_virtual_stages_are_numbered_as_megatron_core_does():
    for pp, vpp, per_stage in itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 5), (1, 2, 3)):
        if pp == 1 and vpp > 1:
            continue  # megatron-core refuses it
        layout, num_layers = ParallelLayout(pp=pp, vpp=vpp), pp * vpp * per_stage
        config = make_config(dataclasses.replace(PLAIN, num_layers=num_layers), layout)
        assert pipeline_layers(config) == (per_stage,) * (pp * vpp)
        for stage, chunk in itertools.product(range(pp), range(vpp)):
            first = get_transformer_layer_offset(config, chunk if vpp > 1 else None, stage)
            for layer in range(first, first + per_stage):
                assert stage_of(layer, layout, num_layers, "layer") == stage


@pytest.mark.parametrize(
    ("layers", "sizes", "stages"),
    [
        # Worked by hand: first and last as given, the middle in equal parts.
        ((1, 4, 4, 3), dict(pp=4), {FIRST: 1, LAST: 3}),
        ((3, 3, 6), dict(pp=3), {LAST: 6}),
        ((6, 3, 3), dict(pp=3), {FIRST: 6}),
        # 12 layers, embedding and loss fill 14 places: 7 a stage, less one at either end.
        ((6, 6), dict(pp=2), COUNTED),
        # 13 places on 13 stages: the first has the embedding alone.
        ((0, *[1] * 12), dict(pp=13), {"account_for_embedding_in_pipeline_split": True}),
        ((2, 3, 5, 2), dict(pp=2, vpp=2), {"pipeline_model_parallel_layout": "Ett|ttt|ttttt|ttL"}),
        ((0, 12), dict(pp=2), {"pipeline_model_parallel_layout": [["embedding"], ["decoder"] * 12 + ["loss"]]}),
    ],
)
def test_uneven_stages_as_data(layers, sizes, stages):
    config = make_config(dataclasses.replace(PLAIN, num_layers=12), ParallelLayout(**sizes), **stages)
    assert pipeline_layers(config) == layers
    assert ParallelLayout(**sizes, layers=layers).layers == layers


@pytest.mark.parametrize(
    ("sizes", "stages", "message"),
    [
        (dict(pp=2), {}, r"7 layers on pp=2, vpp=None: .* num_layers should be divisible .*; change the stages"),
        # Two stages, both given, in chunks: megatron-core 0.16.1 divides by the number of stages between them.
        (
            dict(pp=2, vpp=3),
            {FIRST: 3, LAST: 3},
            r"pp=2, vpp=3: .* by zero; .* list them in pipeline_model_parallel_layout",
        ),
        (dict(pp=1), {FIRST: 1, LAST: 1}, r"deals 1 layers to pp=1, vpp=None, the model has 7"),
    ],
)
def test_layers_that_cannot_be_dealt_are_refused(sizes, stages, message):
    config = make_config(
        dataclasses.replace(PLAIN, num_layers=6 if "vpp" in sizes else 7), ParallelLayout(**sizes), **stages
    )
    with pytest.raises(ReshardError, match=message):
        pipeline_layers(config)


def add_lora(linear: nn.Module, rank: int = 2) -> None:
    """LoRA factors as their authors mark them: the factor on the cut side is cut as the weight is."""
    is_column = isinstance(linear, ColumnParallelLinear)
    group, dtype = linear.tp_group, linear.weight.dtype
    output, inputs = linear.weight.shape
    linear.lora_a = nn.Parameter(torch.empty(rank, inputs, dtype=dtype))
    linear.lora_b = nn.Parameter(torch.empty(output, rank, dtype=dtype))
    whole_output, whole_input = linear.output_size, linear.input_size
    cut, other = (linear.lora_b, linear.lora_a) if is_column else (linear.lora_a, linear.lora_b)
    count_up(other.data)
    sizes = (whole_output, rank, output) if is_column else (rank, whole_input, inputs)
    _initialize_affine_weight_cpu(
        cut,
        *sizes,
        0 if is_column else 1,
        count_up,
        stride=linear.weight.partition_stride,
        rank=group.rank(),
        world_size=group.size(),
    )


@pytest.mark.parametrize("text", ["tp2", "tp4.pp2", "tp2.dp2.ep2.etp1"])
def test_lora_factors_are_cut_as_their_weights(text):
    layout = ParallelLayout.parse(text)
    shape = EXPERTS if layout.ep > 1 else PLAIN
    mesh = DeviceMesh(name=text, layout=layout, ranks=tuple(range(layout.world_size)), ranks_per_node=4)

    def with_lora(chunks):
        for module in [module for chunk in chunks for module in chunk.decoder.modules()]:
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                add_lora(module)
        return chunks

    (whole,) = with_lora([make_whole(shape, "cpu")])
    spec, values = describe(whole, vocab_divisible_by=shape.vocab_divisible_by), logical_tensors(whole)
    cut = {tensor.name.split(".", 3)[3]: tensor.tp_dim for tensor in spec.tensors if ".3." in tensor.name}
    assert cut["self_attention.linear_qkv.lora_a"] is cut["self_attention.linear_proj.lora_b"] is None
    assert (cut["self_attention.linear_qkv.lora_b"], cut["self_attention.linear_proj.lora_a"]) == (0, 1)
    for rank in mesh.ranks:
        chunks = with_lora(make_chunks(shape, layout, rank))
        shards = local_shards(chunks, spec, mesh, rank)
        assert any("lora" in name for name in shards)
        for name, (local, part) in shards.items():
            tensor = next(tensor for tensor in spec.tensors if tensor.name == name)
            assert torch.equal(local[inner(part)], expected_part(values[name], tensor, part)), (rank, name)


def test_gate_and_up_are_told_by_their_module_where_the_stride_does_not():
    whole = make_whole(PLAIN, add_bias_linear=True)
    linear = whole.decoder.layers[1].mlp.linear_fc1
    linear.weight.partition_stride = 1  # as Transformer Engine's grouped layers leave it
    linear.lora_gate = nn.Parameter(torch.empty(24, 2, device="meta"))
    set_tensor_model_parallel_attributes(linear.lora_gate, True, 0, 1)
    found = {tensor.name: (tensor.shape, tensor.tp_dim) for tensor in describe(whole).tensors}
    assert found["decoder.layers.1.mlp.linear_fc1.weight"] == ((2, 24, 16), 1)
    assert found["decoder.layers.1.mlp.linear_fc1.bias"] == ((2, 24), 1)
    assert found["decoder.layers.1.mlp.linear_fc2.bias"] == ((16,), None)
    assert found["decoder.layers.1.mlp.linear_fc1.lora_gate"] == ((24, 2), 0), "a factor of the gate alone"


def grouped(sizes: dict[str, tuple[int, ...]], config: Any) -> TEGroupedMLP:
    """Experts as Transformer Engine's grouped layers name and mark them; it does not run without CUDA."""
    experts = TEGroupedMLP.__new__(TEGroupedMLP)
    nn.Module.__init__(experts)
    experts.config = config
    for layer, shape in sizes.items():
        linear = nn.Module()
        for index in range(config.num_moe_experts):
            weight = nn.Parameter(torch.empty(shape, device="meta"))
            set_tensor_model_parallel_attributes(weight, True, 0 if layer == "linear_fc1" else 1, 1)
            linear.register_parameter(f"weight{index}", weight)
        experts.add_module(layer, linear)
    return experts


def test_grouped_experts_are_described_as_sequential_ones_are():
    whole, again = make_whole(EXPERTS), make_whole(EXPERTS)
    for layer in whole.decoder.layers:
        layer.mlp.experts = grouped({"linear_fc1": (48, 16), "linear_fc2": (16, 24)}, layer.config)
    described, expected = describe(whole), describe(again)
    assert {tensor.name: tensor for tensor in described.tensors} == {tensor.name: tensor for tensor in expected.tensors}
    assert {tensor.expert for tensor in described.tensors} == {None, (0, 4), (1, 4), (2, 4), (3, 4)}


def test_parameters_and_buffers():
    whole = make_whole(EXPERTS)
    bias = "decoder.layers.2.mlp.router.expert_bias"
    assert bias in logical_tensors(whole) and bias not in logical_parameters(whole)
    assert list(logical_parameters(whole)) == [name for name in logical_tensors(whole) if not name.endswith("_bias")]
    assert len(logical_parameters(whole)) == len(list(whole.parameters()))


def mark(parameter: nn.Parameter, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(parameter, name, value)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda model: mark(model.decoder.layers[2].self_attention.linear_qkv.weight, partition_dim=-1),
            r"2\.self_attention\.linear_qkv\.weight: marked tensor_model_parallel with partition_dim=-1, .*give",
        ),
        (
            lambda model: mark(model.decoder.layers[0].self_attention.linear_proj.weight, partition_stride=2),
            r"layers\.0\.self_attention\.linear_proj\.weight: partition_stride=2; expected 1, .* keep the pieces",
        ),
        (
            lambda model: mark(model.decoder.layers[0].mlp.shared_experts.linear_fc1.weight, partition_stride=4),
            r"shared_experts\.linear_fc1\.weight: partition_stride=4; expected 1, or 2",
        ),
        (
            lambda model: model.decoder.layers[1].mlp.experts.register_parameter(
                "weight1", nn.Parameter(torch.ones(2))
            ),
            r"decoder\.layers\.1\.mlp\.experts\.weight1: not the tensor of one expert, but of SequentialMLP; use",
        ),
        (
            lambda model: model.register_parameter("mtp", nn.Parameter(torch.ones(2))),
            r"mtp: in neither the embedding, .* take it out",
        ),
        (
            lambda model: mark(model.output_layer.weight, data=torch.ones(29, 16, dtype=torch.float64)),
            r"output_layer\.weight: torch\.float64; expected one of torch\.float32",
        ),
    ],
    ids=["no dim", "stride", "stride of gate and up", "all experts in one", "no place", "dtype"],
)
def test_what_cannot_be_described_is_refused_by_name(spoil, message):
    whole = make_whole(EXPERTS, "cpu")
    describe(whole)
    spoil(whole)
    with pytest.raises(ReshardError, match=message):
        describe(whole)


def test_only_a_whole_model_is_described():
    (cut,) = make_chunks(PLAIN, ParallelLayout(tp=2), device="meta")
    with pytest.raises(ReshardError, match=r"uncut; found parallel sizes .*'tensor_model': 2.* build it with all"):
        describe(cut)


def test_a_model_of_another_layout_is_refused_by_tensor():
    spec = describe(make_whole(PLAIN), vocab_divisible_by=3)

    def shards(built: str, claimed: str):
        mesh = DeviceMesh(name="mesh", layout=ParallelLayout.parse(claimed), ranks=(0, 1), ranks_per_node=2)
        return local_shards(make_chunks(PLAIN, ParallelLayout.parse(built), device="meta"), spec, mesh, 0)

    assert shards("tp2", "tp2")
    with pytest.raises(
        ReshardError, match=r"embedding.*: rank 0 of mesh \(tp2.* should hold \[15, 16\], .* \[30, 16\]"
    ):
        shards("dp2", "tp2")
    with pytest.raises(ReshardError, match=r"decoder\.layers\.2\..*has no such tensor"):
        shards("pp2", "dp2")
    with pytest.raises(ReshardError, match=r"decoder\.final_layernorm\.weight: rank 0 .* should not hold it"):
        shards("dp2", "pp2")
