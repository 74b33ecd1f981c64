"""Images in prompts. Each of their tokens has an id that says which image it is of, and where in it it stands.

Such ids are beyond every vocabulary. They go wherever token ids go: into batches, through the engine, from rank to
rank. Who computes a model asks for an image by its number. No torch.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hybridflow.errors import ConfigError, DataError
from hybridflow.families.images import ImageSettings

if TYPE_CHECKING:
    from PIL.Image import Image as Pixels
    from torch import Tensor

FIRST_ID = 1 << 61
"""Ids from here on are tokens of images."""

MARK = "<image>"
"""Stands for an image in a message of text, as in the data of other frameworks."""

IMAGES = "images"
"""What data sets call the field of a row's images."""

HELD_OUT = 255
"""The source of held-out rows, in the numbers of rows."""

_PLACE_BITS, _WHICH_BITS, _ROW_BITS = 16, 4, 32
_MOST_TOKENS, _MOST_IMAGES = 1 << _PLACE_BITS, 1 << _WHICH_BITS
_DATA = "data:"
_MAGICS = {"PNG": b"\x89PNG", "JPEG": b"\xff\xd8\xff", "GIF": b"GIF8", "WEBP": b"RIFF", "BMP": b"BM"}
"""Formats of images that come as bytes, with what their files begin with. A file on disk may have others of Pillow."""
_ORIENTATION, _ON_THEIR_SIDE = 0x0112, range(5, 9)
_BROKEN = (OSError, SyntaxError, ValueError, LookupError, TypeError, ArithmeticError, EOFError, struct.error)
"""What Pillow raises where a file is broken."""
_PART = {"type": "image"}
_SOURCES = ("image", "url", "path", "image_url")
"""Keys of a part of a message that say where its image is."""

Grid = tuple[int, int]
"""Rows and columns of an image's tokens."""

_Ids = TypeVar("_Ids", int, "Tensor")


class Image(NamedTuple):
    """An image of a row.

    Attributes:
        source: Its file, or its bytes as an address (``data:;base64,…``).
        grid: Rows and columns of its tokens.
        token_id: Stands for it in the tokens of a text.
    """

    source: str
    grid: Grid
    token_id: int

    @property
    def num_tokens(self) -> int:
        """Return the number of its tokens."""
        return self.grid[0] * self.grid[1]

    def size(self) -> tuple[int, int]:
        """Return its width and height as its file tells them. Raises DataError: it cannot be read."""
        with _opened(self.source) as pixels:
            found: tuple[int, int] = pixels.size
            return found

    def open(self) -> Pixels:
        """Return its pixels. Raises DataError: it cannot be read."""
        with _opened(self.source) as pixels:
            return _in_colors(_upright(pixels))


def row_number(source: int, row: int) -> int:
    """Return the number of a row among those of all sources."""
    if source >= HELD_OUT or row >> _ROW_BITS:
        raise DataError(
            f"source {source}, row {row}: rows with images come from at most {HELD_OUT} sources of {1 << _ROW_BITS} "
            "rows; join some"
        )
    return source << _ROW_BITS | row


def held_out_number(row: int) -> int:
    """Return the number of a held-out row."""
    return HELD_OUT << _ROW_BITS | row


def source_and_row(row_number: int) -> tuple[int, int]:
    """Return where a row is."""
    return row_number >> _ROW_BITS, row_number & ((1 << _ROW_BITS) - 1)


def row_and_which(number: int) -> tuple[int, int]:
    """Return the number of an image's row, and which of its images it is."""
    return number >> _WHICH_BITS, number & (_MOST_IMAGES - 1)


def image_ids(number: int, count: int) -> range:
    """Return the ids of all tokens of an image."""
    first = FIRST_ID + (number << _PLACE_BITS)
    return range(first, first + count)


def numbers_of(tokens: _Ids) -> _Ids:
    """Return the numbers of the images of tokens of images."""
    return (tokens - FIRST_ID) >> _PLACE_BITS


def places_of(tokens: _Ids) -> _Ids:
    """Return where in their images tokens of images stand."""
    return tokens & (_MOST_TOKENS - 1)


