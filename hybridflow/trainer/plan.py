"""Where a recipe's roles are and what every rank will do. No torch: a login node prints it before a GPU is held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridflow.config.recipe import CRITICS, Recipe
from hybridflow.dataflow.compiler import compile_flow, compile_stages
from hybridflow.dataflow.graph import Flow, Step
from hybridflow.dataflow.schedule import Branch, Program, project, rank_sets, role_ranks
from hybridflow.errors import ConfigError
from hybridflow.flows.nodes import (
    VALIDATION,
    VALIDATION_OF_PAIRS,
    VALIDATION_OF_SOLUTIONS,
    WARM_START,
    with_drops,
    with_environment,
    with_router_choices,
    with_truncated,
    without,
)
from hybridflow.flows.registry import ALGORITHMS
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.recipe.check_transformers import transformers_meshes
from hybridflow.recipe.meshes import role_meshes
from hybridflow.reshard.plan import participants
from hybridflow.trainer.ahead import WORKING_AHEAD, sampling_mesh, with_versions
from hybridflow.trainer.loop import training_loop, training_loop_ahead, two_halves


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """A recipe, compiled.

    Attributes:
        meshes: Name -> mesh. Beside those of roles: ``job``, all ranks; and ``sampling``, those that work ahead.
        warm_start: Supervised training before reinforcement learning; empty without one.
        validation: Greedy answers to the held-out problems, judged; of preferences, the held-out pairs compared. Empty
            without held-out data.
        fill: The first batches, where they are made ahead of the steps that learn from them; else empty.
        train: The loop over training steps.
        rollout: A step up to its last score, where a program runs steps one by one; empty where samples are made ahead.
        learn: The rest of it.
    """

    meshes: Mapping[str, DeviceMesh]
    warm_start: Program
    validation: Program
    fill: Program = ()
    train: Program
    rollout: Program = ()
    learn: Program = ()

    @property
    def whole(self) -> Program:
        """Return all parts of the job, in order."""
        return self.warm_start + self.validation + self.fill + self.train + self.validation

    def schedule(self, program: Program, rank: int) -> Program:
        """Return a rank's part of one of the programs.

        A rank that only generates changes phase with those that learn, even where it is not called. It does not in the
        warm start, before which nothing was generated.
        """
        parts = program if program == self.warm_start else self.whole[len(self.warm_start) :]
        return project(program, rank, self.meshes, role_ranks(parts, self.meshes))

    def rank_sets(self) -> tuple[tuple[int, ...], ...]:
        """Return the sets of ranks that exchange messages beside those of a model.

        They exchange moves, decisions and copies of weights.
        """
        sets = dict.fromkeys(rank_sets(self.whole + self.rollout + self.learn, self.meshes))
        # What was sampled is dealt anew among those who sample, and goes back from the replica that generated it.
        sets[tuple(sorted(self.meshes["actor.rollout"].ranks))] = None
        for name in ("actor.rollout", "reference", *CRITICS):
            if name in self.meshes:
                sets[participants(self.meshes["actor.update"], self.meshes[name])] = None
        return tuple(sets)


def training_step(recipe: Recipe, step: Step | None = None) -> Step:
    """Return the stages of a training step, without what this recipe has no use for.

    Args:
        recipe: The recipe.
        step: A program's own stages; None: the algorithm's.
    """
    step = ALGORITHMS[recipe.algorithm].step if step is None else step
    if not recipe.has_reference:
        step = step.map(lambda flow: without(flow, "ref_log_probs"))
    if recipe.kl.place == "loss" or recipe.kl.coef == 0:
        step = step.map(lambda flow: without(flow, "ref_log_probs", role="advantage"))
        if not recipe.archives:  # which keeps them beside the advantages
            step = step.map(lambda flow: without(flow, "old_log_probs", role="advantage"))
    if recipe.is_on_policy:
        step = step.map(lambda flow: without(flow, "old_log_probs"))
    if recipe.teacher is not None and recipe.teacher.top_k == 0:
        step = step.map(lambda flow: without(flow, "teacher_ids"))
    if recipe.drops_samples:
        step = with_drops(step)
    return step.map(lambda flow: _with_columns(recipe, flow))


def _with_columns(recipe: Recipe, flow: Flow) -> Flow:
    """Return the flow with the other columns that this recipe's sampler produces."""
    if recipe.trainer.max_staleness > 0:
        flow = with_versions(flow)
    if recipe.actor.moe.router_replay != "none":
        flow = with_router_choices(flow)
    if recipe.loss.mask_truncated:
        flow = with_truncated(flow)
    return flow if recipe.rollout.environment is None else with_environment(flow)


