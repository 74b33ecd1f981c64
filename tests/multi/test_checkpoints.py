"""A model in training is saved in one layout and goes on in another, in a job of as many, twice or half the ranks.

What was saved is read back through megatron-core's own records, and whole tensors are put together by joining numpy
arrays: see ``test_regroup``.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils
from safetensors import safe_open

from hybridflow.checkpoint.manifest import NAME, OptimizerProgress
from hybridflow.checkpoint.model_dir import ModelDir
from hybridflow.checkpoint.saver import RolePart, Saver, Step
from hybridflow.checkpoint.store import latest_step, load_latest, open_role
from hybridflow.checkpoint.training_state import Shares, load_training
from hybridflow.config.roles import OptimizerConfig
from hybridflow.errors import DeadlineError
from hybridflow.exit_status import exit_status
from hybridflow.families.model import ModelConfig
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.log_probs import vocab_parallel_log_probs
from hybridflow.models.microbatch import pack
from hybridflow.models.shapes import model_spec
from hybridflow.models.specs import logical_tensors
from hybridflow.models.training import Trainable
from hybridflow.models.weights import initialize
from hybridflow.parallel.megatron import rank_sets
from hybridflow.parallel.world import World
from hybridflow.reshard.spec import ModelSpec
from tests.multi.models import SHARED, VOCAB, make_model, samples
from tests.multi.test_regroup import MODELS, Run, Side, Snapshot, assert_equal, describe, describe_all, mesh_of, whole
from tests.support.megatron_models import make_chunks, make_collection, ranks_of_groups
from tests.support.ranks import run_ranks
from tests.support.waiting import with_more_time


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Where a checkpoint is loaded."""

    source: str
    side: Side


def side(layout: str, *, ranks: tuple[int, ...] | None = None, **more: Any) -> Side:
    size = ParallelLayout.parse(layout).world_size
    return Side(layout=layout, ranks=tuple(range(size)) if ranks is None else ranks, **more)


SOURCES = {
    "plain": ("plain", side("tp2.pp2")),
    "mixed": ("mixed", side("tp2.dp2", ranks=(3, 1, 2, 0))),
    "replicas": ("mixed", side("dp4", bucket_size=2000)),
    "stages": ("mixed", side("pp2.dp2", bucket_size=1000)),
    "undistributed": ("mixed", side("pp2.dp2", distributed=False)),
    "bf16": ("bf16", side("tp2.dp2")),
    "bf16 undistributed": ("bf16", side("tp2.pp2", distributed=False)),
    "value": ("value", side("pp2.dp2")),
    "chunks": ("mixed", side("pp2.vpp2.dp2", bucket_size=1000)),
    "uneven": ("bf16", side("pp2.dp2.layers1-3")),
    "sequences": ("mixed", side("tp2.cp2", bucket_size=1000)),
}
"""Name -> model, and where it is saved: by four ranks."""

GOALS = [
    *(Goal(source=name, side=where) for name, (_, where) in SOURCES.items()),
    *(
        Goal(source=name, side=side(layout))
        for name, layouts in {
            "plain": "dp4 tp2 tp2.pp2.dp2",
            "mixed": "tp4.dp2 pp2 cp2.dp2",
            "replicas": "tp4 dp8",
            "stages": "tp2.pp2.dp2 dp2",
            "undistributed": "tp2.dp2 tp1",
            "bf16": "pp2.dp2",
            "bf16 undistributed": "dp8",
            "value": "tp4 tp2",
            "chunks": "pp2.layers3-1 tp2.pp2.vpp2.dp2 dp4",
            "uneven": "tp2.pp2.vpp2 pp2.layers2-2",
            "sequences": "dp4 pp2.cp2 tp2.cp2.dp2",
        }.items()
        for layout in layouts.split()
    ),
    Goal(source="replicas", side=side("dp4")),
    Goal(source="bf16", side=side("tp2.dp2", bucket_size=1500)),
    Goal(source="mixed", side=side("tp2.dp2", distributed=False)),
    Goal(source="bf16", side=side("tp2", distributed=False)),
]


