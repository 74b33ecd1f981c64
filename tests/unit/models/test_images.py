"""What a model is told of images, by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.data.images import Grid, image_ids
from hybridflow.families.images import KEPT_TOKENS, ImageSettings
from hybridflow.models.images import ImageReader

SETTINGS = ImageSettings(path="", token_id=9, side=8, min_pixels=1, max_pixels=9, axes=(0, 1, 2, 1), num_deep=1)
GRIDS = {3: (2, 3), 4: (1, 1), 5: (128, 128), 6: (1, 2)}


class Numbers:
    """Images whose patches are their numbers, and a tower that tells image, place and level of each token."""

    def __init__(self) -> None:
        self.computed: list[int] = []

    def grid(self, number: int) -> Grid:
        return GRIDS[number]

    def patches(self, number: int) -> Tensor:
        return torch.tensor([float(number)])

    def tower(self, patches: Tensor, grid: Grid) -> Tensor:
        self.computed.append(int(patches))
        places = torch.arange(grid[0] * grid[1])
        return torch.stack(
            [torch.stack([patches.expand(len(places)), places + level], dim=1) for level in (0, 100)], dim=1
        )


def reader() -> tuple[ImageReader, Numbers]:
    images = Numbers()
    return ImageReader(SETTINGS, images, images.tower), images


def ids(number: int) -> list[int]:
    rows, columns = GRIDS[number]
    return list(image_ids(number, rows * columns))


def test_text_goes_on_behind_the_longer_side() -> None:
    tokens = torch.tensor([7, 8, *ids(3), 7, *ids(4), *ids(6), 7, 7])
    expected = [[0] * 3, [1] * 3]
    expected += [[2, 2 + row, 2 + column] for row in range(2) for column in range(3)]
    expected += [[5] * 3, [6] * 3, [7, 7, 7], [7, 7, 8], [9] * 3, [10] * 3]
    found = reader()[0]
    turns = found.turns(tokens)
    assert turns.tolist() == expected
    rows = found.rows(tokens, turns, torch.device("cpu"))
    assert rows.positions.tolist() == [[time, height, width, height] for time, height, width in expected]
    assert rows.places.tolist() == [*range(2, 8), 9, 10, 11]


def test_tokens_of_images_stand_for_themselves_in_any_order() -> None:
    """Of two sequences with one prompt, say, or in pieces."""
    found, images = reader()
    tokens = [*ids(3)[4:], *ids(6), *ids(3), *ids(6)[1:], *ids(3)[:2]]
    vectors = found.features(torch.tensor(tokens))
    expected = [(3, 4), (3, 5), (6, 0), (6, 1), *((3, place) for place in range(6)), (6, 1), (3, 0), (3, 1)]
    assert vectors[:, 0].tolist() == [[number, place] for number, place in expected]
    assert vectors[:, 1].tolist() == [[number, place + 100] for number, place in expected]
    assert images.computed == [3, 6]


def test_rows_of_a_slice_take_their_own() -> None:
    found, _ = reader()
    tokens = torch.tensor([7, *ids(3), 7, 7, *ids(6)])
    rows = found.rows(tokens, found.turns(tokens), torch.device("cpu"))
    hidden = torch.full((3, 1, 2), -1.0)
    assert rows.put(hidden, 0)[:, 0].tolist() == [[-1, -1], [3, 0], [3, 1]]
    assert rows.put(hidden, 6)[:, 0].tolist() == [[3, 5], [-1, -1], [-1, -1]]
    assert rows.add(hidden, 1, 8)[:, 0].tolist() == [[-1, -1], [5, 99], [5, 100]]
    assert rows.put(hidden[:2], 7)[:, 0].tolist() == [[-1, -1]] * 2


def test_what_was_used_last_stays() -> None:
    found, images = reader()
    assert GRIDS[5][0] * GRIDS[5][1] == KEPT_TOKENS
    for number in (3, 4, 3, 5, 5, 3):
        found.features(torch.tensor(ids(number)))
    assert images.computed == [3, 4, 5, 3]
