"""The time of a recipe's whole training step on described hardware: when each call begins, and how long it takes.

No torch. Calls of disjoint ranks run side by side, as the dataflow graph and the meshes allow.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

from hybridflow.config.recipe import FROZEN, REWARDS, Recipe
from hybridflow.config.types import Recompute
from hybridflow.dataflow.graph import Flow, Node, Repeat
from hybridflow.errors import ConfigError
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.mapping.estimate import (
    TrainStep,
    decode_seconds,
    forward_seconds,
    most_bytes,
    prefill_seconds,
    train_seconds,
)
from hybridflow.mapping.hardware import Hardware
from hybridflow.mapping.memory import held_texts
from hybridflow.mapping.reshard_time import reshard_seconds
from hybridflow.mapping.sizes import Size
from hybridflow.observe.phases import phase_of
from hybridflow.recipe.meshes import SAMPLING_MESHES
from hybridflow.reshard.spec import ITEM_BYTES
from hybridflow.rollout.blocks import STEP_TOKENS

_SPREAD = 1.0
"""Standard deviation of the logarithm of response lengths where they are not known.

With it the longest of 2,048 responses is about 20 times as long as the mean, if the limit allows that.
"""


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
class Work:
    """How a model works.

    Attributes:
        layout: Its layout.
        micro_batch_tokens: Tokens of each micro-batch.
        recompute: What its backward pass computes anew.
        recompute_layers: With ``full`` so many of a stage's layers; None: all.
        is_offloaded: Whether its optimizer, or a frozen model, is in host memory while it is not in use.
        concurrent: Texts that a replica generates at a time.
    """

    layout: ParallelLayout
    micro_batch_tokens: int
    recompute: Recompute = "none"
    recompute_layers: int | None = None
    is_offloaded: bool = False
    concurrent: int = 1


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The texts of a step.

    Attributes:
        prompt: Tokens of each prompt.
        responses: Tokens of each response of the step, ascending.
    """

    prompt: int
    responses: tuple[int, ...]

    @property
    def mean_response(self) -> float:
        """Return the tokens of a response, on average."""
        return sum(self.responses) / len(self.responses)

    @property
    def mean(self) -> int:
        """Return the tokens of a prompt and its response, on average, in whole tokens."""
        return round(self.prompt + self.mean_response)


def spread_lengths(number: int, mean: float, longest: int) -> tuple[int, ...]:
    """Return response lengths with this mean: log-normal, and none above ``longest``.

    Raises:
        ConfigError: The mean is longer than the longest.
    """
    if not 1 <= mean <= longest:
        raise ConfigError(f"--response {mean:g}: expected 1 to rollout.max_new_tokens={longest}; raise that key, too")
    normal = NormalDist()
    shape = [math.exp(_SPREAD * normal.inv_cdf((index + 0.5) / number)) for index in range(number)]
    low, high = 0.0, float(longest) / min(shape)
    for _ in range(60):
        scale = (low + high) / 2
        found = sum(max(1.0, min(longest, scale * each)) for each in shape) / number
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
    check_estimated(recipe, hardware)
    rollout = meshes["actor.rollout"].layout
    if rollout.pp > 1 and recipe.generates:
        raise ConfigError(f"actor.rollout pp={rollout.pp}: not estimated yet; set it to 1")
    seconds: dict[str, float] = {}
    for node, is_update in nodes(flow):
        if (size := role_size(recipe, node)) is not None:
            work = work_of(recipe, meshes[node.mesh])
            if node.source:
                held = held_texts(recipe, meshes, hardware, texts.mean)
                work = replace(work, concurrent=max(1, min(work.concurrent, held)))
            seconds[node.name] = node_seconds(recipe, node, size, work, hardware, texts, is_update=is_update)
            if node.source:
                update = meshes["actor.update"]
                seconds["offload"] = offload_seconds(size, work_of(recipe, update), hardware)
                seconds["reshard"] = reshard_seconds(recipe, update, meshes[node.mesh], hardware)
    return timed(flow, busy_ranks({name: mesh.ranks for name, mesh in meshes.items()}, hardware), seconds)


def busy_ranks(ranks: Mapping[str, Collection[int]], hardware: Hardware) -> Mapping[str, Collection[int]]:
    """Return which ranks each mesh keeps busy: where ranks share cores, all of them, so that calls come in turn."""
    if hardware.crowding == 1:
        return ranks
    return dict.fromkeys(ranks, tuple(set().union(*ranks.values())))


