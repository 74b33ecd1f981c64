"""The time of a recipe's whole training step on described hardware: when each call begins, and how long it takes.

No torch. Calls of disjoint ranks run side by side, as the dataflow graph and the meshes allow.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from hybridflow.config.recipe import Recipe
from hybridflow.config.types import Recompute
from hybridflow.dataflow.graph import Flow, Node, Repeat
from hybridflow.errors import ConfigError
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.mapping.estimate import (
    Size,
    TrainStep,
    decode_seconds,
    forward_seconds,
    prefill_seconds,
    train_seconds,
)
from hybridflow.mapping.hardware import Hardware
from hybridflow.mapping.memory import with_vocabulary
from hybridflow.mapping.sizes import size_of
from hybridflow.models.shapes import model_spec, shape_of
from hybridflow.recipe.meshes import SAMPLING_MESHES
from hybridflow.reshard.holdings import WeightHoldings
from hybridflow.reshard.plan import shares_storage
from hybridflow.reshard.report import Bandwidth, report

_SPREAD = 0.6
"""Standard deviation of the logarithm of response lengths where they are not known."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a step.

    Attributes:
        name: Of the node, or ``reshard``.
        mesh: Whose ranks make it.
        start: Seconds after the step began.
        seconds: How long it takes, all its turns.
    """

    name: str
    mesh: str
    start: float
    seconds: float

    @property
    def end(self) -> float:
        """Return when it has ended, in seconds after the step began."""
        return self.start + self.seconds


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The texts of a step.

    Attributes:
        prompt: Tokens of each prompt.
        responses: Tokens of each response of the step.
    """

    prompt: int
    responses: tuple[int, ...]

    @property
    def mean(self) -> int:
        """Return the tokens of a prompt and its response, on average, in whole tokens."""
        return max(1, round(self.prompt + sum(self.responses) / len(self.responses)))


def spread_lengths(number: int, mean: float, longest: int) -> tuple[int, ...]:
    """Return response lengths with this mean: log-normal, and none above ``longest``.

    Raises:
        ConfigError: The mean is longer than the longest.
    """
    if not 1 <= mean <= longest:
        raise ConfigError(f"--response {mean:g}: expected 1 to rollout.max_new_tokens={longest}")
    normal = NormalDist()
    shape = [math.exp(_SPREAD * normal.inv_cdf((index + 0.5) / number)) for index in range(number)]
    low, high = 0.0, float(longest) / min(shape)
    for _ in range(60):
        scale = (low + high) / 2
        found = sum(min(longest, scale * each) for each in shape) / number
        low, high = (scale, high) if found < mean else (low, scale)
    return tuple(max(1, min(longest, round(high * each))) for each in shape)


def step_calls(
    recipe: Recipe, flow: Flow, meshes: Mapping[str, DeviceMesh], hardware: Hardware, texts: Texts
) -> tuple[Call, ...]:
    """Return the calls of a step in the order of the flow.

    Args:
        recipe: The recipe.
        flow: Of a step, as ``trainer.plan.training_step`` has it.
        meshes: Of its roles.
        hardware: Where.
        texts: Of the step.

    Raises:
        ConfigError: The recipe has what is not estimated.
    """
    _check(recipe, meshes)
    free: dict[int, float] = {}
    written: dict[str, float] = {}
    calls: list[Call] = []

    def add(name: str, mesh: str, ranks: Iterable[int], reads: Iterable[str], seconds: float) -> Call:
        ranks = tuple(ranks)
        known = (written[column] for column in reads if column in written)
        start = max([*(free.get(rank, 0.0) for rank in ranks), *known], default=0.0)
        calls.append(Call(name=name, mesh=mesh, start=start, seconds=seconds))
        free.update(dict.fromkeys(ranks, start + seconds))
        return calls[-1]

    for node, is_update in _nodes(flow):
        mesh = meshes[node.mesh]
        if (node.role, node.call) == ("actor", "sample"):
            source = meshes["actor.update"]
            if moved := reshard_seconds(recipe, source, mesh, hardware):
                add("reshard", node.mesh, {*source.ranks, *mesh.ranks}, (), moved)
        seconds = _seconds(recipe, node, mesh, hardware, texts, is_update=is_update)
        call = add(node.name, node.mesh, mesh.ranks, node.reads, seconds)
        written.update(dict.fromkeys(node.writes, call.end))
    return tuple(calls)


def total_seconds(recipe: Recipe, calls: Iterable[Call]) -> float:
    """Return the seconds from step to step: with samples made ahead, the longer of sampling and learning."""
    calls = tuple(calls)
    if recipe.trainer.max_staleness == 0:
        return max(call.end for call in calls)
    halves = (
        [call for call in calls if call.mesh in SAMPLING_MESHES],
        [call for call in calls if call.mesh not in SAMPLING_MESHES],
    )
    spans = [max(call.end for call in half) - min(call.start for call in half) for half in halves if half]
    return max(spans)