def with_images(tokens: Sequence[int], images: Sequence[Image], row_number: int, place: str) -> list[int]:
    """Return a prompt's tokens with those of its images in the places of the tokens that stand for them.

    Args:
        tokens: Of the text.
        images: The row's, at least one.
        row_number: From ``row_number``.
        place: The row's, for messages.

    Raises:
        DataError: There are not as many places as images.
    """
    num_places = tokens.count(images[0].token_id)
    if num_places != len(images):
        raise DataError(
            f"{place}: {len(images)} images, and {num_places} places for them in the prompt's text; give messages with "
            f"{MARK} for each image, and a chat template that writes images; in a recipe data.prompt_as_message=true "
            "makes a message of a prompt"
        )
    found: list[int] = []
    which = 0
    for token in tokens:
        if token == images[0].token_id:
            found += image_ids(row_number << _WHICH_BITS | which, images[which].num_tokens)
            which += 1
        else:
            found.append(token)
    return found


def images_of(
    value: Any, place: str, settings: ImageSettings, grids: Sequence[Sequence[int]] | None = None
) -> tuple[Image, ...]:
    """Return the images of a row's field.

    Args:
        value: A source, or a list of them: a path, an address with the bytes, or an object with ``bytes`` or ``path``.
        place: The field's, for messages.
        settings: How images become tokens.
        grids: Rows and columns of each; None: its file tells.

    Raises:
        DataError: It is none of these, or an image cannot be read.
    """
    values = value if isinstance(value, list) else [] if value is None else [value]
    if len(values) > _MOST_IMAGES:
        raise DataError(f"{place}: {len(values)} images; expected at most {_MOST_IMAGES}")
    found = []
    for number, each in enumerate(values):
        source = source_of(each, place)
        rows, columns = _grid_of(source, place, settings) if grids is None else grids[number]
        found.append(Image(source, (rows, columns), settings.token_id))
    return tuple(found)


def _grid_of(source: str, place: str, settings: ImageSettings) -> Grid:
    """Return rows and columns of an image's tokens, of which its file tells."""
    try:
        with _opened(source) as pixels:
            size = pixels.size[::-1] if _orientation(pixels) in _ON_THEIR_SIDE else pixels.size
        grid = settings.grid(*size)
    except DataError as error:
        raise DataError(f"{place}: {error}") from error
    except ValueError as error:
        raise DataError(f"{place}: {_short(source)}: {error}") from error
    if grid[0] * grid[1] > _MOST_TOKENS:
        raise DataError(f"{place}: {_short(source)}: {grid[0]} x {grid[1]} tokens; expected at most {_MOST_TOKENS}")
    return grid


def source_of(value: Any, place: str) -> str:
    """Return the path of an image, or its bytes as an address. Raises DataError: it has neither."""
    if isinstance(value, Mapping):
        value = next((value[name] for name in ("bytes", *_SOURCES) if value.get(name) is not None), None)
        if isinstance(value, Mapping):
            return source_of(value, place)
    if not isinstance(value, str) or not value:
        raise DataError(f"{place}: found {value!r:.60}, expected the path of an image, or a list of them")
    if value.startswith(("http://", "https://")):
        raise DataError(f"{place}: found {value:.60}, expected the path of an image: download it, and name the file")
    return value.removeprefix("file://")


def as_address(content: bytes) -> str | None:
    """Return the bytes of an image file as an address; None: they are of no image."""
    return (
        f"{_DATA};base64,{base64.b64encode(content).decode()}" if content.startswith(tuple(_MAGICS.values())) else None
    )


