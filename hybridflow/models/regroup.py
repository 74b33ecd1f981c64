"""A model in training goes on in another layout: weights, optimizer state and gradients regrouped live."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, replace

from torch import Tensor

from hybridflow.errors import ReshardError
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.models.specs import logical_parameters
from hybridflow.models.training import Trainable
from hybridflow.models.weights import local_tensors
from hybridflow.parallel.world import World
from hybridflow.reshard.execute import Resharder, ReshardStats
from hybridflow.reshard.fsdp import state_holdings, weight_holdings
from hybridflow.reshard.holdings import Holdings
from hybridflow.reshard.optimizer import OptimizerHoldings
from hybridflow.reshard.plan import participants
from hybridflow.reshard.spec import ModelSpec, TensorSpec

_LAYER = re.compile(r"decoder\.layers\.\d+\.(.*)")


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model in training on a mesh, as all ranks of the job know it.

    Attributes:
        mesh: Where it is.
        is_distributed: Whether optimizer state is dealt to the data parallel ranks (``Optimizer.distributed``).
        trainable: This rank's part; None outside the mesh.
        bucket_size: That of its ``Trainable``.
    """

    mesh: DeviceMesh
    is_distributed: bool
    trainable: Trainable | None
    bucket_size: int | None = None

    def state_holdings(self, model: ModelSpec) -> Holdings:
        """Return where the optimizer keeps its state; ``model`` has the trained tensors in their order."""
        return state_holdings(model, self.mesh, is_distributed=self.is_distributed, bucket_size=self.bucket_size)


def regroup(
    world: World, model: ModelSpec, source: Training, target: Training, *, with_gradients: bool = False
) -> dict[str, ReshardStats]:
    """Make one model in training go on as another does: in another layout, on the same ranks, others, or some of both.

    Weights, moments, fp32 master weights, the step count and the learning rate are copied bit for bit; ``source`` is
    left as it is.

    Collective: all ranks of either mesh; ``world.make_groups`` has been called with ``plan.participants`` of the two.

    Args:
        world: The job.
        model: The description of the weights.
        source: The model as trained so far.
        target: Another ``Trainable`` of the same model; overwritten.
        with_gradients: Also copy the gradients, for a change between ``accumulate`` and ``step``.

    Returns:
        What each kind of tensor cost this rank: ``weight``, ``exp_avg``, ``exp_avg_sq``, and where there are such,
        ``master`` and ``gradient``.

    Raises:
        ReshardError: A layout cannot cut a tensor, ranks disagree about the plan or are at different steps, or
            megatron-core keeps state elsewhere than ``OptimizerHoldings`` says; on every rank, the source is intact.
        DeadlineError: A rank did not come; the target is undefined, the source intact.
    """
    ranks = participants(source.mesh, target.mesh)
    trained = trained_tensors(world, ranks, model, source.trainable or target.trainable)
    before, after = source.state_holdings(trained), target.state_holdings(trained)
    problem = None
    weights: list[dict[str, Tensor] | None] = []
    try:
        for side, holdings in ((source, before), (target, after)):
            weights.append(_weights(world, model, side))
            if side.trainable is not None:
                check_ranges(side.trainable, trained, holdings, world.rank)
    except ReshardError as error:
        problem = str(error)
    num_steps, learning_rate = _progress(world, ranks, source, problem)
    # For a single copy it does not pay to open the source's memory to the node; and it could not be freed any more.
    stats = {
        "weight": Resharder(
            world,
            model,
            weight_holdings(model, source.mesh),
            weight_holdings(model, target.mesh),
            source_tensors=weights[0],
            target_tensors=weights[1],
            transport="torch",
        ).run()
    }
    held = None if source.trainable is None else source.trainable.state()
    needed = None if target.trainable is None else target.trainable.state()
    for kind, described in _kinds(trained, with_gradients):
        stats[kind] = Resharder(
            world,
            described,
            before,
            after,
            source_tensors=None if held is None else held[kind],
            target_tensors=None if needed is None else needed[kind],
            transport="torch",
        ).run()
    if target.trainable is not None:
        target.trainable.set_num_steps(num_steps)
        target.trainable.set_learning_rate(learning_rate)
    return stats


