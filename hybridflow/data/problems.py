"""Problems in the order in which training draws them, read from prepared stores when they are drawn.

A prompt is a function of its prompt index, the seed and the sources, so all that a checkpoint keeps of the data is one
integer, which means the same to any number of ranks; and a rank reads the rows that it draws alone.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hybridflow.config.data import DataConfig, DataSourceConfig
from hybridflow.config.recipe import Recipe
from hybridflow.config.rewards import RewardConfig
from hybridflow.data.chat import chat_template
from hybridflow.data.images import Image, row_number, source_and_row
from hybridflow.data.live import Taken
from hybridflow.data.mixture import source_of, whole_weights
from hybridflow.data.order import permuted
from hybridflow.data.part import Given
from hybridflow.data.preferences import JudgedResponse, encode_responses
from hybridflow.data.prepare import Everyone, prepare
from hybridflow.data.prompts import END_OF_SEQUENCE, Example, Solution, encode_solution, prompt_tokens
from hybridflow.data.row_store import RowStore, Stored
from hybridflow.data.shaping import Shape, ends_of, examples_of
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import ConfigError, DataError
from hybridflow.families.images import ImageSettings, image_settings

FOLDER = "rows"
"""Where stores are kept in a run's directory."""

_KEPT_BYTES = 16 << 20
_ENTRY_BYTES, _BYTES_PER_BYTE = 1024, 8
"""What a row takes in memory, about: its objects, and its texts and tokens for each byte on disk."""


class _Drawn(NamedTuple):
    """A row with all that is asked of it."""

    example: Example
    prompt: tuple[int, ...]
    solution: Solution | None
    responses: tuple[JudgedResponse, ...]


class Stores:
    """The rows of stores: each store in epochs of its own, shuffled anew in each.

    Args:
        stores: One for each source.
        weights: How often each is drawn from, in proportion; None: as often as it has rows, so that ``num_rows``
            prompt indices are all the rows.
        seed: Seed of the order.

    Attributes:
        num_rows: In all of them.
        seed: Seed of the order.
    """

    def __init__(self, stores: Sequence[RowStore], weights: Sequence[float | None], seed: int) -> None:
        self._stores, self.seed = tuple(stores), seed
        self.num_rows = sum(map(len, stores))
        shares = [len(store) if weight is None else weight for weight, store in zip(weights, stores, strict=True)]
        self._weights = whole_weights(shares)

    @functools.cached_property
    def sha256(self) -> str:
        """Return the sha256 of the rows in order and of the weights; with the seed they decide each prompt index."""
        if len(self._stores) == 1:
            return self._stores[0].sha256
        told = [[store.sha256, weight] for store, weight in zip(self._stores, self._weights, strict=True)]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()

    def place(self, prompt_index: int) -> tuple[int, int]:
        """Return the store and the row of a prompt index, counted from 0: equal for all that have the same row."""
        source, count = source_of(prompt_index, self._weights)
        size = len(self._stores[source])
        epoch, index = divmod(count, size)
        # Of a single source the order is that of ``api.feed.GivenProblems``.
        key = (self.seed, epoch) if len(self._stores) == 1 else (self.seed, epoch, source)
        return source, permuted(index, size=size, key=key)

    def stored(self, place: tuple[int, int]) -> Stored:
        """Return the row at a place."""
        return self._stores[place[0]][place[1]]

    def close(self) -> None:
        """Close the stores' files."""
        for store in self._stores:
            store.close()