def steps_ahead(max_staleness: int, hardware: Hardware) -> int:
    """Return by how many steps samples are made ahead to save time: by none where ranks share cores."""
    return max_staleness if hardware.crowding == 1 else 0


def timed(flow: Flow, ranks: Mapping[str, Collection[int]], seconds: Mapping[str, float]) -> tuple[Call, ...]:
    """Return when each call of a step begins: its ranks are free, and what it reads is there.

    Args:
        flow: Of the step.
        ranks: Of each mesh, or numbers of sets of ranks that work as one.
        seconds: Of each node; of ``offload`` and ``reshard``, which come before the actor generates.
    """
    turns = turns_of(flow, ranks)
    return tuple(
        Call(name=turn.name, mesh=turn.mesh, start=start, seconds=end - start)
        for turn, (start, end) in zip(turns, spans(turns, seconds), strict=True)
    )


def phase_seconds(calls: Sequence[Call], ranks: Mapping[str, Collection[int]]) -> dict[str, float]:
    """Return the seconds of each phase, of the rank that takes longest, as a run's metrics have them."""
    shares: dict[str, dict[int, float]] = {}
    for call in calls:
        share = shares.setdefault(phase_of("call", call.name), {})
        for rank in ranks[call.mesh]:
            share[rank] = share.get(rank, 0.0) + call.seconds
    return {phase: max(share.values()) for phase, share in shares.items()}


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A call's place in a step.

    Attributes:
        name: Of the node, or ``offload`` or ``reshard``.
        mesh: Whose ranks make it.
        ranks: Those that are busy with it.
        after: Earlier calls that write what it reads, by their place.
    """

    name: str
    mesh: str
    ranks: tuple[int, ...]
    after: tuple[int, ...]


def turns_of(flow: Flow, ranks: Mapping[str, Collection[int]]) -> tuple[Turn, ...]:
    """Return the calls of a step in order; ``ranks`` as for ``timed``."""
    writers: dict[str, int] = {}
    turns: list[Turn] = []

    def add(name: str, mesh: str, taken: Collection[int], reads: Iterable[str] = ()) -> None:
        after = sorted({writers[column] for column in reads if column in writers})
        turns.append(Turn(name=name, mesh=mesh, ranks=tuple(taken), after=tuple(after)))

    for node, _ in nodes(flow):
        if (node.role, node.call) == ("actor", "sample"):
            update = ranks["actor.update"]
            add("offload", "actor.update", update)
            add("reshard", node.mesh, {*update, *ranks[node.mesh]})
        add(node.name, node.mesh, ranks[node.mesh], node.reads)
        writers.update(dict.fromkeys(node.writes, len(turns) - 1))
    return tuple(turns)


def spans(turns: Sequence[Turn], seconds: Mapping[str, float]) -> list[tuple[float, float]]:
    """Return when each call begins and ends, in seconds; one without seconds takes no time."""
    free: dict[int, float] = {}
    found: list[tuple[float, float]] = []
    for turn in turns:
        start = 0.0
        for rank in turn.ranks:
            start = max(start, free.get(rank, 0.0))
        for earlier in turn.after:
            start = max(start, found[earlier][1])
        end = start + seconds.get(turn.name, 0.0)
        for rank in turn.ranks:
            free[rank] = end
        found.append((start, end))
    return found


def step_seconds(calls: Sequence[Turn | Call], times: Sequence[tuple[float, float]], *, max_staleness: int) -> float:
    """Return the seconds from step to step: with samples made ahead, the longer of sampling and learning."""
    if max_staleness == 0:
        return max(end for _, end in times)
    longest = 0.0
    for is_sampling in (True, False):
        mine = [time for call, time in zip(calls, times, strict=True) if (call.mesh in SAMPLING_MESHES) == is_sampling]
        half = [(start, end) for start, end in mine if start < end]
        if half:
            longest = max(longest, max(end for _, end in half) - min(start for start, _ in half))
    return longest


def total_seconds(calls: Sequence[Call], *, max_staleness: int) -> float:
    """Return ``step_seconds`` of calls that are known to the end."""
    return step_seconds(calls, [(call.start, call.end) for call in calls], max_staleness=max_staleness)


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
    """Return the seconds in which the slowest replica generates its share of the responses, long and short ones alike.

    It has the longest response: until that ends, the step goes on.
    Each response takes a slot until it ends; the next one waits for the slot. A prompt is read once for its group, and
    as many at a time as the engine takes.

    Args:
        size: The model.
        hardware: Where.
        layout: Of the rollout.
        texts: Of all replicas.
        num_replicas: Replicas.
        group_size: Responses to a prompt.
        concurrent: Slots of a replica.
    """
    waiting = _shuffled(texts.responses[::-num_replicas])
    prompts = math.ceil(len(waiting) / group_size)
    at_once = min(prompts, concurrent, max(1, STEP_TOKENS // texts.prompt))
    seconds = prompts / at_once * prefill_seconds(size, hardware, layout, texts.prompt, at_once)
    # In tokens since the first: when each response ends, and when it began.
    running = [(length, 0) for length in waiting[:concurrent]]
    heapq.heapify(running)
    rest, now, begun = iter(waiting[concurrent:]), 0, 0
    a_token: dict[int, tuple[float, float]] = {}
    while running:
        until, number = running[0][0], len(running)
        if until > now:
            if number not in a_token:
                # Keys and values alone grow with the context, and in proportion to it.
                first, other = (decode_seconds(size, hardware, layout, number, context) for context in (0, 1))
                grows = other["attention"] - first["attention"]
                a_token[number] = sum(first.values()) + hardware.engine_launch, grows
            context = texts.prompt + (now + until) / 2 - begun / number
            seconds += (until - now) * (a_token[number][0] + a_token[number][1] * context)
        now = until
        begun -= heapq.heappop(running)[1]
        for length in itertools.islice(rest, 1):
            heapq.heappush(running, (now + length, now))
            begun += now
    return seconds


def check_estimated(recipe: Recipe, hardware: Hardware) -> None:
    """Refuse a recipe that has what is not estimated, whatever its layouts. Raises ConfigError."""
    rollout = recipe.rollout
    refused = {
        "actor.lora": (recipe.actor.lora is not None, "actor.lora=null"),
        f"actor.fp8={recipe.actor.fp8}": (recipe.actor.fp8 != "none", "actor.fp8=none"),
        "rollout.environment": (rollout.environment is not None, "rollout.environment=null"),
        f"rollout.engine.kind={rollout.engine.kind}": (rollout.engine.is_server, "rollout.engine.kind=megatron"),
        f"model.implementation={recipe.model.implementation}": (
            recipe.model.implementation != "megatron",
            "model.implementation=megatron",
        ),
    }
    for name, (is_there, remedy) in refused.items():
        if is_there:
            raise ConfigError(f"{name}: not estimated yet; estimate the recipe without it, by {remedy}")
    if recipe.model.dtype != hardware.dtype:
        raise ConfigError(
            f"model.dtype={recipe.model.dtype}: this hardware is described for {hardware.dtype}; change the dtype, or "
            "name other hardware, such as --hardware measured, which `hybridflow doctor --measure` writes"
        )


def nodes(flow: Flow, *, is_update: bool = False) -> Iterable[tuple[Node, bool]]:
    """Yield the nodes in order, and whether each learns: a model's updates are repeated over its mini-batches."""
    for element in flow.elements:
        if isinstance(element, Repeat):
            yield from nodes(element.body, is_update=element.decision.endswith("mini_batch"))
        else:
            yield element, is_update


