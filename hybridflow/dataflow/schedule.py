"""The compiled form of a flow: instructions, the whole job's program, and a rank's own schedule. No torch.

A program is a tuple of instructions. The trainer composes what flows cannot say by plain tuples:

    step = compile_flow(sample >> score >> update, meshes)
    program = (Loop("train_step", "job", (*step, Branch("validate", "job", validation))),)

A program is the same on every rank, and each rank keeps the part that concerns it (``project``), in the program's
order; so whatever several ranks do together, all of them reach in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from hybridflow.dataflow.graph import ORDER
from hybridflow.errors import GraphError
from hybridflow.layout.mesh import DeviceMesh


# Instructions read like statements, so their fields may be given by position.
@dataclass(frozen=True)
class Call:
    """A method of a role, called by every rank of a mesh; its columns go to the mesh's holders.

    Attributes:
        name: The node's name, for messages.
        role: Which role object.
        call: Its method.
        mesh: Name of the mesh.
        reads: Columns given.
        writes: Columns returned.
        source: Whether it makes new samples, which hide those before.
    """

    name: str
    role: str
    call: str
    mesh: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    source: bool = False


@dataclass(frozen=True)
class Move:
    """Columns from the holders of one mesh to every rank of another; each sample goes once to each receiving rank.

    The destination also gets ``order``, each sample's position among all samples sorted by id. Source and destination
    may be the same place: then the ranks before the last pipeline stage get what the last one computed.
    """

    columns: tuple[str, ...]
    source: str
    destination: str


@dataclass(frozen=True)
class Phase:
    """A role changes its phase, on all ranks on which it is ever called."""

    role: str
    phase: str


@dataclass(frozen=True)
class Loop:
    """Run the body as long as the decision, taken on the mesh before each turn, is truthy."""

    decision: str
    mesh: str
    body: tuple[Instruction, ...]


@dataclass(frozen=True)
class Branch:
    """Run the body if the decision, taken on the mesh, is truthy."""

    decision: str
    mesh: str
    then: tuple[Instruction, ...]


@dataclass(frozen=True)
class Concurrent:
    """Bodies on disjoint ranks, which run at the same time."""

    branches: tuple[tuple[Instruction, ...], ...]


Instruction = Call | Move | Phase | Loop | Branch | Concurrent
Program = tuple[Instruction, ...]


def bodies(instruction: Instruction) -> tuple[tuple[Instruction, ...], ...]:
    """Return the programs inside an instruction."""
    match instruction:
        case Loop():
            return (instruction.body,)
        case Branch():
            return (instruction.then,)
        case Concurrent():
            return instruction.branches
        case _:
            return ()


def walk(program: tuple[Instruction, ...]) -> Iterator[Instruction]:
    """Yield every instruction of a program, outer ones before inner ones."""
    for instruction in program:
        yield instruction
        for body in bodies(instruction):
            yield from walk(body)


def role_ranks(program: tuple[Instruction, ...], meshes: Mapping[str, DeviceMesh]) -> dict[str, frozenset[int]]:
    """Return role -> the ranks on which the program calls it; all of them change phase together."""
    ranks: dict[str, frozenset[int]] = {}
    for instruction in walk(program):
        if isinstance(instruction, Call):
            ranks[instruction.role] = ranks.get(instruction.role, frozenset()).union(meshes[instruction.mesh].ranks)
    return ranks


def rank_sets(program: tuple[Instruction, ...], meshes: Mapping[str, DeviceMesh]) -> tuple[tuple[int, ...], ...]:
    """Return the sets of ranks that talk to each other while the program runs, for ``World.make_groups``."""
    sets: dict[tuple[int, ...], None] = {}
    for instruction in walk(program):
        match instruction:
            case Move():
                sets[participants(instruction, meshes)] = None
            case Loop() | Branch():
                sets[deciders(instruction, meshes)] = None
    return tuple(ranks for ranks in sets if len(ranks) > 1)


def participants(move: Move, meshes: Mapping[str, DeviceMesh]) -> tuple[int, ...]:
    """Return the ranks that take part in a move, in ascending order."""
    return tuple(sorted({*meshes[move.source].ranks, *meshes[move.destination].ranks}))


def deciders(instruction: Loop | Branch, meshes: Mapping[str, DeviceMesh]) -> tuple[int, ...]:
    """Return the ranks that share a decision, in ascending order; the first one decides."""
    return tuple(sorted(meshes[instruction.mesh].ranks))


def project(
    program: tuple[Instruction, ...],
    rank: int,
    meshes: Mapping[str, DeviceMesh],
    roles: Mapping[str, frozenset[int]] | None = None,
) -> tuple[Instruction, ...]:
    """Return the rank's own schedule: the part of the program that concerns it, in the program's order.

    A rank of the mesh that takes a decision keeps the loop or branch even when its body has nothing for it, since
    sharing the decision is collective.

    Args:
        program: Program of the whole job, or a part of it.
        rank: The rank.
        meshes: Name -> mesh.
        roles: From ``role_ranks`` of the whole, where the program is a part; None: it is the whole.

    Raises:
        GraphError: A mesh is unknown; a rank has work under a decision that is taken without it, or in two bodies of
            one concurrent instruction.
    """
    check_meshes(program, meshes)
    return _project(program, rank, meshes, role_ranks(program, meshes) if roles is None else roles)


def check_meshes(program: tuple[Instruction, ...], meshes: Mapping[str, DeviceMesh]) -> None:
    """Refuse mesh names that are not in ``meshes``. Raises GraphError."""
    for instruction in walk(program):
        match instruction:
            case Call() | Loop() | Branch():
                names: tuple[str, ...] = (instruction.mesh,)
            case Move():
                names = (instruction.source, instruction.destination)
            case _:
                names = ()
        for name in names:
            if name not in meshes:
                raise GraphError(f"{describe(instruction)} is on mesh {name!r}; the meshes are {', '.join(meshes)}")


def describe(instruction: Instruction) -> str:
    """Describe an instruction in one line, without the programs inside it."""
    match instruction:
        case Call():
            return f"call {instruction.name}"
        case Move():
            columns = ", ".join(instruction.columns) or ORDER
            return f"move {columns} from {instruction.source} to {instruction.destination}"
        case Phase():
            return f"phase {instruction.role} {instruction.phase}"
        case Loop():
            return f"loop {instruction.decision}"
        case Branch():
            return f"branch {instruction.decision}"
        case Concurrent():
            return "concurrent"


def _project(
    program: tuple[Instruction, ...], rank: int, meshes: Mapping[str, DeviceMesh], roles: Mapping[str, frozenset[int]]
) -> tuple[Instruction, ...]:
    own: list[Instruction] = []
    for instruction in program:
        inner = [_project(body, rank, meshes, roles) for body in bodies(instruction)]
        match instruction:
            case Call():
                is_own = rank in meshes[instruction.mesh]
            case Move():
                is_own = rank in participants(instruction, meshes)
            case Phase():
                is_own = rank in roles.get(instruction.role, frozenset())
            case Loop() | Branch():
                is_own = rank in meshes[instruction.mesh]
                work = next((first for body in inner for first in body), None)
                if work is not None and not is_own:
                    raise GraphError(
                        f"rank {rank} takes part in '{describe(work)}' inside '{describe(instruction)}', which mesh "
                        f"{instruction.mesh!r} decides without it; decide on a mesh that has all ranks of the body"
                    )
            case Concurrent():
                busy = [body for body in inner if body]
                if len(busy) > 1:
                    raise GraphError(
                        f"rank {rank} has work in {len(busy)} bodies of one concurrent instruction "
                        f"({'; '.join(describe(body[0]) for body in busy)}); concurrent bodies need disjoint ranks"
                    )
                own += [each for body in busy for each in body]
                continue
        if not is_own:
            continue
        if isinstance(instruction, Loop):
            instruction = replace(instruction, body=inner[0])
        elif isinstance(instruction, Branch):
            instruction = replace(instruction, then=inner[0])
        own.append(instruction)
    return tuple(own)
