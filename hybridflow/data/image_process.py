"""The process in which images of strangers are looked at: it reads all their pixels, and counts their tokens.

    python -m hybridflow.data.image_process MEMORY_BYTES CPU_S MOST_PIXELS SETTINGS

SETTINGS are those of ``ImageSettings``, as JSON. A line of its standard input is a list of addresses, as JSON. The
answer is a line, too: rows and columns of the tokens of each, or an error. The process ends when its input does.
"""

from __future__ import annotations

import json
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

# Before the limits, which leave no room for its threads.
import numpy as np  # noqa: F401
from PIL.Image import DecompressionBombWarning

from hybridflow.data.images import images_of
from hybridflow.errors import DataError
from hybridflow.families.images import ImageSettings
from hybridflow.foreign import limit_cpu, limit_process


def main() -> int:
    """Answer until the input ends, or images take too much."""
    memory_bytes, cpu_s, most_pixels = map(int, sys.argv[1:4])
    settings = ImageSettings(**json.loads(sys.argv[4]))
    begin_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit_process(begin_bytes + memory_bytes)
    # Of files with fewer pixels than those that it refuses, Pillow only warns.
    warnings.simplefilter("error", DecompressionBombWarning)
    for line in sys.stdin.buffer:
        limit_cpu(cpu_s)
        answer: dict[str, Any]
        try:
            answer = {"grids": _grids(json.loads(line), settings, most_pixels)}
        except DataError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)
    return 0


def _grids(sources: list[str], settings: ImageSettings, most_pixels: int) -> list[tuple[int, int]]:
    images = images_of(sources, "messages", settings)
    num_pixels = sum(width * height for width, height in (image.size() for image in images))
    if num_pixels > most_pixels:
        raise DataError(
            f"messages: images of {num_pixels} pixels in all; expected at most {most_pixels}: make them smaller"
        )
    for image in images:
        image.open()
    return [image.grid for image in images]


if __name__ == "__main__":
    sys.exit(main())