class Kept(Run):
    """A model in training that can be saved and loaded, and tells its losses."""

    loss_sum = 0.0

    def accumulate(self, number: int) -> None:
        self.loss_sum = 0.0
        if self.trainable is None:
            return
        sequences, prompts = samples(8, seed=number)
        count = sum(map(len, sequences)) - sum(prompts)
        mine = list(range(len(sequences)))[self.mesh.coordinate(self._rank).dp :: self.mesh.layout.dp]

        def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, float]:
            if self._is_value:
                share = batch.gathered(output[:, 0].float() - batch.targets / VOCAB).square().sum() / count
            else:
                share = -vocab_parallel_log_probs(output, batch.targets, group=self._groups.tp, vocab_size=VOCAB)[0]
                share = batch.gathered(share).sum() / count
            return share, float(share.detach())

        parts = [pack(mine, sequences, prompts, self._device, self._groups.cp)]
        self.loss_sum = sum(self.trainable.accumulate(parts, loss))

    def go_on(self, steps: int) -> tuple[list[float], Snapshot]:
        """Losses of some further steps, and what is held after them."""
        losses = []
        for number in range(2, 2 + steps):
            self.step(number)
            losses.append(self.loss_sum)
        return losses, self.snapshot()


def saver_of(world: World, folder: Path, name: str = "test") -> Saver:
    return Saver(folder, world.rank, world.new_store(name), deadline_s=30.0, keep_last=2, keep_every=0, frozen={})


def part_of(world: World, trainable: Trainable, spec: ModelSpec, mesh: DeviceMesh, **more: Any) -> RolePart:
    shares = Shares(trainable.model, spec, mesh, world.rank, trainable)
    return RolePart(
        ranks=mesh.ranks,
        layout=str(mesh.layout),
        spec=spec,
        shares=tuple(shares.copied()),
        trained=shares.trained(),
        progress=shares.progress(),
        is_frozen=False,
        **{"model": MODELS["plain"], "has_value_head": False, **more},
    )


def save_all(world: World, folder: Path, steps: int) -> dict[str, Any]:
    """What this rank held when each source was saved, and after some further steps."""
    found = {}
    world.make_groups(rank_sets([mesh_of(world, where) for _, where in SOURCES.values()], world.size))
    for name, (model, where) in SOURCES.items():
        run = Kept(world, model, where, seed=1)
        for number in range(2):
            run.step(number)
        run.trainable.set_learning_rate(2e-3)
        spec = describe(world, model)
        part = part_of(world, run.trainable, spec, run.mesh, model=MODELS[model], has_value_head=model == "value")
        before = run.snapshot()
        saver = saver_of(world, folder / name, name)
        saver.save(Step(number=2, state={}, leads={"actor": where.ranks[0]}, parts={"actor": part}))
        # The weights change while they are written.
        losses, after = run.go_on(steps)
        saver.finish(print)
        found[name] = before, losses, after
    return found


def load_all(world: World, folder: Path, goals: list[Goal], steps: int) -> list[Any]:
    """What this rank holds after loading each checkpoint, and after some further steps."""
    found = []
    world.make_groups(rank_sets([mesh_of(world, goal.side) for goal in goals], world.size))
    for goal in goals:
        model = SOURCES[goal.source][0]
        run, spec = Kept(world, model, goal.side, seed=5), describe(world, model)
        run.poison()
        load_training(open_role(load_latest(folder / goal.source), "actor"), run.trainable, spec, run.mesh, world.rank)
        assert run.trainable.learning_rate() in (2e-3, None)
        before = run.snapshot()
        found.append((before, *run.go_on(steps)))
    return found


STEPS = 4


