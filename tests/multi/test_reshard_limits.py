"""What resharding costs beside the tensors, and what is left when it fails."""

from __future__ import annotations

import gc
import os
import resource
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridflow.errors import DeadlineError, ReshardError
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.parallel.world import World
from hybridflow.reshard import execute, memory, peers
from hybridflow.reshard.execute import ReshardStats
from hybridflow.reshard.holdings import WeightHoldings
from hybridflow.reshard.memory import HostOffload, release, restore
from hybridflow.reshard.messages import RUN_BYTES
from hybridflow.reshard.plan import aliases, bucket_bytes, held_bytes, participants, plan
from hybridflow.reshard.spec import ModelSpec, num_elements
from tests.multi.test_reshard import Mesh, assert_same, given, make_resharder, over, overwrite, padded_with, shards
from tests.support.ranks import run_ranks
from tests.support.reshard_cases import make_large_model, make_mesh, make_model, whole_arrays

PAIRS = [
    (over("tp4", 0, 1, 2, 3), over("tp2.dp2", 0, 1, 2, 3)),
    (over("tp2.pp2", 0, 1, 2, 3), over("dp4", 0, 1, 2, 3)),
    (over("pp4", 0, 1, 2, 3), over("tp4", 0, 1, 2, 3)),
]


@pytest.fixture(scope="module", autouse=True)
def made_once() -> Iterator[None]:
    """The numbers of the large models are there before the ranks are."""
    for dtype in ("fp32", "bf16"):
        whole_arrays(make_large_model(dtype))
    yield
    whole_arrays.cache_clear()


def meshes(world: World, pair: tuple[Mesh, Mesh]) -> tuple[DeviceMesh, DeviceMesh]:
    source, target = (make_mesh(layout, ranks, ranks_per_node=world.ranks_per_node) for layout, ranks in pair)
    return source, target


def memory_kb(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(f"{field}:"))


def measure(world: World, pairs: list[tuple[Mesh, Mesh]], transport: str) -> list[dict[str, Any]]:
    """A large model resharded three times, and what that took beside its tensors."""
    model = make_large_model()
    world.make_groups([participants(*meshes(world, pair)) for pair in pairs])
    found = []
    for pair in pairs:
        source_mesh, target_mesh = meshes(world, pair)
        source, target = given(model, source_mesh, target_mesh, world.rank)
        expected = padded_with(0.0, shards(model, target_mesh, world.rank))
        resharder = make_resharder(world, model, source_mesh, target_mesh, source, target, transport=transport)
        gc.collect()
        before_kb = memory_kb("RssAnon")
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak begins anew
        peak_kb = memory_kb("VmHWM")
        resharder.run()
        peak_kb = memory_kb("VmHWM") - peak_kb
        kept_kb = memory_kb("RssAnon") - before_kb
        overwrite(target)
        with torch.profiler.profile(profile_memory=True) as profile:
            stats = resharder.run()
        assert_same(target, expected)
        allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.events())
        found.append(
            {
                "stats": stats,
                "peak_bytes": peak_kb << 10,
                "kept_bytes": kept_kb << 10,
                "allocated_bytes": allocated,
                "sends": [
                    copy
                    for wave in plan(model, *holdings(model, source_mesh, target_mesh), world.rank).waves
                    for copy in wave.sends
                ],
            }
        )
    return found


def holdings(model: ModelSpec, *both: DeviceMesh) -> list[WeightHoldings]:
    return [WeightHoldings(model, mesh) for mesh in both]


