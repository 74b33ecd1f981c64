"""Process groups over any subset of ranks, and the coordinator's messages."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybridflow.errors import DeadlineError, LayoutError, WriteError
from hybridflow.parallel.world import World
from tests.support.ranks import run_ranks


def groups_and_messages(world: World) -> dict[str, object]:
    world.make_groups([(0, 1, 2, 3), (1, 3), (2, 0), (0, 2)])
    value = torch.tensor([float(world.rank)])
    found: dict[str, object] = {}
    for ranks in [(1, 3), (2, 0)]:
        if world.rank in ranks:
            group = world.group(ranks)
            total = value.clone()
            dist.all_reduce(total, group=group)
            found[str(ranks)] = (total.item(), dist.get_rank(group))
    if world.rank in (1, 3):
        coordinator = world.coordinator((1, 3))
        found["decided"] = coordinator.decide("which", {"from": world.rank})
        long = "x" * 5000 if world.rank == 1 else "y"
        found["gathered"] = [len(text) for text in coordinator.gather(long)]
        found["long"] = len(coordinator.decide("long", long))
        peer = 4 - world.rank
        mine = torch.full((3,), world.rank, dtype=torch.uint8)
        theirs = torch.empty(3, dtype=torch.uint8)
        coordinator.exchange({peer: mine}, {peer: theirs})
        found["received"] = theirs.tolist()
        found["of_lead"] = coordinator.on_lead("work", lambda: world.rank)
        with pytest.raises(WriteError, match="^full$"):
            coordinator.on_lead("refused work", full)
        coordinator.barrier("end")
    return found


def full() -> None:
    raise WriteError("full")


def test_groups_decisions_and_exchanges_over_subsets_of_ranks():
    found = run_ranks(groups_and_messages, 4)
    assert found[1]["(1, 3)"] == (4.0, 0) and found[3]["(1, 3)"] == (4.0, 1)
    # A group keeps the order it was asked in: rank 2 comes first in (2, 0).
    assert found[2]["(2, 0)"] == (2.0, 0) and found[0]["(2, 0)"] == (2.0, 1)
    for rank in (1, 3):
        assert found[rank]["decided"] == {"from": 1}
        assert found[rank]["gathered"] == [5000, 1] and found[rank]["of_lead"] == 1
        assert found[rank]["long"] == 5000
        assert found[rank]["received"] == [4 - rank] * 3


def one_rank_never_comes(world: World) -> str:
    world.make_groups([(0, 1)])
    if world.rank == 1:
        return ""
    with pytest.raises(DeadlineError, match="which batch") as error:
        world.coordinator((0, 1)).decide("which batch", 1)
        world.coordinator((0, 1)).barrier("which batch")
    return str(error.value)


def test_a_rank_that_never_comes_ends_the_wait_with_its_name():
    assert "lost contact with some of ranks [0, 1]" in run_ranks(one_rank_never_comes, 2, wait_s=5)[0]


def find_memory(world: World) -> list[object]:
    """What each rank finds where all have a GPU, none has, and rank 0 alone has one."""
    cpu, gpu, found = world.device, torch.device("cuda", 0), []
    size = SimpleNamespace(total_memory=100 - world.rank)
    with mock.patch.object(torch.cuda, "get_device_properties", lambda device: size):
        for with_gpu in ((0, 1, 2), (), (0,)):
            world.device = gpu if world.rank in with_gpu else cpu
            try:
                found.append(world.gpu_bytes())
            except LayoutError as error:
                found.append(str(error))
    world.device = cpu
    return found


def test_memory_is_that_of_the_smallest_gpu_and_nodes_without_one_are_named():
    for smallest, none, told in run_ranks(find_memory, 3):
        assert (smallest, none) == (98, None)
        assert told.startswith("ranks 1-2 on ") and "see no GPU, and the others do" in told and "--exclude" in told