@pytest.fixture(scope="module")
def specs() -> dict[str, ModelSpec]:
    return run_ranks(describe_all, 1)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(save_all, 4, folder, STEPS)


@pytest.fixture(scope="module")
def loaded(saved: Any) -> dict[Goal, list[Any]]:
    """What each rank found for each goal; a job for each number of ranks."""
    found = {}
    for size in (1, 2, 4, 8):
        goals = [goal for goal in GOALS if len(goal.side.ranks) == size]
        ranks = run_ranks(load_all, size, saved[0], goals, STEPS)
        found |= {goal: [mine[place] for mine in ranks] for place, goal in enumerate(goals)}
    return found


def losses(where: Side, ranks: list[list[float]]) -> np.ndarray:
    """Of each step: the shares of all replicas, from the first rank of each that knows."""
    layout = ParallelLayout.parse(where.layout)
    grid = np.array(where.ranks).reshape(layout.pp, layout.dp, layout.cp, layout.tp)
    return np.sum([ranks[rank] for rank in grid[-1, :, 0, 0]], axis=0)


@pytest.mark.slow
@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: f"{goal.source} on {goal.side.layout}")
def test_training_goes_on(goal: Goal, specs: Any, saved: Any, loaded: Any) -> None:
    model, source = SOURCES[goal.source]
    was, now = [mine[goal.source] for mine in saved[1]], loaded[goal]
    spec = specs[model]
    before = whole(spec, source, [each[0] for each in was])
    kinds = {"weight", "exp_avg", "exp_avg_sq", "step"} | ({"master"} if model == "bf16" else set())
    assert before.keys() == {(kind, tensor.name) for kind in kinds for tensor in spec.tensors}
    here = whole(spec, goal.side, [each[0] for each in now])
    assert here.keys() == before.keys()
    for key, values in before.items():
        np.testing.assert_array_equal(here[key], values, err_msg=str(key))
    if goal.side == source:
        assert [each[1] for each in now] == [each[1] for each in was]
        for one, other in zip(now, was, strict=True):
            assert_equal(one[2], other[2])
    if model == "bf16":
        return
    expected, found = (losses(*each) for each in ((source, [e[1] for e in was]), (goal.side, [e[1] for e in now])))
    assert expected.std() > 1e-3 and abs(found[0] - expected[0]) <= 1e-6 * abs(expected[0]), (found, expected)
    after, later = (whole(spec, *each) for each in ((source, [e[2] for e in was]), (goal.side, [e[2] for e in now])))
    for tensor in spec.tensors:
        key = "weight", tensor.name
        moved = np.linalg.norm(after[key] - before[key]) / np.linalg.norm(after[key])
        apart = np.linalg.norm(later[key] - after[key]) / np.linalg.norm(after[key])
        assert moved > 1e-3 and apart <= 1e-4, (key, moved, apart)


# --- A mixture of experts: held in other groups than the rest, and with a buffer that is not trained ---

EXPERTS = ModelConfig(
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=12,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=4,
    max_context=32,
    vocab_size=VOCAB,
    vocab_divisible_by=4,
    num_experts=4,
    shared_ffn_hidden_size=8,
    router_bias=True,
)


