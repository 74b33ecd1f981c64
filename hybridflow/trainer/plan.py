"""Where a recipe's roles are and what every rank will do. No torch: a login node prints it before a GPU is held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hybridflow.config.recipe import Recipe
from hybridflow.dataflow.compiler import compile_flow
from hybridflow.dataflow.graph import Flow
from hybridflow.dataflow.schedule import Branch, Call, Instruction, Loop, project, rank_sets, role_ranks, walk
from hybridflow.flows import (
    cispo,
    dapo,
    distill,
    dpo,
    dr_grpo,
    grpo,
    gspo,
    ipo,
    kto,
    opo,
    ppo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    reward_model,
    rloo,
    safe_rlhf,
    sft,
)
from hybridflow.flows.nodes import (
    VALIDATION,
    VALIDATION_OF_PAIRS,
    WARM_START,
    with_drops,
    with_environment,
    without,
)
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.recipe.meshes import role_meshes
from hybridflow.reshard.plan import participants
from hybridflow.trainer.ahead import WORKING_AHEAD, compile_ahead, sampling_mesh, with_versions

STEPS = {
    "ppo": ppo.STEP,
    "grpo": grpo.STEP,
    "dr-grpo": dr_grpo.STEP,
    "dapo": dapo.STEP,
    "gspo": gspo.STEP,
    "cispo": cispo.STEP,
    "rloo": rloo.STEP,
    "reinforce++": reinforce_plus_plus.STEP,
    "reinforce++-baseline": reinforce_plus_plus_baseline.STEP,
    "remax": remax.STEP,
    "opo": opo.STEP,
    "sft": sft.STEP,
    "reward-model": reward_model.STEP,
    "dpo": dpo.STEP,
    "ipo": ipo.STEP,
    "kto": kto.STEP,
    "safe-rlhf": safe_rlhf.STEP,
    "distill": distill.STEP,
}
"""Algorithm -> the flow of one training step, with all that it may need."""

Program = tuple[Instruction, ...]


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """A recipe, compiled.

    Attributes:
        meshes: Name -> mesh. Beside those of roles: ``job``, all ranks; and ``sampling``, those that work ahead.
        warm_start: Supervised training before reinforcement learning; empty without one.
        validation: Greedy answers to the held-out problems, judged; of preferences, the held-out pairs compared.
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
        """All that the job does, in order."""
        return self.warm_start + self.validation + self.fill + self.train + self.validation

    def schedule(self, program: Program, rank: int) -> Program:
        """What a rank does of one of the programs.

        A rank that only generates changes phase with those that learn, also where it is not called; but in the warm
        start, before which nothing was generated.
        """
        parts = program if program == self.warm_start else self.whole[len(self.warm_start) :]
        return project(program, rank, self.meshes, role_ranks(parts, self.meshes))

    def rank_sets(self) -> tuple[tuple[int, ...], ...]:
        """Sets of ranks that exchange messages beside those of a model: for moves, decisions and copies of weights."""
        sets = dict.fromkeys(rank_sets(self.whole, self.meshes))
        # What was sampled is dealt anew among those who sample.
        sets[tuple(sorted(self.meshes["actor.rollout"].ranks))] = None
        for name in ("actor.rollout", "reference", "critic", "cost_critic"):
            if name in self.meshes:
                sets[participants(self.meshes["actor.update"], self.meshes[name])] = None
        # Samples that another replica has generated go back.
        sets[tuple(sorted(self.meshes["actor.rollout"].ranks))] = None
        return tuple(sets)


def step_flow(recipe: Recipe, flow: Flow | None = None) -> Flow:
    """What one training step does: the algorithm's flow, or another, without what this recipe has no use for."""
    flow = STEPS[recipe.algorithm] if flow is None else flow
    if not recipe.has_reference:
        flow = without(flow, "ref_log_probs")
    if recipe.kl.place == "loss" or recipe.kl.coef == 0:
        for column in ("old_log_probs", "ref_log_probs"):
            flow = without(flow, column, role="advantage")
    if recipe.is_on_policy:
        flow = without(flow, "old_log_probs")
    if recipe.teacher is not None and recipe.teacher.top_k == 0:
        flow = without(flow, "teacher_ids")
    if recipe.drops_samples:
        flow = with_drops(flow)
    return _with_columns(recipe, flow)


