"""Images that clients send: inside the request, looked at in a process of their own. No torch.

The server fetches nothing and opens no file that a client names.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hybridflow.data.images import Image, images_of
from hybridflow.data.limited import LimitedProcess
from hybridflow.errors import DataError
from hybridflow.families.images import ImageSettings

MOST_PIXELS = 1 << 25
"""Of the images of a request together: two photos of 12 megapixels, or four screens of 4K."""

_MEMORY_BYTES = 1 << 30
_CPU_S, _START_S, _LOOK_S = 4, 60.0, 30.0
_ADDRESS = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)
_ROWS = 1 << 32
"""Numbers of rows, see ``data.images``."""


class Looker(LimitedProcess):
    """Looks at images before a model does.

    Args:
        settings: How images become tokens.
    """

    def __init__(self, settings: ImageSettings) -> None:
        limits = str(_MEMORY_BYTES), str(_CPU_S), str(MOST_PIXELS)
        arguments = (*limits, json.dumps(asdict(settings)))
        super().__init__("hybridflow.data.image_process", arguments, max_answer_bytes=1 << 16)
        self._settings = settings
        self._rows = itertools.count()

    def look(self, addresses: list[str]) -> tuple[int, tuple[Image, ...]]:
        """Return images, and the number that the ids of their tokens are to have.

        Args:
            addresses: The images of a request, from ``addressed``.

        Raises:
            DataError: They are too many or too large, or one cannot be read.
        """
        with self._lock:
            try:
                if not self.is_running:
                    self.exchange(b"[]", _START_S)
                answer = json.loads(self.exchange(json.dumps(addresses).encode(), _LOOK_S))
            except (OSError, EOFError, TimeoutError) as error:
                self.close()
                raise DataError(
                    f"messages: the images cannot be read within {_CPU_S} s and {_MEMORY_BYTES >> 20} MiB; make them "
                    "smaller, or save them anew"
                ) from error
        if "error" in answer:
            raise DataError(answer["error"])
        return next(self._rows) % _ROWS, images_of(addresses, "messages", self._settings, answer["grids"])


def addressed(messages: Any) -> Any:
    """Return messages whose images are addresses with the bytes, and nothing else.

    Raises:
        DataError: One is elsewhere, or in another form.
    """
    if not isinstance(messages, list):
        return messages
    return [
        {**each, "content": [_addressed(part) for part in each["content"]]}
        if isinstance(each, Mapping) and isinstance(each.get("content"), list)
        else each
        for each in messages
    ]


def _addressed(part: Any) -> Any:
    if not isinstance(part, Mapping) or part.get("type") not in ("image", "image_url"):
        return part
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    if part["type"] != "image_url" or not isinstance(url, str) or not _ADDRESS.match(url):
        found = url if isinstance(url, str) else part
        raise DataError(
            f"messages: found the image {found!r:.60}, which this server neither fetches nor opens; send the file "
            'itself: {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}'
        )
    return {"type": "image_url", "image_url": "data:;base64," + url.partition(",")[2]}
