"""Running a rank's schedule: calls, moves, phases, and loops and branches on shared decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hybridflow.dataflow.batch import Batch
from hybridflow.dataflow.move import Mover
from hybridflow.dataflow.role import Role
from hybridflow.dataflow.schedule import (
    Branch,
    Call,
    Concurrent,
    Instruction,
    Loop,
    Move,
    Phase,
    deciders,
    describe,
    walk,
)
from hybridflow.errors import GraphError
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.observe.activity import current_activity
from hybridflow.observe.timeline import Timeline
from hybridflow.parallel.failure import lost_contact
from hybridflow.parallel.world import World

Scope = dict[tuple[ParallelLayout, tuple[int, ...]], Batch]
"""Place -> the samples that this rank holds there, in order of id."""


@dataclass(frozen=True)
class Replicated:
    """A decision that needs no data and comes out the same on every rank, so that no message is needed to share it."""

    take: Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Executor:
    """Runs a rank's own schedule, as ``schedule.project`` gives it.

    A role's call gets ``(batch, decided)``: the batch has exactly the columns that the node reads, with
    this rank's samples in order of id; ``decided`` has the values of the loops and branches around it. On the holders
    of the mesh it returns a batch with exactly the columns that the node writes; what other ranks return is not kept.

    A turn of a loop and the body of a branch see the columns outside, and their own columns end with them.

    Attributes:
        schedule: What this rank does.
        roles: Name -> role.
        decisions: Name -> function that takes the decision; called on the lowest rank of the deciding mesh alone, and
            on all of its ranks, without a message, where it is ``Replicated``. A
            loop ends at the first falsy value, so turns are numbered from 1.
        mover: Executes moves.
        world: The ranks of the job.
        meshes: Name -> mesh.
        timeline: Notes the time of every call, move, phase and decision.

    Raises:
        GraphError: The schedule names a role, call or decision that is not there.
    """

    schedule: tuple[Instruction, ...]
    roles: Mapping[str, Role]
    decisions: Mapping[str, Callable[[], Any] | Replicated]
    mover: Mover
    world: World
    meshes: Mapping[str, DeviceMesh]
    timeline: Timeline

    def __post_init__(self) -> None:
        for instruction in walk(self.schedule):
            self._check(instruction)

    def run(self, scope: Scope | None = None, decided: Mapping[str, Any] | None = None) -> Scope:
        """Run the schedule once.

        Args:
            scope: What this rank holds before; None: nothing.
            decided: Decisions that were taken outside it.

        Returns:
            What this rank holds after it.

        Raises:
            GraphError: A role's columns are not those of its node.
        """
        held = {} if scope is None else dict(scope)
        self._run(self.schedule, held, {} if decided is None else decided)
        return held

    def _run(self, program: tuple[Instruction, ...], scope: Scope, decided: Mapping[str, Any]) -> None:
        for instruction in program:
            match instruction:
                case Call():
                    ranks = self.meshes[instruction.mesh].ranks
                    with (
                        self.timeline.span("call", instruction.name),
                        lost_contact(instruction.name, ranks, self.world.deadline_s),
                    ):
                        self._call(instruction, scope, decided)
                case Move():
                    with self.timeline.span("move", describe(instruction)):
                        self._move(instruction, scope)
                case Phase():
                    with self.timeline.span("phase", describe(instruction)):
                        self.roles[instruction.role].enter_phase(instruction.phase)
                case Loop():
                    while value := self._decide(instruction):
                        with current_activity(_turn(instruction, value)):
                            self._run(instruction.body, dict(scope), {**decided, instruction.decision: value})
                case Branch():
                    if value := self._decide(instruction):
                        self._run(instruction.then, dict(scope), {**decided, instruction.decision: value})
                case Concurrent():
                    raise AssertionError("a rank's own schedule has no concurrent bodies: project the program first")

    def _decide(self, instruction: Loop | Branch) -> Any:
        decision, ranks = self.decisions[instruction.decision], deciders(instruction, self.meshes)
        with self.timeline.span("control", instruction.decision):
            if isinstance(decision, Replicated):
                return decision.take()
            value = decision() if self.world.rank == ranks[0] else None
            return self.world.coordinator(ranks).decide(instruction.decision, value)

    def _move(self, move: Move, scope: Scope) -> None:
        source, destination = self.meshes[move.source].key, self.meshes[move.destination].key
        moved = self.mover.move(move, scope.get(source), scope.get(destination))
        if moved is not None:
            held = scope.get(destination)
            is_same = held is not None and torch.equal(held.ids, moved.ids)
            scope[destination] = held.with_columns(moved.columns) if held is not None and is_same else moved

    def _call(self, call: Call, scope: Scope, decided: Mapping[str, Any]) -> None:
        mesh = self.meshes[call.mesh]
        given = scope.get(mesh.key, Batch.empty()) if call.reads else Batch.empty()
        for column in call.reads:
            if column not in given.columns:
                raise GraphError(
                    f"node {call.name!r} reads column {column!r}, which rank {self.world.rank} does not hold on "
                    f"{call.mesh}; move it there before"
                )
        result = self.roles[call.role].calls[call.call](given.only(call.reads), decided)
        if call.source:
            # New samples hide those of before, wherever this rank held them.
            scope.clear()
        if not mesh.has_outputs(self.world.rank):
            return
        written = () if result is None else tuple(result.columns)
        if set(written) != set(call.writes):
            raise GraphError(
                f"node {call.name!r} ({call.role}.{call.call}) returned columns {sorted(written)} on rank "
                f"{self.world.rank}; it declares to write {sorted(call.writes)}: return exactly these"
            )
        if result is None or not written:
            return
        if call.source:
            scope[mesh.key] = result.select(result.ids.argsort())
        elif torch.equal(result.ids, given.ids):
            scope[mesh.key] = scope[mesh.key].with_columns(result.columns)
        else:
            raise GraphError(
                f"node {call.name!r} ({call.role}.{call.call}) returned other samples than it was given on rank "
                f"{self.world.rank} ({len(result)} for {len(given)}); return the ids of the batch, in its order"
            )

    def _check(self, instruction: Instruction) -> None:
        match instruction:
            case Call() | Phase():
                role = self.roles.get(instruction.role)
                call = instruction.call if isinstance(instruction, Call) else None
                if role is None or (call is not None and call not in role.calls):
                    known = ", ".join(self.roles) or "none"
                    missing = f"{instruction.role}.{call or 'enter_phase'}"
                    raise GraphError(f"{describe(instruction)}: there is no {missing}; the roles are {known}")
            case Loop() | Branch():
                if instruction.decision not in self.decisions:
                    known = ", ".join(self.decisions) or "none"
                    raise GraphError(f"{describe(instruction)}: nothing decides it; the decisions are {known}")


def _turn(loop: Loop, value: Any) -> str:
    """Name a turn of a loop: ``train step 3``."""
    name = loop.decision.replace("_", " ")
    return f"{name} {value['step']}" if isinstance(value, dict) and "step" in value else name
