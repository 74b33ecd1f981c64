"""What contributes to a job of a program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


def objects_of(parts: Iterable[Part]) -> dict[str, Any]:
    """Return role -> model or function, of all parts."""
    return {role: each for part in parts for role, each in part.objects.items()}


def tokenizer_of(parts: Iterable[Part]) -> Any:
    """Return the first tokenizer that a part has, or None if none has one."""
    return next((part.tokenizer for part in parts if part.tokenizer is not None), None)
