"""What every role is built from: the ranks, the recipe, the meshes and the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hybridflow.config.recipe import MODEL_SECTIONS, Recipe
from hybridflow.data.images import FIRST_ID, Image
from hybridflow.data.preferences import JudgedResponse
from hybridflow.data.prompts import Example, Solution
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.families.images import ImageSettings
from hybridflow.families.model import ModelConfig
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.models.images import ImageReader
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
        held_out_solutions: What of them would be imitated, of SFT.
        held_out_pairs: Preferences to be judged by, in the order of the file; then there are no problems.
        is_resumed: Models are made without initial values: a checkpoint will fill them.
        objects: What a Python program gave in the place of what the recipe names, by role: functions, models.
        modules: The models that run in ``transformers``, by role, from ``placement.library_models``.
        images: How the actor makes tokens of images; None: prompts are text.
        images_of: Number of a row, as the ids of its images' tokens have it -> its images; None: prompts are text.
        image_readers: What models know of images, by directory and dtype, from ``placement.images``.
    """

    world: World
    recipe: Recipe
    meshes: Mapping[str, DeviceMesh]
    tokenizer: Tokenizer
    train: Problems
    held_out: tuple[tuple[Example, tuple[int, ...]], ...] = ()
    held_out_solutions: tuple[Solution, ...] = ()
    held_out_pairs: tuple[tuple[JudgedResponse, JudgedResponse], ...] = ()
    is_resumed: bool = False
    objects: Mapping[str, Any] = field(default_factory=dict)
    modules: Mapping[str, Any] = field(default_factory=dict)
    images: ImageSettings | None = None
    images_of: Callable[[int], tuple[Image, ...]] | None = None
    image_readers: dict[tuple[str, str], ImageReader] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids that the actor chooses among; every model that reads them has these."""
        return min(self.model_of(role).known_vocab_size for role in MODEL_SECTIONS)

    def without_images(self, prompt: Sequence[int]) -> list[int]:
        """Return a prompt's tokens as the vocabulary has them: those of images are the one that stands for an image."""
        if self.images is None:
            return list(prompt)
        return [self.images.token_id if token >= FIRST_ID else token for token in prompt]

    def model_of(self, name: str) -> ModelConfig:
        """Return the settings of the model of a role or mesh, with the vocabulary size."""
        model = self.recipe.model_of(name)
        return replace(model, vocab_size=self.tokenizer.vocab_size) if model.vocab_size is None else model
