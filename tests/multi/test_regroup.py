"""Training goes on in another layout: what megatron-core's optimizers hold before and after, element by element.

The state is read through other records of megatron-core than those that hybridflow reads, and whole tensors are put
together by joining numpy arrays.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from hybridflow.config.roles import OptimizerConfig
from hybridflow.errors import ReshardError
from hybridflow.families.model import ModelConfig
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.gpt import build_stage
from hybridflow.models.log_probs import vocab_parallel_log_probs
from hybridflow.models.microbatch import pack
from hybridflow.models.regroup import Training, check_ranges, regroup, trained_tensors
from hybridflow.models.specs import logical_parameters
from hybridflow.models.training import Trainable
from hybridflow.models.weights import initialize
from hybridflow.parallel.megatron import collection, rank_sets
from hybridflow.parallel.world import World
from hybridflow.reshard.plan import participants
from hybridflow.reshard.spec import ModelSpec, TensorSpec
from tests.multi.models import VOCAB, layouts_of, samples
from tests.support.described import describe_model
from tests.support.ranks import run_ranks

PLAIN = ModelConfig(
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    max_context=48,
    vocab_divisible_by=4,
    qkv_bias=True,
)
# One key-value head for two tensor-parallel ranks, and a vocabulary of 29 padded to 30 by one or two ranks and to 40 by
# four: the last then holds nothing but padding.
MIXED = replace(PLAIN, num_query_groups=2, vocab_divisible_by=5, tied_embeddings=True, qk_norm=True, qkv_bias=False)
MODELS = {"plain": PLAIN, "mixed": MIXED, "bf16": replace(MIXED, dtype="bf16"), "value": PLAIN}


@dataclass(frozen=True, kw_only=True)
class Side:
    """Where one of the two models is, whether its optimizer is distributed, and the size of its buckets."""

    layout: str
    ranks: tuple[int, ...] = (0, 1, 2, 3)
    distributed: bool = True
    bucket_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    model: str
    source: Side
    target: Side


def case(model: str, source: str, target: str, **more: Any) -> Case:
    sides = {
        name: Side(layout=layout, **{key[2:]: value for key, value in more.items() if key[0] == prefix})
        for name, layout, prefix in (("source", source, "s"), ("target", target, "t"))
    }
    return Case(model=model, **sides)


CASES = [
    case("plain", "tp2.pp2", "dp4"),
    case("mixed", "dp4", "tp4", s_bucket_size=2000),
    case("mixed", "tp2.dp2", "pp4", s_bucket_size=1000),
    case("mixed", "pp2.dp2", "tp2.dp2", s_bucket_size=2000, t_ranks=(3, 1, 2, 0), t_bucket_size=1000),
    case("value", "pp2.dp2", "tp4"),
    case("bf16", "tp2.dp2", "pp2.dp2", t_bucket_size=3000),
    case("bf16", "tp2.pp2", "dp4", s_distributed=False),
    case("plain", "pp2.dp2", "tp2.dp2", t_distributed=False),
    # Ranks of one sequence share the optimizer's state as replicas do.
    case("mixed", "tp2.cp2", "dp4"),
    case("value", "pp2.dp2", "cp2.dp2"),
    case("mixed", "tp2", "pp2", s_ranks=(0, 1), t_ranks=(2, 3)),
    case("plain", "dp2", "dp3", s_ranks=(0, 1), t_ranks=(3, 1, 2), t_bucket_size=4000),
    case("mixed", "tp1", "tp2.dp2", s_ranks=(2,)),
    case("mixed", "pp2.vpp2.dp2", "tp2.pp2.layers3-1", s_bucket_size=2000),
    case("bf16", "pp2.layers1-3.dp2", "tp2.pp2.vpp2", t_bucket_size=1000),
    case("plain", "dp2", "tp2.dp2", s_ranks=(1, 0), s_distributed=False, t_distributed=False),
]
assert {str(ParallelLayout.parse(side.layout)) for each in CASES for side in (each.source, each.target)} >= {
    str(layout) for layout in layouts_of(4, PLAIN)
}, "a layout of four ranks is left out"

Snapshot = dict[tuple[str, str], tuple[int, np.ndarray]]
"""(kind, tensor) -> where in the flat local parameter the values begin, and the values."""


def mesh_of(world: World, side: Side) -> DeviceMesh:
    layout = ParallelLayout.parse(side.layout)
    return DeviceMesh(name=side.layout, layout=layout, ranks=side.ranks, ranks_per_node=world.ranks_per_node)


def describe(world: World, model: str) -> ModelSpec:
    return describe_model(world, MODELS[model], vocab_size=VOCAB, has_value_head=model == "value")


class Run:
    """One of the two models in training, on the ranks that have it."""

    def __init__(self, world: World, model: str, side: Side, *, seed: int) -> None:
        self.mesh, self._is_value, self.trainable = mesh_of(world, side), model == "value", None
        self._rank, self._device = world.rank, world.device
        if world.rank in self.mesh:
            self._groups = collection(world, self.mesh)
            spec = describe(world, model)
            built = build_stage(
                MODELS[model],
                self.mesh.layout,
                self._groups,
                world.device,
                vocab_size=VOCAB,
                has_value_head=self._is_value,
            )
            initialize(built, spec, self.mesh, world.rank, seed=seed, std=0.1)
            settings = OptimizerConfig(lr=1e-3, distributed=side.distributed, weight_decay=0.1, clip_grad=0.5)
            self.trainable = Trainable(built, self._groups, settings, bucket_size=side.bucket_size)
        self.training = Training(
            mesh=self.mesh,
            is_distributed=side.distributed,
            trainable=self.trainable,
            bucket_size=side.bucket_size,
        )

    def accumulate(self, number: int) -> None:
        """The gradients of one batch, the same whatever the layout."""
        if self.trainable is None:
            return
        sequences, prompts = samples(8, seed=number)
        count = sum(map(len, sequences)) - sum(prompts)
        mine = list(range(len(sequences)))[self.mesh.coordinate(self._rank).dp :: self.mesh.layout.dp]

        def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, None]:
            if self._is_value:
                values = batch.gathered(output[:, 0].float() - batch.targets / VOCAB)
                return values.square().sum() / count, None
            log_probs, _ = vocab_parallel_log_probs(output, batch.targets, group=self._groups.tp, vocab_size=VOCAB)
            return -batch.gathered(log_probs).sum() / count, None

        self.trainable.accumulate([pack(mine, sequences, prompts, self._device, self._groups.cp)], loss)

    def step(self, number: int) -> None:
        self.accumulate(number)
        if self.trainable is not None:
            self.trainable.step()

    def poison(self) -> None:
        """Nothing of what is there may be left after a change, in the padding neither."""
        if self.trainable is not None:
            for tensors in self.trainable.state().values():
                for tensor in tensors.values():
                    tensor.fill_(7)
            for parameter in self.trainable.model.parameters():
                parameter.data.fill_(7)

    def snapshot(self, *, with_gradients: bool = False) -> Snapshot:
        """Everything that this rank holds, as megatron-core records it."""
        found: Snapshot = {}
        if self.trainable is None:
            return found
        for name, parameter in logical_parameters(self.trainable.model).items():
            found["weight", name] = 0, parameter.data
        names = {id(parameter): name for name, parameter in logical_parameters(self.trainable.model).items()}
        (optimizer,) = self.trainable._optimizer.chained_optimizers
        inner = optimizer.optimizer
        if isinstance(optimizer, DistributedOptimizer):
            for parameter, (group, place) in optimizer.model_param_group_index_map.items():
                main = inner.param_groups[group]["params"][place]
                ranges = optimizer._get_model_param_range_map(parameter)
                start, world = ranges["param"].start, ranges["gbuf_world"]
                # Each virtual pipeline chunk has its own.
                buffer = optimizer.buffers[optimizer.model_param_gbuf_map[parameter][0]]
                self._keep(found, names[id(parameter)], start, parameter, main, inner.state[main])
                found["gradient", names[id(parameter)]] = start, buffer.grad_data[world.start : world.end]
        else:
            for parameter in self.trainable.model.parameters():
                main = getattr(parameter, "main_param", parameter)
                self._keep(found, names[id(parameter)], 0, parameter, main, inner.state[main])
                found["gradient", names[id(parameter)]] = 0, parameter.main_grad
        return {
            key: (start, values.detach().float().flatten().clone().numpy())
            for key, (start, values) in found.items()
            if with_gradients or key[0] != "gradient"
        }

    def _keep(self, found: Snapshot, name: str, start: int, parameter: Any, main: Any, state: dict) -> None:
        for kind in ("exp_avg", "exp_avg_sq", "step"):
            found[kind, name] = start if kind != "step" else 0, state[kind]
        if parameter.dtype != torch.float32:
            assert main.dtype == torch.float32
            found["master", name] = start, main


def run_case(world: World, each: Case) -> dict[str, Snapshot]:
    """What this rank holds at each point."""
    model, found = each.model, {}
    spec, source = describe(world, model), Run(world, model, each.source, seed=1)
    for number in range(2):
        source.step(number)
    found["source"] = source.snapshot()
    if source.trainable is not None:
        source.trainable.set_learning_rate(2e-3)

    target, back = Run(world, model, each.target, seed=2), Run(world, model, each.source, seed=3)
    if world.rank not in participants(source.mesh, target.mesh):
        return {}
    for run in (target, back):
        run.poison()
    stats = regroup(world, spec, source.training, target.training)
    assert all(each.received_bytes == each.limit_bytes for each in stats.values()), stats
    assert list(stats) == ["weight", "exp_avg", "exp_avg_sq", *(["master"] if model == "bf16" else [])]
    found["target"] = target.snapshot()
    regroup(world, spec, target.training, back.training)
    found["back"] = back.snapshot()
    assert_equal(found["source"], source.snapshot())

    for name, run in (("source", source), ("target", target), ("back", back)):
        run.accumulate(2)
        found[f"{name} accumulated"] = run.snapshot(with_gradients=True)
    late = Run(world, model, each.target, seed=4)
    late.poison()
    assert "gradient" in regroup(world, spec, source.training, late.training, with_gradients=True)
    found["late accumulated"] = late.snapshot(with_gradients=True)
    for name, run in (("source", source), ("target", target), ("back", back), ("late", late)):
        if run.trainable is not None:
            run.trainable.step()
        found[f"{name} stepped"] = run.snapshot()
    return found


def run_cases(world: World, cases: list[Case]) -> list[dict[str, Snapshot]]:
    meshes = [mesh_of(world, side) for each in cases for side in (each.source, each.target)]
    sets = [participants(*pair) for pair in zip(meshes[::2], meshes[1::2], strict=True)]
    world.make_groups([*rank_sets(meshes, world.size), *sets])
    return [run_case(world, each) for each in cases]


def assert_equal(one: Snapshot, other: Snapshot) -> None:
    assert one.keys() == other.keys()
    for key, (start, values) in one.items():
        assert start == other[key][0], key
        np.testing.assert_array_equal(values, other[key][1], err_msg=str(key))


def whole(spec: ModelSpec, side: Side, ranks: list[Snapshot]) -> dict[tuple[str, str], np.ndarray]:
    """Whole tensors from what the ranks of a mesh hold: equal wherever several hold the same, with nothing left out."""
    layout = ParallelLayout.parse(side.layout)
    grid = np.array(side.ranks).reshape(layout.pp, layout.dp * layout.cp, layout.tp)
    tensors = {tensor.name: tensor for tensor in spec.tensors}
    found: dict[tuple[str, str], np.ndarray] = {}
    for stage in range(layout.pp):
        keys = {key for rank in grid[stage].flat for key in ranks[rank]}
        for kind, name in keys:
            columns = []
            for tp in range(layout.tp):
                held = [ranks[rank][kind, name] for rank in grid[stage, :, tp] if (kind, name) in ranks[rank]]
                if kind == "step":
                    columns.append(held[0][1])
                    continue
                size = local_size(tensors[name], layout.tp)
                column = np.full(size, np.nan, dtype=np.float32)
                for start, values in held:
                    known = column[start : start + len(values)]
                    assert ((known == values) | np.isnan(known)).all(), f"{kind} of {name} differs between replicas"
                    column[start : start + len(values)] = values
                columns.append(column)
            joined = columns[0] if kind == "step" else join(tensors[name], columns)
            assert not np.isnan(joined).any(), f"{kind} of {name} is held in part"
            np.testing.assert_array_equal(joined, found.setdefault((kind, name), joined), err_msg=f"{kind} of {name}")
    return found


def local_size(tensor: TensorSpec, tp: int) -> int:
    if tensor.tp_dim is None:
        return int(np.prod(tensor.shape))
    unit = tp * (tensor.padded_to or 1)
    size = tensor.shape[tensor.tp_dim]
    return int(np.prod(tensor.shape)) // size * (-(-size // unit) * unit) // tp


def join(tensor: TensorSpec, columns: list[np.ndarray]) -> np.ndarray:
    if tensor.tp_dim is None:
        for column in columns:
            np.testing.assert_array_equal(column, columns[0], err_msg=tensor.name)
        return columns[0].reshape(tensor.shape)
    shape = list(tensor.shape)
    shape[tensor.tp_dim] = -1
    joined = np.concatenate([column.reshape(shape) for column in columns], axis=tensor.tp_dim)
    size = tensor.shape[tensor.tp_dim]
    padding = np.take(joined, range(size, joined.shape[tensor.tp_dim]), axis=tensor.tp_dim)
    assert (padding == 0).all(), f"padding of {tensor.name}"
    return np.take(joined, range(size), axis=tensor.tp_dim)


def describe_all(world: World) -> dict[str, ModelSpec]:
    world.make_groups([(0,)])
    return {model: describe(world, model) for model in MODELS}


@pytest.fixture(scope="module")
def specs() -> dict[str, ModelSpec]:
    return run_ranks(describe_all, 1)[0]


@pytest.fixture(scope="module", params=[0, 1], ids=["a node", "two nodes"])
def found(request: pytest.FixtureRequest) -> list[tuple[Case, list[dict[str, Snapshot]]]]:
    """Every other case and what each rank found in it: with all ranks on one node, and the others with two on each."""
    cases = CASES[request.param :: 2]
    by_rank = run_ranks(run_cases, 4, cases, ranks_per_node=(4, 2)[request.param])
    return list(zip(cases, zip(*by_rank, strict=True), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES) // 2))
def test_training_goes_on_in_another_layout(number: int, specs: Any, found: Any) -> None:
    each, ranks = found[number]
    spec = specs[each.model]

    def tensors(point: str) -> dict[tuple[str, str], np.ndarray]:
        side = each.target if point.split()[0] in ("target", "late") else each.source
        return whole(spec, side, [mine.get(point, {}) for mine in ranks])

    kinds = {"weight", "exp_avg", "exp_avg_sq", "step"} | ({"master"} if each.model == "bf16" else set())
    before = tensors("source")
    assert before.keys() == {(kind, tensor.name) for kind in kinds for tensor in spec.tensors}
    assert all(before["step", tensor.name] == 2 for tensor in spec.tensors)
    assert all((before["exp_avg_sq", tensor.name] != 0).any() for tensor in spec.tensors)
    for point, other in (("target", "source"), ("late accumulated", "source accumulated")):
        there, here = tensors(point), tensors(other)
        assert there.keys() == here.keys()
        for key, values in here.items():
            np.testing.assert_array_equal(there[key], values, err_msg=f"{point}: {key}")
    for point in ("", " accumulated", " stepped"):
        for mine in ranks:
            if mine:
                assert_equal(mine[f"back{point}"], mine[f"source{point}"])
    stepped = tensors("source stepped")
    for point in ("target", "late"):
        for key, values in tensors(f"{point} stepped").items():
            # In another layout bf16 rounds otherwise, but not the step itself, from the same gradients.
            if each.model == "bf16" and (point == "target" or key[0] == "weight"):
                continue
            moved = np.linalg.norm(stepped[key] - before[key])
            distance = np.linalg.norm(values - stepped[key])
            assert moved > 0, key
            # Of a bias, which began as zeros, rounding decides a whole step where the gradient is about zero.
            limit = 1e-4 if key[1].endswith(".bias") else 2e-5
            assert distance <= limit * np.linalg.norm(stepped[key]), (point, key)
            assert key[0] not in ("weight", "master") or distance <= 0.02 * moved, (point, key, distance / moved)


@pytest.mark.slow
def test_the_learning_rate_goes_along(found: Any) -> None:
    """It was doubled before the change: of weights that go steadily one way, the third step is larger than a rate."""
    for mine in found[0][1]:
        rates = [
            np.abs(mine["target stepped"][key][1] - values).max()
            for key, (_, values) in mine["target"].items()
            if key[0] == "weight"
        ]
        assert 1.2e-3 < max(rates) < 3e-3, rates


def check_all(world: World) -> None:
    """Make an optimizer in every layout, and hold its ranges against the arithmetic."""
    sides = [
        (model, Side(layout=str(layout), ranks=tuple(range(world.size)), distributed=distributed))
        for model in MODELS
        for layout in layouts_of(world.size, MODELS[model])
        for distributed in ((True, False) if world.size == 2 else (True,))
    ]
    world.make_groups(rank_sets([mesh_of(world, side) for _, side in sides], world.size))
    for model, side in sides:
        run, spec = Run(world, model, side, seed=1), describe(world, model)
        assert trained_tensors(world, run.mesh.ranks, spec, run.trainable) == spec
        check_ranges(run.trainable, spec, run.training.state_holdings(spec), world.rank)


@pytest.mark.parametrize("size", [2, *(pytest.param(each, marks=pytest.mark.slow) for each in (4, 8))])
def test_megatron_lays_its_buffers_out_as_described(size: int) -> None:
    run_ranks(check_all, size)


def refused(world: World) -> list[str]:
    """What is said of buffers that are laid out otherwise, of a description that lacks a tensor, of unequal steps."""
    side = Side(layout="dp2", ranks=(0, 1))
    world.make_groups(rank_sets([mesh_of(world, side)], world.size))
    run, spec, messages = Run(world, "plain", side, seed=1), describe(world, "plain"), []
    for tensors, alignment in ((spec.tensors, 8), (spec.tensors[1:-1], 64)):
        described = replace(spec, tensors=tensors)
        with (
            mock.patch("hybridflow.reshard.optimizer.PARAMETER_ALIGNMENT", alignment),
            pytest.raises(ReshardError) as wrong,
        ):
            check_ranges(run.trainable, described, run.training.state_holdings(spec), world.rank)
        messages.append(str(wrong.value))
    for step, alignment in ((world.rank, 64), (0, 8 if world.rank else 64)):
        run.trainable.set_num_steps(step)
        with (
            mock.patch("hybridflow.reshard.optimizer.PARAMETER_ALIGNMENT", alignment),
            pytest.raises(ReshardError) as wrong,
        ):
            regroup(world, spec, run.training, run.training)
        messages.append(str(wrong.value))
    return messages


def test_what_does_not_fit_is_refused_on_every_rank() -> None:
    for rank, (shifted, lacking, uneven, alone) in enumerate(run_ranks(refused, 2)):
        keeps = f"dp2: rank {rank}'s optimizer keeps (nothing|elements [0-9]+ to [0-9]+) of its part of decoder.*, "
        assert re.match(keeps, shifted), shifted
        missing = ("output_layer.weight", "embedding.word_embeddings.weight")[rank]
        assert lacking.startswith(f"dp2: rank {rank}'s optimizer keeps {missing}, which"), lacking
        assert "its ranks are at steps [0, 1] with learning rates [0.001]" in uneven
        assert alone.startswith(("rank 1 cannot take part: dp2: rank 1's optimizer", "dp2: rank 1's optimizer")[rank])


def test_layers_are_ordered_as_their_parameters_are() -> None:
    """As with Transformer Engine, whose norms come with the projection behind them; what is frozen is left out."""
    names = [f"decoder.layers.{layer}.{kind}" for layer in range(2) for kind in ("norm", "proj", "qkv", "bias")]
    tensors = [
        TensorSpec(name=name, shape=(1,), dtype="fp32", tp_dim=None, place=index // 4)
        for index, name in enumerate(names)
    ]
    order = [f"decoder.layers.1.{kind}" for kind in ("proj", "norm", "qkv", "bias")]
    parameters = {name: torch.nn.Parameter(torch.zeros(1), requires_grad="bias" not in name) for name in order}
    coordinator = mock.Mock(gather=lambda mine, name: [[], mine])
    with mock.patch("hybridflow.models.regroup.logical_parameters", lambda _: parameters):
        found = trained_tensors(
            mock.Mock(coordinator=lambda ranks: coordinator),
            (0, 1),
            ModelSpec(tensors=tuple(tensors), num_layers=2),
            mock.Mock(),
        )
    assert [tensor.name for tensor in found.tensors] == [
        f"decoder.layers.{layer}.{kind}" for layer in range(2) for kind in ("proj", "norm", "qkv")
    ]