class StoredProblems:
    """Problems by the prompt index; see ``placement.job.Problems``.

    Attributes:
        num_rows: In all sources; None: it is not known, more may come.
        seed: Seed of the order; None: rows come in an order of their own.
        template: Text of the chat template for rows of messages; None: there is none.

    Args:
        rows: Rows by the prompt index.
        shape: What the rows were prepared as.
        tokenizer: Gives the tokens.
    """

    def __init__(self, rows: Stores | Taken, shape: Shape, tokenizer: Tokenizer) -> None:
        self._rows = rows
        self._shape, self._tokenizer = shape, tokenizer
        self.num_rows, self.seed = rows.num_rows, rows.seed
        self.template = shape.template
        # What was read last: a row is asked for several times in a step, and small files stay in memory as a whole.
        self._kept: OrderedDict[tuple[int, int], tuple[_Drawn, int]] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()

    @property
    def sha256(self) -> str:
        """Return the sha256 of all that decides the prompt of each prompt index, but for the seed."""
        return self._rows.sha256

    def look(self, prompt_index: int, since_s: float, within_s: float) -> bool:
        """Return whether a prompt index has its row, see ``live.Taken.look``; in files each has."""
        return not isinstance(self._rows, Taken) or self._rows.look(prompt_index, since_s, within_s)

    def example(self, prompt_index: int) -> Example:
        """Return the example of a prompt index. Raises DataError: its row cannot be read; as all methods here."""
        return self._drawn(prompt_index).example

    def prompt(self, prompt_index: int) -> tuple[int, ...]:
        """Return the token ids of its prompt."""
        return self._drawn(prompt_index).prompt

    def solution(self, prompt_index: int) -> Solution:
        """Return the text to imitate."""
        found = self._drawn(prompt_index).solution
        assert found is not None, "solutions are asked for where is_imitating says so"
        return found

    def responses(self, prompt_index: int) -> tuple[JudgedResponse, ...]:
        """Return the responses of a preference, the better one first; else one response."""
        return self._drawn(prompt_index).responses

    def images(self, row_number: int) -> tuple[Image, ...]:
        """Return the images of a row, by its number."""
        return self._at(source_and_row(row_number)).example.images

    def _drawn(self, prompt_index: int) -> _Drawn:
        return self._at(self._rows.place(prompt_index))

    def _at(self, place: tuple[int, int]) -> _Drawn:
        with self._lock:
            if place in self._kept:
                self._kept.move_to_end(place)
                return self._kept[place][0]
        stored = self._rows.stored(place)
        drawn = self._encoded(stored, place)
        with self._lock:
            num_bytes = _ENTRY_BYTES + _BYTES_PER_BYTE * stored.num_bytes
            self._kept_bytes += num_bytes - self._kept.pop(place, (None, 0))[1]
            self._kept[place] = drawn, num_bytes
            while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= self._kept.popitem(last=False)[1][1]
        return drawn

    def _encoded(self, stored: Stored, place: tuple[int, int]) -> _Drawn:
        example = example_in(stored, self._shape)
        if example.images:
            example = replace(example, row_number=row_number(*place))
        most = self._shape.max_context
        # Checked when it was prepared; without a context any length will do.
        context = 2**62 if most is None else most
        is_imitating = self._shape.is_imitating
        is_learned = is_imitating or bool(example.responses)
        ends = ends_of(example, self._shape, self._tokenizer) if is_learned else END_OF_SEQUENCE
        return _Drawn(
            example,
            prompt_tokens(example, self._tokenizer),
            encode_solution(example, self._tokenizer, max_context=context, ends=ends) if is_imitating else None,
            encode_responses(example, self._tokenizer, max_context=context, ends=ends),
        )


def example_in(stored: Stored, shape: Shape) -> Example:
    """Return the example of a row that was read from a store."""
    return examples_of(stored.row, stored.place, stored.begins, shape)[stored.which]


def shape_of(recipe: Recipe, tokenizer: Tokenizer | None) -> Shape:
    """Return the shape that a recipe asks of its rows.

    Args:
        recipe: What is run.
        tokenizer: Its tokenizer; None: it is yet to be trained, and lengths are not looked at.

    Raises:
        DataError: The file of the chat template cannot be read.
    """
    traits = recipe.traits
    return Shape(
        data=recipe.data,
        kind=("pairs" if traits.is_paired else "preferences") if traits.has_preferences else "problems",
        is_imitating=recipe.warm_start is not None or traits.imitates,
        needs_answer=False,
        template=template_of(recipe.data, tokenizer),
        tokenizer=None if tokenizer is None else str(tokenizer.path),
        num_rows=None if tokenizer is None else tokenizer.vocab_size,
        images=images_settings(recipe),
        stop=recipe.rollout.stop,
        # Of what is only imitated nothing is sampled.
        max_new_tokens=1 if traits.imitates else recipe.rollout.max_new_tokens,
        max_context=recipe.model.max_context,
    )