class Mixture:
    """A mixture in training on all ranks."""

    def __init__(self, world: World, text: str, *, distributed: bool) -> None:
        layout = ParallelLayout.parse(text)
        ranks = tuple(range(world.size))
        groups = [tuple(each) for rank in ranks for each in ranks_of_groups(layout, rank).values()]
        world.make_groups(sorted({*groups, *((rank,) for rank in ranks), ranks}))
        collection = make_collection(layout, world.rank, world.group)
        collection.hcp, collection.intra_dist_opt = [world.group((world.rank,))], world.group(ranks)
        self.mesh = DeviceMesh(name="mesh", layout=layout, ranks=ranks, ranks_per_node=world.size)
        (model,) = make_chunks(EXPERTS, layout, world.rank, groups=collection, calculate_per_token_loss=True)
        self.spec, self._tp, self._place = model_spec(EXPERTS), collection.tp, self.mesh.coordinate(world.rank)
        for tensor in model.state_dict().values():
            if torch.is_tensor(tensor):
                tensor.fill_(7)
        self.trainable = Trainable(model, collection, OptimizerConfig(lr=1e-2, distributed=distributed))

    def begin(self, rank: int) -> None:
        """Weights that are the same in every layout."""
        initialize(self.trainable.model, self.spec, self.mesh, rank, seed=3, std=0.2)
        for name, tensor in logical_tensors(self.trainable.model).items():
            if name.endswith("expert_bias"):
                tensor.copy_(torch.linspace(-0.1, 0.1, len(tensor)))

    def step(self, number: int) -> float:
        # Of one length: what ranks exchange for their experts is.
        sequences = list(torch.randint(0, VOCAB, (8, 9), generator=torch.Generator().manual_seed(number)))
        prompts, count = [2] * 8, 8 * 7
        mine = list(range(len(sequences)))[self._place.dp :: self.mesh.layout.dp]

        def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, float]:
            share = vocab_parallel_log_probs(output, batch.targets, group=self._tp, vocab_size=VOCAB)[0]
            return -share.sum() / count, float(-share.detach().sum() / count)

        found = sum(self.trainable.accumulate([pack(mine, sequences, prompts, torch.device("cpu"))], loss))
        self.trainable.step()
        return found if self._place.tp == 0 else 0.0


@contextlib.contextmanager
def without_globals() -> Iterator[None]:
    """What of megatron-core 0.16.1 looks for groups, buffers and names that are never set here."""
    parallel_state._set_global_memory_buffer()
    with (
        mock.patch.object(moe_utils, "te_general_gemm", None, create=True),
        mock.patch("megatron.core.distributed.finalize_model_grads._update_router_expert_bias"),
    ):
        yield


def saved_mixture(world: World, folder: Path, text: str, distributed: bool) -> list[float]:
    """Losses of the steps after a checkpoint."""
    with without_globals():
        run = Mixture(world, text, distributed=distributed)
        run.begin(world.rank)
        for number in range(2):
            run.step(number)
        saver = saver_of(world, folder)
        part = part_of(world, run.trainable, run.spec, run.mesh)
        saver.save(Step(number=2, state={}, leads={"actor": 0}, parts={"actor": part}))
        found = [run.step(number) for number in range(2, 4)]
        saver.finish(print)
        return found