def role_size(recipe: Recipe, node: Node) -> Size | None:
    """Return the sizes of the model that makes a call; None: no model does."""
    section: Any = getattr(recipe, node.role, None)
    if section is None or node.role == "advantage" or (node.role in REWARDS and section.model is None):
        return None
    model, has_value_head = recipe.sized_model_of(node.role), recipe.has_value_head(node.role)
    return Size(model=model, item_bytes=ITEM_BYTES[model.dtype], has_value_head=has_value_head)


def work_of(recipe: Recipe, mesh: DeviceMesh) -> Work:
    """Return how the recipe has a mesh's model work."""
    section: Any = getattr(recipe, mesh.role)
    return Work(
        layout=mesh.layout,
        micro_batch_tokens=recipe.trainer.micro_batch_tokens,
        recompute=getattr(section, "recompute", "none"),
        recompute_layers=getattr(section, "recompute_layers", None),
        is_offloaded=bool(getattr(section, "offload", False)),
        concurrent=recipe.rollout.max_concurrent,
    )


def node_seconds(
    recipe: Recipe, node: Node, size: Size, work: Work, hardware: Hardware, texts: Texts, *, is_update: bool
) -> float:
    """Return the seconds of a call while no others compute, all turns of a repeated one.

    Args:
        recipe: The recipe, for its batches.
        node: The call.
        size: Of its model.
        work: How the model works.
        hardware: Where.
        texts: Of the step.
        is_update: Whether the call learns.
    """
    computing = computing_seconds(
        recipe, size, work, hardware, texts, is_update=is_update, is_sampling=bool(node.source)
    )
    return computing + moving_seconds(node, size, work, hardware, is_update=is_update)


