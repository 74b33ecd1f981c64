"""The nodes of algorithms: which role does what on which mesh, reading and writing which columns. No torch."""

from __future__ import annotations

from dataclasses import replace

from hybridflow.dataflow.graph import SCORED, Flow, Node, Repeat, Step, repeat

SEQUENCES = ("tokens", "prompt_lengths")

SAMPLE = Node(
    name="actor.sample",
    role="actor",
    call="sample",
    mesh="actor.rollout",
    phase="rollout",
    source=True,
    writes=(*SEQUENCES, "prompt_indices", "response_mask", "rollout_log_probs"),
)


def _score(role: str, column: str) -> Node:
    return Node(
        name=f"{role}.score",
        role=role,
        call="score",
        mesh=role,
        reads=(*SEQUENCES, "prompt_indices"),
        writes=(column,),
    )


SCORE, COST = _score("reward", "scores"), _score("cost", "costs")
_SAMPLED = (*SAMPLE.writes, "scores")
KEEP = Node(name="groups.keep", role="groups", call="keep", mesh="actor.rollout", reads=_SAMPLED)
FILL = repeat("fill", SAMPLE >> SCORE >> KEEP, mesh="job")
TAKE = Node(name="groups.take", role="groups", call="take", mesh="actor.rollout", source=True, writes=_SAMPLED)
ACTOR_LOG_PROBS = Node(
    name="actor.log_probs",
    role="actor",
    call="log_probs",
    mesh="actor.update",
    phase="update",
    reads=SEQUENCES,
    writes=("old_log_probs",),
)
REFERENCE_LOG_PROBS = Node(
    name="reference.log_probs",
    role="reference",
    call="log_probs",
    mesh="reference",
    reads=SEQUENCES,
    writes=("ref_log_probs",),
)


def _values(role: str, column: str) -> Node:
    return Node(name=f"{role}.values", role=role, call="values", mesh=role, reads=SEQUENCES, writes=(column,))


CRITIC_VALUES, COST_VALUES = _values("critic", "values"), _values("cost_critic", "cost_values")
TEACHER_TOP = Node(
    name="teacher.top",
    role="teacher",
    call="top",
    mesh="teacher",
    reads=SEQUENCES,
    writes=("teacher_log_probs", "teacher_ids"),
)
_OLD, _REFERENCE = "old_log_probs", "ref_log_probs"


def advantages(call: str, *, reads: tuple[str, ...] = (), writes: tuple[str, ...] = ("advantages",)) -> Node:
    """Return a node from scores to advantages, in one of the ways that ``roles.advantage`` has."""
    return Node(
        name=f"advantage.{call}",
        role="advantage",
        call=call,
        mesh="actor.update",
        reads=("tokens", "scores", "prompt_indices", "response_mask", _OLD, _REFERENCE, *reads),
        writes=writes,
    )


def _critic_update(role: str, values: str, returns: str) -> Repeat:
    return repeat(
        # The critics have equally many mini-batches.
        "critic_mini_batch",
        Node(
            name=f"{role}.update",
            role=role,
            call="update",
            mesh=role,
            reads=(*SEQUENCES, "response_mask", values, returns, "order"),
        ),
        mesh=role,
    )


CRITIC_UPDATE = _critic_update("critic", "values", "returns")
COST_CRITIC_UPDATE = _critic_update("cost_critic", "cost_values", "cost_returns")


def update(*reads: str, call: str = "update") -> Repeat:
    """Return the actor's updates, a mini-batch each, in one of the ways that it has."""
    return repeat(
        "actor_mini_batch",
        Node(
            name=f"actor.{call}",
            role="actor",
            call=call,
            mesh="actor.update",
            phase="update",
            reads=(*SEQUENCES, *reads, "order"),
        ),
        mesh="actor.update",
    )


ACTOR_UPDATE = update("response_mask", "rollout_log_probs", _OLD, _REFERENCE, "advantages")
DISTILL = update("response_mask", "teacher_log_probs", "teacher_ids", call="distill")
IMITATE = repeat(
    "warm_step",
    Node(name="actor.imitate", role="actor", call="imitate", mesh="actor.update", phase="update"),
    mesh="actor.update",
)
SAMPLE_VALIDATION = replace(SAMPLE, name="actor.sample_validation", call="sample_validation")
SCORE_VALIDATION = replace(SCORE, name="reward.score_validation", call="score_validation", writes=())


def offline(call: str, *writes: str) -> Node:
    """Return a node that reads samples instead of sampling, in one of the ways of ``roles.offline_samples``."""
    return Node(
        name=f"offline.{call}",
        role="offline",
        call=call,
        mesh="actor.update",
        source=True,
        writes=(*SEQUENCES, *writes),
    )


REFERENCE_MISMATCHED_LOG_PROBS = Node(
    name="reference.mismatched_log_probs",
    role="reference",
    call="mismatched_log_probs",
    mesh="reference",
    reads=("mismatched_tokens", "prompt_lengths"),
    writes=("ref_mismatched_log_probs",),
)
VALIDATE_PAIRS = Node(
    name="actor.validate_pairs",
    role="actor",
    call="validate_pairs",
    mesh="actor.update",
    phase="update",
    reads=(*SEQUENCES, _REFERENCE),
)

WARM_START = Flow(elements=(IMITATE,))
VALIDATION = SAMPLE_VALIDATION >> SCORE_VALIDATION
VALIDATION_OF_PAIRS = (
    offline("held_out_pairs") >> replace(REFERENCE_LOG_PROBS, name="reference.validation_log_probs") >> VALIDATE_PAIRS
)


def without(flow: Flow, column: str, *, role: str | None = None) -> Flow:
    """Return the flow in which no node, or no node of a role, reads or writes a column.

    Nodes that wrote nothing else are left out.
    """
    elements: list[Node | Repeat] = []
    for element in flow.elements:
        if isinstance(element, Repeat):
            elements.append(replace(element, body=without(element.body, column, role=role)))
        elif role in (None, element.role):
            if element.writes == (column,):
                continue
            reads, writes = (
                tuple(name for name in names if name != column) for names in (element.reads, element.writes)
            )
            elements.append(replace(element, reads=reads, writes=writes))
        else:
            elements.append(element)
    return Flow(elements=tuple(elements))


def with_drops(step: Step) -> Step:
    """Return the step where samples may be left out: the update reads the columns that tell which."""
    written = {column for node in step.flow.nodes() for column in node.writes}
    found = tuple(column for column in SCORED if column in written)

    def reading(element: Node | Repeat) -> Node | Repeat:
        if isinstance(element, Node):
            return replace(element, reads=tuple(dict.fromkeys((*element.reads, *found))))
        return replace(element, body=Flow(elements=tuple(map(reading, element.body.elements))))

    return replace(step, update=Flow(elements=tuple(map(reading, step.update.elements))))


def with_environment(flow: Flow) -> Flow:
    """Return the flow in which an environment answers the responses.

    Its rewards go from the sampling nodes to the scoring ones.
    """
    changed: list[Node | Repeat] = []
    for element in flow.elements:
        if isinstance(element, Repeat):
            element = replace(element, body=with_environment(element.body))
        elif element.source and element.role == "actor":
            element = replace(element, writes=(*element.writes, "environment_rewards"))
        elif element.role in ("reward", "cost"):
            rewards = ("environment_rewards",) if element.role == "reward" else ()
            element = replace(element, reads=(*element.reads, "response_mask", *rewards))
        changed.append(element)
    return Flow(elements=tuple(changed))
