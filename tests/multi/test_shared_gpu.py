"""Groups of ranks that share a GPU do what those of gloo do, with tensors that are copied to host memory and back."""

import torch
import torch.distributed as dist

from hybridflow.parallel import shared_gpu
from hybridflow.parallel.world import World
from tests.support.ranks import run_ranks


def results(group: dist.ProcessGroup, rank: int) -> dict[str, list[float]]:
    """Run each operation, with numbers that tell ranks and places apart."""
    own = torch.arange(4.0) + 10 * rank
    found = {name: torch.zeros(4) for name in ("gathered", "received")}
    found |= {name: own.clone() for name in ("reduced", "sent", "summed on 1", "later")}
    dist.all_reduce(found["reduced"], group=group)
    dist.broadcast(found["sent"], src=1, group=group)
    dist.reduce(found["summed on 1"], dst=1, group=group)
    dist.all_gather_into_tensor(found["gathered"], own[:2].contiguous(), group=group)
    found["scattered"] = torch.zeros(2)
    dist.reduce_scatter_tensor(found["scattered"], own, group=group)
    # Unequal parts.
    parts = [1, 3]
    sizes = [parts[rank]] * 2
    found["exchanged"] = torch.zeros(sum(sizes))
    dist.all_to_all_single(found["exchanged"], own, sizes, parts, group=group)
    lists = [torch.zeros(4) for _ in range(2)]
    dist.all_gather(lists, own, group=group)
    found["list"] = torch.cat(lists)
    works = [
        dist.isend(own, 1 - rank, group=group),
        dist.irecv(found["received"], 1 - rank, group=group),
        dist.all_reduce(found["later"], group=group, async_op=True),
    ]
    for work in works:
        assert work is not None
        work.wait()
    for name, run, source in (
        ("all scattered", dist.reduce_scatter_tensor, own),
        ("all gathered", dist.all_gather_into_tensor, own[:1]),
    ):
        pair = [torch.zeros(2), torch.zeros(2)]
        with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as manager:
            for target in pair:
                run(target, source.clone(), group=group)
        manager.wait()
        found[name] = torch.cat(pair)
    dist.barrier(group=group)
    return {name: value.tolist() for name, value in found.items()}


def both(world: World) -> list[dict[str, list[float]]]:
    world.make_groups([(0, 1)])
    plain = results(world.group((0, 1)), world.rank)
    shared = dist.new_group([0, 1], backend=shared_gpu.register())
    assert isinstance(shared, shared_gpu.SharedGpuGroup)
    copied = []

    def is_staged(tensor: torch.Tensor) -> bool:
        copied.append(tensor)
        return True

    # There is no GPU here: each tensor stands for one on it.
    shared_gpu._is_staged = is_staged
    found = results(shared, world.rank)
    assert len(copied) > 10
    return [plain, found]


def test_each_operation_does_what_gloo_does():
    for plain, found in run_ranks(both, 2):
        assert found == plain
        assert found["reduced"] == found["later"] == [10.0, 12.0, 14.0, 16.0]
