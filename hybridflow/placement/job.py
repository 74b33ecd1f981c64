"""What every role is built from: the ranks, the recipe, the meshes and the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hybridflow.config.recipe import MODEL_SECTIONS, Recipe
from hybridflow.data.preferences import JudgedResponse
from hybridflow.data.prompts import Example, Solution
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.families.model import ModelConfig
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.parallel.world import World


class Problems(Protocol):
    """What is learned from, by the prompt index, over all epochs. A rank asks for what it uses alone."""

    def example(self, prompt_index: int) -> Example:
        """Return the example of a prompt index."""

    def prompt(self, prompt_index: int) -> tuple[int, ...]:
        """Return the token ids of its prompt."""

    def solution(self, prompt_index: int) -> Solution:
        """Return the text to imitate."""

    def responses(self, prompt_index: int) -> tuple[JudgedResponse, ...]:
        """Return the responses of a preference, the better one first; else one response."""

    @property
    def sha256(self) -> str:
        """Return the sha256 of all that decides the prompt of each prompt index, but for the seed."""

    @property
    def seed(self) -> int | None:
        """Return the seed of the order; None: the problems have no order that a seed decides."""

    @property
    def num_rows(self) -> int | None:
        """Return the number of different prompts; None: it is not known, as of a live queue."""


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
        modules: The models that run in ``transformers``, by role, from ``placement.library_models``.
    """

    world: World
    recipe: Recipe
    meshes: Mapping[str, DeviceMesh]
    tokenizer: Tokenizer
    train: Problems
    held_out: tuple[tuple[Example, tuple[int, ...]], ...]
    held_out_pairs: tuple[tuple[JudgedResponse, JudgedResponse], ...] = ()
    is_resumed: bool = False
    objects: Mapping[str, Any] = field(default_factory=dict)
    modules: Mapping[str, Any] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids that the actor chooses among; every model that reads them has these."""
        return min(self.model_of(role).known_vocab_size for role in MODEL_SECTIONS)

    def model_of(self, name: str) -> ModelConfig:
        """Return the settings of the model of a role or mesh, with the vocabulary size."""
        model = self.recipe.model_of(name)
        return replace(model, vocab_size=self.tokenizer.vocab_size) if model.vocab_size is None else model
