"""The dataflow graph of the whole job: which call reads and writes which columns on which mesh. No torch.

    flow = sample >> score >> repeat("mini_batch", update, mesh="update")

Edges come from names: a node depends on the nodes that write the columns it reads.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from hybridflow.errors import GraphError

ORDER = "order"
"""The column that every source gives without naming it: a sample's position among all samples sorted by id."""


SCORED = ("scores", "costs", "baselines")
"""Columns whose numbers a sample that is learned from all has, as far as the flow has them; NaN: it is left out."""


class _Chain:
    """Part that ``>>`` joins into a flow."""

    def __rshift__(self, other: Node | Repeat | Flow) -> Flow:
        return Flow(elements=(*_elements(self), *_elements(other)))


@dataclass(frozen=True, kw_only=True)
class Node(_Chain):
    """One call of a role on every rank of a mesh.

    Attributes:
        name: Unique within the flow, for messages and pictures (``"actor.sample"``).
        role: Which role object does it (``"actor"``).
        call: Name of the role's method.
        mesh: Name of the mesh whose ranks make the call together.
        reads: Columns that the call is given.
        writes: Columns that it returns.
        phase: Phase in which the role must be (``"rollout"``); None: any.
        source: Whether the call makes new samples; then it reads nothing.

    Raises:
        GraphError: A source reads, or another node writes columns without reading any.
    """

    name: str
    role: str
    call: str
    mesh: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    phase: str | None = None
    source: bool = False

    def __post_init__(self) -> None:
        if self.source and self.reads:
            raise GraphError(
                f"node {self.name!r} is a source and reads {list(self.reads)}; "
                "a source makes new samples and reads none"
            )
        if self.writes and not self.reads and not self.source:
            raise GraphError(
                f"node {self.name!r} writes {list(self.writes)} and reads nothing; "
                "let it read columns, or set source=True"
            )
        for what, names in (("reads", self.reads), ("writes", self.writes)):
            if len(set(names)) != len(names):
                raise GraphError(f"node {self.name!r} {what} {list(names)}; name each column once")

    def nodes(self) -> tuple[Node, ...]:
        """Return only this node, so that a node and a repeat can be walked alike."""
        return (self,)

    def needs(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Return the mesh and the columns that must be there before."""
        return ((self.mesh, self.reads),)


@dataclass(frozen=True, kw_only=True)
class Repeat(_Chain):
    """A flow that is run as long as a decision is truthy; what it writes lives for one turn.

    Attributes:
        decision: Name of the decision, taken before each turn.
        mesh: Name of the mesh that takes it; it has every rank of the body.
        body: The flow of one turn.
    """

    decision: str
    mesh: str
    body: Flow

    def nodes(self) -> tuple[Node, ...]:
        """Return the nodes of the body, those of inner repeats included."""
        return self.body.nodes()

    @property
    def has_source(self) -> bool:
        """Return whether a turn makes its own samples, which hide those outside."""
        return any(isinstance(element, Node) and element.source for element in self.body.elements)

    def needs(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Return the meshes of the body, and the columns that must be there before the first turn."""
        if self.has_source:
            return ()
        local = {column for element in self.body.elements if isinstance(element, Node) for column in element.writes}
        return tuple(
            (mesh, tuple(column for column in columns if column not in local))
            for element in self.body.elements
            for mesh, columns in element.needs()
        )


def repeat(decision: str, flow: Node | Flow, mesh: str) -> Repeat:
    """Run ``flow`` as long as ``decision``, taken on ``mesh`` before each turn, is truthy."""
    return Repeat(decision=decision, mesh=mesh, body=Flow(elements=_elements(flow)))


@dataclass(frozen=True, kw_only=True)
class Flow(_Chain):
    """Nodes and repeats in the order in which one rank that had them all would run them."""

    elements: tuple[Node | Repeat, ...]

    def nodes(self) -> tuple[Node, ...]:
        """Return all nodes in order, those inside repeats included."""
        return tuple(node for element in self.elements for node in element.nodes())

    def check(self) -> None:
        """Check names and columns of the whole flow.

        Raises:
            GraphError: A column is read before anything wrote it, or written twice; a node's name is used twice; a
                second source would mix two sets of samples. The message names nodes and columns.
        """
        names = [node.name for node in self.nodes()]
        for name in names:
            if names.count(name) > 1:
                raise GraphError(f"two nodes are called {name!r}; give each its own name")
        self._check_columns({})

    def _check_columns(self, outer: Mapping[str, Node]) -> None:
        """Check that each column is written once, before it is read; ``outer`` has the writers outside."""
        writers = dict(outer)
        own_source: Node | None = None
        for element in self.elements:
            if isinstance(element, Repeat):
                element.body._check_columns({} if element.has_source else writers)
                continue
            for column in element.reads:
                if column not in writers:
                    raise GraphError(self._missing(element, column, writers))
            if element.source and own_source is not None:
                raise GraphError(
                    f"nodes {own_source.name!r} and {element.name!r} are both sources; a flow follows one set of "
                    "samples: compile the second flow on its own, or put it into a repeat"
                )
            own_source = element if element.source else own_source
            for column in element.writes:
                if column in writers or column == ORDER:
                    first = writers[column].name if column in writers else "the source of the samples"
                    raise GraphError(
                        f"column {column!r} is written by {first!r} and again by {element.name!r}; "
                        "rename one of the two"
                    )
                writers[column] = element
            if element.source:
                writers[ORDER] = element

    def _missing(self, node: Node, column: str, writers: Mapping[str, Node]) -> str:
        """Return the message about a column that nothing wrote before ``node``."""
        message = f"node {node.name!r} reads column {column!r}, which no earlier node writes"
        others = [other for other in self.nodes() if column in other.writes]
        if others and others[0] in self.elements:
            message += f"; {others[0].name!r} writes it, but comes later: put it before {node.name!r}"
        elif others:
            message += f"; {others[0].name!r} writes it, but inside a repeat, where it lives for one turn only"
        else:
            near = difflib.get_close_matches(column, list(writers), n=1)
            message += f"; nearest name: {near[0]!r}" if near else ""
            message += "; add a node that writes it, or correct the name"
        known = ", ".join(f"{name} ({writer.name})" for name, writer in writers.items())
        return f"{message}. Columns so far: {known or 'none'}"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One training step, in stages. Programs are composed from stages; ``>>`` joins two steps stage by stage.

    Attributes:
        sample: Make the samples: one source, and for algorithms with several rollouts in a step the loop before it.
        score: Score the samples on the ranks that sample, so that they can work ahead of those that learn.
        experience: Compute what the update reads: log-probabilities, values, advantages.
        update: Loops over mini-batches.
    """

    sample: Flow = Flow(elements=())
    score: Flow = Flow(elements=())
    experience: Flow = Flow(elements=())
    update: Flow = Flow(elements=())

    def __rshift__(self, other: Step) -> Step:
        return Step(**{name: flow >> getattr(other, name) for name, flow in self._stages()})

    @property
    def flow(self) -> Flow:
        """Return the whole step."""
        return self.sample >> self.score >> self.experience >> self.update

    def map(self, change: Callable[[Flow], Flow]) -> Step:
        """Return the step with each stage changed."""
        return Step(**{name: change(flow) for name, flow in self._stages()})

    def _stages(self) -> tuple[tuple[str, Flow], ...]:
        return tuple((item.name, getattr(self, item.name)) for item in fields(self))


def step(
    *,
    sample: Node | Repeat | Flow | None = None,
    score: Node | Repeat | Flow | None = None,
    experience: Node | Repeat | Flow | None = None,
    update: Node | Repeat | Flow | None = None,
) -> Step:
    """Return a step whose stages are nodes, repeats or flows; a stage that is left out is empty."""
    stages = {"sample": sample, "score": score, "experience": experience, "update": update}
    return Step(**{name: Flow(elements=_elements(part)) for name, part in stages.items() if part is not None})


def _elements(part: object) -> tuple[Node | Repeat, ...]:
    if isinstance(part, Flow):
        return part.elements
    if isinstance(part, Node | Repeat):
        return (part,)
    raise GraphError(f"{part!r} cannot be joined with >>; give a Node, a repeat(...) or a Flow")