def image_parts(messages: list[dict[str, Any]], given: Any, place: str) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return messages with a part for each image, as chat templates take them, and the sources of the images.

    Images stand where parts of type ``image`` do, or ``<image>`` in the user's text; else before the first text of the
    user.

    Args:
        messages: The conversation; their content is text or a list of parts.
        given: The row's field of images.
        place: The row's, for messages.

    Raises:
        DataError: Some images are in parts and others in the field.
    """
    parts = [part for message in messages for part in _parts(message) if part["type"] == "image"]
    named = [part for part in parts if len(part) > 1]
    sources = given if isinstance(given, list) else [] if given is None else [given]
    if named and (sources or len(named) < len(parts)):
        raise DataError(
            f"{place}: some images are named in messages and others are not; name all, or give all in the field"
        )
    if parts and not sources and not named:
        raise DataError(
            f"{place}: {len(parts)} images in messages, and none in the row's field; name them, or leave the parts out"
        )
    if named:
        sources = [source_of(part, place) for part in named]
    if not parts and sources:
        messages = _split_at_marks(messages)
        if not any(part["type"] == "image" for message in messages for part in _parts(message)):
            messages = _in_front(messages, len(sources))
    plain = [
        {**message, "content": [_PART if part["type"] == "image" else part for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]
    return plain, sources


def as_part(part: Any) -> dict[str, Any] | None:
    """Return a part of a message's content under the usual names, an image's with where it is; None: it is no part."""
    if not isinstance(part, dict):
        return None
    if part.get("type") in ("image", "image_url"):
        return {**_PART, **{name: part[name] for name in _SOURCES if part.get(name) is not None}}
    is_text = part.get("type") == "text" and isinstance(part.get("text"), str)
    return {"type": "text", "text": part["text"]} if is_text else None


def _parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _split_at_marks(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with a part for each ``<image>`` in the user's text."""
    return [{**each, "content": _at_marks(each)} if each["role"] == "user" else each for each in messages]


def _at_marks(message: Mapping[str, Any]) -> Any:
    texts = message["content"].split(MARK) if isinstance(message["content"], str) else []
    if len(texts) < 2:
        return message["content"]
    found: list[dict[str, Any]] = []
    for number, text in enumerate(texts):
        found += [dict(_PART)] if number else []
        found += [{"type": "text", "text": text}] if text else []
    return found


def _in_front(messages: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return messages with so many images before the user's first text."""
    first = next((index for index, each in enumerate(messages) if each["role"] == "user"), None)
    if first is None:
        return messages
    content = [dict(_PART) for _ in range(count)] + _parts(messages[first])
    return [*messages[:first], {**messages[first], "content": content}, *messages[first + 1 :]]


@contextlib.contextmanager
def _opened(source: str) -> Iterator[Any]:
    """Open an image; its pixels are not yet read. Raises DataError: it cannot be read."""
    try:
        from PIL import Image as reader
    except ImportError:
        raise ConfigError("images are read by Pillow, which is not there: pip install 'hybridflow[hf]'") from None
    try:
        where: Any = source
        formats = None
        if source.startswith(_DATA):
            formats = tuple(_MAGICS)
            where = io.BytesIO(base64.b64decode(source.partition(",")[2], validate=True))
        elif not stat.S_ISREG(os.stat(source).st_mode):
            # A pipe would be waited for without end.
            raise OSError("is no regular file")
        with reader.open(where, formats=formats) as pixels:
            yield pixels
    except (reader.DecompressionBombError, reader.DecompressionBombWarning, *_BROKEN) as error:
        raise DataError(
            f"{_short(source)}: cannot be read as an image: {error}; mend the file, or leave the row out"
        ) from error


def _orientation(pixels: Pixels) -> int:
    """Return how a camera says that an image is to be turned: a number of EXIF."""
    # Else it would read all pixels of a PNG.
    return int(pixels.getexif().get(_ORIENTATION, 1)) if "exif" in pixels.info else 1


def _upright(pixels: Pixels) -> Pixels:
    from PIL.ImageOps import exif_transpose

    return pixels if _orientation(pixels) == 1 else exif_transpose(pixels)


def _in_colors(pixels: Pixels) -> Pixels:
    """Return an image in red, green and blue: on white where it is transparent."""
    # Not above: processes that ranks are forked from have none of numpy's threads.
    import numpy as np
    from PIL import Image as maker

    if pixels.mode.startswith("I"):
        # Pillow would make every gray of 16 bits but the darkest white.
        pixels = maker.fromarray((np.asarray(pixels) >> 8).clip(0, 255).astype(np.uint8))
    if pixels.has_transparency_data:
        pixels = pixels.convert("RGBA")
        pixels = maker.alpha_composite(maker.new("RGBA", pixels.size, "white"), pixels)
    return pixels.convert("RGB")


def _short(source: str) -> str:
    return source if len(source) < 200 else f"{source[:40]}…"
