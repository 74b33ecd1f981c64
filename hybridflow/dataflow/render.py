"""A compiled program for a person: who does what, the program as text, the way of the columns. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hybridflow.dataflow.schedule import Branch, Call, Instruction, Loop, Move, bodies, describe, walk
from hybridflow.layout.mesh import DeviceMesh, format_ranks
from hybridflow.observe.table import format_table


def plan_table(program: tuple[Instruction, ...], meshes: Mapping[str, DeviceMesh], num_ranks: int) -> str:
    """Render ranks × role × calls, ranks that do the same in one row, and the program below.

    Args:
        program: The program of the whole job.
        meshes: Name -> mesh.
        num_ranks: Ranks of the job; those without any call are listed as idle.
    """
    names = dict.fromkeys(each.mesh for each in walk(program) if isinstance(each, Call))
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank in range(num_ranks):
        alike.setdefault(tuple(name for name in names if rank in meshes[name]), []).append(rank)
    rows = [("ranks", "role", "mesh", "calls")]
    for ranks in alike.values():
        tasks = _work(program, meshes, ranks[0])
        for index, task in enumerate(tasks or (("idle", "", ""),)):
            rows.append((format_ranks(ranks) if index == 0 else "", *task))
    return "\n".join([*format_table(rows), "", "program", *_lines(program, meshes, "  ")])


def mermaid(program: tuple[Instruction, ...], meshes: Mapping[str, DeviceMesh]) -> str:
    """Render the columns' way through a program as a Mermaid flowchart.

    A box is a call with its mesh and layout, a frame is a loop or branch; a thin arrow is columns read where they were
    written, a thick one columns that a move brought. A call
    that the program makes in several places is one box.
    """
    calls = dict.fromkeys(each for each in walk(program) if isinstance(each, Call))
    names = {call: f"n{index}" for index, call in enumerate(calls)}
    lines = ["flowchart TD", *_boxes(program, meshes, names, "  ")]
    lines += [f'  {edge}|"{", ".join(columns)}"| {reader}' for edge, reader, columns in _arrows(program, names, meshes)]
    return "\n".join(lines)


def _work(
    program: tuple[Instruction, ...], meshes: Mapping[str, DeviceMesh], rank: int
) -> tuple[tuple[str, str, str], ...]:
    """Return the rank's (role, mesh, calls), in the order of their first call."""
    calls: dict[tuple[str, str], dict[str, None]] = {}
    for instruction in walk(program):
        if isinstance(instruction, Call) and rank in meshes[instruction.mesh]:
            calls.setdefault((instruction.role, _mesh(instruction.mesh, meshes)), {})[instruction.call] = None
    return tuple((role, mesh, ", ".join(names)) for (role, mesh), names in calls.items())


def _mesh(name: str, meshes: Mapping[str, DeviceMesh]) -> str:
    return f"{name} {meshes[name].layout}"


def _lines(program: tuple[Instruction, ...], meshes: Mapping[str, DeviceMesh], indent: str) -> Iterator[str]:
    for instruction in program:
        line = indent + describe(instruction)
        if isinstance(instruction, Call):
            line += f" on {_mesh(instruction.mesh, meshes)}"
        elif isinstance(instruction, Loop | Branch):
            line += f", decided on {instruction.mesh}"
        yield line
        for body in bodies(instruction):
            if body and not isinstance(instruction, Loop):
                yield f"{indent}  {'then' if isinstance(instruction, Branch) else 'at the same time'}"
                yield from _lines(body, meshes, indent + "    ")
            else:
                yield from _lines(body, meshes, indent + "  ")


def _boxes(
    program: tuple[Instruction, ...], meshes: Mapping[str, DeviceMesh], names: Mapping[Call, str], indent: str
) -> Iterator[str]:
    for instruction in program:
        if isinstance(instruction, Call):
            yield f'{indent}{names[instruction]}["{instruction.name}<br/>{_mesh(instruction.mesh, meshes)}"]'
            continue
        frame = isinstance(instruction, Loop | Branch)
        inside = [line for body in bodies(instruction) for line in _boxes(body, meshes, names, indent + "  " * frame)]
        if frame and inside:
            first = next(names[each] for each in walk((instruction,)) if isinstance(each, Call))
            yield f'{indent}subgraph {first}_frame["{describe(instruction)}"]'
            yield from inside
            yield f"{indent}end"
        else:
            yield from inside


def _arrows(
    program: tuple[Instruction, ...], names: Mapping[Call, str], meshes: Mapping[str, DeviceMesh]
) -> list[tuple[str, str, list[str]]]:
    """Return (writer and arrow, reader, columns) of a program."""
    arrows: dict[tuple[str, str], list[str]] = {}

    def follow(body: tuple[Instruction, ...], writers: dict[str, str], moved: set[tuple[str, object]]) -> None:
        for instruction in body:
            match instruction:
                case Move():
                    place = meshes[instruction.destination].key
                    moved.update((column, place) for column in instruction.columns)
                case Call():
                    name = names[instruction]
                    for column in instruction.reads:
                        if column in writers:
                            arrow = "==>" if (column, meshes[instruction.mesh].key) in moved else "-->"
                            arrows.setdefault((f"{writers[column]} {arrow}", name), []).append(column)
                    if instruction.source:
                        writers.clear()
                        moved.clear()
                    writers.update(dict.fromkeys(instruction.writes, name))
                case Loop() | Branch():
                    for inner in bodies(instruction):
                        follow(inner, dict(writers), set(moved))
                case _:
                    for inner in bodies(instruction):
                        follow(inner, writers, moved)

    follow(program, {}, set())
    return [(edge, reader, columns) for (edge, reader), columns in arrows.items()]