def images_settings(recipe: Recipe) -> ImageSettings | None:
    """Return how the actor makes tokens of images; None: its prompts are text.

    Raises:
        ConfigError: It reads no images.
    """
    if recipe.data.images_field is None:
        return None
    if recipe.model.path is None:
        raise ConfigError("data.images_field: model.path is missing; name the directory of a model that reads images")
    return image_settings(Path(recipe.model.path), recipe.data.image_max_pixels)


def training_shape(recipe: Recipe, tokenizer: Tokenizer | None) -> Shape:
    """Return ``shape_of`` where the recipe's own reward scores: it may compare with a problem's answer."""
    learns_from_scores = "loss" in recipe.traits.reads
    return replace(shape_of(recipe, tokenizer), needs_answer=learns_from_scores and _compares_answers(recipe))


def held_out_shape(shape: Shape, recipe: Recipe) -> Shape:
    """Return the shape of held-out rows: their prompts are sampled from, and SFT compares with their solutions.

    Where responses are scored, they are those to the last turn's prompt, which the answer belongs to.
    """
    return replace(
        shape,
        data=replace(shape.data, learned_turns="last") if recipe.scores_held_out else shape.data,
        is_imitating=recipe.traits.imitates,
        needs_answer=recipe.scores_held_out and _compares_answers(recipe),
        max_new_tokens=recipe.rollout.max_new_tokens if recipe.scores_held_out else 1,
    )


def _compares_answers(recipe: Recipe) -> bool:
    """Return whether what scores compares a response with the answer, so that a problem without one is of no use."""
    sections = [recipe.reward] if recipe.cost is None else [recipe.reward, recipe.cost]
    return any(_compares(section, recipe) for section in sections)


def _compares(reward: RewardConfig, recipe: Recipe) -> bool:
    if reward.kind is None:
        return recipe.rollout.environment is None
    has_group = reward.pattern is not None and re.compile(reward.pattern).groups > 0
    return reward.function in ("exact_match", "maths", "code") or has_group


def template_of(data: DataConfig, tokenizer: Tokenizer | None) -> str | None:
    """Return the text of the chat template: of the named file, or of the tokenizer; None: there is none.

    Raises:
        DataError: It cannot be read.
    """
    if data.chat_template is None:
        return None if tokenizer is None else chat_template(tokenizer)
    try:
        return Path(data.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.chat_template={data.chat_template!r}: cannot be read: {error}; name a file of jinja text"
        ) from error


def open_problems(
    sources: Sequence[DataSourceConfig | Given],
    shape: Shape,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    seed: int,
    everyone: Everyone | None = None,
) -> StoredProblems:
    """Prepare what training draws from, or find it prepared. Collective: ``everyone``.

    Args:
        sources: What it draws from.
        shape: What rows have to be.
        tokenizer: Gives the tokens.
        folder: Where stores are kept, but for ``data.cache_dir``.
        seed: Seed of the order.
        everyone: The ranks; None: this process alone.

    Raises:
        DataError: As ``prepare``.
    """
    stores = open_stores(sources, shape, folder, everyone=everyone)
    return StoredProblems(Stores(stores, [each.weight for each in sources], seed), shape, tokenizer)


def open_stores(
    sources: Sequence[DataSourceConfig | Given],
    shape: Shape,
    folder: Path,
    *,
    everyone: Everyone | None = None,
) -> list[RowStore]:
    """Open the stores of sources; see ``open_problems``."""
    data = shape.data
    where = folder if data.cache_dir is None else Path(data.cache_dir)
    return [prepare(source, shape, where, everyone=everyone, num_workers=data.num_workers) for source in sources]
