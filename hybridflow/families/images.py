"""How a vision-language model makes tokens of an image, as its directory says. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.errors import CheckpointError, ConfigError, HybridflowError
from hybridflow.families.assets import CONFIG, FOLDER, PROCESSORS, read_json
from hybridflow.families.model import ModelConfig
from hybridflow.families.vision import ORIGIN, VISION_MODELS, rotary_sections, vision_model
from hybridflow.families.weight_files import read_shapes

PROCESSOR, _ALL_PROCESSORS, _ = PROCESSORS

_MOST_STRETCHED = 200
"""An image is at most so many times as long as it is wide, as in ``transformers``."""

TOWER = ("model.visual.", "visual.")
"""What names of the vision tower's tensors begin with."""

KEPT_TOKENS = 1 << 14
"""So many tokens of images stay computed on a rank: those of a prompt are asked for by each of its samples."""


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """How images become tokens.

    Attributes:
        path: Directory of the original model, which has the tower.
        token_id: Stands for an image in the text of a prompt.
        side: Pixels of a token, in height and in width.
        min_pixels: A smaller image is made larger.
        max_pixels: A larger one is made smaller.
        axes: Of each pair of rotated dims, what turns it: 0 time, 1 height, 2 width.
        num_deep: Layers of the language model behind which the tower adds something.
    """

    path: str
    token_id: int
    side: int
    min_pixels: int
    max_pixels: int
    axes: tuple[int, ...]
    num_deep: int

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of tokens of an image of so many pixels.

        Raises:
            ValueError: The image is too long for its width.
        """
        if max(width, height) > _MOST_STRETCHED * min(width, height):
            raise ValueError(f"{width} x {height} pixels; one side may be at most {_MOST_STRETCHED} times the other")
        rows, columns = (round(length / self.side) for length in (height, width))
        pixels = rows * columns * self.side**2
        if pixels > self.max_pixels:
            shrink = math.sqrt(width * height / self.max_pixels)
            rows, columns = (math.floor(length / shrink / self.side) for length in (height, width))
        elif pixels < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (width * height))
            rows, columns = (math.ceil(length * grow / self.side) for length in (height, width))
        return max(1, rows), max(1, columns)


def reads_images(path: str | None) -> bool:
    """Return whether the model of a directory reads images."""
    if path is None:
        return False
    try:
        image_settings(Path(path))
    except HybridflowError:
        return False
    return True


def image_settings(folder: Path, max_pixels: int | None = None) -> ImageSettings:
    """Return how the model in a directory makes tokens of images.

    Args:
        folder: The directory, or a checkpoint of ours.
        max_pixels: Most pixels of an image; None: as the model's settings say.

    Raises:
        ConfigError: It does not read images, or its files do not say how.
    """
    original = folder
    if not (folder / CONFIG).is_file() and (folder / FOLDER / CONFIG).is_file():
        # A checkpoint of ours has the language model, and names the directory of the whole.
        folder = folder / FOLDER
        original = Path(read_json(folder / CONFIG).get(ORIGIN, folder))
        if not original.is_dir():
            raise ConfigError(
                f"{folder}: has the language model alone; its vision tower is in {original}, which is not there; "
                "restore that directory, or give what `hybridflow convert … --to hf --base DIR` writes"
            )
    values = read_json(folder / CONFIG)
    kind = vision_model(values)
    if kind is None or kind.image_axes is None:
        found = values.get("model_type")
        known = sorted(name for name, each in VISION_MODELS.items() if each.image_axes is not None)
        raise ConfigError(
            f"{folder}: model_type {found!r} does not read images here; expected one of {', '.join(known)}: give "
            "such a model, or prompts of text alone"
        )
    processor = _processor(folder)
    try:
        sections = rotary_sections(values, kind)
        side = int(processor["patch_size"]) * int(processor["merge_size"])
        smallest, largest = _bounds(processor)
        token_id = int(values["image_token_id"])
        num_deep = len(values["vision_config"]["deepstack_visual_indexes"]) if kind.is_deep else 0
        axes = _axes(sections, is_interleaved=kind.image_axes == "turns")
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{folder}: {CONFIG} and {PROCESSOR} do not say how images are read ({type(error).__name__}: {error}); "
            "copy both from the original model"
        ) from error
    return ImageSettings(
        path=str(original),
        token_id=token_id,
        side=side,
        min_pixels=smallest,
        max_pixels=largest if max_pixels is None else max(smallest, min(largest, max_pixels)),
        axes=axes,
        num_deep=num_deep,
    )


def check_turns(settings: ImageSettings, model: ModelConfig) -> None:
    """Refuse settings of images that are of another model.

    Raises:
        ConfigError: They turn other dims than the model does.
    """
    if len(settings.axes) != model.rotary_size // 2:
        raise ConfigError(
            f"{settings.path}: mrope_section has {len(settings.axes)} pairs of dims, and {model.rotary_size // 2} "
            f"turn; copy {CONFIG} from the original model"
        )


def image_elements(settings: ImageSettings, hidden_size: int) -> int:
    """Return the numbers that a rank of a first stage has of images: the vision tower, and what it made of the last.

    Args:
        settings: How images become tokens.
        hidden_size: Of the language model.
    """
    return tower_elements(Path(settings.path)) + KEPT_TOKENS * (1 + settings.num_deep) * hidden_size


def tower_elements(folder: Path) -> int:
    """Return the numbers in the vision tower of a directory; 0: its weights are not there."""
    try:
        shapes = read_shapes(folder)
    except CheckpointError:
        # Who reads the weights says so.
        return 0
    return sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(TOWER))


def _processor(folder: Path) -> Mapping[str, Any]:
    """Return the settings of the image processor: a file of their own, or a part of those of all processors."""
    if not (folder / PROCESSOR).exists() and (folder / _ALL_PROCESSORS).exists():
        found = read_json(folder / _ALL_PROCESSORS).get("image_processor")
        return found if isinstance(found, Mapping) else {}
    return read_json(folder / PROCESSOR)


def _bounds(processor: Mapping[str, Any]) -> tuple[int, int]:
    """Return the fewest and the most pixels of an image."""
    size = processor.get("size") or {}
    smallest, largest = (processor.get(f"{name}_pixels") or size[edge] for name, edge in _EDGES)
    return int(smallest), int(largest)


_EDGES = (("min", "shortest_edge"), ("max", "longest_edge"))


def _axes(sections: list[int], *, is_interleaved: bool) -> tuple[int, ...]:
    """Return the axis of each pair of rotated dims: by sections, or in turns for as long as a section lasts."""
    if not is_interleaved:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    return tuple(pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(sum(sections)))
