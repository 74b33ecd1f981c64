"""The nodes of algorithms: which role does what on which mesh, reading and writing which columns. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hybridflow.dataflow.graph import SCORED, Flow, Node, Repeat, Step, repeat

SEQUENCES = ("tokens", "prompt_lengths")


def _node(
    name: str,
    mesh: str | None = None,
    *,
    reads: tuple[str, ...] = (),
    writes: tuple[str, ...] = (),
    source: bool = False,
) -> Node:
    """Return the node that is named after a role and its call; the actor's phase is that of the mesh.

    Args:
        name: ``role.call``.
        mesh: Name of the mesh; None: that of the role's name.
        reads: See ``Node``.
        writes: See ``Node``.
        source: See ``Node``.
    """
    role, _, call = name.partition(".")
    mesh = role if mesh is None else mesh
    phase = mesh.removeprefix("actor.") if role == "actor" else None
    return Node(name=name, role=role, call=call, mesh=mesh, reads=reads, writes=writes, phase=phase, source=source)


SAMPLE = _node(
    "actor.sample",
    "actor.rollout",
    source=True,
    writes=(*SEQUENCES, "prompt_indices", "response_mask", "rollout_log_probs"),
)
_TO_SCORE = (*SEQUENCES, "prompt_indices")
SCORE = _node("reward.score", reads=_TO_SCORE, writes=("scores",))
COST = _node("cost.score", reads=_TO_SCORE, writes=("costs",))
_SAMPLED = (*SAMPLE.writes, "scores")
KEEP = _node("groups.keep", "actor.rollout", reads=_SAMPLED)
FILL = repeat("fill", SAMPLE >> SCORE >> KEEP, mesh="job")
TAKE = _node("groups.take", "actor.rollout", source=True, writes=_SAMPLED)
_OLD, _REFERENCE = "old_log_probs", "ref_log_probs"
ACTOR_LOG_PROBS = _node("actor.log_probs", "actor.update", reads=SEQUENCES, writes=(_OLD,))
REFERENCE_LOG_PROBS = _node("reference.log_probs", reads=SEQUENCES, writes=(_REFERENCE,))
CRITIC_VALUES = _node("critic.values", reads=SEQUENCES, writes=("values",))
COST_VALUES = _node("cost_critic.values", reads=SEQUENCES, writes=("cost_values",))
TEACHER_TOP = _node("teacher.top", reads=SEQUENCES, writes=("teacher_log_probs", "teacher_ids"))


def advantages(call: str, *, reads: tuple[str, ...] = (), writes: tuple[str, ...] = ("advantages",)) -> Node:
    """Return a node from scores to advantages, in one of the ways that ``roles.advantage`` has."""
    known = ("tokens", "scores", "prompt_indices", "response_mask", _OLD, _REFERENCE)
    return _node(f"advantage.{call}", "actor.update", reads=(*known, *reads), writes=writes)


def _critic_update(role: str, values: str, returns: str) -> Repeat:
    node = _node(f"{role}.update", reads=(*SEQUENCES, "response_mask", values, returns, "order"))
    # The critics have equally many mini-batches.
    return repeat("critic_mini_batch", node, mesh=role)


CRITIC_UPDATE = _critic_update("critic", "values", "returns")
COST_CRITIC_UPDATE = _critic_update("cost_critic", "cost_values", "cost_returns")


def update(*reads: str, call: str = "update") -> Repeat:
    """Return the actor's updates, a mini-batch each, in one of the ways that it has."""
    node = _node(f"actor.{call}", "actor.update", reads=(*SEQUENCES, *reads, "order"))
    return repeat("actor_mini_batch", node, mesh="actor.update")


ACTOR_UPDATE = update("response_mask", "rollout_log_probs", _OLD, _REFERENCE, "advantages")
DISTILL = update("response_mask", "teacher_log_probs", "teacher_ids", call="distill")
IMITATE = repeat("warm_step", _node("actor.imitate", "actor.update"), mesh="actor.update")
SAMPLE_VALIDATION = replace(SAMPLE, name="actor.sample_validation", call="sample_validation")
SCORE_VALIDATION = replace(SCORE, name="reward.score_validation", call="score_validation", writes=())