@pytest.mark.parametrize("transport", [pytest.param("torch", marks=pytest.mark.slow), "shared"])
def test_extra_memory_and_messages_are_bounded(transport: str) -> None:
    model = make_large_model()
    found = run_ranks(measure, 4, PAIRS, transport)
    for index, pair in enumerate(PAIRS):
        target = WeightHoldings(model, make_mesh(*pair[1]))
        bucket = bucket_bytes(model, target)
        for rank, each in enumerate(found):
            stats: ReshardStats = each[index]["stats"]
            sends = each[index]["sends"]
            assert stats.extra_bytes <= 4 * bucket
            assert each[index]["kept_bytes"] <= 4 * bucket + (4 << 20)
            if transport == "torch":  # else the peak holds the peers' memory, which is mapped and not allocated
                assert each[index]["peak_bytes"] <= 4 * bucket + (4 << 20)
            assert each[index]["allocated_bytes"] == 0
            assert stats.received_bytes == stats.limit_bytes > 0
            peers = {copy.destination for copy in sends}
            # Gate and up are one piece of the plan, and two in memory.
            long = [copy for copy in sends if num_elements(copy.box) * 4 >= RUN_BYTES]
            pieces = sum(copy.box[0][1] - copy.box[0][0] if len(copy.box) == 3 else 1 for copy in long)
            assert stats.messages <= len(peers) + stats.sent_bytes // bucket + pieces
            assert (stats.messages == 0) == (transport == "shared")
            assert held_bytes(model, target, rank) > 30 * bucket


def alias(world: World) -> None:
    """A pair of meshes of which some tensors are cut alike: one storage serves both."""
    model = make_model()
    source_mesh, target_mesh = make_mesh("tp2.dp2"), make_mesh("dp4")
    world.make_groups([(0, 1, 2, 3)])
    source, target = given(model, source_mesh, target_mesh, world.rank)
    expected = padded_with(0.0, shards(model, target_mesh, world.rank))
    same = aliases(model, *holdings(model, source_mesh, target_mesh), world.rank)
    assert same == {"norm", *(f"{layer}.norm" for layer in range(4))}
    target |= {name: source[name] for name in same}
    resharder = make_resharder(world, model, source_mesh, target_mesh, source, target)
    apart = resharder.run()
    assert_same(target, expected)
    for name in same:
        assert target[name].data_ptr() == source[name].data_ptr()
    norms = sum(spec.num_bytes for spec in model.tensors if spec.name in same)
    _, separate = given(model, source_mesh, target_mesh, world.rank)
    together = make_resharder(world, model, source_mesh, target_mesh, source, separate).run()
    assert together.local_bytes - apart.local_bytes == norms

    overlapping = separate | {"norm": source["0.down"].view(-1)[:3]}
    with pytest.raises(ReshardError, match=r"target norm overlaps source 0\.down in memory"):
        make_resharder(world, model, source_mesh, target_mesh, source, overlapping)


def test_equal_shards_are_one_storage() -> None:
    run_ranks(alias, 4)


def convert(world: World, source_dtype: torch.dtype, target_dtype: torch.dtype, transport: str) -> None:
    """fp32 master weights by way of bf16, in pieces of every length, within and between ranks."""
    model = make_large_model(dtype="bf16")
    source_mesh, target_mesh = make_mesh("tp2.pp2"), make_mesh("tp2.dp2")
    world.make_groups([(0, 1, 2, 3)])
    source, target = given(model, source_mesh, target_mesh, world.rank)
    expected = padded_with(0.0, shards(model, target_mesh, world.rank))
    # Not to be had in bf16: rounded on the way.
    source = {name: (tensor.float() * 1.001).to(source_dtype) for name, tensor in source.items()}
    target = {name: tensor.to(target_dtype) for name, tensor in target.items()}
    expected = {
        name: (tensor.float() * 1.001).to(source_dtype).bfloat16().to(target_dtype) for name, tensor in expected.items()
    }
    stats = make_resharder(world, model, source_mesh, target_mesh, source, target, transport=transport).run()
    assert_same(target, expected)
    assert stats.received_bytes == stats.limit_bytes


DTYPES = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize(
    ("source_dtype", "target_dtype", "transport"),
    [
        (*DTYPES[0], "torch"),
        *((*dtypes, "shared") for dtypes in DTYPES),
        *(pytest.param(*dtypes, "torch", marks=pytest.mark.slow) for dtypes in DTYPES[1:]),
    ],
)
def test_dtypes_are_converted_on_the_way(source_dtype: torch.dtype, target_dtype: torch.dtype, transport: str) -> None:
    run_ranks(convert, 4, source_dtype, target_dtype, transport)


VICTIM = 3


