"""The search for placement, layouts and memory settings with which a step of a recipe takes the least time. No torch.

Branch and bound. Bounds are never above what the step takes and needs, and each complete configuration is judged as
``plan estimate`` and ``plan job`` judge it. So what is found is the best of all, as far as these are right.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybridflow.config.recipe import REWARDS, Recipe
from hybridflow.config.rewards import RewardConfig
from hybridflow.dataflow.graph import Flow
from hybridflow.errors import HybridflowError
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.mapping.choices import LEARNERS, Choice, Choices, Load, shared_share
from hybridflow.mapping.hardware import Hardware
from hybridflow.mapping.memory import RankMemory, job_memory, rank_memory
from hybridflow.mapping.reshard_time import least_seconds, reshard_seconds
from hybridflow.mapping.rl_step import (
    Call,
    Texts,
    Turn,
    Work,
    busy_ranks,
    nodes,
    spans,
    step_seconds,
    steps_ahead,
    timed,
    turns_of,
)
from hybridflow.recipe.meshes import SAMPLING_MESHES, role_meshes

BLOCKS = 16
"""Most parts of the job's ranks that a set of models may have or not."""

_ALIKE = 0.001
"""Share of the time by which a configuration must be faster than the fastest to be looked for."""

_ROUGH = 0.03
"""The same for the others that are shown, compared with the best of their own kind."""

_MOST_REFUSED = 50
"""Configurations of one way to share ranks, one after the other, that are no recipes; then none of them is tried."""

_MOST_REFUSED_WAYS = 8
"""As many times more, of all ways, after which none is expected to be a recipe."""


@dataclass(frozen=True, kw_only=True)
class ModelSet:
    """Models that share ranks.

    Attributes:
        meshes: Their names.
        ranks: Their ranks.
    """

    meshes: tuple[str, ...]
    ranks: range


Placement = tuple[ModelSet, ...]


@dataclass(frozen=True, kw_only=True)
class Found:
    """A configuration that fits.

    Attributes:
        recipe: The recipe with it.
        overrides: What it changes, as ``key=value``.
        placement: Which models share which ranks.
        calls: Of a step.
        seconds: From step to step.
        memory_bytes: Needed by the fullest rank.
    """

    recipe: Recipe
    overrides: tuple[str, ...]
    placement: Placement
    calls: tuple[Call, ...]
    seconds: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """What is searched.

    Attributes:
        load: Returns the recipe with further overrides, checked.
        flow: Of a step, for a recipe.
        hardware: Where.
        texts: Of a step.
        num_ranks: Ranks of the job.
        ranks_per_node: Of each node.
        memory_bytes: What a rank may need.
        staleness: Values of ``trainer.max_staleness`` that are tried.
        most: Ways to share ranks that are returned.
        is_any: Whether any configuration that fits will do, in the place of the fastest.
        blocks: Most parts of the ranks that a set of models may have or not.
        allows: Whether a mesh, named ``actor.update`` and so on, may have a layout.
    """

    load: Callable[[Sequence[str]], Recipe]
    flow: Callable[[Recipe], Flow]
    hardware: Hardware
    texts: Texts
    num_ranks: int
    ranks_per_node: int
    memory_bytes: float
    staleness: tuple[int, ...] = (0,)
    most: int = 5
    is_any: bool = False
    blocks: int = BLOCKS
    allows: Callable[[str, ParallelLayout], bool] = lambda mesh, layout: True


def search(request: SearchRequest) -> list[Found]:
    """Return the fastest configurations that fit in memory, one for each way to share ranks, the fastest first.

    Raises:
        HybridflowError: Those that fit are no recipes: the error of the last one.
    """
    return _Search(request).run()


