"""What a directory, or a program, says of a model. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hybridflow.families.model import ModelConfig


class ModelInfo(NamedTuple):
    """What a directory, or a program that has it in memory, says of a model.

    Attributes:
        model: Its settings, the vocabulary included.
        has_value_head: Whether it gives a number instead of logits.
        family: Hugging Face family; None where that is not known.
        assets: Where the small files are that travel along; None of a model that a program has in memory.
        is_cut: Whether a layout may cut it; not a class of a user's own.
        is_coded: Whether its directory holds weights in codes of fewer bits, which are decoded when they are read.
    """

    model: ModelConfig
    has_value_head: bool
    family: str | None
    assets: Path | None
    is_cut: bool = True
    is_coded: bool = False
