"""The nodes of algorithms: which role does what on which mesh, reading and writing which columns. No torch."""

from __future__ import annotations

from dataclasses import replace

from hybridflow.dataflow.graph import Flow, Node, Repeat, repeat

SEQUENCES = ("tokens", "prompt_lengths")

SAMPLE = Node(
    name="actor.sample",
    role="actor",
    call="sample",
    mesh="actor.rollout",
    phase="rollout",
    source=True,
    writes=(*SEQUENCES, "draws", "response_mask", "rollout_log_probs"),
)
SCORE = Node(
    name="reward.score",
    role="reward",
    call="score",
    mesh="reward",
    reads=(*SEQUENCES, "draws"),
    writes=("scores",),
)
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
CRITIC_VALUES = Node(
    name="critic.values",
    role="critic",
    call="values",
    mesh="critic",
    reads=SEQUENCES,
    writes=("values",),
)
_OLD, _REFERENCE = "old_log_probs", "ref_log_probs"


def advantages(call: str, *, reads: tuple[str, ...] = (), writes: tuple[str, ...] = ("advantages",)) -> Node:
    """From scores to advantages, in one of the ways that ``roles.advantage`` has."""
    return Node(
        name=f"advantage.{call}",
        role="advantage",
        call=call,
        mesh="actor.update",
        reads=("tokens", "scores", "draws", "response_mask", _OLD, _REFERENCE, *reads),
        writes=writes,
    )


CRITIC_UPDATE = repeat(
    "critic_mini_batch",
    Node(
        name="critic.update",
        role="critic",
        call="update",
        mesh="critic",
        reads=(*SEQUENCES, "response_mask", "values", "returns", "order"),
    ),
    mesh="critic",
)
ACTOR_UPDATE = repeat(
    "actor_mini_batch",
    Node(
        name="actor.update",
        role="actor",
        call="update",
        mesh="actor.update",
        phase="update",
        reads=(*SEQUENCES, "response_mask", "rollout_log_probs", _OLD, _REFERENCE, "advantages", "order"),
    ),
    mesh="actor.update",
)
IMITATE = repeat(
    "warm_step",
    Node(name="actor.imitate", role="actor", call="imitate", mesh="actor.update", phase="update"),
    mesh="actor.update",
)
ANSWER = Node(
    name="actor.answer",
    role="actor",
    call="answer",
    mesh="actor.rollout",
    phase="rollout",
    source=True,
    writes=(*SEQUENCES, "draws", "response_mask", "rollout_log_probs"),
)
JUDGE = Node(name="reward.judge", role="reward", call="judge", mesh="reward", reads=(*SEQUENCES, "draws"))

WARM_START = Flow(elements=(IMITATE,))
VALIDATION = ANSWER >> JUDGE


def without(flow: Flow, column: str, *, role: str | None = None) -> Flow:
    """The flow in which nobody reads a column, or no node of a role, and which nobody makes then."""
    elements: list[Node | Repeat] = []
    for element in flow.elements:
        if isinstance(element, Repeat):
            elements.append(replace(element, body=without(element.body, column, role=role)))
        elif role in (None, element.role):
            if column in element.writes:
                continue
            elements.append(replace(element, reads=tuple(name for name in element.reads if name != column)))
        else:
            elements.append(element)
    return Flow(elements=tuple(elements))


def with_environment(flow: Flow) -> Flow:
    """The flow where an environment answers the responses: its rewards go from those who sample to those who score."""
    changed = []
    for element in flow.elements:
        if isinstance(element, Node) and element.source:
            element = replace(element, writes=(*element.writes, "environment_rewards"))
        elif isinstance(element, Node) and element.role == "reward":
            element = replace(element, reads=(*element.reads, "response_mask", "environment_rewards"))
        changed.append(element)
    return Flow(elements=tuple(changed))
