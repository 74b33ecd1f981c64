"""Resharding between real processes, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridflow.errors import DeadlineError, ReshardError
from hybridflow.parallel.mesh import DeviceMesh
from hybridflow.parallel.world import World
from hybridflow.reshard.execute import TORCH_DTYPES, Resharder
from hybridflow.reshard.plan import participants, summarize
from hybridflow.reshard.spec import ModelSpec
from tests.ranks import run_ranks
from tests.reshard_cases import make_mesh, make_model, scatter, whole_arrays

Mesh = tuple[str, tuple[int, ...]]


def over(layout: str, *ranks: int) -> Mesh:
    return layout, ranks


PAIRS = {
    4: [
        (over("tp4", 0, 1, 2, 3), over("tp2.dp2", 0, 1, 2, 3)),
        (over("tp4", 0, 1, 2, 3), over("tp2.dp2", 0, 2, 1, 3)),
        (over("tp2.pp2", 0, 1, 2, 3), over("dp4", 0, 1, 2, 3)),
        (over("tp2.dp2", 0, 1, 2, 3), over("dp4", 0, 1, 2, 3)),
        (over("tp2.cp2", 3, 1, 2, 0), over("pp4", 0, 1, 2, 3)),
        (over("tp2", 0, 1), over("pp2", 2, 3)),
        (over("tp2", 1, 2), over("dp3", 0, 3, 2)),
        (over("tp1", 2), over("tp4", 0, 1, 2, 3)),
        (over("tp1", 2), over("tp1", 2)),
    ],
    8: [
        (over("tp4.dp2", *range(8)), over("tp2.dp4", *range(8))),
        (over("tp4.dp2", *range(8)), over("tp2.dp4", 0, 2, 1, 3, 4, 6, 5, 7)),
        (over("tp2.pp2.dp2", *range(8)), over("tp2.dp4", *range(8))),
        (over("pp4.dp2", *range(8)), over("tp4.dp2", *range(8))),
        (over("tp8", *range(8)), over("dp8", *range(8))),
        (over("tp2.pp2", 0, 1, 2, 3), over("tp4", 4, 5, 6, 7)),
        (over("tp4", 0, 1, 2, 3), over("tp2.pp2", 2, 3, 4, 5)),
    ],
}


def shards(model: ModelSpec, mesh: DeviceMesh, rank: int) -> dict[str, torch.Tensor] | None:
    """What a rank holds, as flat parameters with NaN in the padding; None where it holds nothing."""
    if rank not in mesh:
        return None
    found = {}
    for spec, whole in zip(model.tensors, whole_arrays(model), strict=True):
        array = scatter(spec, whole, mesh).get(rank)
        if array is not None:
            values = np.where(array == -1, np.nan, array).reshape(array.shape[0], -1)
            found[spec.name] = torch.from_numpy(values).to(TORCH_DTYPES[spec.dtype])
    return found


def padded_with(padding: float, tensors: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    return {name: torch.nan_to_num(tensor, nan=padding) for name, tensor in (tensors or {}).items()}


def empty_like(tensors: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | None:
    return tensors and {name: torch.full_like(tensor, -7).requires_grad_() for name, tensor in tensors.items()}


def assert_same(given: dict[str, torch.Tensor] | None, expected: dict[str, torch.Tensor]) -> None:
    given = given or {}
    assert given.keys() == expected.keys()
    for name in given:
        assert torch.equal(given[name], expected[name]), name


def there_and_back(world: World, pairs: list[tuple[Mesh, Mesh]]) -> None:
    model = make_model(vocab_size=13, padded_to=2, tied=True)
    meshes = [
        tuple(make_mesh(layout, ranks, ranks_per_node=world.ranks_per_node) for layout, ranks in pair) for pair in pairs
    ]
    world.make_groups([participants(*pair) for pair in meshes])
    for source_mesh, target_mesh in meshes:
        if world.rank not in participants(source_mesh, target_mesh):
            continue
        there = Resharder(world, model, source_mesh, target_mesh)
        back = Resharder(world, model, target_mesh, source_mesh)
        source, expected = (shards(model, mesh, world.rank) for mesh in (source_mesh, target_mesh))
        for _ in range(2):
            target, returned = empty_like(expected), empty_like(source)
            stats = there.run(source, target)
            assert_same(target, padded_with(0.0, expected))
            back.run(target, returned)
            assert_same(returned, padded_with(0.0, source))
        summary = summarize(model, source_mesh, target_mesh)
        assert stats.received_bytes == summary.received_bytes[world.rank]
        assert stats.sent_bytes == summary.sent_bytes[world.rank]
        assert stats.local_bytes == summary.local_bytes[world.rank]


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("ranks_per_node", [2, 8])
def test_every_pair_is_bit_exact(size: int, ranks_per_node: int) -> None:
    run_ranks(there_and_back, size, PAIRS[size], ranks_per_node=ranks_per_node)


def convert(world: World) -> dict[str, list[float]]:
    """fp32 to fp32 by way of the described bf16, from two holders to a rank that has its half and one that does not."""
    model = make_model()
    source_mesh, target_mesh = make_mesh("tp2", (0, 1)), make_mesh("dp2", (0, 1))
    world.make_groups([(0, 1)])
    generator = torch.Generator().manual_seed(1)
    whole = {spec.name: torch.randn(spec.shape, generator=generator) for spec in model.tensors}
    source = {
        spec.name: whole[spec.name].chunk(2, spec.tp_dim)[world.rank].contiguous()
        for spec in model.tensors
        if spec.tp_dim is not None and spec.padded_to is None
    }
    source |= {spec.name: whole[spec.name] for spec in model.tensors if spec.tp_dim is None}
    embedding = torch.zeros(14, 2)
    embedding[:13] = whole["embedding"]
    source["embedding"] = embedding.chunk(2)[world.rank]
    target = {spec.name: torch.empty(spec.shape) for spec in model.tensors}
    Resharder(world, model, source_mesh, target_mesh).run(source, target)
    for spec in model.tensors:
        assert torch.equal(target[spec.name], whole[spec.name].to(TORCH_DTYPES[spec.dtype]).float()), spec.name
    return {name: tensor.flatten().tolist() for name, tensor in target.items()}


def test_replicas_are_equal_after_conversion() -> None:
    one, other = run_ranks(convert, 2)
    assert one == other


def disagree(world: World) -> list[str]:
    """The message of each kind of bad input."""
    messages = []
    model = make_model(vocab_size=13 if world.rank != 2 else 14)
    source_mesh, target_mesh = make_mesh("tp4"), make_mesh("dp4")
    world.make_groups([(0, 1, 2, 3), (0, 1)])
    with pytest.raises(ReshardError) as caught:
        Resharder(world, model, source_mesh, target_mesh)
    messages.append(str(caught.value))
    if world.rank < 2:
        model = make_model()
        source_mesh, target_mesh = make_mesh("tp2"), make_mesh("dp2")
        resharder = Resharder(world, model, source_mesh, target_mesh)
        source, target = shards(model, source_mesh, world.rank), shards(model, target_mesh, world.rank)
        assert source is not None and target is not None
        for bad in (
            {name: tensor for name, tensor in source.items() if name != "norm"},
            source | {"extra": torch.zeros(1)},
            source | {"norm": torch.zeros(4)},
            source | {"0.down": torch.zeros(4, 3).T},
        ):
            with pytest.raises(ReshardError) as caught:
                resharder.run(bad, target)
            messages.append(str(caught.value))
    return messages


def test_disagreement_and_bad_tensors_are_named() -> None:
    found = run_ranks(disagree, 4)
    for messages in found:
        assert messages[0].startswith("reshard tp4 to dp4: ranks [2] have another plan than the rest of [0, 1, 2, 3]")
    lacks, unknown, size, strided = found[0][1:]
    assert "source lacks norm" in lacks and "source has unknown extra" in unknown
    assert "norm is [4]; expected a contiguous tensor that can be viewed as [3]" in size
    assert "0.down is a strided [3, 4]" in strided


def lose_a_rank(world: World) -> str:
    model = make_model()
    source_mesh, target_mesh = make_mesh("tp2"), make_mesh("dp2")
    world.make_groups([(0, 1)])
    resharder = Resharder(world, model, source_mesh, target_mesh)
    if world.rank == 1:
        return ""
    source, target = shards(model, source_mesh, 0), shards(model, target_mesh, 0)
    assert source is not None
    before = {name: tensor.clone() for name, tensor in source.items()}
    with pytest.raises(DeadlineError) as caught:
        resharder.run(source, target)
    assert_same(source, before)
    return str(caught.value)


def test_a_lost_rank_ends_the_wait() -> None:
    message = run_ranks(lose_a_rank, 2, wait_s=2.0)[0]
    assert message.startswith("reshard tp2 to dp2: lost contact with some of ranks [0, 1] (deadline 2 s)")
