"""Resharding, snapshots and offload on a fake GPU: what is copied is on the right device, and as much as planned."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hybridflow.checkpoint.training_state import Shares
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.gpt import build_transformer
from hybridflow.models.shapes import model_spec
from hybridflow.parallel.megatron import collection, rank_sets
from hybridflow.reshard.execute import Resharder
from hybridflow.reshard.holdings import WeightHoldings
from hybridflow.reshard.memory import HostOffload
from hybridflow.reshard.plan import held_bytes, participants, plan, received_limit
from hybridflow.reshard.views import local_sizes
from tests.cuda.fake.machine import DEVICE, Launches, fake_cuda, place
from tests.cuda.fake.shapes import family_model

SIZE = 8
LAYOUTS = ParallelLayout(tp=4, pp=2), ParallelLayout(tp=2, dp=4)


def note_pinned(monkeypatch) -> list[int]:
    """From here on make host memory without asking a driver to pin it; returns the bytes that were to be pinned."""
    empty, found = torch.empty, []

    def plain(*shape, pin_memory=False, **given):
        made = empty(*shape, **given)
        if pin_memory:
            found.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", plain)
    return found


def tell_devices(monkeypatch, on_device) -> None:
    """From here on let these storages say that they are on the GPU, and all others on the host: torch says meta."""
    where = property(lambda self: DEVICE if self._cdata in on_device else torch.device("cpu"))
    monkeypatch.setattr(torch.UntypedStorage, "device", where, raising=False)


def note_copies(monkeypatch) -> list[tuple[tuple[str, str], int]]:
    """From here on note which way tensors are copied, and how many bytes; nobody may wait for a copy."""
    copy, found = torch.Tensor.copy_, []

    def noted(target, source, non_blocking=False):
        assert non_blocking
        found.append(((source.device.type, target.device.type), target.nbytes))
        return copy(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    return found


@pytest.fixture
def addresses(monkeypatch):
    """Give fake tensors addresses: each storage far from the others."""
    starts: dict[int, int] = {}

    def address(self):
        start = starts.setdefault(self.untyped_storage()._cdata, len(starts) + 1)
        return start * 2**40 + self.storage_offset() * self.element_size()

    monkeypatch.setattr(torch.Tensor, "data_ptr", address)


@functools.cache
def spec():
    model = family_model("llama")
    return model, model_spec(model)


def mesh_of(layout: ParallelLayout) -> DeviceMesh:
    return DeviceMesh(name=str(layout), layout=layout, ranks=tuple(range(SIZE)), ranks_per_node=8)


class Everyone:
    """Answers for all ranks as this one does, but for the messages that each sends."""

    def __init__(self, resharder: Resharder) -> None:
        self._resharder = resharder

    def gather(self, value, name):
        mine = self._resharder
        if not (isinstance(value, list) and all(isinstance(each, list) for each in value)):
            return [value] * SIZE
        found = []
        for rank in range(SIZE):
            other = copy.copy(mine)
            other._world = copy.copy(mine._world)
            other._world.rank = rank
            waves = other._divide(plan(mine._model, *mine._holdings, rank), {})
            found.append([[[to, len(each)] for (source, to), each in wave.items() if source == rank] for wave in waves])
        return found


@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_weights_are_packed_and_unpacked_on_the_device(monkeypatch, addresses, where):
    """Also where what is sent is in host memory, as FSDP keeps it."""
    model, tensors = spec()
    source, target = (WeightHoldings(tensors, mesh_of(layout)) for layout in LAYOUTS)
    monkeypatch.setattr(Resharder, "_gather", lambda self, value: dict(enumerate(Everyone(self).gather(value, ""))))
    monkeypatch.setattr(Resharder, "_synchronize", lambda self: None)
    exchanged: list[torch.Tensor] = []
    sent: list[torch.Tensor] = []

    def carry(operations):
        exchanged.extend(each.tensor for each in operations)
        sent.extend(each.tensor for each in operations if each.op is dist.isend)
        return []

    monkeypatch.setattr(dist, "batch_isend_irecv", carry)
    with fake_cuda(monkeypatch, rank=3, size=SIZE) as world:
        world.make_groups([participants(source.mesh, target.mesh)])
        given = [
            {
                name: torch.empty(size, dtype=torch.bfloat16, device=device)
                for name, size in local_sizes(tensors, holdings, 3).items()
            }
            for holdings, device in ((source, torch.device(where)), (target, DEVICE))
        ]
        resharder = Resharder(
            world, tensors, source, target, source_tensors=given[0], target_tensors=given[1], transport="torch"
        )
        with Launches() as launches:
            stats = resharder.run()
    assert {each.device for each in resharder._buckets.values()} == {DEVICE}
    if where == "cpu":
        # Out of buckets alone; a view of a fake tensor's own memory would be on meta.
        assert {each.device for each in sent} == {DEVICE}
    assert sum(each.nbytes for each in exchanged) == stats.received_bytes + stats.sent_bytes
    assert sum(each.nbytes for each in resharder._buckets.values()) == stats.extra_bytes
    assert stats.received_bytes == stats.limit_bytes == received_limit(tensors, source, target, 3)
    # Many views at once: far fewer launches than tensors and boxes.
    assert launches.names["carry"] > 0
    started = launches.names["carry"] + launches.names["_foreach_copy_"]
    assert started <= 2 * stats.messages + 2 * len(tensors.tensors)


def test_a_snapshot_is_pinned_host_memory_of_a_rank_s_own_part(monkeypatch):
    model, tensors = spec()
    mesh = mesh_of(ParallelLayout(tp=2, pp=2, dp=2))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    with fake_cuda(monkeypatch, rank=0, size=SIZE) as world:
        world.make_groups(rank_sets([mesh], SIZE))
        groups = collection(world, mesh)
        built = build_transformer(model, mesh.layout, groups, DEVICE, vocab_size=model.vocab_size)
        pinned = note_pinned(monkeypatch)
        shares = Shares(built, tensors, mesh, 0, None)
        copies = [shares.copied() for _ in range(2)]
    assert {each.values.device.type for found in copies for each in found} == {"cpu"}
    num_bytes = sum(each.values.nbytes for each in copies[0])
    assert 0 < num_bytes <= held_bytes(tensors, WeightHoldings(tensors, mesh), 0)
    # In slabs of powers of two; the second snapshot overwrites the first.
    assert len(pinned) < len(copies[0]) and all(size.bit_count() == 1 for size in pinned)
    assert num_bytes <= sum(pinned) <= 1.25 * num_bytes


def test_offloaded_weights_are_in_pinned_memory_and_come_back(monkeypatch):
    with fake_cuda(monkeypatch) as world:
        model = family_model("qwen3_moe")
        mesh, groups = place(world, ParallelLayout())
        built = build_transformer(model, ParallelLayout(), groups, DEVICE, vocab_size=model.vocab_size)
        weights = [each.detach() for each in built.parameters()]
        sizes = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in weights}
        tell_devices(monkeypatch, sizes)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
        pinned, copied = note_pinned(monkeypatch), note_copies(monkeypatch)
        offload = HostOffload(weights, owner="rank 0: weights")
        for _ in range(2):
            assert offload.offload() == sum(sizes.values())
            assert not any(each.untyped_storage().nbytes() for each in weights)
            assert {way for way, _ in copied} == {("cuda", "cpu")}
            assert sum(num_bytes for _, num_bytes in copied) == sum(sizes.values())
            copied.clear()
            offload.restore()
            assert {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in weights} == sizes
            assert {way for way, _ in copied} == {("cpu", "cuda")}
            copied.clear()
    # Once for both turns, in few blocks.
    assert sum(sizes.values()) <= sum(pinned) < sum(sizes.values()) + 2**20 and len(pinned) < 20
    tensors = model_spec(model)
    assert sum(sizes.values()) == held_bytes(tensors, WeightHoldings(tensors, mesh), 0)
