"""Programs in which the next batches are generated while one is learned from, on disjoint ranks. No torch.

One turn, with samples made ``trainer.max_staleness`` steps ahead:

    take the batch of step i, and move it to those that learn    all ranks
    bring the weights of step i - 1 to the rollout               all ranks
    sample and score for step i + max_staleness, and put         ranks of the rollout, and of the reward
    log-probabilities, advantages, updates on batch i            the other ranks

Each rank keeps what concerns it, so the last two run at the same time, and meet at the end of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from hybridflow.dataflow.compiler import compile_flow
from hybridflow.dataflow.graph import Flow, Node, Repeat
from hybridflow.dataflow.schedule import Branch, Call, Concurrent, Instruction, Loop, Move
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.recipe.meshes import SAMPLING_MESHES

Program = tuple[Instruction, ...]

VERSIONS = "versions"
"""Column of each sample's oldest weights, ``[samples]``: so many updates they had."""

WORKING_AHEAD = "sampling"
"""Mesh of all ranks that work on the next batches."""


class Ahead(NamedTuple):
    """The parts of a training step.

    Attributes:
        fill: Before the first step: samples for so many as are made ahead.
        hand_over: The step's samples to those that learn.
        sample: Those of a later step.
        learn: Learning from the step's own.
    """

    fill: Program
    hand_over: Program
    sample: Program
    learn: Program


def sampling_mesh(meshes: Mapping[str, DeviceMesh]) -> DeviceMesh:
    """The mesh of all ranks that work on the next batches, to decide on."""
    ranks = tuple(sorted({rank for name in SAMPLING_MESHES if name in meshes for rank in meshes[name].ranks}))
    per_node = meshes["actor.rollout"].ranks_per_node
    return DeviceMesh(name=WORKING_AHEAD, layout=ParallelLayout(dp=len(ranks)), ranks=ranks, ranks_per_node=per_node)


def with_versions(flow: Flow) -> Flow:
    """The flow whose sources tell which weights sampled."""
    return Flow(
        elements=tuple(
            replace(element, writes=(*element.writes, VERSIONS))
            if isinstance(element, Node) and element.source
            else element
            for element in flow.elements
        )
    )


def compile_ahead(flow: Flow, meshes: Mapping[str, DeviceMesh]) -> Ahead:
    """The parts of a step, compiled.

    Args:
        flow: Of a step, from ``with_versions``.
        meshes: Name -> mesh, ``WORKING_AHEAD`` among them.

    Raises:
        GraphError: What samples or scores reads what is learned.
    """
    sampling, learning = _divide(flow)
    columns = _handed_over(sampling, learning)
    put = Node(name="buffer.put", role="buffer", call="put", mesh="actor.rollout", reads=columns)
    take = Node(name="buffer.take", role="buffer", call="take", mesh="actor.rollout", writes=columns, source=True)
    begin, end = _after_source(compile_flow(sampling >> put, meshes))
    hand_over, learn = _cut(compile_flow(take >> learning, meshes))
    return Ahead(
        fill=(Loop("fill_buffer", "job", (*begin, Branch("go_on", "job", end))),),
        hand_over=hand_over,
        sample=(Branch("sample_ahead", "job", (*begin, Branch("keep_samples", WORKING_AHEAD, end))),),
        learn=learn,
    )


def _divide(flow: Flow) -> tuple[Flow, Flow]:
    """What makes and scores samples, and what learns from them."""

    def is_sampling(element: Node | Repeat) -> bool:
        return isinstance(element, Node) and element.mesh in SAMPLING_MESHES

    chosen = [is_sampling(element) for element in flow.elements]
    sampling, learning = (
        Flow(elements=tuple(element for element, mine in zip(flow.elements, chosen, strict=True) if mine is side))
        for side in (True, False)
    )
    return sampling, learning


def _handed_over(sampling: Flow, learning: Flow) -> tuple[str, ...]:
    """The columns that are made by the one and read by the other, and the versions."""
    read = {column for element in learning.elements for _, columns in element.needs() for column in columns}
    made = [column for node in sampling.nodes() for column in node.writes]
    return tuple(column for column in made if column in read or column == VERSIONS)


def _after_source(program: Program) -> tuple[Program, Program]:
    """A program up to its samples, and the rest."""
    at = 1 + next(at for at, each in enumerate(program) if isinstance(each, Call) and each.source)
    return program[:at], program[at:]


def _cut(program: Program) -> tuple[Program, Program]:
    """What ranks of the rollout take part in, to come first, since nobody is to wait for them later; and the rest."""
    first: list[Instruction] = []
    rest: list[Instruction] = []
    for instruction in program:
        if isinstance(instruction, Concurrent):
            pairs = [_cut(branch) for branch in instruction.branches]
            first += [each for begin, _ in pairs for each in begin]
            rest.append(Concurrent(tuple(end for _, end in pairs)))
        else:
            is_first = (
                instruction.source == "actor.rollout"
                if isinstance(instruction, Move)
                else (isinstance(instruction, Call) and instruction.mesh == "actor.rollout")
            )
            (first if is_first else rest).append(instruction)
    return tuple(first), tuple(rest)