def die(world: World, is_large: bool, transport: str, at_once: bool) -> tuple[str, float] | None:
    """Kill rank 3 in the middle of its work; the other ranks' error and how long they took to raise it."""
    model = make_large_model() if is_large else make_model()
    source_mesh, target_mesh = make_mesh("tp4"), make_mesh("tp2.dp2")
    world.make_groups([(0, 1, 2, 3)])
    source, target = given(model, source_mesh, target_mesh, world.rank)
    resharder = make_resharder(world, model, source_mesh, target_mesh, source, target, transport=transport)
    resharder.run()
    before = {name: tensor.clone() for name, tensor in source.items()}
    if world.rank == VICTIM:
        done = []

        def carry_out(self: Any) -> None:
            done.append(whole(self))
            if len(done) > 1 or at_once:
                os.kill(os.getpid(), signal.SIGKILL)

        whole, execute.Moves.carry_out = execute.Moves.carry_out, carry_out
    start_s = time.monotonic()
    with pytest.raises(DeadlineError) as caught:
        for _ in range(3):
            resharder.run()
    took_s = time.monotonic() - start_s
    assert_same(source, before)
    return str(caught.value), took_s


@pytest.mark.parametrize("is_large", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("transport", ["torch", "shared"])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_killed_rank_is_named_and_the_source_intact(is_large: bool, transport: str, at_once: bool) -> None:
    wait_s = 10.0
    found = run_ranks(die, 4, is_large, transport, at_once, wait_s=wait_s, dying=frozenset({VICTIM}))
    told = [message for message, _ in (each for each in found if each is not None)]
    assert all(message.startswith("reshard tp4 to tp2.dp2: ") for message in told)
    # Whoever dealt with it names it; those who dealt with these name them.
    assert any(f"[{VICTIM}]" in message or f", {VICTIM}]" in message for message in told)
    assert all(took_s < 2 * wait_s for _, took_s in (each for each in found if each is not None))


BUCKET_BYTES = 64 << 20


def run_out_of_room(world: World) -> str:
    model = make_model()
    source_mesh, target_mesh = make_mesh("tp2"), make_mesh("dp2")
    world.make_groups([(0, 1)])
    source, target = given(model, source_mesh, target_mesh, world.rank)
    before = {name: tensor.clone() for name, tensor in source.items()}
    execute.bucket_bytes = lambda *_: BUCKET_BYTES
    if world.rank == 1:
        limit_memory(BUCKET_BYTES // 2)
    with pytest.raises(ReshardError) as caught:
        make_resharder(world, model, source_mesh, target_mesh, source, target, transport="torch")
    assert_same(source, before)
    return str(caught.value)


def limit_memory(more_bytes: int) -> None:
    """Let this process allocate so much more, and that only."""
    used_bytes = memory_kb("VmSize") << 10
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + more_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def test_buckets_without_room_end_every_rank() -> None:
    other, full = run_ranks(run_out_of_room, 2)
    assert full.startswith(f"rank 1: reshard tp2 to dp2: a buffer: no room for {2 * BUCKET_BYTES} bytes on cpu; cut")
    assert other == f"rank 1 cannot take part: {full}"


def restore_without_room(world: World) -> str:
    tensors = [torch.ones(1 << 20), torch.ones(64 << 20)]
    assert release(tensors) == 4 * (65 << 20)
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit_memory(32 << 20)
    with pytest.raises(ReshardError) as caught:
        restore(tensors, "rank 0: the rollout's weights")
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    resource.setrlimit(resource.RLIMIT_AS, before)
    restore(tensors, "rank 0: the rollout's weights")
    tensors[1].fill_(2.0)
    assert tensors[1].sum() == 2.0 * (64 << 20)
    return str(caught.value)


def test_a_restore_without_room_names_who_wanted_how_much() -> None:
    (message,) = run_ranks(restore_without_room, 1)
    assert message.startswith(f"rank 0: the rollout's weights: no room for {4 * (65 << 20)} bytes on cpu; cut the")


def free_and_fill(world: World) -> None:
    """A released target comes back, is filled by the same resharder, and a run before that is refused."""
    model = make_model()
    source_mesh, target_mesh = make_mesh("tp2"), make_mesh("dp2")
    world.make_groups([(0, 1)])
    source, target = given(model, source_mesh, target_mesh, world.rank)
    expected = padded_with(0.0, shards(model, target_mesh, world.rank))
    resharder = make_resharder(world, model, source_mesh, target_mesh, source, target)
    for _ in range(2):
        assert release(target.values()) == held_bytes(model, WeightHoldings(model, target_mesh), world.rank)
        with pytest.raises(ReshardError, match="target embedding has no storage; restore what was released first"):
            resharder.run()
        restore(target.values(), "target")
        resharder.run()
        assert_same(target, expected)
    with pytest.raises(ReshardError, match="other processes read in place"):
        release(source.values())


def test_released_targets_are_filled_again() -> None:
    run_ranks(free_and_fill, 2)


def test_offloaded_tensors_come_back() -> None:
    flat, gradients = torch.arange(64.0), torch.ones(8, 8)
    views = [flat[:10].view(2, 5), flat[10:60]]
    offload = HostOffload(views, zeroed=[gradients], owner="rank 0: optimizer state")
    for _ in range(2):
        assert offload.offload() == 64 * 4 + 64 * 4
        assert flat.untyped_storage().nbytes() == gradients.untyped_storage().nbytes() == 0
        assert offload.offload() == 0
        offload.restore()
        offload.restore()
        assert torch.equal(flat, torch.arange(64.0)) and not gradients.any()
        gradients.fill_(1.0)


def test_offloaded_tensors_fill_blocks_that_are_not_rounded_up() -> None:
    # 3.5 MiB and one byte: 4 MiB in one block, and what does not fit the first block goes on in the next.
    assert memory.blocks(7 * 2**19 + 1) == [4 << 20] and memory.blocks(5 * 2**20) == [4 << 20, 1 << 20]
    assert memory.blocks(0) == []
    tensors = [torch.arange(size, dtype=torch.float32) for size in (3 * 2**18, 0, 7 * 2**18 + 5, 11)]
    offload = HostOffload(tensors, owner="rank 0: optimizer state")
    offload.offload()
    assert [len(each) for each in offload._host] == [8 << 20, 2 << 20, 1 << 20]
    offload.restore()
    for tensor in tensors:
        assert torch.equal(tensor, torch.arange(len(tensor), dtype=torch.float32))


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_that_cuda_ipc_cannot_open_is_refused(monkeypatch: Any, variable: str) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv(variable, "max_split_size_mb:512,expandable_segments: True")
    storage = SimpleNamespace(device=torch.device("cuda", 0))
    with pytest.raises(ReshardError, match=f"out of {variable}, or set actor.reshard to torch"):
        peers._open_up(storage)  # type: ignore[arg-type]


def fall_back(world: World) -> list[str]:
    """Shared memory that one rank cannot have: refused by name, or done without."""
    model = make_model()
    source_mesh, target_mesh = make_mesh("tp4"), make_mesh("tp2.dp2")
    world.make_groups([(0, 1, 2, 3)])
    source, target = given(model, source_mesh, target_mesh, world.rank)
    expected = padded_with(0.0, shards(model, target_mesh, world.rank))
    if world.rank == 2:

        def refuse(*_: Any) -> Any:
            raise PermissionError("not allowed")

        execute.NodePeers.open = refuse
    with pytest.raises(ReshardError) as caught:
        make_resharder(world, model, source_mesh, target_mesh, source, target, transport="shared")
    stats = make_resharder(world, model, source_mesh, target_mesh, source, target).run()
    assert_same(target, expected)
    told = [str(caught.value), stats.messages]
    execute.room_to_share = lambda: 0
    source, target = given(model, source_mesh, target_mesh, world.rank)
    with pytest.raises(ReshardError) as caught:
        make_resharder(world, model, source_mesh, target_mesh, source, target, transport="shared")
    return [*told, str(caught.value)]


def test_without_shared_memory_the_pair_sends_messages() -> None:
    found = run_ranks(fall_back, 4)
    for message, _, _ in found:
        assert message.startswith("reshard tp4 to tp2.dp2: ranks [2] cannot share memory in their node: rank ")
    # Rank 2 and those that deal with it send messages, the others read.
    assert found[2][1] > 0
    for _, _, full in found:
        assert "ranks [0, 1, 2, 3] cannot share memory in their node" in full and "and /dev/shm has 0" in full
