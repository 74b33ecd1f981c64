"""Values of dotted keys in nested mappings. No torch."""

from __future__ import annotations

from typing import Any


def inner(values: Any, key: str) -> Any:
    """Return the value of a dotted key.

    None where there is none, or a section on the way is not one.
    """
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values


def put_under(values: dict[str, Any], key: str, value: Any) -> bool:
    """Set a dotted key unless it is there.

    Returns:
        Whether it was set. It is not if a section on the way is something else.
    """
    *sections, last = key.split(".")
    place: Any = values
    for section in sections:
        place = place.setdefault(section, {})
        if not isinstance(place, dict):
            return False
    if last in place:
        return False
    place[last] = value
    return True
