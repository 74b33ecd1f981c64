"""The order of host and device: with copies and kernels that run only when somebody waits for them.

A queue stands for the stream. What reads a result before it waited finds the old content; what writes to the source of
a copy too early changes what is copied. Both show in the results.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.parallel.world import World
from hybridflow.reshard import memory
from hybridflow.rollout.engine import MegatronEngine
from hybridflow.rollout.gpu import decode
from hybridflow.rollout.gpu.runner import GpuRunner
from tests.cuda.interpreted.test_engine import KINDS, SMALL, generated, requests
from tests.multi.models import VOCAB, make_model


class Stream:
    """Runs what was queued when somebody waits, in order."""

    def __init__(self) -> None:
        self.queued = []
        self.num_waits = 0

    def synchronize(self, *_) -> None:
        self.num_waits += 1
        queued, self.queued = self.queued, []
        for run in queued:
            run()


@pytest.fixture
def stream(monkeypatch):
    made, copy = Stream(), torch.Tensor.copy_

    def copy_later(target, source, non_blocking=False):
        if non_blocking:
            made.queued.append(lambda: copy(target, source))
            return target
        return copy(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_later)
    monkeypatch.setattr(decode, "wait_for", made.synchronize)
    return made


@pytest.fixture(scope="module")
def world():
    made = World(rank=0, size=1, ranks_per_node=1, device=torch.device("cpu"), deadline_s=60.0, store=dist.HashStore())
    yield made
    dist.destroy_process_group()


def test_decoding_reads_and_writes_host_memory_only_when_the_device_is_done(world, monkeypatch, stream):
    model, _, groups, _ = make_model(world, ParallelLayout(), model=SMALL)
    asked = requests(6, KINDS)
    wanted = generated(MegatronEngine(model, groups, vocab_size=VOCAB, seed=7, max_concurrent=4), asked)
    step = decode.Decoder.step
    steps = []

    def step_later(decoder, rows, edits, *, is_cut):
        steps.append(rows)
        stream.queued.append(lambda: step(decoder, rows, edits, is_cut=is_cut))

    monkeypatch.setattr(decode.Decoder, "step", step_later)
    engine = MegatronEngine(model, groups, vocab_size=VOCAB, seed=7, max_concurrent=4)
    engine.runner = GpuRunner(model, groups, VOCAB, max_rows=4, max_steps=16)
    assert generated(engine, asked) == wanted
    # Fewer waits than steps: the host does not look at each.
    assert 0 < stream.num_waits < len(steps) / 2


def test_memory_is_freed_only_when_its_copy_is_there(monkeypatch, stream):
    monkeypatch.setattr(memory, "wait_for_copies", lambda storages: stream.synchronize())
    values = torch.arange(12.0)
    offload = memory.HostOffload([values], owner="rank 0: values")
    for change in (0.0, 100.0):
        values += change
        wanted = values.tolist()
        offload.offload()
        assert values.untyped_storage().nbytes() == 0
        offload.restore()
        stream.synchronize()
        assert values.tolist() == wanted
