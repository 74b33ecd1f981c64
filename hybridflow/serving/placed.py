"""A model that only generates, on the ranks of a job: its mesh, its engine, its tokenizer."""

from __future__ import annotations

import argparse
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from hybridflow.checkpoint.formats.registry import open_model
from hybridflow.checkpoint.formats.sharded import find_model
from hybridflow.data.images import Image
from hybridflow.data.tokenizer import Tokenizer, open_tokenizer, tokenizer_in
from hybridflow.errors import ConfigError, LayoutError
from hybridflow.families.cut import check_cut
from hybridflow.families.images import ImageSettings, check_turns, image_elements, image_settings
from hybridflow.families.model import ModelConfig
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.shapes import cached_token_bytes, model_spec, state_bytes
from hybridflow.observe.console import format_bytes
from hybridflow.parallel.coordinator import Coordinator
from hybridflow.parallel.world import World
from hybridflow.placement.images import make_reader
from hybridflow.placement.pretrained import check_table, from_pretrained
from hybridflow.reshard.holdings import WeightHoldings
from hybridflow.reshard.plan import held_bytes
from hybridflow.reshard.spec import ITEM_BYTES
from hybridflow.rollout.engine import MegatronEngine


@dataclass(frozen=True, kw_only=True)
class Placed:
    """This rank's part of a model that generates.

    Attributes:
        model: Its settings, the vocabulary included.
        mesh: Where it is.
        engine: Generates; all ranks of a replica make the same calls.
        tokenizer: Of the model's directory, or the one that was named; None: there is none.
        replica: The ranks of this rank's replica.
        everyone: All ranks.
        is_reporter: Whether this rank has all that its replica's responses say, and tells it.
        images: Those of each prompt, by the number that the ids of their tokens have.
    """

    model: ModelConfig
    mesh: DeviceMesh
    engine: MegatronEngine
    tokenizer: Tokenizer | None
    replica: Coordinator
    everyone: Coordinator
    is_reporter: bool
    images: dict[int, tuple[Image, ...]] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        """Return the true vocabulary size."""
        return self.model.known_vocab_size

    @property
    def dp(self) -> int:
        """Return the number of this replica."""
        return self.mesh.coordinate(self.everyone.rank).dp


def layout_of(arguments: argparse.Namespace, num_ranks: int) -> ParallelLayout:
    """Return the requested layout; by default each rank has the whole model.

    Raises:
        LayoutError: It cannot be read, does not fill the ranks, or cannot generate.
    """
    layout = ParallelLayout(dp=num_ranks) if arguments.layout is None else ParallelLayout.parse(arguments.layout)
    layout.check_generates("--layout")
    layout.check_fits(num_ranks, "--layout")
    return layout


def model_settings(arguments: argparse.Namespace) -> ModelConfig:
    """Return the settings of the requested model, with the requested number format and context.

    Raises:
        ConfigError: There is none, it is no language model, or its context is shorter.
        CheckpointError: The directory is damaged.
    """
    source = open_model(arguments.model)
    check_table(source)
    if source.has_value_head:
        raise ConfigError(f"--model {arguments.model}: found a scorer, expected a language model; choose another")
    model = source.model
    if arguments.max_context is not None and arguments.max_context > model.max_context:
        raise ConfigError(
            f"--max-context {arguments.max_context}: the model's own is {model.max_context}; ask for no more"
        )
    return replace(
        model,
        max_context=model.max_context if arguments.max_context is None else arguments.max_context,
        dtype=model.dtype if arguments.dtype is None else arguments.dtype,
    )


def find_tokenizer(arguments: argparse.Namespace) -> Tokenizer | None:
    """Return the tokenizer of the arguments, or that of the model's directory; None: it has none.

    Raises:
        DataError: It cannot be read.
    """
    path = tokenizer_in(model_folder(arguments)) if arguments.tokenizer is None else arguments.tokenizer
    return None if path is None else open_tokenizer(path)


def model_folder(arguments: argparse.Namespace) -> Path:
    """Return the directory of the model; of a run or a step that of its model."""
    return Path(find_model(arguments.model) or arguments.model)


