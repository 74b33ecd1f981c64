"""What contributes to a job of a program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hybridflow.errors import ConfigError


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


def settings_of_mesh(mesh: Any) -> Mapping[str, Any]:
    """Return the role placement that a program's ``device_mesh`` asks for. Raises ConfigError: it is none."""
    if mesh is None:
        return {}
    if not isinstance(mesh, Part):
        raise ConfigError(
            f"device_mesh: found {type(mesh).__name__}; give a DeviceMesh, such as DeviceMesh(devices=[0, 1])"
        )
    return mesh.settings


def objects_of(parts: Iterable[Part]) -> dict[str, Any]:
    """Return role -> model or function, of all parts."""
    return {role: each for part in parts for role, each in part.objects.items()}


def tokenizer_of(parts: Iterable[Part]) -> Any:
    """Return the first tokenizer that a part has, or None if none has one."""
    return next((part.tokenizer for part in parts if part.tokenizer is not None), None)
