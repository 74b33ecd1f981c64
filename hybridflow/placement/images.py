"""The images of a job's rows, and what its models see of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.data.images import Grid, Image, row_and_which
from hybridflow.errors import DataError
from hybridflow.families.images import ImageSettings, image_settings
from hybridflow.models.hf_model import make_image_processor
from hybridflow.models.images import ImageReader
from hybridflow.placement.job import Job
from hybridflow.placement.vision_tower import VisionTower
from hybridflow.reshard.spec import DType
from hybridflow.reshard.views import TORCH_DTYPES


def image_reader(job: Job, role: str) -> ImageReader | None:
    """Return what a role's model knows of images; None: prompts are text. Models of one directory share it.

    Raises:
        ConfigError: The model reads no images.
    """
    model = job.model_of(role)
    if job.images_of is None or model.path is None:
        return None
    settings = image_settings(Path(model.path), job.recipe.data.image_max_pixels)
    key = settings.path, model.dtype
    if key not in job.image_readers:
        job.image_readers[key] = make_reader(settings, job.images_of, model.dtype, job.world.device)
    return job.image_readers[key]


def make_reader(
    settings: ImageSettings,
    images_of: Callable[[int], tuple[Image, ...]],
    dtype: DType,
    device: torch.device,
    *,
    is_ready: bool = False,
) -> ImageReader:
    """Return what a model knows of images.

    Args:
        settings: How they become tokens.
        images_of: Number of a row, as the ids of its images' tokens have it -> its images.
        dtype: Of the vision tower.
        device: Where the vision tower lives.
        is_ready: What computes images is read now, not with the first of them.

    Raises:
        ConfigError: With ``is_ready``: ``transformers`` is not there, or does not know the model.
        CheckpointError: With ``is_ready``: a file is damaged, or lacks a tensor.
    """
    tower, images = VisionTower(Path(settings.path), TORCH_DTYPES[dtype], device), RowImages(images_of, settings)
    if is_ready:
        tower.prepare()
        images.prepare()
    return ImageReader(settings, images, tower)


class RowImages:
    """The images of rows, see ``models.images.Images``."""

    def __init__(self, images_of: Callable[[int], tuple[Image, ...]], settings: ImageSettings) -> None:
        self._images_of, self._settings = images_of, settings

    def grid(self, number: int) -> Grid:
        """Return rows and columns of an image's tokens."""
        return self._image(number).grid

    def patches(self, number: int) -> Tensor:
        """Return an image as the tower takes it, ``[patches, numbers]`` fp32.

        Raises:
            DataError: Its file is not what it was when the job began.
        """
        image = self._image(number)
        size = {"shortest_edge": self._settings.min_pixels, "longest_edge": self._settings.max_pixels}
        found = self._processor([image.open()], size=size, return_tensors="pt")
        rows, columns = (found["image_grid_thw"][0, 1:] // self._processor.merge_size).tolist()
        if (rows, columns) != image.grid:
            raise DataError(
                f"{image.source:.200}: {rows} x {columns} tokens, there were {image.grid[0]} x {image.grid[1]}; "
                "restore the file as it was when the job began"
            )
        patches: Tensor = found["pixel_values"]
        return patches

    def prepare(self) -> None:
        """Read what makes patches, if it is not there. Raises ConfigError: as ``make_image_processor``."""
        self._processor  # noqa: B018  # it is kept

    def _image(self, number: int) -> Image:
        row, which = row_and_which(number)
        return self._images_of(row)[which]

    @functools.cached_property
    def _processor(self) -> Any:
        return make_image_processor(Path(self._settings.path))
