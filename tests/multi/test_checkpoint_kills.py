"""Writers that are killed while they save, and disks that are full: what was complete stays, and loads."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hybridflow.checkpoint.manifest import OptimizerProgress
from hybridflow.checkpoint.model_dir import Share
from hybridflow.checkpoint.saver import RolePart, Saver, Step
from hybridflow.checkpoint.store import clear_leftovers, latest_step, load_latest, open_role
from hybridflow.errors import WriteError
from hybridflow.reshard.spec import ModelSpec, TensorSpec
from tests.support.disks import mounted
from tests.unit.checkpoint.test_store import MODEL, assert_is, save

ROWS, WIDTH, NUM_RANKS = 512, 1024, 2
SPEC = ModelSpec(
    tensors=tuple(
        TensorSpec(name=f"layer.{index}", shape=(ROWS, WIDTH), dtype="fp32", tp_dim=0, place=0) for index in range(4)
    ),
    num_layers=1,
)


def value(step: int, index: int) -> float:
    return 1000.0 * step + index


def save_for_ever(run_dir: Path, rank: int, rendezvous: Path) -> None:
    """Each rank writes half the rows of each tensor, one step after the other."""
    board = dist.FileStore(str(rendezvous), NUM_RANKS)
    saver = Saver(run_dir, rank, board, deadline_s=20.0, keep_last=2, keep_every=0, frozen={})
    box = ((rank * ROWS // NUM_RANKS, (rank + 1) * ROWS // NUM_RANKS), (0, WIDTH))
    tensor = torch.empty(ROWS // NUM_RANKS, WIDTH)
    first = latest_step(run_dir)
    for step in range(1 if first is None else first + 1, 10**6):
        shares = [
            Share("weight", spec.name, box, tensor.clone().fill_(value(step, index)))
            for index, spec in enumerate(SPEC.tensors)
        ]
        part = RolePart(
            ranks=(0, 1),
            model=MODEL,
            has_value_head=False,
            layout="tp2.pp1.dp1",
            spec=SPEC,
            shares=tuple(shares),
            trained=(),
            progress=OptimizerProgress(step, 1.0),
            is_frozen=False,
        )
        saver.save(Step(number=step, state={"k": step}, leads={"actor": 0}, parts={"actor": part}))
        if step % 3 == 0:
            saver.finish(print)


def fork(run_dir: Path, rank: int, rendezvous: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        save_for_ever(run_dir, rank, rendezvous)
    finally:
        os._exit(1)


def assert_loads(run_dir: Path, step: int) -> None:
    """What is there is what was saved at that step, every element."""
    checkpoint = load_latest(run_dir)
    assert checkpoint is not None and checkpoint.step == step and checkpoint.state == {"k": step}
    model = open_role(checkpoint, "actor")
    assert model.manifest.progress == OptimizerProgress(step, 1.0)
    assert len(list(model.verify())) == NUM_RANKS * len(SPEC.tensors)
    for index, spec in enumerate(SPEC.tensors):
        np.testing.assert_array_equal(model.read("weight", spec.name).numpy(), value(step, index))


@pytest.mark.slow
def test_killed_at_any_moment_of_a_save(tmp_path: Path) -> None:
    """Twenty times; now and then one rank dies before the other."""
    moments, before, moved = random.Random(4), 0, 0
    for turn in range(20):
        clear_leftovers(tmp_path)
        ranks = [fork(tmp_path, rank, tmp_path / f"meet-{turn}") for rank in range(NUM_RANKS)]
        try:
            # Long enough to have saved, each time, and then at any place within the next.
            end_s = time.monotonic() + 200
            while (latest_step(tmp_path) or 0) < before + 2 and time.monotonic() < end_s:
                time.sleep(0.002)
            time.sleep(moments.uniform(0, 0.08))
        finally:
            moments.shuffle(ranks)
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
                time.sleep(moments.choice([0, 0, 0.02]))
            for rank in ranks:
                os.waitpid(rank, 0)
        folder = tmp_path / "checkpoints"
        step = latest_step(tmp_path)
        assert step is not None and step >= before + 2
        assert_loads(tmp_path, step)
        moved += any(path.name.endswith((".tmp", ".part")) for path in folder.iterdir())
        # The one before is whole, too.
        (folder / "latest").write_text(f"step_{step - 1:06d}\n")
        assert_loads(tmp_path, step - 1)
        (folder / "latest").write_text(f"step_{step:06d}\n")
        before = step
    assert moved >= 10, "hardly any kill came while something was written"


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system whose size is given in pages; of a machine that lets us have one."""
    with contextlib.ExitStack() as disks:
        yield lambda pages: disks.enter_context(mounted(tmp_path / f"disk-{pages}", pages * mmap.PAGESIZE))


def test_a_full_disk_ends_the_save_and_takes_nothing_with_it(tmp_path: Path, small_disk) -> None:
    """From a disk that has no room for the first checkpoint's first file to one with room for all but the last."""
    reached = {}
    for pages in range(3, 20):
        disk = small_disk(pages)
        run_dir, step = disk / "run", 0
        with pytest.raises((WriteError, OSError)) as caught:
            for step in range(1, 10):
                save(run_dir, step, keep_last=9)
        assert isinstance(caught.value, WriteError), repr(caught.value)
        assert "No space left on device" in str(caught.value) and str(disk) in str(caught.value)
        found = reached[pages] = latest_step(run_dir)
        # Of the first there may have been room for all but the pointer to it.
        assert found == step - 1 or (step == 1 and found in (None, 1))
        if found is not None:
            assert_is(run_dir, found, first=1)
    assert {None, 1, 2, 3} <= set(reached.values()), reached