def validation_flow(recipe: Recipe) -> Flow:
    """How what is trained is judged on what was held out."""
    if recipe.traits.has_preferences:
        return VALIDATION_OF_PAIRS if recipe.has_reference else without(VALIDATION_OF_PAIRS, "ref_log_probs")
    return _with_columns(recipe, VALIDATION)


def _with_columns(recipe: Recipe, flow: Flow) -> Flow:
    """The flow with what else this recipe's sampler gives."""
    if recipe.trainer.max_staleness > 0:
        flow = with_versions(flow)
    return flow if recipe.rollout.environment is None else with_environment(flow)


def placement_warnings(meshes: Mapping[str, DeviceMesh]) -> tuple[str, ...]:
    """What is possible but slow in where the models lie, in words."""
    across: dict[tuple[int, int], list[str]] = {}
    for mesh in meshes.values():
        if mesh.spans_nodes("tp"):
            across.setdefault((mesh.layout.tp, mesh.ranks_per_node), []).append(mesh.name)
    return tuple(
        f"{', '.join(names)}: tensor-parallel groups of {tp} reach across nodes (ranks on each: {per_node}), and "
        f"exchange activations in every layer; choose a tp that divides {per_node} and ranks that begin with a node, "
        "or set cluster.ranks_per_node if nodes are larger"
        for (tp, per_node), names in across.items()
    )


def plan_job(recipe: Recipe, flow: Flow | None = None) -> JobPlan:
    """Place and compile a recipe, the same on every rank and without any message.

    Args:
        recipe: The recipe.
        flow: What a training step does in the place of the algorithm's own flow.

    Raises:
        LayoutError: A layout does not fit its ranks.
        GraphError: The flow's columns do not fit together.
    """
    meshes = role_meshes(recipe)
    rollout = meshes["actor.rollout"]
    everyone = tuple(range(recipe.cluster.ranks))
    meshes["job"] = DeviceMesh(
        name="job",
        layout=ParallelLayout(dp=len(everyone)),
        ranks=everyone,
        ranks_per_node=rollout.ranks_per_node,
    )
    if recipe.trainer.max_staleness > 0:
        meshes[WORKING_AHEAD] = sampling_mesh(meshes)
    validation = compile_flow(validation_flow(recipe), meshes)
    flow = step_flow(recipe, flow)
    fill, turn = _turn(recipe, flow, meshes, validation)
    rollout, learn = ((), ()) if recipe.trainer.max_staleness > 0 else _halves(compile_flow(flow, meshes))
    return JobPlan(
        meshes=meshes,
        warm_start=compile_flow(WARM_START, meshes) if recipe.warm_start is not None else (),
        validation=validation,
        fill=fill,
        train=(Loop("train_step", "job", turn),),
        rollout=rollout,
        learn=learn,
    )


_FINISH = Call("trainer.finish_step", "trainer", "finish_step", "job")


def _halves(step: Program) -> tuple[Program, Program]:
    """A step up to its last samples and scores, and the rest with what ends a step."""
    last = max(
        at
        for at, each in enumerate(step)
        if any(isinstance(inner, Call) and (inner.source or inner.call == "score") for inner in walk((each,)))
    )
    return step[: last + 1], (*step[last + 1 :], _FINISH)


def _turn(recipe: Recipe, flow: Flow, meshes: Mapping[str, DeviceMesh], validation: Program) -> tuple[Program, Program]:
    """What comes before the training steps, and one of them."""
    save = Branch("save", "job", (Call("trainer.save", "trainer", "save", "job"),))
    end = (Branch("validate", "job", validation), _FINISH, save)
    # Until the weights change, a step can be left as if it had never begun.
    if recipe.trainer.max_staleness > 0:
        ahead = compile_ahead(flow, meshes)
        turn = (*ahead.hand_over, *ahead.sample, *ahead.learn, *end)
        return ahead.fill, (Branch("go_on_to_update", "job", turn),)
    sample, experience, update = _cut(compile_flow(flow, meshes))
    learn = Branch("go_on_to_update", "job", (*update, *end))
    return (), (*sample, Branch("go_on", "job", (*experience, learn)))


def _cut(step: Program) -> tuple[Program, Program, Program]:
    """A step's instructions up to its last samples, then up to its first loop over mini-batches, then the rest."""
    sampled = max(at for at, each in enumerate(step) if isinstance(each, Call) and each.source) + 1
    later = range(sampled, len(step))
    looping = next(at for at in later if any(isinstance(inner, Loop) for inner in walk((step[at],))))
    return step[:sampled], step[sampled:looping], step[looping:]
