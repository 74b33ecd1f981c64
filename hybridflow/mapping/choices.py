"""What a model can be given by the search for a layout: cuts, micro-batches, recomputation and offloading. No torch."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hybridflow.config.recipe import CRITICS, REWARDS, Recipe
from hybridflow.dataflow.graph import Flow, Node
from hybridflow.errors import LayoutError
from hybridflow.families.cut import check_cut
from hybridflow.families.model import ModelConfig
from hybridflow.layout.mesh import DeviceMesh, role_of
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.mapping.activations import activation_bytes, decoding_bytes
from hybridflow.mapping.estimate import kept_bytes
from hybridflow.mapping.hardware import Hardware
from hybridflow.mapping.memory import MeshMemory, cache_room, least_image_bytes, vllm_bytes, vllm_texts
from hybridflow.mapping.rl_step import (
    Texts,
    Work,
    computing_seconds,
    moving_seconds,
    nodes,
    offload_seconds,
    role_size,
)
from hybridflow.mapping.sizes import Size
from hybridflow.recipe.stages import stage_layers

_CONCURRENT = (16, 32, 64, 128, 256, 512)
"""Texts at a time that are tried, and the recipe's own number."""

_MICRO_BATCHES = (1, 2, 4)
"""Times ``model.max_context``: tokens of a micro-batch that are tried, and the recipe's own number."""

_CHUNKS = (1, 2, 4)
"""Values of vpp that are tried."""

_SHORTEST_SLICE = 2048
"""Tokens of a sequence that a context-parallel rank has at least."""

_NORMS = 8
"""Vectors as wide as the activations that a layer has at most: norms and biases, which no layout cuts."""

LEARNERS = ("actor.update", *CRITICS)