def computing_seconds(
    recipe: Recipe, size: Size, work: Work, hardware: Hardware, texts: Texts, *, is_update: bool, is_sampling: bool
) -> float:
    """Return what ``node_seconds`` does without what is moved to host memory and back.

    Recomputation matters to updates only, and ``work.concurrent`` to sampling.
    """
    share, layout = hardware.share_of_time(work.layout.world_size), work.layout
    batch = recipe.trainer.global_batch_size
    if is_sampling:
        group, slots = recipe.rollout.group_size, work.concurrent
        generated = generation_seconds(
            *(size, hardware, layout, texts), num_replicas=layout.dp, group_size=group, concurrent=slots
        )
        return share * generated
    if is_update:
        samples = recipe.trainer.samples_per_update
        updates = recipe.loss.epochs * math.ceil(batch / samples)
        return share * updates * update_seconds(size, hardware, work, texts, samples)
    return share * scoring_seconds(size, hardware, work, texts, batch)


def moving_seconds(node: Node, size: Size, work: Work, hardware: Hardware, *, is_update: bool) -> float:
    """Return the seconds in which a call brings its model's offloaded state from host memory, and back if it learns.

    The actor's is moved before it generates.
    """
    if is_update and node.role != "actor":
        return offload_seconds(size, work, hardware)
    return weight_seconds(size, work, hardware) if node.role in FROZEN else 0.0


def update_seconds(size: Size, hardware: Hardware, work: Work, texts: Texts, samples: int) -> float:
    """Return the seconds of one optimizer step with so many of the texts."""
    parts = train_seconds(size, hardware, _step(work, texts, samples))
    after = sum(parts.pop(name) for name in ("data parallel", "optimizer"))
    return sum(parts.values()) / _pass_share(size, hardware) + after


def scoring_seconds(size: Size, hardware: Hardware, work: Work, texts: Texts, samples: int) -> float:
    """Return the seconds of log-probabilities, values or rewards of so many of the texts."""
    return forward_seconds(size, hardware, _step(work, texts, samples)) / _pass_share(size, hardware)


def _pass_share(size: Size, hardware: Hardware) -> float:
    return hardware.sample_share * (1.0 if size.model.num_experts is None else hardware.mixture_share)


def offload_seconds(size: Size, work: Work, hardware: Hardware) -> float:
    """Return the seconds in which an offloaded optimizer's state goes to host memory and comes back."""
    return 2 * most_bytes(size, work.layout, "optimizer") / _host(hardware) if work.is_offloaded else 0.0


def weight_seconds(size: Size, work: Work, hardware: Hardware) -> float:
    """Return the seconds in which an offloaded frozen model's weights come from host memory, where they stay too."""
    return most_bytes(size, work.layout, "weights") / _host(hardware) if work.is_offloaded else 0.0


def _host(hardware: Hardware) -> float:
    return hardware.host_bandwidth * hardware.host_share


def _step(work: Work, texts: Texts, samples: int) -> TrainStep:
    """Return a step over samples of mean length, in as few micro-batches as the budget allows, equally large."""
    layout = work.layout
    each = math.ceil(samples / layout.dp)
    number = math.ceil(each / max(1, work.micro_batch_tokens // texts.mean))
    micro_batch = math.ceil(each / number)
    batch = layout.dp * micro_batch * number
    return TrainStep(
        layout=layout,
        sequence=texts.mean,
        batch=batch,
        micro_batch=micro_batch,
        recompute=work.recompute,
        recompute_layers=work.recompute_layers,
    )


def _shuffled(lengths: tuple[int, ...]) -> list[int]:
    """Return the lengths in a fixed order without a trend: by the fractional parts of multiples of the golden ratio."""
    order = sorted(range(len(lengths)), key=lambda index: index * 0.6180339887498949 % 1)
    return [lengths[index] for index in order]