def loaded_mixture(world: World, folder: Path, text: str, distributed: bool) -> list[float]:
    """The same, gone on from the checkpoint; what it now holds is saved once more, as step 3."""
    with without_globals():
        run = Mixture(world, text, distributed=distributed)
        source = open_role(load_latest(folder), "actor")
        load_training(source, run.trainable, run.spec, run.mesh, world.rank)
        assert source.manifest.progress == OptimizerProgress(2, 1e-2)
        saver = saver_of(world, folder)
        part = part_of(world, run.trainable, run.spec, run.mesh)
        saver.save(Step(number=3, state={}, leads={"actor": 0}, parts={"actor": part}))
        saver.finish(print)
        return [run.step(number) for number in range(2, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("dp2.ep2", True), ("dp2.ep1", True)),
        (("dp2.ep2", True), ("dp4.ep4", False)),
        (("dp4.ep2", True), ("dp2.ep2", True)),
        (("dp4.ep1", False), ("dp2.ep2", True)),
    ],
    ids=str,
)
def test_a_mixture_of_experts_goes_on(source: Any, target: Any, tmp_path: Path) -> None:
    sizes = [ParallelLayout.parse(text).world_size for text, _ in (source, target)]
    expected = np.sum(run_ranks(saved_mixture, sizes[0], tmp_path, *source), axis=0)
    found = np.sum(run_ranks(loaded_mixture, sizes[1], tmp_path, *target), axis=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert abs(found[0] - expected[0]) <= 1e-6 * expected[0]
    assert_same_tensors(*(tmp_path / f"checkpoints/step_00000{step}/actor" for step in (2, 3)))
    manifest = ModelDir(tmp_path / "checkpoints/step_000002/actor").manifest
    assert [len(tensors) for tensors in manifest.tensors.values()] == [35, 33, 33]


def own_mixture(world: World, text: str) -> tuple[Trainable, ModelSpec, DeviceMesh]:
    """A mixture of ours in training, in bf16, with fp32 masters."""
    model, mesh, groups, spec = make_model(world, ParallelLayout.parse(text), model=replace(SHARED, dtype="bf16"))
    return Trainable(model, groups, OptimizerConfig(lr=1e-2)), spec, mesh


def saved_own_mixture(world: World, folder: Path, text: str) -> None:
    trainable, spec, mesh = own_mixture(world, text)
    sequences, dp = list(torch.randint(0, 29, (8, 9), generator=torch.Generator().manual_seed(1))), mesh.layout.dp
    mine = list(range(8))[mesh.coordinate(world.rank).dp :: dp]

    def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, None]:
        return output.float().square().sum() / 8, None

    for _ in range(2):
        trainable.accumulate([pack(mine, sequences, [2] * 8, torch.device("cpu"))], loss)
        trainable.step()
    saver = saver_of(world, folder)
    part = part_of(world, trainable, spec, mesh)
    saver.save(Step(number=2, state={}, leads={"actor": 0}, parts={"actor": part}))
    saver.finish(print)


def loaded_own_mixture(world: World, folder: Path, text: str) -> None:
    trainable, spec, mesh = own_mixture(world, text)
    load_training(open_role(load_latest(folder), "actor"), trainable, spec, mesh, world.rank)
    saver = saver_of(world, folder)
    part = part_of(world, trainable, spec, mesh)
    saver.save(Step(number=3, state={}, leads={"actor": 0}, parts={"actor": part}))
    saver.finish(print)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target"),
    [
        *(("dp4.ep4", target) for target in ("tp2.dp2.ep2", "tp2.dp2.ep2.etp1", "pp2.dp2.ep2", "dp1")),
        *(("tp2.dp2.ep2.etp1", "cp2.dp2.ep2"), ("tp2.dp2.etp1", "dp2"), ("pp2.dp2.ep2", "tp2.dp2.ep4.etp1")),
    ],
)
def test_state_of_experts_changes_its_layout_bit_by_bit(source: str, target: str, tmp_path: Path) -> None:
    run_ranks(saved_own_mixture, 4, tmp_path, source)
    run_ranks(loaded_own_mixture, ParallelLayout.parse(target).world_size, tmp_path, target)
    kinds = [*ModelDir(tmp_path / "checkpoints/step_000002/actor").manifest.tensors]
    assert len(kinds) == 4, f"weights, masters and two moments: {kinds}"
    assert_same_tensors(*(tmp_path / f"checkpoints/step_00000{step}/actor" for step in (2, 3)))


def assert_same_tensors(one: Path, other: Path) -> None:
    """Every tensor of two model directories bit for bit, put together in numpy from what safetensors reads."""
    (first, second) = (whole_tensors(path) for path in (one, other))
    assert first.keys() == second.keys()
    for key, values in first.items():
        assert not np.isnan(values).any(), key
        np.testing.assert_array_equal(values, second[key], err_msg=str(key))


