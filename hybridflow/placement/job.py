"""What every role is built from: the ranks, the recipe, the meshes and the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hybridflow.config.recipe import Recipe
from hybridflow.data.preferences import Response
from hybridflow.data.prompts import Example, PromptSource, Solution
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.families.model import ModelConfig
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.parallel.world import World

READERS = ("actor", "critic", "reward", "cost", "cost_critic", "teacher")
"""Roles whose models read what the actor writes."""


class Problems(Protocol):
    """What is learned from, by the prompt index, over all epochs. A rank asks for what it uses alone."""

    def example(self, prompt_index: int) -> Example:
        """The example of a prompt index."""

    def prompt(self, prompt_index: int) -> tuple[int, ...]:
        """Token ids of its prompt."""

    def solution(self, prompt_index: int) -> Solution:
        """What to imitate of it."""

    def responses(self, prompt_index: int) -> tuple[Response, ...]:
        """Of a preference: the better and the other, or one."""

    @property
    def sha256(self) -> str:
        """Of all that decides what each prompt index is."""


@dataclass(frozen=True, kw_only=True)
class ReadProblems:
    """Problems with their tokens, all of them in memory.

    Attributes:
        source: The examples in the order in which they are drawn.
        prompts: Token ids of each example's prompt, in the order of the file.
        solutions: Of each example, to be imitated; empty where none are.
        all_responses: Of each example that is a preference: the better and the other, or one.
    """

    source: PromptSource
    prompts: tuple[tuple[int, ...], ...]
    solutions: tuple[Solution, ...] = ()
    all_responses: tuple[tuple[Response, ...], ...] = ()

    def example(self, prompt_index: int) -> Example:
        """The example of a prompt index."""
        return self.source.example(prompt_index)

    def prompt(self, prompt_index: int) -> tuple[int, ...]:
        """The prompt's tokens of a prompt index."""
        return self.prompts[self.source.row(prompt_index)]

    def solution(self, prompt_index: int) -> Solution:
        """What to imitate of a prompt index."""
        return self.solutions[self.source.row(prompt_index)]

    def responses(self, prompt_index: int) -> tuple[Response, ...]:
        """The responses of a prompt index."""
        return self.all_responses[self.source.row(prompt_index)]

    @property
    def num_rows(self) -> int:
        """How many different ones there are; so many prompt indices are an epoch."""
        return len(self.prompts)

    @property
    def sha256(self) -> str:
        """Of the problems in their order."""
        return self.source.sha256


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every role is built from; equal on all ranks but for ``world``.

    Attributes:
        world: This rank and the others.
        recipe: What was asked for.
        meshes: Name -> mesh, from ``trainer.plan``.
        tokenizer: Text to tokens and back; None only where a program gives tokens alone (``roles.stepped_actor``).
        train: Problems to learn from.
        held_out: Problems to be judged by, in the order of the file.
        held_out_pairs: Preferences to be judged by, in the order of the file; then there are no problems.
        is_resumed: Models are made without initial values: a checkpoint will fill them.
        objects: What a Python program gave in the place of what the recipe names, by role: functions, models.
    """

    world: World
    recipe: Recipe
    meshes: Mapping[str, DeviceMesh]
    tokenizer: Tokenizer
    train: Problems
    held_out: tuple[tuple[Example, tuple[int, ...]], ...]
    held_out_pairs: tuple[tuple[Response, Response], ...] = ()
    is_resumed: bool = False
    objects: Mapping[str, Any] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        """Token ids that the actor chooses among: those that every model has which reads what it writes."""
        models = (self.model_of(role) for role in READERS)
        return min(model.vocab_size for model in models if model.vocab_size is not None)

    def model_of(self, name: str) -> ModelConfig:
        """The settings of the model of a role or mesh, the vocabulary included."""
        model = self.recipe.model_of(name)
        return replace(model, vocab_size=self.tokenizer.vocab_size) if model.vocab_size is None else model