class Load(NamedTuple):
    """What models need of a rank that they share, in bytes: sums, but for the last two, of which the largest counts.

    Attributes:
        kept: From call to call, without a rollout's weights.
        idle: What of it an offloaded actor takes away while it generates.
        rollout_weights: Weights in the rollout's layout.
        shared_weights: Of the actor's weights in its own layout those that a rollout's may be views of, at most.
        updates: 1 if the actor learns here.
        generating: While responses are generated and scored.
        learning: While models learn.
    """

    kept: int
    idle: int
    rollout_weights: int
    shared_weights: int
    updates: int
    generating: int
    learning: int

    @classmethod
    def of(cls, part: MeshMemory, work: Work) -> Load:
        """Return what one model needs."""
        passing = part.passing
        if part.mesh == "actor.rollout":
            return cls(0, 0, part.weights, 0, 0, passing, 0)
        away = part.gradients + part.optimizer if part.gradients else part.weights
        away *= work.is_offloaded
        if part.mesh == "actor.update":
            return cls(part.kept, away, 0, part.weights, 1, 0, passing)
        passing += away
        is_scorer = part.mesh in REWARDS
        return cls(part.kept - away, 0, 0, 0, 0, passing if is_scorer else 0, 0 if is_scorer else passing)

    def __add__(self, other: Load) -> Load:  # type: ignore[override]
        kept, idle, rollout, shared, updates = map(operator.add, self[:5], other[:5])
        generating, learning = max(self.generating, other.generating), max(self.learning, other.learning)
        return Load(kept, idle, rollout, shared, updates, generating, learning)

    @property
    def peak(self) -> int:
        """Return what they need at least, if the rollout has all the weights that it can from the update."""
        own = max(0, self.rollout_weights - self.shared_weights)
        staying = 0 if self.updates else self.rollout_weights
        return max(self.kept - self.idle + own + self.generating, self.kept + staying + self.learning)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way in which a model can work on a number of ranks.

    Attributes:
        mesh: Of the model.
        work: The way.
        seconds: Of each of its calls, by node.
        memory: On its first and on its last rank, as if a rollout shared no weights with the update.
        loads: What that comes to.
    """

    mesh: str
    work: Work
    seconds: Mapping[str, float]
    memory: tuple[MeshMemory, MeshMemory]
    loads: tuple[Load, Load]

    @functools.cached_property
    def total(self) -> float:
        """Return the seconds of all its calls."""
        return sum(self.seconds.values())


def shared_share(size: Size, update: ParallelLayout, rollout: ParallelLayout) -> float:
    """Return the largest share of the update's weights on a rank that may serve as the rollout's too.

    That needs equal slices: of matrices equal tp, of experts equal etp and an expert that the rank has in both layouts.
    """
    of_dense = float(update.tp == rollout.tp)
    of_experts = min(1.0, update.ep / rollout.ep) if update.expert_tp == rollout.expert_tp else 0.0
    whole = size.whole_weights + _NORMS * size.model.hidden_size
    dense, experts = size.layer_weights - size.whole_weights, size.expert_weights / (update.ep * update.expert_tp)
    if size.model.num_dense_layers:
        # Stages differ: one may have layers of one kind alone.
        return max(of_dense, of_experts, whole / (whole + dense / update.tp))
    if of_dense > of_experts:
        layers = size.model.num_layers // update.pp if not isinstance(update.layers, tuple) else min(update.layers)
        dense += (size.table_weights + size.output_weights) / layers
    dense /= update.tp
    return (whole + of_dense * dense + of_experts * experts) / (whole + dense + experts)


class Choices:
    """The ways in which each model of a recipe can work, by the number of its ranks, if it fits on them alone."""

    def __init__(
        self,
        recipe: Recipe,
        flow: Flow,
        hardware: Hardware,
        texts: Texts,
        *,
        ranks_per_node: int,
        memory_bytes: float,
        allows: Callable[[str, ParallelLayout], bool],
    ) -> None:
        self._recipe, self._hardware, self._texts, self._allows = recipe, hardware, texts, allows
        self._per_node, self._memory_bytes = ranks_per_node, memory_bytes
        self._nodes: dict[str, list[tuple[Node, bool]]] = {}
        self._sizes: dict[str, Size] = {}
        for node, is_update in nodes(flow):
            if (size := role_size(recipe, node)) is not None:
                self._nodes.setdefault(node.mesh, []).append((node, is_update))
                self._sizes[node.mesh] = size
        self.image_bytes = least_image_bytes(recipe, self._nodes)
        own, context = recipe.trainer.micro_batch_tokens, recipe.model.max_context
        self.micro_batches = tuple(sorted({own, *(times * context for times in _MICRO_BATCHES)}))
        self.concurrent = tuple(sorted({*_CONCURRENT, recipe.rollout.max_concurrent}))
        self._found: dict[tuple[str, int, int], tuple[Choice, ...]] = {}
        self._seconds: dict[tuple[object, ...], float] = {}
        self._layers: dict[tuple[str, int, str], tuple[int, ...] | None] = {}

    @property
    def meshes(self) -> tuple[str, ...]:
        """Return the meshes that have a model, the actor's first."""
        return tuple(sorted(self._nodes, key=lambda name: (name != "actor.update", name != "actor.rollout", name)))

    def size(self, mesh: str) -> Size:
        """Return the sizes of a mesh's model."""
        return self._sizes[mesh]

    def of(self, mesh: str, num_ranks: int, micro_batch_tokens: int) -> tuple[Choice, ...]:
        """Return the ways that no other is better than, in time and memory, the fastest first."""
        key = (mesh, num_ranks, 0 if mesh == "actor.rollout" else micro_batch_tokens)
        if key not in self._found:
            # A vision tower is beside the model however it is cut.
            fits = self.image_bytes <= self._memory_bytes
            self._found[key] = tuple(self._best(*key)) if fits else ()
        return self._found[key]

    def _best(self, mesh: str, num_ranks: int, micro_batch_tokens: int) -> Iterable[Choice]:
        if mesh not in ("actor.update", "actor.rollout"):
            return _undominated(self._computing(mesh, num_ranks, micro_batch_tokens))
        is_rollout = mesh == "actor.rollout"
        found = self._generating(num_ranks) if is_rollout else self._computing(mesh, num_ranks, micro_batch_tokens)
        # Weights are resharded between the two layouts: how, is not known for one alone.
        cuts: dict[object, list[Choice]] = {}
        for choice in found:
            layout = choice.work.layout
            cuts.setdefault((layout.tp, layout.pp, layout.ep, layout.etp), []).append(choice)
        kept = itertools.chain.from_iterable(map(_undominated, cuts.values()))
        return sorted(kept, key=lambda choice: choice.total)

    def _generating(self, num_ranks: int) -> Iterator[Choice]:
        ((node, _),), size = self._nodes["actor.rollout"], self._sizes["actor.rollout"]
        model = self._recipe.sized_model_of("actor.rollout")
        tokens, responses = self._texts.mean, len(self._texts.responses)
        for layout in _rollout_layouts(model, num_ranks, self._per_node):
            if not self._allows("actor.rollout", layout):
                continue
            mesh = _mesh("actor.rollout", layout)
            keys, state = tokens * size.cached_bytes(layout.tp), size.state_bytes(layout.tp)
            # States get no more than half of the cache.
            a_text = state + max(keys, state)
            weights = int(kept_bytes(size, layout)["first"]["weights"])
            most, held = -(-responses // layout.dp), self._texts_held(mesh, a_text)
            for concurrent in (max(1, int(min(slots, held))) for slots in self.concurrent):
                work = Work(layout=layout, micro_batch_tokens=0, concurrent=concurrent)
                if self._is_vllm:
                    share = vllm_bytes(self._recipe, self._hardware.memory_bytes)
                    kept = MeshMemory(mesh=mesh.name, weights=weights, cache=share)
                else:
                    cache = min(concurrent, most) * a_text
                    kept = MeshMemory(
                        mesh=mesh.name,
                        weights=weights,
                        cache=cache,
                        room=cache_room(self._recipe, cache),
                        activations=decoding_bytes(self._recipe, model, mesh, 0, concurrent),
                    )
                if (choice := self._choice(mesh.name, work, (kept, kept), [(node, False)])) is not None:
                    yield choice
                if concurrent >= min(most, held):
                    break

    @property
    def _is_vllm(self) -> bool:
        """Return whether vLLM generates on GPUs, of which it takes a share."""
        return self._recipe.rollout.engine.kind == "vllm" and not self._hardware.is_cpu

    def _texts_held(self, mesh: DeviceMesh, text_bytes: int) -> float:
        """Return how many texts a cache of fixed size holds, however many slots there are."""
        if self._is_vllm:
            return vllm_texts(self._recipe, mesh, self._hardware.memory_bytes, self._texts.mean)
        given = self._recipe.rollout.cache_memory
        return given // text_bytes if given >= 1 else math.inf

    def _computing(self, mesh: str, num_ranks: int, micro_batch_tokens: int) -> Iterator[Choice]:
        size, calls = self._sizes[mesh], self._nodes[mesh]
        role, learns = role_of(mesh), mesh in LEARNERS
        model = self._recipe.sized_model_of(role)
        for recompute in ("none", "full") if learns else ("none",):
            recipe = _changed(self._recipe, role, micro_batch_tokens, recompute)
            for layout in self._layouts(role, model, num_ranks, recompute):
                # Chunks shorten the wait for backward passes.
                if (layout.vpp > 1 and not learns) or not self._allows(mesh, layout):
                    continue
                placed, kept = _mesh(mesh, layout), kept_bytes(size, layout)
                memory = []
                for rank, stage in ((0, kept["first"]), (num_ranks - 1, kept.get("last", kept["first"]))):
                    memory.append(
                        MeshMemory(
                            mesh=mesh,
                            weights=int(stage["weights"]),
                            gradients=int(stage["gradients"]) if learns else 0,
                            optimizer=int(stage["optimizer"]) if learns else 0,
                            activations=activation_bytes(
                                recipe, model, placed, rank, has_value_head=size.has_value_head
                            ),
                        )
                    )
                for is_offloaded in (False, True):
                    work = Work(
                        layout=layout,
                        micro_batch_tokens=micro_batch_tokens,
                        recompute=recompute,
                        is_offloaded=is_offloaded,
                    )
                    if (choice := self._choice(mesh, work, (memory[0], memory[1]), calls)) is not None:
                        yield choice

    def _choice(
        self, mesh: str, work: Work, memory: tuple[MeshMemory, MeshMemory], calls: Iterable[tuple[Node, bool]]
    ) -> Choice | None:
        """Return the choice, or None if it does not fit: those are never timed, which takes longest."""
        seconds, size = {}, self._sizes[mesh]
        loads = Load.of(memory[0], work), Load.of(memory[1], work)
        if max(self.image_bytes + loads[0].peak, loads[1].peak) > self._memory_bytes:
            return None
        for node, is_update in calls:
            moving = moving_seconds(node, size, work, self._hardware, is_update=is_update)
            seconds[node.name] = self._computing_seconds(node, size, work, is_update=is_update) + moving
        if mesh == "actor.update":
            seconds["offload"] = offload_seconds(size, work, self._hardware)
        return Choice(mesh=mesh, work=work, seconds=seconds, memory=memory, loads=loads)

    def _computing_seconds(self, node: Node, size: Size, work: Work, *, is_update: bool) -> float:
        """Return ``computing_seconds``, the same for models of equal size: a search asks often."""
        recompute, is_sampling = work.recompute if is_update else "none", bool(node.source)
        key = (size, work.layout, work.micro_batch_tokens, work.concurrent, recompute, is_update, is_sampling)
        if key not in self._seconds:
            self._seconds[key] = computing_seconds(
                *(self._recipe, size, work, self._hardware, self._texts), is_update=is_update, is_sampling=is_sampling
            )
        return self._seconds[key]

    def _layouts(self, role: str, model: ModelConfig, num_ranks: int, recompute: str) -> Iterator[ParallelLayout]:
        for layout in _update_layouts(model, num_ranks, self._per_node):
            if model.num_layers % (layout.pp * layout.vpp) == 0:
                yield layout
            elif layout.vpp == 1:
                yield replace(layout, layers=self._uneven(role, layout.pp, recompute))

    def _uneven(self, role: str, pp: int, recompute: str) -> tuple[int, ...] | None:
        key = (role, pp, recompute)
        if key not in self._layers:
            recipe = _changed(self._recipe, role, self._recipe.trainer.micro_batch_tokens, recompute)
            self._layers[key] = stage_layers(recipe, role, ParallelLayout(pp=pp))
        return self._layers[key]


def _update_layouts(model: ModelConfig, num_ranks: int, ranks_per_node: int) -> Iterator[ParallelLayout]:
    """Yield the layouts in which a model can learn on so many ranks, with equal stages or ones yet to be settled."""
    longest = max(1, model.max_context // _SHORTEST_SLICE)
    for tp, pp in itertools.product(_divisors(ranks_per_node), _divisors(num_ranks)):
        is_even = model.num_layers % pp == 0
        if num_ranks % (tp * pp) or pp > model.num_layers or not (is_even or pp & (pp - 1) == 0):
            continue
        for cp in (size for size in (1, 2, 4, 8) if size <= longest and num_ranks // (tp * pp) % size == 0):
            dp = num_ranks // (tp * pp * cp)
            chunks = _CHUNKS if pp > 1 else (1,)
            for vpp, (ep, etp) in itertools.product(chunks, _expert_cuts(model, tp, cp, dp)):
                if vpp > 1 and model.num_layers % (pp * vpp):
                    continue
                layout = ParallelLayout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, etp=etp, vpp=vpp)
                stages = replace(layout, pp=1, dp=dp * pp, vpp=1)
                if _fits(model, stages):
                    yield layout


def _rollout_layouts(model: ModelConfig, num_ranks: int, ranks_per_node: int) -> Iterator[ParallelLayout]:
    for tp in _divisors(ranks_per_node):
        if num_ranks % tp == 0:
            for ep, etp in _expert_cuts(model, tp, 1, num_ranks // tp):
                layout = ParallelLayout(tp=tp, dp=num_ranks // tp, ep=ep, etp=etp)
                if _fits(model, layout):
                    yield layout


def _expert_cuts(model: ModelConfig, tp: int, cp: int, dp: int) -> list[tuple[int, int | None]]:
    """Return sizes of ep and etp for a stage: the ranks that share experts are parts of a replica, or whole ones."""
    if model.num_experts is None:
        return [(1, None)]
    sizes = [size for size in _divisors(model.num_experts) if size & (size - 1) == 0]
    cuts = itertools.product(sizes, (None, 1) if tp > 1 else (None,))
    shared = [((ep, etp), ep * (tp if etp is None else etp)) for ep, etp in cuts]
    replica = tp * cp
    return [cut for cut, size in shared if replica % size == 0 or (size % replica == 0 and replica * dp % size == 0)]


def _fits(model: ModelConfig, layout: ParallelLayout) -> bool:
    try:
        check_cut(model, layout, "layout")
    except LayoutError:
        return False
    return True


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _mesh(name: str, layout: ParallelLayout) -> DeviceMesh:
    ranks = tuple(range(layout.world_size))
    return DeviceMesh(name=name, layout=layout, ranks=ranks, ranks_per_node=len(ranks))


def _changed(recipe: Recipe, role: str, micro_batch_tokens: int, recompute: str) -> Recipe:
    """Return the recipe with other micro-batches, and another recomputation of one role, if that learns."""
    changed: dict[str, Any] = {"trainer": replace(recipe.trainer, micro_batch_tokens=micro_batch_tokens)}
    if hasattr(section := getattr(recipe, role), "recompute"):
        changed[role] = replace(section, recompute=recompute, recompute_layers=None)
    return replace(recipe, **changed)


def _undominated(found: Iterable[Choice]) -> Iterator[Choice]:
    """Yield the choices than which no other is as good in each call's time and in memory, the fastest first."""
    frontier: list[tuple[float, ...]] = []
    for choice in sorted(found, key=lambda choice: choice.total):
        # What an offloaded actor keeps while it generates counts beside what it keeps otherwise.
        loads = ((*load, load.kept - load.idle) for load in choice.loads)
        mine = (*choice.seconds.values(), *itertools.chain.from_iterable(loads))
        if not any(all(map(operator.le, other, mine)) for other in frontier):
            frontier.append(mine)
            yield choice