def whole_tensors(folder: Path) -> dict[tuple[str, str], np.ndarray]:
    body = json.loads((folder / NAME).read_text())
    found = {
        (kind, name): np.full(shape, np.nan, dtype=np.float32)
        for kind, tensors in body["tensors"].items()
        for name, (_, *shape) in tensors.items()
    }
    for file, held in body["files"].items():
        with safe_open(folder / file, "pt") as opened:
            for key, kind, name, box, _ in held["pieces"]:
                place = found[kind, name][tuple(slice(*edge) for edge in box)]
                assert np.isnan(place).all(), f"{kind} of {name} is written twice"
                # fp32 holds every number of bf16.
                place[...] = opened.get_tensor(key).float().numpy()
    return found


# --- In the background ---


def save_slowly(world: World, folder: Path) -> dict[str, Any]:
    """A save whose bytes cannot come to the disk until the weights have changed; rank 2 holds nothing."""
    layouts = {"actor": ("dp2", (0, 1)), "critic": ("pp2", (1, 3))}
    sides = {role: Side(layout=layout, ranks=ranks) for role, (layout, ranks) in layouts.items()}
    world.make_groups(rank_sets([mesh_of(world, each) for each in sides.values()], world.size))
    runs = {role: Kept(world, "plain", each, seed=1) for role, each in sides.items()}
    spec, may_sync, is_syncing, real = describe(world, "plain"), threading.Event(), threading.Event(), os.fsync

    def fsync(file: int) -> None:
        is_syncing.set()
        assert may_sync.wait(30), "the test has not gone on"
        real(file)

    held = {role: run for role, run in runs.items() if run.trainable is not None}
    for run in held.values():
        run.step(0)
    before = {role: run.snapshot() for role, run in held.items()}
    saver = saver_of(world, folder)
    with mock.patch.object(os, "fsync", fsync):
        parts = {role: part_of(world, run.trainable, spec, run.mesh) for role, run in held.items()}
        begin_s = time.perf_counter()
        saver.save(Step(number=1, state={"k": 1}, leads={"actor": 0, "critic": 1}, parts=parts))
        returned_s = time.perf_counter() - begin_s
        for run in held.values():
            assert is_syncing.wait(30)
            run.step(1)
            run.poison()
        assert saver._thread is not None if held else saver._thread is None, "a rank that holds nothing has no thread"
        saver.check()
        is_there = (folder / "checkpoints/latest").exists()
        may_sync.set()
        saver.finish(print)
    return {"before": before, "is_there": is_there, "returned_s": returned_s}


def test_weights_that_change_while_they_are_written_are_saved_as_they_were(tmp_path: Path) -> None:
    ranks = run_ranks(save_slowly, 4, tmp_path)
    assert not any(each["is_there"] for each in ranks) and max(each["returned_s"] for each in ranks) < 5
    assert ranks[2]["before"] == {}
    spec = run_ranks(describe_all, 1)[0]["plain"]
    checkpoint = load_latest(tmp_path)
    assert checkpoint is not None and checkpoint.state == {"k": 1} and checkpoint.step == 1
    for role, (layout, members) in {"actor": ("dp2", (0, 1)), "critic": ("pp2", (1, 3))}.items():
        held = [each["before"].get(role, {}) for each in ranks]
        expected = whole(spec, Side(layout=layout, ranks=members), held)
        found = whole_tensors(checkpoint.path / role)
        assert found.keys() == {key for key in expected if key[0] != "step"}
        for key, values in found.items():
            np.testing.assert_array_equal(values, expected[key], err_msg=str(key))


def fail_to_write(world: World, folder: Path) -> list[str]:
    """What each rank is told when rank 1's disk is full, and when nobody writes any more."""
    run = Kept(world, "plain", side("dp2"), seed=1)
    spec, messages = describe(world, "plain"), []

    def full(file: int, *_: Any) -> int:
        raise OSError(28, "No space left on device")

    def step(number: int) -> Step:
        parts = {"actor": part_of(world, run.trainable, spec, run.mesh)}
        return Step(number=number, state={}, leads={"actor": 0}, parts=parts)

    first = saver_of(world, folder, "first")
    first.save(step(1))
    first.finish(print)
    with mock.patch.object(os, "pwrite", full if world.rank == 1 else os.pwrite):
        first.save(step(2))
        messages.append(error_of(lambda: first.finish(print)))
    silent = Saver(folder, world.rank, world.new_store("silent"), deadline_s=1.0, keep_last=2, keep_every=0, frozen={})
    if world.rank == 0:
        silent.save(step(3))
        messages.append(error_of(lambda: silent.finish(print)))
    return messages


