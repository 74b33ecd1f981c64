"""Programs in which the next batches are generated while one is learned from, on disjoint ranks. No torch.

One turn, with samples made ``trainer.max_staleness`` steps ahead:

    take the batch of step i, and move it to those that learn    all ranks
    bring the weights of step i - 1 to the rollout               all ranks
    sample and score for step i + max_staleness, and put         ranks of the rollout, and of the reward
    log-probabilities, advantages, updates on batch i            the other ranks

Each rank keeps what concerns it, so the last two run at the same time, and meet at the end of the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

from hybridflow.dataflow.compiler import compile_stages
from hybridflow.dataflow.graph import Flow, Node, Step
from hybridflow.dataflow.schedule import Branch, Loop, Phase, Program
from hybridflow.flows.nodes import each_node
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.recipe.meshes import SAMPLING_MESHES

VERSIONS = "versions"
"""Column of each sample's oldest weights, ``[samples]``: so many updates they had."""

WORKING_AHEAD = "sampling"
"""Mesh of all ranks that work on the next batches."""


def sampling_mesh(meshes: Mapping[str, DeviceMesh]) -> DeviceMesh:
    """Return the mesh of all ranks that work on the next batches, for decisions."""
    ranks = tuple(sorted({rank for name in SAMPLING_MESHES if name in meshes for rank in meshes[name].ranks}))
    per_node = meshes["actor.rollout"].ranks_per_node
    return DeviceMesh(name=WORKING_AHEAD, layout=ParallelLayout(dp=len(ranks)), ranks=ranks, ranks_per_node=per_node)


def with_versions(flow: Flow) -> Flow:
    """Return the flow whose sources tell which weights sampled."""
    return each_node(flow, lambda node: replace(node, writes=(*node.writes, VERSIONS)) if node.source else node)


def compile_ahead(step: Step, meshes: Mapping[str, DeviceMesh]) -> tuple[Program, Program]:
    """Compile what comes before the first step, the samples for so many as are made ahead, and a step.

    Args:
        step: The step, from ``with_versions``.
        meshes: Name -> mesh, ``WORKING_AHEAD`` among them.

    Raises:
        GraphError: What samples or scores reads what is learned.
    """
    columns = _handed_over(step)
    put = Node(name="buffer.put", role="buffer", call="put", mesh="actor.rollout", reads=columns)
    take = Node(name="buffer.take", role="buffer", call="take", mesh="actor.rollout", writes=columns, source=True)
    sample, score = compile_stages((step.sample, step.score >> put), meshes)
    taken = Flow(elements=(take,))
    hand_over, *learn = compile_stages(
        (taken, step.experience, step.update), meshes, hands_over=True, elsewhere=(step.sample, step.score)
    )
    fill = Loop("fill_buffer", "job", (*sample.whole, Branch("go_on", "job", score.whole)))
    # All ranks change the phase. Those that learn do not wait for prompts.
    phases = tuple(itertools.takewhile(lambda each: isinstance(each, Phase), sample.whole))
    keep = Branch("keep_samples", WORKING_AHEAD, score.whole)
    have = Branch("have_prompts", WORKING_AHEAD, (*sample.whole[len(phases) :], keep))
    later = Branch("sample_ahead", "job", (*phases, have))
    return (fill,), (*hand_over.whole, later, *(instruction for stage in learn for instruction in stage.whole))


def _handed_over(step: Step) -> tuple[str, ...]:
    """Return the columns that are sampled or scored and read by what learns, and the versions."""
    learning = step.experience >> step.update
    read = {column for element in learning.elements for _, columns in element.needs() for column in columns}
    made = [column for node in (step.sample >> step.score).nodes() for column in node.writes]
    return tuple(column for column in made if column in read or column == VERSIONS)
