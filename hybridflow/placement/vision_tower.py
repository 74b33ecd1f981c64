"""The part of a vision-language model that computes images, with its weights. It is not trained."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybridflow.checkpoint.formats.huggingface import open_files
from hybridflow.data.images import Grid
from hybridflow.errors import CheckpointError
from hybridflow.families.assets import CONFIG
from hybridflow.families.images import TOWER
from hybridflow.models.hf_model import make_vision_tower


class VisionTower:
    """Makes vectors of images. Its weights are read when it is first asked for one: not every rank computes images.

    Args:
        folder: Directory of the vision-language model.
        dtype: Of its weights.
        device: Where they live.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder, self._dtype, self._device = folder, dtype, device

    @torch.no_grad()
    def __call__(self, patches: Tensor, grid: Grid) -> Tensor:
        """Return the vectors of an image, ``[tokens, 1 + deep, hidden]``: its embeddings, and what layers add to them.

        Args:
            patches: Its pixels, ``[patches, numbers]``.
            grid: Rows and columns of its tokens.

        Raises:
            ConfigError: ``transformers`` is not there, or does not know the tower.
            CheckpointError: A file is damaged, or lacks a tensor.
        """
        merged = self._module.spatial_merge_size
        sizes = torch.tensor([[1, grid[0] * merged, grid[1] * merged]], device=self._device)
        # cuDNN would take the first product of fp32 in TF32; nothing else here goes through it.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            output = self._module(patches.to(self._device, self._dtype), grid_thw=sizes, return_dict=True)
        return torch.stack([output.pooler_output, *getattr(output, "deepstack_features", ())], dim=1)

    def prepare(self) -> None:
        """Read the weights, if they are not there. Raises ConfigError and CheckpointError: as for an image."""
        self._module  # noqa: B018  # it is kept

    @functools.cached_property
    def _module(self) -> Any:
        module = make_vision_tower(self._folder, self._dtype)
        module.load_state_dict(_weights(self._folder, module))
        return module.to(self._device)


def _weights(folder: Path, module: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a directory by the tower's own names."""
    files = {name: file for file in open_files(folder).values() for name in file.entries}
    found = {}
    for name, own in module.state_dict().items():
        file_name = next((prefix + name for prefix in TOWER if prefix + name in files), None)
        if file_name is None:
            raise CheckpointError(f"{folder}: missing: {TOWER[0]}{name} of the vision tower; restore it from a copy")
        found[name] = files[file_name].read(file_name)
        if found[name].shape != own.shape:
            raise CheckpointError(
                f"{folder}: {file_name} has shape {list(found[name].shape)}, {CONFIG} asks for {list(own.shape)}; give "
                "the files of one model"
            )
    return found