def placements(meshes: Sequence[str], num_ranks: int, ranks_per_node: int, blocks: int = BLOCKS) -> Iterator[Placement]:
    """Yield the ways to share ranks: sets of models, and consecutive ranks for each set."""
    bounds = _blocks(num_ranks, ranks_per_node, blocks)
    for sets in _partitions(meshes):
        for cuts in itertools.combinations(bounds[1:-1], len(sets) - 1):
            edges = (0, *cuts, num_ranks)
            yield tuple(
                ModelSet(meshes=names, ranks=range(start, stop))
                for names, (start, stop) in zip(sets, itertools.pairwise(edges), strict=True)
            )


def _blocks(num_ranks: int, ranks_per_node: int, most: int) -> list[int]:
    """Return where a set of ranks may begin: at most so many blocks, parts of a node or whole nodes."""
    size = 1
    while -(-num_ranks // size) > most or (ranks_per_node % size and size % ranks_per_node):
        size += 1
    return [*range(0, num_ranks, size), num_ranks]


def _partitions(names: Sequence[str]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yield all ways to put names into sets, in the order of the first of each set."""
    if not names:
        yield ()
        return
    *others, last = names
    for sets in _partitions(others):
        for index, members in enumerate(sets):
            yield (*sets[:index], (*members, last), *sets[index + 1 :])
        yield (*sets, (last,))


@dataclass(frozen=True, kw_only=True)
class _Problem:
    """Choices to be made for one way to share ranks.

    Attributes:
        key: Of the way.
        placement: The way.
        staleness: Value of ``trainer.max_staleness``.
        ahead: Steps ahead that save time.
        tokens: Of each micro-batch.
        turns: Of a step, where a set of models is one rank.
        offered: Choices for each model.
    """

    key: object
    placement: Placement
    staleness: int
    ahead: int
    tokens: int
    turns: tuple[Turn, ...]
    offered: dict[str, list[Choice]]

    def bound(self, seconds: Mapping[str, float]) -> float:
        """Return the seconds of a step."""
        return step_seconds(self.turns, spans(self.turns, seconds), max_staleness=self.ahead)

    def least_seconds(self, names: Iterable[str]) -> dict[str, float]:
        """Return the least seconds of each call of these models."""
        return {
            node: min(choice.seconds[node] for choice in self.offered[name])
            for name in names
            for node in self.offered[name][0].seconds
        }

    def least_loads(self, names: Iterable[str]) -> list[Load]:
        """Return what these models keep at least on the first and the last rank."""
        kept = generating = learning = 0
        for name in names:
            loads = [load for choice in self.offered[name] for load in choice.loads]
            kept += min(load.kept for load in loads)
            generating = max(generating, min(load.generating for load in loads))
            learning = max(learning, min(load.learning for load in loads))
        return [Load(kept, 0, 0, 0, 0, generating, learning)] * 2


class _Search:
    def __init__(self, request: SearchRequest) -> None:
        self._request, self._cleared = request, cleared(request.load(()))
        recipe = request.load(self._cleared)
        self._flow = request.flow(recipe)
        self._choices = Choices(
            *(recipe, self._flow, request.hardware, request.texts),
            ranks_per_node=request.ranks_per_node,
            memory_bytes=request.memory_bytes,
            allows=lambda mesh, layout: self._fits_engine(mesh, layout) and request.allows(mesh, layout),
        )
        self._best: dict[object, Found] = {}
        self._limits: dict[object, float] = {}
        self._last = float("inf")
        self._base = recipe
        self._resharded: dict[object, float] = {}
        self._conflicts: dict[ModelSet, list[frozenset[tuple[str, Work]]]] = {}
        self._leasts: dict[tuple[str, int], float] = {}
        self._refused: Counter[object] = Counter()
        self._error: HybridflowError | None = None

    def run(self) -> list[Found]:
        request, meshes = self._request, self._choices.meshes
        bounded = []
        for index, placement in enumerate(
            placements(meshes, request.num_ranks, request.ranks_per_node, request.blocks)
        ):
            bounds = [sum(self._least(name, len(one.ranks)) for name in one.meshes) for one in placement]
            bound = max(bounds) if request.hardware.crowding == 1 else sum(bounds)
            if bound < float("inf"):
                bounded.append((bound, index, placement))
        for bound, _, placement in sorted(bounded, key=lambda each: each[:2]):
            for staleness in request.staleness:
                key = (tuple(one.meshes for one in placement), staleness)
                if bound < self._limit(key) and (staleness == 0 or _is_apart(placement)):
                    self._descend(key, placement, staleness)
        order = sorted(self._best.values(), key=lambda found: (found.seconds, len(found.placement), found.overrides))
        if not order and self._error is not None:
            raise self._error
        return order[: request.most]

    def _fits_engine(self, mesh: str, layout: ParallelLayout) -> bool:
        """Return whether the rollout's engine allows a layout: vLLM has whole models, on all ranks of the job."""
        if self._base.rollout.engine.kind != "vllm" or not mesh.startswith("actor."):
            return True
        is_whole = layout.tp == layout.ep == 1 or mesh == "actor.update"
        return is_whole and layout.world_size == self._request.num_ranks

    def _least(self, mesh: str, num_ranks: int) -> float:
        """Return the least seconds of a model's calls on so many ranks, if it fits on them alone."""
        if (mesh, num_ranks) not in self._leasts:
            # Fastest first.
            first = (self._choices.of(mesh, num_ranks, tokens)[:1] for tokens in self._choices.micro_batches)
            totals = [choice.total for choices in first for choice in choices]
            self._leasts[mesh, num_ranks] = min(totals, default=float("inf"))
        return self._leasts[mesh, num_ranks]

    def _limit(self, key: object) -> float:
        """Return the seconds that a configuration must stay below to be of interest."""
        if self._refused[key] > _MOST_REFUSED or (self._best and self._request.is_any):
            return 0.0
        return self._limits.get(key, self._last)

    def _keep(self, key: object, found: Found) -> None:
        self._best[key] = found
        self._refused[key] = 0
        best = sorted(found.seconds for found in self._best.values())
        fastest = (1 - _ALIKE) * best[0]
        is_full = len(best) >= self._request.most
        self._last = max(fastest, (1 - _ROUGH) * best[self._request.most - 1]) if is_full else float("inf")
        for key, each in self._best.items():
            self._limits[key] = max(fastest, (1 - _ROUGH) * min(each.seconds, self._last))

    def _descend(self, key: object, placement: Placement, staleness: int) -> None:
        """Try all combinations of choices that may be below the limit."""
        owner = {name: index for index, one in enumerate(placement) for name in one.meshes}
        sets = {"actor.update": (owner["actor.update"],)}
        for node, _ in nodes(self._flow):
            sets[node.mesh] = (owner[node.mesh if node.mesh in owner else _host_of(node.mesh, owner)],)
        turns = turns_of(self._flow, busy_ranks(sets, self._request.hardware))
        for tokens in self._choices.micro_batches:
            offered = {name: self._offered(name, placement[index], tokens) for name, index in owner.items()}
            if all(offered.values()):
                problem = _Problem(
                    key=key,
                    placement=placement,
                    staleness=staleness,
                    ahead=steps_ahead(staleness, self._request.hardware),
                    tokens=tokens,
                    turns=turns,
                    offered=offered,
                )
                if self._narrow(problem):
                    self._branch(problem, {})

    def _narrow(self, problem: _Problem) -> bool:
        """Take away choices that are too slow even beside the fastest others; return whether any are left for each."""
        for name, choices in problem.offered.items():
            least = problem.least_seconds(other for other in problem.offered if other != name)
            limit = self._limit(problem.key)
            problem.offered[name] = [each for each in choices if problem.bound({**least, **each.seconds}) < limit]
            if not problem.offered[name]:
                return False
        return True

    def _offered(self, name: str, one: ModelSet, tokens: int) -> list[Choice]:
        """Return the choices for a model on its ranks; tensor-parallel groups stay within nodes."""
        # Offloading would make room for a rollout that is elsewhere.
        is_useless = name == "actor.update" and "actor.rollout" not in one.meshes
        return [
            choice
            for choice in self._choices.of(name, len(one.ranks), tokens)
            if one.ranks.start % choice.work.layout.tp == 0 and not (is_useless and choice.work.is_offloaded)
        ]

    def _branch(self, problem: _Problem, chosen: dict[str, Choice]) -> None:
        """Try all choices of the next model beside those chosen, and judge where all are."""
        rest = [name for name in problem.offered if name not in chosen]
        if not rest:
            self._judge(problem, chosen)
            return
        name, later = rest[0], rest[1:]
        seconds = problem.least_seconds(later)
        for each in chosen.values():
            seconds.update(each.seconds)
        if name not in ("actor.update", "actor.rollout"):
            seconds["reshard"] = self._least_reshard(chosen, problem.placement)
        mine = _set_of(problem.placement, name).meshes
        beside = problem.least_loads(other for other in later if other in mine)
        for other in mine:
            if other in chosen:
                beside = [load + own for load, own in zip(beside, chosen[other].loads, strict=True)]
        for choice in problem.offered[name]:
            further = {**chosen, name: choice}
            loads = [load + own for load, own in zip(beside, choice.loads, strict=True)]
            if self._least_needed(loads, further, mine) > self._request.memory_bytes:
                continue
            if self._clashes(problem, further):
                continue
            if name in ("actor.update", "actor.rollout"):
                seconds["reshard"] = self._least_reshard(further, problem.placement)
            if problem.bound({**seconds, **choice.seconds}) < self._limit(problem.key):
                self._branch(problem, further)

    def _least_needed(self, loads: Iterable[Load], chosen: Mapping[str, Choice], mine: Sequence[str]) -> int:
        """Return what the models on some ranks need at least."""
        share, names = 1.0, ("actor.update", "actor.rollout")
        if all(name in chosen and name in mine for name in names):
            share = shared_share(self._choices.size(names[0]), *(chosen[name].work.layout for name in names))
        first, last = (load._replace(shared_weights=int(share * load.shared_weights)).peak for load in loads)
        return max(self._choices.image_bytes + first, last)

    def _least_reshard(self, chosen: Mapping[str, Choice], placement: Placement) -> float:
        """Return seconds below which no reshard is."""
        if "actor.update" not in chosen or "actor.rollout" not in chosen:
            return 0.0
        if (known := self._resharded.get(_reshard_key(chosen, placement))) is not None:
            return known
        update, rollout = (chosen[name] for name in ("actor.update", "actor.rollout"))
        ranks, target_ranks = (_set_of(placement, each.mesh).ranks for each in (update, rollout))
        edges = (ranks.start, ranks.stop, target_ranks.start, target_ranks.stop)
        seconds = least_seconds(
            *(self._choices.size("actor.update"), update.work.layout, rollout.work.layout, self._request.hardware),
            ranks_per_node=self._request.ranks_per_node,
            is_together=ranks == target_ranks,
            is_whole_nodes=not any(edge % self._request.ranks_per_node for edge in edges),
        )
        return seconds / self._base.actor.reshard_every

    def _judge(self, problem: _Problem, chosen: Mapping[str, Choice]) -> None:
        """Keep a configuration if it is a recipe, fits, and is faster than what is known."""
        request, placement, staleness = self._request, problem.placement, problem.staleness
        recipe = with_choices(self._base, placement, chosen, problem.tokens, staleness, request.ranks_per_node)
        try:
            meshes = role_meshes(recipe)
            seconds = {node: value for choice in chosen.values() for node, value in choice.seconds.items()}
            seconds["reshard"] = self._reshard_seconds(_reshard_key(chosen, placement), recipe, meshes)
            total = problem.bound(seconds)
            if total >= self._limit(problem.key):
                return
            memory = needed_memory(recipe, meshes, request.texts, request.hardware)
            fullest = max(memory, key=lambda rank: rank.peak)
            if fullest.peak > request.memory_bytes:
                self._learn(fullest, problem, chosen)
                return
            overrides = (*settings_of(recipe, chosen), *self._cleared)
            recipe = request.load(overrides)
        except HybridflowError as error:
            self._refuse(problem.key, error)
            return
        ranks = {name: mesh.ranks for name, mesh in meshes.items()}
        calls = timed(self._flow, busy_ranks(ranks, request.hardware), seconds)
        found = Found(
            recipe=recipe,
            overrides=overrides,
            placement=placement,
            calls=calls,
            seconds=total,
            memory_bytes=fullest.peak,
        )
        self._keep(problem.key, found)

    def _refuse(self, key: object, error: HybridflowError) -> None:
        self._refused[key] += 1
        if not self._best and self._refused.total() > _MOST_REFUSED_WAYS * _MOST_REFUSED:
            raise error
        self._error = error

    def _clashes(self, problem: _Problem, chosen: Mapping[str, Choice]) -> bool:
        """Return whether some of the choices are known not to fit together."""
        for one in problem.placement:
            if known := self._conflicts.get(one):
                mine = {(name, chosen[name].work) for name in one.meshes if name in chosen}
                if any(conflict <= mine for conflict in known):
                    return True
        return False

    def _learn(self, fullest: RankMemory, problem: _Problem, chosen: Mapping[str, Choice]) -> None:
        """Remember the fewest choices that together need more than a rank has, by the exact count of one rank."""
        # A vision tower, and a rollout that only validates, are there whatever is chosen.
        fixed = [part for part in fullest.meshes if part.mesh not in chosen]
        parts = [part for part in fullest.meshes if part.mesh in chosen]
        one = _set_of(problem.placement, parts[0].mesh)
        for part in tuple(parts):
            rest = [each for each in parts if each is not part]
            away = {each.mesh for each in rest if chosen[each.mesh].work.is_offloaded} - {"actor.update"}
            is_offloaded = any(each.mesh == "actor.update" and chosen[each.mesh].work.is_offloaded for each in rest)
            left = (*rest, *fixed)
            # A rollout's own weights are those that the update beside it has not.
            is_whole = part.mesh != "actor.update" or all(each.mesh != "actor.rollout" for each in left)
            if is_whole and rank_memory(left, away, 0, is_offloaded=is_offloaded).peak > self._request.memory_bytes:
                parts = rest
        conflict = frozenset((part.mesh, chosen[part.mesh].work) for part in parts)
        self._conflicts.setdefault(one, []).append(conflict)

    def _reshard_seconds(self, key: object, recipe: Recipe, meshes: Mapping[str, DeviceMesh]) -> float:
        if not recipe.generates:
            return 0.0
        if key not in self._resharded:
            source, target = meshes["actor.update"], meshes["actor.rollout"]
            self._resharded[key] = reshard_seconds(recipe, source, target, self._request.hardware)
        return self._resharded[key]


def _reshard_key(chosen: Mapping[str, Choice], placement: Placement) -> object:
    names = ("actor.update", "actor.rollout")
    return tuple((chosen[name].work.layout, _set_of(placement, name).ranks) for name in names if name in chosen)


def _set_of(placement: Placement, mesh: str) -> ModelSet:
    return next(one for one in placement if mesh in one.meshes)


def needed_memory(
    recipe: Recipe, meshes: Mapping[str, DeviceMesh], texts: Texts, hardware: Hardware
) -> tuple[RankMemory, ...]:
    """Return what each rank needs, with a cache for as many texts of mean length as are generated at a time."""
    cached = 0
    if recipe.generates:
        most = -(-len(texts.responses) // meshes["actor.rollout"].layout.dp)
        cached = min(recipe.rollout.max_concurrent, most) * texts.mean
    return job_memory(recipe, meshes, cached=cached, gpu_bytes=None if hardware.is_cpu else hardware.memory_bytes)


def with_choices(
    recipe: Recipe,
    placement: Placement,
    chosen: Mapping[str, Choice],
    micro_batch_tokens: int,
    staleness: int,
    ranks_per_node: int,
) -> Recipe:
    """Return a recipe with a configuration, not yet checked."""
    num_ranks = placement[-1].ranks.stop
    changed: dict[str, dict[str, Any]] = {
        "cluster": {"ranks": num_ranks, "ranks_per_node": min(ranks_per_node, num_ranks)},
        "trainer": {"micro_batch_tokens": micro_batch_tokens, "max_staleness": staleness},
    }
    for one in placement:
        for name in one.meshes:
            work, (role, _, phase) = chosen[name].work, name.partition(".")
            ranks, values = tuple(one.ranks) if len(placement) > 1 else None, changed.setdefault(role, {})
            values[phase or "layout"] = work.layout
            if phase == "rollout":
                changed["rollout"] = {"max_concurrent": work.concurrent}
                values["rollout_ranks"] = None if "actor.update" in one.meshes else ranks
                continue
            values.update(ranks=ranks, offload=work.is_offloaded)
            if name in LEARNERS:
                values.update(recompute=work.recompute, recompute_layers=None)
    return replace(recipe, **{name: replace(getattr(recipe, name), **values) for name, values in changed.items()})


def cleared(recipe: Recipe) -> tuple[str, ...]:
    """Return overrides that take away what does not go with other layouts.

    That is ``layout: auto``, fallbacks, the ranks of reward functions, and the layout of a rollout that only validates.
    """
    overrides = [f"{name}.ranks=null" for name in REWARDS if _names_ranks(getattr(recipe, name))]
    overrides += ["actor.rollout=null"] if recipe.actor.rollout is not None and recipe.traits.is_offline else []
    overrides += ["layout=null"] if recipe.layout is not None else []
    overrides += ["fallbacks=[]"] if recipe.fallbacks else []
    return tuple(overrides)


def _names_ranks(scorer: RewardConfig | None) -> bool:
    """Return whether it is a function on ranks of its own."""
    return scorer is not None and scorer.model is None and scorer.ranks is not None


def settings_of(recipe: Recipe, meshes: Iterable[str]) -> tuple[str, ...]:
    """Return what the search sets in a recipe for models on these meshes, as overrides ``key=value``."""
    keys = ["cluster.ranks", "cluster.ranks_per_node"]
    for name in meshes:
        role, _, phase = name.partition(".")
        if phase == "rollout":
            keys += ["actor.rollout", "actor.rollout_ranks", "rollout.max_concurrent", "trainer.max_staleness"]
            continue
        keys += [f"{role}.ranks", f"{role}.{phase or 'layout'}", f"{role}.offload"]
        keys += [f"{role}.recompute", f"{role}.recompute_layers"] if name in LEARNERS else []
    settings = []
    for key in [*keys, "trainer.micro_batch_tokens"]:
        section, _, name = key.partition(".")
        value = getattr(getattr(recipe, section), name)
        settings.append(f"{key}={json.dumps(_axes(value) if isinstance(value, ParallelLayout) else value)}")
    return tuple(settings)


def _axes(layout: ParallelLayout) -> dict[str, Any]:
    """Return the layout as a recipe has it."""
    sizes: dict[str, Any] = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp}
    sizes.update((axis, getattr(layout, axis)) for axis in ("cp", "ep", "vpp") if getattr(layout, axis) > 1)
    if layout.etp is not None:
        sizes["etp"] = layout.etp
    if isinstance(layout.layers, tuple):
        sizes["layers"] = list(layout.layers)
    return sizes


def _is_apart(placement: Placement) -> bool:
    """Return whether models that work on the next samples share no rank with those that learn."""
    kinds = [{name in SAMPLING_MESHES for name in one.meshes} for one in placement]
    return all(len(kind) == 1 for kind in kinds) and {True, False} == set().union(*kinds)


def _host_of(mesh: str, owner: Mapping[str, int]) -> str:
    """Return the model on whose ranks a mesh without one is: reward functions are where responses are."""
    return "actor.rollout" if mesh in SAMPLING_MESHES and "actor.rollout" in owner else "actor.update"
