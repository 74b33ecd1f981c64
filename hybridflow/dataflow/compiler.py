"""From a flow to the program of the whole job: moves, phases and concurrency filled in. No torch.

Where a column is, while the program runs: after a call, on the mesh's holders (the last pipeline stage); after a move,
on every rank of the destination. A node needs its columns on every rank of its mesh.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hybridflow.dataflow.graph import ORDER, Flow, Node, Repeat
from hybridflow.dataflow.schedule import Call, Concurrent, Instruction, Loop, Move, Phase, participants
from hybridflow.errors import GraphError
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout

Place = tuple[ParallelLayout, tuple[int, ...]]


def compile_flow(flow: Flow, meshes: Mapping[str, DeviceMesh]) -> tuple[Instruction, ...]:
    """Compile the program of the whole job, the same on every rank, without any message.

    Args:
        flow: What happens to the samples.
        meshes: Name -> mesh, for every mesh that the flow names.

    Raises:
        GraphError: The flow's columns do not fit together, or a mesh is unknown.
    """
    (stage,) = compile_stages((flow,), meshes)
    return stage.whole


class StageProgram(NamedTuple):
    """The program of one stage.

    Attributes:
        moves: Moves that bring the stage its columns, before anything else of it.
        body: The rest.
    """

    moves: tuple[Instruction, ...]
    body: tuple[Instruction, ...]

    @property
    def whole(self) -> tuple[Instruction, ...]:
        """Return all of the stage."""
        return (*self.moves, *self.body)


def compile_stages(
    stages: Sequence[Flow],
    meshes: Mapping[str, DeviceMesh],
    *,
    hands_over: bool = False,
    elsewhere: Sequence[Flow] = (),
) -> tuple[StageProgram, ...]:
    """Compile flows that follow each other; each sees the columns and phases that those before it leave.

    Args:
        stages: The flows, in order.
        meshes: Name -> mesh, for every mesh that the flows name.
        hands_over: Whether the first stage also moves what it made to all later readers, so that its ranks take part in
            no later move.
        elsewhere: Flows of the same program that are compiled apart: a role changes its phase with all its ranks,
            theirs too.

    Raises:
        GraphError: The columns do not fit together, or a mesh is unknown.
    """
    flow = Flow(elements=tuple(element for stage in stages for element in stage.elements))
    flow.check()
    _check_meshes(flow, meshes)
    roles: dict[str, frozenset[int]] = {}
    for node in (node for each in (flow, *elsewhere) for node in each.nodes()):
        roles[node.role] = roles.get(node.role, frozenset()).union(meshes[node.mesh].ranks)
    state, job, later, found = _State(), _Job(meshes, roles), list(flow.elements), []
    for number, stage in enumerate(stages):
        program = _compile(stage, state, job, later)
        if hands_over and number == 0:
            ready = set(state.writer)
            program += tuple(move for element in later for move in _moves(element, later, ready, state, job))
        moves = tuple(itertools.takewhile(lambda each: isinstance(each, Move), program))
        found.append(StageProgram(moves, program[len(moves) :]))
    return tuple(found)


class _Job(NamedTuple):
    """Facts that do not change during compilation: the meshes, and all ranks of each role."""

    meshes: Mapping[str, DeviceMesh]
    roles: Mapping[str, frozenset[int]]


@dataclass(kw_only=True)
class _State:
    """Knowledge at one point of the program.

    Attributes:
        writer: Column -> name of the mesh whose holders wrote it.
        complete: Columns that every rank of a place has.
        phase: Role -> phase that it is in; absent: unknown.
    """

    writer: dict[str, str] = field(default_factory=dict)
    complete: set[tuple[Place, str]] = field(default_factory=set)
    phase: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Lane:
    """Elements that must run one after the other, and what they touch."""

    elements: tuple[Node | Repeat, ...]
    ranks: frozenset[int]
    reads: frozenset[str]
    writes: frozenset[str]

    def is_before(self, other: _Lane) -> bool:
        """Return whether ``other``, which comes later in the flow, has to wait for this."""
        return not self.ranks.isdisjoint(other.ranks) or not self.writes.isdisjoint(other.reads)


def _compile(flow: Flow, state: _State, job: _Job, later: list[Node | Repeat]) -> tuple[Instruction, ...]:
    """Compile a flow. ``later`` holds its elements and those of the following stages; its own are removed."""
    program: list[Instruction] = []
    for lanes in _split(flow, job):
        before = frozenset(state.writer)
        hoisted: list[Instruction] = []
        branches: list[tuple[Instruction, ...]] = []
        for lane in lanes:
            branch: list[Instruction] = []
            ready = set(before)
            for element in lane.elements:
                for move in _moves(element, later, ready, state, job):
                    # A move that needs other ranks too comes first: its columns were there before all branches.
                    (branch if lane.ranks.issuperset(participants(move, job.meshes)) else hoisted).append(move)
                branch += _emit(element, state, job)
                ready.update(_writes(element))
                later.remove(element)
            branches.append(tuple(branch))
        program += hoisted
        program += branches[0] if len(branches) == 1 else [Concurrent(tuple(branches))]
    return tuple(program)


def _split(flow: Flow, job: _Job) -> list[list[_Lane]]:
    """Cut a flow into runs; the lanes of one run share no rank and no column, so they may run at the same time."""
    runs: list[list[_Lane]] = []
    lanes: list[_Lane] = []
    for element in flow.elements:
        new = _lane((element,), job)
        related = [lane for lane in lanes if lane.is_before(new)]
        if not related:
            lanes.append(new)
            continue
        if len(related) > 1:
            runs.append(lanes)
            lanes = [new]
            continue
        (lane,) = related
        last = max(index for index, each in enumerate(lane.elements) if _lane((each,), job).is_before(new))
        free = lane.elements[last + 1 :]
        if free and len(lanes) == 1:
            # The end of the lane does not concern this element: end the run before it, and let the two go side by side.
            runs.append([_lane(lane.elements[: last + 1], job)])
            lanes = [_lane(free, job), new]
        else:
            lanes[lanes.index(lane)] = _lane((*lane.elements, element), job)
    return [*runs, lanes] if lanes else runs


def _lane(elements: Sequence[Node | Repeat], job: _Job) -> _Lane:
    ranks: set[int] = set()
    for element in elements:
        if isinstance(element, Repeat):
            ranks.update(job.meshes[element.mesh].ranks)
        for node in element.nodes():
            # A change of phase concerns all ranks of the role, whichever mesh the node is on.
            ranks.update(job.meshes[node.mesh].ranks if node.phase is None else job.roles[node.role])
    return _Lane(
        elements=tuple(elements),
        ranks=frozenset(ranks),
        reads=frozenset(column for element in elements for _, columns in element.needs() for column in columns),
        writes=frozenset(column for element in elements for column in _writes(element)),
    )


def _writes(element: Node | Repeat) -> tuple[str, ...]:
    """Return the columns that outlive the element."""
    if isinstance(element, Repeat):
        return ()
    return (*element.writes, ORDER) if element.source else element.writes


def _moves(
    element: Node | Repeat, later: Sequence[Node | Repeat], ready: set[str], state: _State, job: _Job
) -> list[Move]:
    """Return the moves that bring an element its columns; a repeat's whole body moves once, not on every turn.

    A move takes along what later elements on the same place will read, as far as it is ``ready``: written before
    all branches, or in this one.
    """
    moves: list[Move] = []
    for mesh, reads in element.needs():
        place = job.meshes[mesh].key
        # At a hand-over, some columns of later elements are not written yet: they are moved when they are.
        wanted = [column for column in reads if column in state.writer and (place, column) not in state.complete]
        # Every move also tells the order of the samples: order asks for a move of its own only when there is no other.
        writers = [state.writer[column] for column in wanted if column != ORDER]
        if wanted and not writers:
            writers = [state.writer[ORDER]]
        # Columns of one place come in one move, whatever their meshes are called.
        sources = {job.meshes[writer].key: writer for writer in reversed(writers)}
        soon = [
            column
            for other in later
            for name, columns in other.needs()
            if job.meshes[name].key == place
            for column in columns
            if column in ready and (place, column) not in state.complete
        ]
        for held, writer in reversed(sources.items()):
            columns = tuple(
                column
                for column in dict.fromkeys([*wanted, *soon])
                if job.meshes[state.writer[column]].key == held and column != ORDER
            )
            moves.append(Move(columns, writer, mesh))
            state.complete.update((place, column) for column in (*columns, ORDER))
    return moves


def _emit(element: Node | Repeat, state: _State, job: _Job) -> list[Instruction]:
    if isinstance(element, Repeat):
        # A turn follows what was before the loop, or another turn: only phases that the whole body keeps are known.
        asked = {(node.role, node.phase) for node in element.nodes() if node.phase is not None}
        before = _before_loop(element, asked, state, job)
        state.phase |= {each.role: each.phase for each in before}
        state.phase = {
            role: phase
            for role, phase in state.phase.items()
            if all(other == phase for each, other in asked if each == role)
        }
        inner = _State(phase=dict(state.phase))
        if not element.has_source:
            inner.writer, inner.complete = dict(state.writer), set(state.complete)
        body = _compile(element.body, inner, job, list(element.body.elements))
        return [*before, Loop(element.decision, element.mesh, body)]
    instructions: list[Instruction] = []
    if element.phase is not None and state.phase.get(element.role) != element.phase:
        state.phase[element.role] = element.phase
        instructions.append(Phase(element.role, element.phase))
    mesh = job.meshes[element.mesh]
    for column in _writes(element):
        state.writer[column] = element.mesh
        if mesh.layout.pp == 1 and column != ORDER:
            state.complete.add((mesh.key, column))
    instructions.append(
        Call(element.name, element.role, element.call, element.mesh, element.reads, element.writes, element.source)
    )
    return instructions


def _before_loop(element: Repeat, asked: set[tuple[str, str]], state: _State, job: _Job) -> list[Phase]:
    """Return the changes of phase that ranks outside the loop take part in, and that its body therefore cannot make."""
    turning = set(job.meshes[element.mesh].ranks)
    alone = {role: phase for role, phase in asked if sum(role == each for each, _ in asked) == 1}
    return [
        Phase(role, phase)
        for role, phase in sorted(alone.items())
        if state.phase.get(role) != phase and not turning.issuperset(job.roles[role])
    ]


def _check_meshes(flow: Flow, meshes: Mapping[str, DeviceMesh]) -> None:
    for element in flow.elements:
        if element.mesh not in meshes:
            user = f"repeat {element.decision!r}" if isinstance(element, Repeat) else f"node {element.name!r}"
            raise GraphError(f"{user} is on mesh {element.mesh!r}; the meshes are {', '.join(meshes)}")
        if isinstance(element, Repeat):
            _check_meshes(element.body, meshes)
