"""The training loop, as a program that every rank compiles and of which it runs its own part. No torch.

``Trainer.run`` executes it. Each ``Call`` is a method of a role, on every rank of a mesh (``trainer.roles``).
"""

from __future__ import annotations

from collections.abc import Mapping

from hybridflow.dataflow.compiler import compile_stages
from hybridflow.dataflow.graph import Step
from hybridflow.dataflow.schedule import Branch, Call, Loop, Program
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.trainer.ahead import compile_ahead

RECORD = Call("trainer.finish_step", "trainer", "finish_step", "job")
SAVE = Call("trainer.save", "trainer", "save", "job")
_SAVE_WHERE_DUE = Branch("save", "job", (SAVE,))


def training_loop(step: Step, meshes: Mapping[str, DeviceMesh], validation: Program) -> Program:
    """Return the training loop: sample; compute experience; update; validate, record and save where due.

    Until the update, a step can be left as if it had never begun. So the ranks agree before each stage on going on.
    What comes after the rollout is begun only if there is time for the update, too.

    Args:
        step: The stages of a training step.
        meshes: Name -> mesh.
        validation: The program of a validation.
    """
    sample, experience, update = compile_stages((step.sample, step.score >> step.experience, step.update), meshes)
    learn = (*update.body, *_end_of_step(validation))
    train = (*experience.whole, *update.moves, Branch("go_on_to_update", "job", learn))
    return (Loop("train_step", "job", (*sample.whole, Branch("go_on_to_update", "job", train))),)


def training_loop_ahead(step: Step, meshes: Mapping[str, DeviceMesh], validation: Program) -> tuple[Program, Program]:
    """Return the first samples, and the loop that samples a later batch while it learns from one, on other ranks.

    Args:
        step: As for ``training_loop``; likewise the others.
        meshes: Name -> mesh.
        validation: The program of a validation.
    """
    fill, turn = compile_ahead(step, meshes)
    body = (*turn, *_end_of_step(validation))
    return fill, (Loop("train_step", "job", (Branch("go_on_to_update", "job", body),)),)


def two_halves(step: Step, meshes: Mapping[str, DeviceMesh]) -> tuple[Program, Program]:
    """Return one step in two halves, for a program that runs its own loop: sample and score; learn, record and save."""
    sample, score, experience, update = compile_stages((step.sample, step.score, step.experience, step.update), meshes)
    return (*sample.whole, *score.whole), (*experience.whole, *update.whole, RECORD, _SAVE_WHERE_DUE)


def _end_of_step(validation: Program) -> Program:
    return (Branch("validate", "job", validation), RECORD, _SAVE_WHERE_DUE)