def _validation(recipe: Recipe, meshes: Mapping[str, DeviceMesh]) -> Program:
    """Return the program of a validation. Where the job is to stop, one that samples is left before it is scored."""
    if recipe.traits.has_preferences:
        pairs = VALIDATION_OF_PAIRS if recipe.has_reference else without(VALIDATION_OF_PAIRS, "ref_log_probs")
        return compile_flow(pairs, meshes)
    solutions = compile_flow(VALIDATION_OF_SOLUTIONS, meshes) if recipe.traits.imitates else ()
    if not recipe.scores_held_out:
        return solutions
    flow = _with_columns(recipe, VALIDATION)
    stages = Flow(elements=flow.elements[:1]), Flow(elements=flow.elements[1:])
    sample, score = compile_stages(stages, meshes)
    return (*sample.whole, Branch("go_on", "job", (*score.whole, *solutions)))


def placement_warnings(meshes: Mapping[str, DeviceMesh], hosts: Sequence[str] = ()) -> tuple[str, ...]:
    """Describe in words what works but is slow in the placement.

    Args:
        meshes: The job's meshes, for whom all nodes are of one size.
        hosts: The node of each rank, where that is known: nodes may be of several sizes.
    """
    across: dict[tuple[int, int], list[str]] = {}
    for mesh in meshes.values():
        spans = any(len({hosts[rank] for rank in group}) > 1 for group in mesh.groups("tp")) if hosts else True
        if spans and mesh.spans_nodes("tp"):
            across.setdefault((mesh.layout.tp, mesh.ranks_per_node), []).append(mesh.name)
    return tuple(
        f"{', '.join(names)}: tensor-parallel groups of {tp} reach across nodes (ranks on each: {per_node}), and "
        f"exchange activations in every layer; choose a tp that divides {per_node} and ranks that begin with a node, "
        "or set cluster.ranks_per_node if nodes are larger"
        for (tp, per_node), names in across.items()
    )


def transformers_note(recipe: Recipe) -> tuple[str, ...]:
    """Describe in words which models run in ``transformers``, if any do."""
    names = ", ".join(transformers_meshes(recipe))
    told = "run in transformers, whole on each rank; memory beyond the weights in their files is estimated"
    return (f"{names}: {told}",) if names else ()


def plan_job(recipe: Recipe, step: Step | None = None) -> JobPlan:
    """Place and compile a recipe, the same on every rank and without any message; ``step`` as for ``training_step``.

    Raises:
        LayoutError: A layout does not fit its ranks.
        GraphError: The step's columns do not fit together.
        ConfigError: ``layout: auto`` was not settled.
    """
    if recipe.layout is not None:
        raise ConfigError(
            "layout: auto: is for `hybridflow train` and `hybridflow launch`; elsewhere take the layouts that "
            "`hybridflow plan auto` prints"
        )
    meshes = role_meshes(recipe)
    everyone = tuple(range(recipe.cluster.ranks))
    per_node = meshes["actor.rollout"].ranks_per_node
    meshes["job"] = DeviceMesh(
        name="job", layout=ParallelLayout(dp=len(everyone)), ranks=everyone, ranks_per_node=per_node
    )
    works_ahead = recipe.trainer.max_staleness > 0
    if works_ahead:
        meshes[WORKING_AHEAD] = sampling_mesh(meshes)
    step = training_step(recipe, step)
    validation = _validation(recipe, meshes) if recipe.data.held_out is not None else ()
    warm_start = compile_flow(WARM_START, meshes) if recipe.warm_start is not None else ()
    begun = {"warm_start": warm_start, "validation": validation}
    if works_ahead:
        fill, train = training_loop_ahead(step, meshes, validation)
        return JobPlan(meshes=meshes, **begun, fill=fill, train=train)
    train = training_loop(step, meshes, validation)
    rollout, learn = two_halves(step, meshes)
    return JobPlan(meshes=meshes, **begun, train=train, rollout=rollout, learn=learn)
