"""Prompts with images: the GPU computes what the CPU does, the vision tower included, in fp32."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_checks.common import make_world, run
from gpu_checks.families import LINEAR, SHAPE, compare, tried

_VISION = {
    **{"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64, "patch_size": 8},
}


def _turns(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 5e3, "mrope_section": list(sections), **more}


MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen3VL": (
        {"head_dim": 32, "rope_parameters": _turns(6, 5, 5, mrope_interleaved=True)},
        {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    ),
    "Qwen2_5_VL": ({"rope_parameters": _turns(2, 3, 3)}, {"fullatt_block_indexes": [1]}),
    "Qwen3_5": (
        {**LINEAR, "rope_parameters": _turns(4, 2, 2, mrope_interleaved=True, partial_rotary_factor=0.5)},
        {"num_position_embeddings": 16},
    ),
}
"""Classes of ``transformers`` -> what their language model and their vision tower have beside the sizes."""

_SIZES = ((64, 96), (33, 40), (80, 80))
"""Width and height of each image, in pixels."""


class _Drawn:
    """Images of random pixels."""

    def __init__(self, folder: Path) -> None:
        from hybridflow.families.images import image_settings
        from hybridflow.models.hf_model import make_image_processor

        self._processor, self._settings = make_image_processor(folder), image_settings(folder)

    def grid(self, number: int) -> tuple[int, int]:
        """Return rows and columns of an image's tokens."""
        return self._settings.grid(*_SIZES[number])

    def patches(self, number: int) -> Any:
        """Return an image as the tower takes it."""
        import numpy as np
        from PIL import Image

        width, height = _SIZES[number]
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        return self._processor([Image.fromarray(pixels)], return_tensors="pt")["pixel_values"]

    def prompts(self) -> list[Any]:
        """Return prompts of text, and with images: in front, in the middle, twice, and last."""
        import torch

        from hybridflow.data.images import image_ids

        written: list[list[Any]] = [[5, 6, 7], ["0", 8], [9, "1", 4, "2", 3], [*range(12), "1"]]
        prompts = []
        for each in written * 2:
            tokens: list[int] = []
            for part in each:
                tokens += [part] if isinstance(part, int) else image_ids(int(part), math.prod(self.grid(int(part))))
            prompts.append(torch.tensor(tokens))
        return prompts


def main(argument: str, is_dry: bool) -> dict[str, Any]:
    """Compute every model here and without a GPU."""
    return compare(__spec__.name, argument, list(MODELS), _compute_all)


def _compute_all() -> Iterator[tuple[str, dict[str, Any]]]:
    import torch

    from hybridflow.checkpoint.formats.registry import open_model
    from hybridflow.families.images import image_settings
    from hybridflow.models.images import ImageReader
    from hybridflow.placement.vision_tower import VisionTower

    world = make_world()
    for name in MODELS:
        # The process without a GPU writes its own.
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir="."))
        _write(name, folder)
        pixels = _Drawn(folder)
        reader = ImageReader(image_settings(folder), pixels, VisionTower(folder, torch.float32, world.device))
        yield name, tried(name, world, lambda folder=folder: open_model(folder).model, pixels.prompts(), reader)


def _write(name: str, folder: Path) -> None:
    """Write a model's directory; its vision tower has random weights, the same in every process."""
    import torch
    import transformers

    text, vision = MODELS[name]
    config = getattr(transformers, f"{name}Config")(
        **{"text_config": {**SHAPE, "max_position_embeddings": 128, **text}, "vision_config": {**_VISION, **vision}},
        **{"image_token_id": SHAPE["vocab_size"] - 1, "video_token_id": SHAPE["vocab_size"] - 2},
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in model.model.visual.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 8, "merge_size": 2}
    processor |= {"temporal_patch_size": 2, "size": {"shortest_edge": 256, "longest_edge": 1 << 16}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")


if __name__ == "__main__":
    run(main)