def offline(call: str, *writes: str) -> Node:
    """Return a node that reads samples instead of sampling, in one of the ways of ``roles.offline_samples``."""
    return _node(f"offline.{call}", "actor.update", source=True, writes=(*SEQUENCES, *writes))


REFERENCE_MISMATCHED_LOG_PROBS = _node(
    "reference.mismatched_log_probs",
    reads=("mismatched_tokens", "prompt_lengths"),
    writes=("ref_mismatched_log_probs",),
)
VALIDATE_PAIRS = _node("actor.validate_pairs", "actor.update", reads=(*SEQUENCES, _REFERENCE))

WARM_START = Flow(elements=(IMITATE,))
VALIDATION = SAMPLE_VALIDATION >> SCORE_VALIDATION
VALIDATION_OF_SOLUTIONS = offline("held_out_solutions", "response_mask") >> _node(
    "actor.validate_solutions", "actor.update", reads=(*SEQUENCES, "response_mask")
)
VALIDATION_OF_PAIRS = (
    offline("held_out_pairs") >> replace(REFERENCE_LOG_PROBS, name="reference.validation_log_probs") >> VALIDATE_PAIRS
)


def each_node(flow: Flow, change: Callable[[Node], Node | None]) -> Flow:
    """Return the flow with its nodes changed, also inside repeats, and without those whose change is None."""
    elements: list[Node | Repeat] = []
    for element in flow.elements:
        if isinstance(element, Repeat):
            elements.append(replace(element, body=each_node(element.body, change)))
        elif (node := change(element)) is not None:
            elements.append(node)
    return Flow(elements=tuple(elements))


def without(flow: Flow, column: str, *, role: str | None = None) -> Flow:
    """Return the flow in which no node, or no node of a role, reads or writes a column.

    Nodes that wrote nothing else are left out.
    """

    def change(node: Node) -> Node | None:
        if role not in (None, node.role):
            return node
        if node.writes == (column,):
            return None
        reads, writes = (tuple(name for name in names if name != column) for names in (node.reads, node.writes))
        return replace(node, reads=reads, writes=writes)

    return each_node(flow, change)


def with_drops(step: Step) -> Step:
    """Return the step where samples may be left out: the update reads the columns that tell which."""
    written = {column for node in step.flow.nodes() for column in node.writes}
    found = tuple(column for column in SCORED if column in written)

    def reading(node: Node) -> Node:
        return replace(node, reads=tuple(dict.fromkeys((*node.reads, *found))))

    return replace(step, update=each_node(step.update, reading))


def with_router_choices(flow: Flow) -> Flow:
    """Return the flow in which the rollout's choices of experts go to where the actor computes log-probabilities."""
    return _from_rollout(flow, "router_choices", "actor.log_probs", "actor.update")


def with_truncated(flow: Flow) -> Flow:
    """Return the flow in which the actor's update is told which responses were cut."""
    return _from_rollout(flow, "is_truncated", "actor.update")


def _from_rollout(flow: Flow, column: str, *readers: str) -> Flow:
    """Return the flow in which a column goes from the rollout to nodes of some names."""

    def change(node: Node) -> Node:
        if node.source and node.role in ("actor", "groups"):
            return replace(node, writes=(*node.writes, column))
        if node.name in (*readers, "groups.keep"):
            return replace(node, reads=(*node.reads, column))
        return node

    return each_node(flow, change)


def with_environment(flow: Flow) -> Flow:
    """Return the flow in which an environment answers the responses.

    Its rewards, and how long the last turns are, go from the sampling nodes to the scoring ones.
    """

    def change(node: Node) -> Node:
        if node.source and node.role == "actor":
            return replace(node, writes=(*node.writes, "environment_rewards", "last_turn_lengths"))
        if node.role in ("reward", "cost"):
            rewards = ("environment_rewards",) if node.role == "reward" else ()
            return replace(node, reads=(*node.reads, "last_turn_lengths", *rewards))
        return node

    return each_node(flow, change)