def generation_seconds(
    size: Size,
    hardware: Hardware,
    layout: ParallelLayout,
    texts: Texts,
    *,
    num_replicas: int,
    group_size: int,
    concurrent: int,
) -> float:
    """Return the seconds in which a replica generates its share of the responses, long and short ones alike.

    Each response takes a slot until it ends; the next one waits for the slot. A prompt is read once for its group.

    Args:
        size: The model.
        hardware: Where.
        layout: Of the rollout.
        texts: Of all replicas.
        num_replicas: Replicas.
        group_size: Responses to a prompt.
        concurrent: Slots of a replica.
    """
    waiting = _shuffled(texts.responses[::num_replicas])
    seconds = math.ceil(len(waiting) / group_size) * prefill_seconds(size, hardware, layout, texts.prompt)
    # In tokens since the first: when each response ends, and when it began.
    running = [(length, 0) for length in waiting[:concurrent]]
    heapq.heapify(running)
    rest, now, begun = iter(waiting[concurrent:]), 0, 0
    while running:
        until = running[0][0]
        if until > now:
            context = texts.prompt + (now + until) / 2 - begun / len(running)
            seconds += (until - now) * sum(decode_seconds(size, hardware, layout, len(running), context).values())
        now = until
        begun -= heapq.heappop(running)[1]
        for length in itertools.islice(rest, 1):
            heapq.heappush(running, (now + length, now))
            begun += now
    return seconds


def reshard_seconds(recipe: Recipe, source: DeviceMesh, target: DeviceMesh, hardware: Hardware) -> float:
    """Return the seconds in which the actor's weights reach the rollout's layout."""
    if shares_storage(source, target):
        return 0.0
    model = with_vocabulary(recipe, "actor.update")
    assert model.vocab_size is not None, "with_vocabulary puts it in"
    spec = model_spec(shape_of(model, model.vocab_size))
    bandwidth = Bandwidth(
        node=hardware.node_bandwidth * hardware.node_share / 1e9,
        network=hardware.network_bandwidth * hardware.network_share / 1e9,
    )
    moved = report(spec, WeightHoldings(spec, source), WeightHoldings(spec, target), bandwidth)
    return moved.time_s / recipe.actor.reshard_every


def _check(recipe: Recipe, meshes: Mapping[str, DeviceMesh]) -> None:
    rollout = meshes["actor.rollout"].layout
    refused = {
        "actor.lora": recipe.actor.lora is not None,
        "rollout.environment": recipe.rollout.environment is not None,
        f"rollout.engine.kind={recipe.rollout.engine.kind}": recipe.rollout.engine.is_server,
        f"actor.rollout pp={rollout.pp}": rollout.pp > 1 and recipe.traits.generates,
        f"model.dtype={recipe.model.dtype}": recipe.model.dtype != "bf16",
    }
    for name, is_there in refused.items():
        if is_there:
            raise ConfigError(f"{name}: not estimated yet; estimate the recipe in bf16 without it")


def _nodes(flow: Flow, *, is_update: bool = False) -> Iterable[tuple[Node, bool]]:
    """Yield the nodes in order, and whether each learns: a model's updates are repeated over its mini-batches."""
    for element in flow.elements:
        if isinstance(element, Repeat):
            yield from _nodes(element.body, is_update=element.decision.endswith("mini_batch"))
        else:
            yield element, is_update


def _seconds(
    recipe: Recipe, node: Node, mesh: DeviceMesh, hardware: Hardware, texts: Texts, *, is_update: bool
) -> float:
    """Return the seconds of a node, all turns of a repeated one."""
    section: Any = getattr(recipe, node.role, None)
    if node.role in ("advantage", "groups", "offline") or (node.role in ("reward", "cost") and section.model is None):
        return 0.0
    size = size_of(shape_of(model := with_vocabulary(recipe, node.role), model.vocab_size or 0))
    if node.source:
        return generation_seconds(
            size,
            hardware,
            mesh.layout,
            texts,
            num_replicas=mesh.layout.dp,
            group_size=recipe.rollout.group_size,
            concurrent=recipe.rollout.max_concurrent,
        )
    if not is_update:
        return forward_seconds(size, hardware, _step(recipe, mesh.layout, texts, recipe.trainer.global_batch_size))
    updates = recipe.loss.epochs * math.ceil(recipe.trainer.global_batch_size / recipe.trainer.samples_per_update)
    step = _step(recipe, mesh.layout, texts, recipe.trainer.samples_per_update, section.recompute)
    return updates * sum(train_seconds(size, hardware, step).values())


def _step(
    recipe: Recipe, layout: ParallelLayout, texts: Texts, samples: int, recompute: Recompute = "none"
) -> TrainStep:
    """Return a step over samples of mean length, in micro-batches as large as the recipe's budget."""
    each = math.ceil(samples / layout.dp)
    micro_batch = max(1, min(each, recipe.trainer.micro_batch_tokens // texts.mean))
    batch = layout.dp * micro_batch * math.ceil(each / micro_batch)
    return TrainStep(layout=layout, sequence=texts.mean, batch=batch, micro_batch=micro_batch, recompute=recompute)


def _shuffled(lengths: tuple[int, ...]) -> list[int]:
    """Return the lengths in a fixed order without a trend: by the fractional parts of multiples of the golden ratio."""
    order = sorted(range(len(lengths)), key=lambda index: index * 0.6180339887498949 % 1)
    return [lengths[index] for index in order]