def trained_tensors(world: World, ranks: tuple[int, ...], model: ModelSpec, trainable: Trainable | None) -> ModelSpec:
    """Return the trained tensors, those of each layer in the order of the model's own parameters.

    That is the order of optimizers' buffers, and with Transformer Engine another than the description's. No rank has
    parameters of every kind, so all tell what they have.

    Collective: ``ranks``.
    """
    parameters = {} if trainable is None else logical_parameters(trainable.model)
    mine = dict.fromkeys(_kind(name) for name, parameter in parameters.items() if parameter.requires_grad)
    told = world.coordinator(ranks).gather(list(mine), "the order of parameters")
    order = {kind: place for place, kind in enumerate(dict.fromkeys(itertools.chain.from_iterable(told)))}
    tensors: list[TensorSpec] = []
    for place, together in itertools.groupby(model.tensors, lambda tensor: tensor.place):
        found = [tensor for tensor in together if _kind(tensor.name) in order]
        tensors += sorted(found, key=lambda tensor: order[_kind(tensor.name)]) if isinstance(place, int) else found
    return replace(model, tensors=tuple(tensors))


def _kind(name: str) -> str:
    """Return a logical name without its layer."""
    match = _LAYER.fullmatch(name)
    return name if match is None else f"layer: {match[1]}"


def check_ranges(trainable: Trainable, model: ModelSpec, holdings: Holdings, rank: int) -> None:
    """Hold megatron-core's own record of what this rank steps against the arithmetic that plans rest on.

    Raises:
        ReshardError: They differ; names the first such tensor, what was found and what was expected.
    """
    found = trainable.state_ranges()
    for tensor in model.tensors:
        regions = holdings.regions(tensor, rank)
        expected = None
        if isinstance(holdings, OptimizerHoldings):
            dealt = holdings.flat_range(tensor, rank)
            expected = None if dealt is None else (dealt.start, dealt.stop)
        elif regions:
            expected = (0, sum(math.prod(region.local_shape) for region in regions))
        kept = found.pop(tensor.name, None)
        if kept != expected:
            raise ReshardError(
                f"{holdings.mesh.name}: rank {rank}'s optimizer keeps {_text(kept)} of its part of "
                f"{tensor.name}, expected {_text(expected)}; the layout of buffers is that of megatron-core 0.16.1: "
                "install that version, bring reshard/optimizer.py up to the installed one, or give the bucket_size of "
                "its Trainable"
            )
    if found:
        raise ReshardError(
            f"{holdings.mesh.name}: rank {rank}'s optimizer keeps {', '.join(sorted(found))}, which the model's "
            "description lacks; describe every tensor that is trained"
        )


def _text(kept: tuple[int, int] | None) -> str:
    return "nothing" if kept is None else f"elements {kept[0]} to {kept[1]}"


def _weights(world: World, model: ModelSpec, side: Training) -> dict[str, Tensor] | None:
    if side.trainable is None:
        return None
    return local_tensors(side.trainable.model, model, side.mesh, world.rank)


def _kinds(model: ModelSpec, with_gradients: bool) -> list[tuple[str, ModelSpec]]:
    """Return the kinds of state with the tensors that have it, all fp32."""
    every = replace(model, tensors=tuple(replace(tensor, dtype="fp32") for tensor in model.tensors))
    narrow = {tensor.name for tensor in model.tensors if tensor.dtype != "fp32"}
    masters = replace(every, tensors=tuple(tensor for tensor in every.tensors if tensor.name in narrow))
    kinds = [("exp_avg", every), ("exp_avg_sq", every)]
    kinds += [("master", masters)] if narrow else []
    return kinds + ([("gradient", every)] if with_gradients else [])


def _progress(world: World, ranks: tuple[int, ...], source: Training, problem: str | None) -> tuple[int, float]:
    """Return step count and learning rate, equal for all parameters; raises on every rank where one has a problem."""
    mine = source.trainable
    told = world.coordinator(ranks).gather(
        [problem, None if mine is None else mine.num_steps(), None if mine is None else mine.learning_rate()],
        f"{source.mesh.name}: optimizer steps",
    )
    for rank, (found, _, _) in zip(ranks, told, strict=True):
        if found is not None:
            raise ReshardError(found if rank == world.rank else f"rank {rank} cannot take part: {found}")
    steps, rates = ({each[index] for each in told if each[index] is not None} for index in (1, 2))
    if len(steps) != 1 or len(rates) != 1:
        raise ReshardError(
            f"{source.mesh.name}: its ranks are at steps {sorted(steps)} with learning rates {sorted(rates)}; "
            "regroup where all are at one step, with one rate"
        )
    return steps.pop(), rates.pop()