def save_twice_with_a_slow_writer(world: World, folder: Path, deadline_s: float) -> tuple[list[int | None], float]:
    """The latest step that each rank sees when it has begun to save each, and for how long the second was waited with.

    Rank 2 holds nothing, rank 0 writes slowly.
    """
    where = Side(layout="dp2", ranks=(0, 1))
    world.make_groups(rank_sets([mesh_of(world, where)], world.size))
    run, spec, pwrite = Kept(world, "plain", where, seed=1), describe(world, "plain"), os.pwrite
    saver = Saver(
        folder, world.rank, world.new_store("slow"), deadline_s=deadline_s, keep_last=2, keep_every=0, frozen={}
    )

    def slow(*arguments: Any) -> int:
        # For each of some ninety tensors: about twice the deadline.
        time.sleep(0.02 * deadline_s)
        return pwrite(*arguments)

    found = []
    with mock.patch.object(os, "pwrite", slow if world.rank == 0 else pwrite):
        for number in (1, 2):
            has_part = run.trainable is not None
            parts = {"actor": part_of(world, run.trainable, spec, run.mesh)} if has_part else {}
            begin_s = time.monotonic()
            saver.save(Step(number=number, state={}, leads={"actor": 0}, parts=parts))
            waited_s = time.monotonic() - begin_s
            found.append(latest_step(folder))
        saver.finish(print)
    return found, waited_s


@pytest.mark.slow
def test_no_rank_goes_on_to_the_next_save_before_the_last_is_complete(tmp_path: Path) -> None:
    """Else it would wait within training, for no longer than the deadline, while the others are still writing."""

    def check(deadline_s: float) -> None:
        folder = tmp_path / f"{deadline_s:g}"
        ranks = run_ranks(save_twice_with_a_slow_writer, 3, folder, deadline_s)
        assert [found for found, _ in ranks] == [[None, 1]] * 3
        assert all(waited_s > deadline_s for _, waited_s in ranks), "the writer was no slower than the deadline"
        assert latest_step(folder) == 2

    # No single write of a busy machine is to take as long.
    with_more_time(check, 1.0, 8.0)


def error_of(call: Any) -> str:
    try:
        call()
    except Exception as error:
        status = f" {exit_status(error)}" if isinstance(error, DeadlineError) else ""
        return f"{type(error).__name__}{status}: {error}"
    return "nothing"


def test_a_rank_that_cannot_write_ends_the_save_on_all(tmp_path: Path) -> None:
    (of_lead, silent), (of_failed,) = run_ranks(fail_with_groups, 2, tmp_path)
    assert of_failed.startswith("WriteError: ") and "rank-00001.safetensors: cannot be written" in of_failed
    assert "No space left" in of_failed and "make room" in of_failed
    assert of_lead.startswith("DeadlineError 4: ") and "actor of step 2: rank 1 could not write its part: " in of_lead
    assert of_lead.endswith(of_failed.partition(": ")[2]), "status 4 and the file's name, whichever rank is first"
    assert "actor of step 3: 3/actor/1 did not come, and nothing was written for 1 s" in silent
    assert load_latest(tmp_path).step == 1
    assert ModelDir(tmp_path / "checkpoints/step_000001/actor").manifest.progress == OptimizerProgress(0, 1e-3)


def fail_with_groups(world: World, folder: Path) -> list[str]:
    world.make_groups(rank_sets([mesh_of(world, side("dp2"))], world.size))
    return fail_to_write(world, folder)
