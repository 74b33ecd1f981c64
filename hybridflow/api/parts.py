"""What contributes to a job of a program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Part:
    """What contributes to a job: settings, and objects that settings cannot name.

    Attributes:
        settings: Short names and sections, as ``PPOTrainer`` takes them.
        objects: Role -> model or function.
        tokenizer: Path, or tokenizer of transformers; None: the model's own.
    """

    def __init__(self, settings: Mapping[str, Any], objects: Mapping[str, Any] | None = None) -> None:
        self.settings = dict(settings)
        self.objects = {} if objects is None else dict(objects)
        self.tokenizer: Any = None
