"""What each rank holds under FSDP against ``torch.chunk``, and the plans that follow from it against brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.shapes import known_models, model_spec
from hybridflow.reshard.fsdp import FsdpHoldings, weight_holdings
from hybridflow.reshard.messages import region_of
from hybridflow.reshard.plan import held_bytes, plan, received_limit
from hybridflow.reshard.report import Bandwidth, Spread, report
from hybridflow.reshard.spec import ITEM_BYTES, TensorSpec, num_elements
from tests.support.reshard_cases import make_model

TENSORS = [
    TensorSpec(name="plain", shape=(10, 3), dtype="fp32", tp_dim=0, place=0),
    TensorSpec(name="gate_up", shape=(2, 5, 3), dtype="fp32", tp_dim=1, place=0),
    TensorSpec(name="gate_up.bias", shape=(2, 5), dtype="fp32", tp_dim=1, place=0),
    TensorSpec(name="rows", shape=(7, 4), dtype="fp32", tp_dim=1, place=0),
    TensorSpec(name="qkv.bias", shape=(6,), dtype="fp32", tp_dim=0, place=0),
    TensorSpec(name="norm", shape=(3,), dtype="fp32", tp_dim=None, place=0),
    TensorSpec(name="padded", shape=(10, 3), dtype="fp32", tp_dim=0, place="embedding", padded_to=8),
]


def mesh_of(text: str) -> DeviceMesh:
    layout = ParallelLayout.parse(text)
    return DeviceMesh(name=text, layout=layout, ranks=tuple(range(layout.world_size)), ranks_per_node=8)


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: tensor.name)
@pytest.mark.parametrize("text", ["fsdp2", "fsdp4", "fsdp2.dp4", "fsdp8"])
def test_a_rank_holds_its_chunk_of_the_parameter(tensor, text):
    mesh = mesh_of(text)
    holdings, fsdp = FsdpHoldings(mesh), mesh.layout.fsdp
    whole = np.arange(math.prod(tensor.shape)).reshape(tensor.shape)
    rows = np.concatenate([*whole]) if tensor.name.startswith("gate_up") else whole
    if tensor.padded_to is not None:
        rows = np.concatenate([rows, np.full((16 - len(rows), rows.shape[1]), -1)])
    chunks = [chunk.flatten().tolist() for chunk in torch.from_numpy(rows).chunk(fsdp)]
    chunks += [[]] * (fsdp - len(chunks))
    for rank in mesh.ranks:
        flat: list[int] = []
        for region in holdings.regions(tensor, rank):
            assert region.offset == len(flat)
            values = np.full(region.local_shape, -1)
            inside = tuple(slice(0, stop - start) for start, stop in region.box)
            values[inside] = whole[tuple(slice(start, stop) for start, stop in region.box)]
            flat += values.flatten().tolist()
            assert region_of(holdings, tensor, rank, region.box) == region
        assert flat == chunks[rank % fsdp]
        # Whose parts are the same write other tensors.
        assert [holdings.writes(number, rank) for number in range(4)] == [
            number % (mesh.layout.dp // fsdp) == rank // fsdp for number in range(4)
        ]
    parts = holdings.parts(tensor)
    assert sum(num_elements(part.box) for part in parts) == whole.size
    assert {part.ranks for part in parts} <= {tuple(range(index, mesh.layout.dp, fsdp)) for index in range(fsdp)}


@pytest.mark.parametrize(
    "pair",
    [("fsdp8", "tp2.dp4"), ("fsdp8", "dp8"), ("fsdp4.dp8", "tp4.dp2"), ("tp2.dp4", "fsdp8"), ("fsdp8", "fsdp4.dp8")],
)
def test_a_plan_receives_what_it_lacks_and_no_more(pair):
    model = model_spec(known_models()["llama3-1b"])
    held, needed = (weight_holdings(model, mesh_of(text)) for text in pair)
    sizes = [ITEM_BYTES[tensor.dtype] for tensor in model.tensors]
    for rank in range(8):
        copies = [copy for wave in plan(model, held, needed, rank).waves for copy in wave.receives]
        received = sum(num_elements(copy.box) * sizes[copy.tensor] for copy in copies)
        assert received == received_limit(model, held, needed, rank) > 0


@pytest.mark.parametrize("pair", [("fsdp4", "tp2.dp2"), ("fsdp2.dp4", "tp4"), ("tp2.dp2", "fsdp4")])
def test_report_counts_the_shares_of_each_rank(pair):
    model = make_model(padded_to=2)
    held, needed = (weight_holdings(model, mesh_of(text)) for text in pair)
    found = report(model, held, needed, Bandwidth())
    assert found.received.total == found.received_limit == sum(received_limit(model, held, needed, r) for r in range(4))
    for spread, holdings in ((found.before, held), (found.after, needed)):
        sizes = sorted(held_bytes(model, holdings, rank) for rank in range(4))
        assert spread == Spread(sizes[0], sizes[1], sizes[3], sum(sizes))
