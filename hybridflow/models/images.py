"""Images among the tokens of a model: what stands in the place of their embeddings, and how they turn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hybridflow.data.images import FIRST_ID, Grid, numbers_of, places_of
from hybridflow.families.images import KEPT_TOKENS, ImageSettings
from hybridflow.parallel.copies import to_device


class Images(Protocol):
    """Images by their numbers, see ``data.images``."""

    def grid(self, number: int) -> Grid:
        """Return rows and columns of an image's tokens."""

    def patches(self, number: int) -> Tensor:
        """Return an image as the tower takes it, ``[patches, numbers]`` fp32, for ``grid``."""


class ImageReader:
    """What a model knows of images.

    Args:
        settings: How images become tokens.
        images: The images.
        tower: What computes them, from ``vision_tower``.
    """

    def __init__(self, settings: ImageSettings, images: Images, tower: Callable[[Tensor, Grid], Tensor]) -> None:
        self.settings = settings
        self._images, self._tower = images, tower
        self._axes = torch.tensor(settings.axes)
        self._kept: OrderedDict[int, Tensor] = OrderedDict()

    def turns(self, tokens: Tensor) -> Tensor:
        """Return how far each token of a sequence turns by time, height and width, ``[tokens, 3]`` int64.

        A token of text turns alike by all three, an image's by its place. The text behind an image goes on where its
        longer side ends.

        Args:
            tokens: Token ids, ``[tokens]`` int64 in host memory.

        Source: Qwen2-VL, arXiv 2409.12191.
        """
        is_image = tokens >= FIRST_ID
        steps = (~is_image).long()
        offsets = torch.zeros(len(tokens), 3, dtype=torch.int64)
        numbers = numbers_of(tokens)
        for number in numbers[is_image].unique().tolist():
            where = (is_image & (numbers == number)).nonzero()[:, 0]
            rows, columns = self._images.grid(number)
            places = places_of(tokens[where])
            offsets[where, 1], offsets[where, 2] = places // columns, places % columns
            steps[where[places == rows * columns - 1]] = max(rows, columns)
        return (steps.cumsum(0) - steps)[:, None] + offsets

    def rows(self, tokens: Tensor, turns: Tensor, device: torch.device) -> ImageRows:
        """Return what a forward pass asks for.

        Args:
            tokens: Token ids, ``[tokens]`` int64 in host memory.
            turns: How far each turns, ``[tokens, 3]`` int64 in host memory.
            device: Where the model lives.
        """
        places = (tokens >= FIRST_ID).nonzero()[:, 0]
        return ImageRows(
            reader=self,
            positions=to_device(turns[:, self._axes], device),
            places=places,
            tokens=tokens[places],
        )

    @torch.no_grad()
    def features(self, tokens: Tensor) -> Tensor:
        """Return what the tower makes of tokens of images, ``[tokens, 1 + deep, hidden]``, on its device.

        Args:
            tokens: Token ids, ``[tokens]`` int64 in host memory.
        """
        numbers, counts = numbers_of(tokens).unique_consecutive(return_counts=True)
        places = places_of(tokens).split(counts.tolist())
        return torch.cat([self._rows(number, rows) for number, rows in zip(numbers.tolist(), places, strict=True)])

    def _rows(self, number: int, places: Tensor) -> Tensor:
        image = self._image(number)
        return image[to_device(places, image.device)]

    def _image(self, number: int) -> Tensor:
        if number not in self._kept:
            # Each alone: what comes out does not depend on the others.
            self._kept[number] = self._tower(self._images.patches(number), self._images.grid(number))
        self._kept.move_to_end(number)
        while sum(map(len, self._kept.values())) > KEPT_TOKENS and len(self._kept) > 1:
            self._kept.popitem(last=False)
        return self._kept[number]


@dataclass(frozen=True, kw_only=True)
class ImageRows:
    """A rank's tokens of images in a forward pass.

    Attributes:
        reader: What knows the images.
        positions: How far each pair of rotated dims of each token turns, ``[tokens, pairs]`` int64; of all tokens.
        places: Where the tokens of images stand, ``[image tokens]`` int64 in host memory.
        tokens: Their ids, ``[image tokens]`` int64 in host memory.
    """

    reader: ImageReader
    positions: Tensor
    places: Tensor
    tokens: Tensor

    def put(self, embedded: Tensor, first: int) -> Tensor:
        """Return embeddings with those of images in their places.

        Args:
            embedded: Those of consecutive tokens, ``[rows, 1, hidden]``.
            first: The first of these.
        """
        inside = self._inside(first, len(embedded))
        if not len(inside):
            return embedded
        return embedded.index_copy(0, self._where(inside, first, embedded), self._vectors(inside, 0, embedded))

    def add(self, hidden: Tensor, level: int, first: int) -> Tensor:
        """Return hidden states with what the tower adds to them behind the model's layer ``level``, counted from 1.

        Args:
            hidden: Those of consecutive tokens, ``[rows, 1, hidden]``.
            level: The layer.
            first: The first of the tokens.
        """
        inside = self._inside(first, len(hidden))
        if not len(inside):
            return hidden
        return hidden.index_add(0, self._where(inside, first, hidden), self._vectors(inside, level, hidden))

    def _inside(self, first: int, count: int) -> Tensor:
        """Return which of the images' tokens are among so many, ``[some]`` int64 in host memory."""
        return ((self.places >= first) & (self.places < first + count)).nonzero()[:, 0]

    def _where(self, inside: Tensor, first: int, like: Tensor) -> Tensor:
        return to_device(self.places[inside] - first, like.device)

    def _vectors(self, inside: Tensor, level: int, like: Tensor) -> Tensor:
        return self.reader.features(self.tokens[inside])[:, level, None].to(like.dtype)