def settings_of_images(arguments: argparse.Namespace, model: ModelConfig) -> ImageSettings:
    """Return how the requested model makes tokens of images.

    Raises:
        ConfigError: It reads none.
    """
    settings = image_settings(model_folder(arguments), arguments.image_max_pixels)
    check_turns(settings, model)
    return settings


def place_model(arguments: argparse.Namespace, world: World, settings: ImageSettings | None = None) -> Placed:
    """Read the weights into the layout that was asked for. Collective: all ranks.

    Args:
        arguments: Of the command.
        world: This rank and the others.
        settings: How images become tokens; None: prompts are text.

    Raises:
        HybridflowError: The model, its tokenizer or the layout are not what they should be.
    """
    model, layout = model_settings(arguments), layout_of(arguments, world.size)
    check_cut(model, layout, f"--layout {layout}")
    mesh = DeviceMesh(
        name="--layout", layout=layout, ranks=tuple(range(world.size)), ranks_per_node=world.ranks_per_node
    )
    tokenizer = find_tokenizer(arguments)
    placed = from_pretrained(arguments.model, world, mesh, max_context=model.max_context, dtype=model.dtype)
    images: dict[int, tuple[Image, ...]] = {}
    if settings is not None:
        is_first = mesh.coordinate(world.rank).pp == 0
        placed.read_images(make_reader(settings, images.__getitem__, model.dtype, world.device, is_ready=is_first))
    everyone = world.everyone()
    engine = placed.make_engine(
        seed=everyone.decide("seed", secrets.randbits(62) if arguments.seed is None else arguments.seed),
        max_concurrent=arguments.max_concurrent,
        cache_memory=arguments.cache_memory,
        tokenizer=tokenizer,
    )
    return Placed(
        model=model,
        mesh=mesh,
        engine=engine,
        tokenizer=tokenizer,
        replica=world.coordinator(mesh.replica_of(world.rank)),
        everyone=everyone,
        is_reporter=mesh.speaks(world.rank),
        images=images,
    )


def check_lockstep(layout: ParallelLayout) -> None:
    """Refuse replicas that share experts where each answers whenever it is asked: they would wait for each other.

    Raises:
        LayoutError: Experts are cut over more ranks than a replica has.
    """
    if layout.tp % (layout.expert_tp * layout.ep):
        raise LayoutError(
            f"--layout {layout}: etp·ep = {layout.expert_tp * layout.ep} ranks share experts, which a server can cut "
            f"over the tp={layout.tp} ranks of a replica alone; raise tp and set etp=1, or lower ep"
        )


def memory_line(
    model: ModelConfig,
    layout: ParallelLayout,
    lengths: Sequence[int],
    cache_memory: float,
    settings: ImageSettings | None = None,
) -> str:
    """Describe in words the memory of the rank that needs the most.

    Args:
        model: The model.
        layout: How it is cut.
        lengths: Most tokens of each of the sequences that are decoded together.
        cache_memory: Most memory of the cache: in bytes, or, below 1, a share of what will be free.
        settings: How images become tokens; None: prompts are text.
    """
    spec = model_spec(model)
    mesh = DeviceMesh(
        name="--layout", layout=layout, ranks=tuple(range(layout.world_size)), ranks_per_node=layout.world_size
    )
    held = WeightHoldings(spec, mesh)
    by_stage = [held_bytes(spec, held, mesh.first_of_stage(stage)) for stage in range(layout.pp)]
    if settings is not None:
        by_stage[0] += ITEM_BYTES[model.dtype] * image_elements(settings, model.hidden_size)
    cache = sum(lengths) * cached_token_bytes(model, layout) + len(lengths) * state_bytes(model, layout)
    most = int(cache_memory) if cache_memory >= 1 else cache
    least = format_bytes(min(cache, most))
    what = "weights" if settings is None else "weights and images"
    return f"memory of a rank: {what} {format_bytes(max(by_stage))}, key-value cache up to {least}"


def as_tensor(ids: list[int]) -> torch.Tensor:
    """Return token ids as the engine takes them."""
    return torch.tensor(ids, dtype=torch.int64)


def finite_or_none(numbers: torch.Tensor) -> list[float | None]:
    """Return log-probabilities as JSON can have them."""
    return [number if math.isfinite(number) else None for number in numbers.tolist()]
