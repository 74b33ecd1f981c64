"""Resharding between real processes, bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.errors import DeadlineError, ReshardError
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.parallel.world import World
from hybridflow.reshard import execute, messages
from hybridflow.reshard.execute import TORCH_DTYPES, Resharder
from hybridflow.reshard.holdings import WeightHoldings
from hybridflow.reshard.plan import participants
from hybridflow.reshard.spec import ModelSpec
from tests.support.ranks import run_ranks
from tests.support.reshard_cases import make_mesh, make_model, scatter, summarize, whole_arrays
from tests.support.waiting import wait_until

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
        (over("pp2.vpp2.tp2", *range(4)), over("tp2.pp2", *range(4))),
        (over("pp2.dp2.layers3-1", *range(4)), over("pp2.vpp2.dp2.layers1-0-1-2", *range(4))),
        (over("tp2.dp2.ep4.etp1", *range(4)), over("tp2.pp2.ep2.etp1", *range(4))),
        (over("dp4.ep2.etp2", *range(4)), over("tp4", 2, 0, 1, 3)),
    ],
    8: [
        (over("tp4.dp2", *range(8)), over("tp2.dp4", *range(8))),
        (over("tp4.dp2", *range(8)), over("tp2.dp4", 0, 2, 1, 3, 4, 6, 5, 7)),
        (over("tp2.pp2.dp2", *range(8)), over("tp2.dp4", *range(8))),
        (over("pp4.dp2", *range(8)), over("tp4.dp2", *range(8))),
        (over("tp8", *range(8)), over("dp8", *range(8))),
        (over("tp2.pp2", 0, 1, 2, 3), over("tp4", 4, 5, 6, 7)),
        (over("tp4", 0, 1, 2, 3), over("tp2.pp2", 2, 3, 4, 5)),
        (over("tp2.pp2.dp2.ep4.etp1.layers3-1", *range(8)), over("tp4.dp2.ep2", *range(8))),
        (over("dp8.ep8", *range(8)), over("pp2.vpp2.tp2.dp2", *range(8))),
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


def given(model: ModelSpec, source: DeviceMesh, target: DeviceMesh, rank: int) -> tuple[Any, Any]:
    """Source tensors without padding, and target tensors to be overwritten."""
    held = shards(model, source, rank)
    return held and padded_with(0.0, held), empty_like(shards(model, target, rank))


def empty_like(tensors: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | None:
    return tensors and {name: torch.full_like(tensor, -7).requires_grad_() for name, tensor in tensors.items()}


def overwrite(tensors: dict[str, torch.Tensor] | None) -> None:
    for tensor in (tensors or {}).values():
        tensor.detach().fill_(-7)


def assert_same(given: dict[str, torch.Tensor] | None, expected: dict[str, torch.Tensor]) -> None:
    given = given or {}
    assert given.keys() == expected.keys()
    for name in given:
        assert torch.equal(given[name], expected[name]), name


def make_resharder(
    world: World,
    model: ModelSpec,
    source_mesh: DeviceMesh,
    target_mesh: DeviceMesh,
    source: Any,
    target: Any,
    **how: Any,
) -> Resharder:
    return Resharder(
        world,
        model,
        WeightHoldings(model, source_mesh),
        WeightHoldings(model, target_mesh),
        source_tensors=source,
        target_tensors=target,
        **how,
    )


def shrink_messages() -> None:
    """Make this process treat a small model like a large one: runs that travel in place, and many small buckets."""
    messages.RUN_BYTES = 48
    execute.bucket_bytes = lambda *_: 64


def there_and_back_in_small_messages(world: World, pairs: list[tuple[Mesh, Mesh]], transport: str) -> None:
    shrink_messages()
    there_and_back(world, pairs, transport)


def there_and_back(world: World, pairs: list[tuple[Mesh, Mesh]], transport: str) -> None:
    model = make_model(vocab_size=13, padded_to=2, tied=True, num_experts=8)
    meshes = [
        tuple(make_mesh(layout, ranks, ranks_per_node=world.ranks_per_node) for layout, ranks in pair) for pair in pairs
    ]
    world.make_groups([participants(*pair) for pair in meshes])
    for source_mesh, target_mesh in meshes:
        if world.rank not in participants(source_mesh, target_mesh):
            continue
        source, expected = (shards(model, mesh, world.rank) for mesh in (source_mesh, target_mesh))
        target, returned = empty_like(expected), empty_like(source)
        there = make_resharder(world, model, source_mesh, target_mesh, source, target, transport=transport)
        back = make_resharder(world, model, target_mesh, source_mesh, target, returned, transport=transport)
        for _ in range(2):
            overwrite(target)
            overwrite(returned)
            stats = there.run()
            assert_same(target, padded_with(0.0, expected))
            back.run()
            assert_same(returned, padded_with(0.0, source))
        summary = summarize(model, WeightHoldings(model, source_mesh), WeightHoldings(model, target_mesh))
        assert stats.received_bytes == summary.received_bytes[world.rank]
        assert stats.sent_bytes == summary.sent_bytes[world.rank]
        assert stats.local_bytes == summary.local_bytes[world.rank]
        assert stats.received_bytes == stats.limit_bytes or world.size > world.ranks_per_node


QUICK = (("torch", 8, 4), ("shared", 8, 4), ("auto", 2, 4))
"""Each transport on the nodes for which it is, and both at once."""


@pytest.mark.parametrize(
    ("transport", "ranks_per_node", "size"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK))
        for case in itertools.product(("torch", "shared", "auto"), (2, 8), (4, 8))
    ],
)
def test_every_pair_is_bit_exact(size: int, ranks_per_node: int, transport: str) -> None:
    run_ranks(there_and_back, size, PAIRS[size], transport, ranks_per_node=ranks_per_node)


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 8])
def test_every_pair_is_bit_exact_in_small_messages(size: int) -> None:
    run_ranks(there_and_back_in_small_messages, size, PAIRS[size], "torch", ranks_per_node=4)


def disagree(world: World) -> list[str]:
    """The message of each kind of bad input."""
    messages = []
    model = make_model(vocab_size=13 if world.rank != 2 else 14)
    source_mesh, target_mesh = make_mesh("tp4"), make_mesh("dp4")
    world.make_groups([(0, 1, 2, 3), (0, 1)])
    with pytest.raises(ReshardError) as caught:
        make_resharder(world, model, source_mesh, target_mesh, *given(model, source_mesh, target_mesh, world.rank))
    messages.append(str(caught.value))
    if world.rank < 2:
        model = make_model()
        source_mesh, target_mesh = make_mesh("tp2"), make_mesh("dp2")
        source, target = given(model, source_mesh, target_mesh, world.rank)
        for bad in (
            {name: tensor for name, tensor in source.items() if name != "norm"},
            source | {"extra": torch.zeros(1)},
            source | {"norm": torch.zeros(4)},
            source | {"0.down": torch.zeros(4, 3).T},
        ):
            with pytest.raises(ReshardError) as caught:
                make_resharder(world, model, source_mesh, target_mesh, bad if world.rank == 0 else source, target)
            messages.append(str(caught.value))
    return messages


def test_disagreement_and_bad_tensors_are_named() -> None:
    found = run_ranks(disagree, 4)
    for told in found:
        assert told[0].startswith("reshard tp4 to dp4: ranks [2] have another plan than the rest of [0, 1, 2, 3]")
    lacks, unknown, size, strided = found[0][1:]
    assert lacks.startswith("reshard tp2 to dp2: source lacks norm") and "source has unknown extra" in unknown
    assert "norm is [4]; expected a contiguous tensor of 3 elements" in size
    assert "0.down is a strided [3, 4]" in strided
    assert found[1][1:] == [f"rank 0 cannot take part: {message}" for message in found[0][1:]]


def lose_a_rank(world: World, transport: str, is_over: Path) -> str:
    model = make_model()
    source_mesh, target_mesh = make_mesh("tp2"), make_mesh("dp2")
    world.make_groups([(0, 1)])
    source, target = given(model, source_mesh, target_mesh, world.rank)
    resharder = make_resharder(world, model, source_mesh, target_mesh, source, target, transport=transport)
    if world.rank == 1:
        # Alive for longer than the other waits.
        wait_until(is_over.exists)
        return ""
    before = {name: tensor.clone() for name, tensor in source.items()}
    with pytest.raises(DeadlineError) as caught:
        resharder.run()
    is_over.touch()
    assert_same(source, before)
    return str(caught.value)


@pytest.mark.parametrize(
    ("transport", "expected"),
    [
        ("torch", "reshard tp2 to dp2: lost contact with some of ranks [1] (deadline 3 s)"),
        ("shared", "reshard tp2 to dp2: ranks [1] did not come within 3 s"),
    ],
)
def test_a_silent_rank_ends_the_wait(transport: str, expected: str, tmp_path: Path) -> None:
    message = run_ranks(lose_a_rank, 2, transport, tmp_path / "over", wait_s=3.0)[0]
    assert message.startswith(expected)
