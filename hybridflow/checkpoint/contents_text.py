"""What a checkpoint holds, for a person: its facts and tensors, or an overview of several."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping
from typing import Any

from hybridflow.checkpoint.contents import Collection, Contents, Damaged, dtypes
from hybridflow.checkpoint.manifest import WEIGHT, TensorEntry
from hybridflow.families.model import ModelConfig
from hybridflow.layout.mesh import format_ranks
from hybridflow.observe.console import format_bytes
from hybridflow.sections import to_dict

_SAID = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "base_model_name_or_path")


def as_text(found: Contents | Collection, *, every_tensor: bool = False) -> str:
    """Format the contents for a person.

    Args:
        found: What was found.
        every_tensor: List each tensor, instead of one line for those that are alike in every layer and expert.
    """
    if isinstance(found, Contents):
        return f"{found.path}\n{_facts(found)}\n\n{_tree(found, every_tensor)}"
    return "\n".join(_collection_lines(found, every_tensor))


def _collection_lines(found: Collection, every_tensor: bool) -> list[str]:
    """Return an overview of all members, then facts and tensors of each role as in the newest member."""
    lines = [str(found.path), *_overview(found, "  ")]
    for role, contents in _newest_by_role(found).items():
        lines += ["", f"{role}: {contents.path}", _facts(contents), "", _tree(contents, every_tensor)]
    return lines


def _overview(found: Collection, indent: str) -> list[str]:
    lines = []
    for name, member in found.members.items():
        mark = " (latest)" if name == found.latest else ""
        if isinstance(member, Contents):
            size = format_bytes(sum(member.files.values()))
            step = "" if member.held.progress is None else f", {member.held.progress.num_steps} optimizer steps"
            lines.append(f"{indent}{name}{mark}: {member.num_parameters:,} parameters, {size} in files{step}")
        elif isinstance(member, Damaged):
            lines.append(f"{indent}{name}{mark}: damaged: {member.error}")
        else:
            lines += [f"{indent}{name}{mark}", *_overview(member, indent + "  ")]
    if found.latest is not None and found.latest not in found.members:
        lines.append(f"{indent}latest names {' '.join(found.latest.split())}, which is not there")
    return lines + [
        f"{indent}{name}: incomplete: being written, or left by a killed writer" for name in found.incomplete
    ]


def _newest_by_role(found: Collection) -> dict[str, Contents]:
    roles: dict[str, Contents] = {}
    for name, member in found.members.items():
        if isinstance(member, Contents):
            roles[name] = member
        elif isinstance(member, Collection):
            roles |= _newest_by_role(member)
    return roles


def _facts(found: Contents) -> str:
    weights = ", ".join(f"{format_bytes(size)} {dtype}" for dtype, size in dtypes(found.weights.values()).items())
    held = found.held
    head = "values" if held.has_value_head else "logits"
    rows = {
        "format": f"{found.format}, {'not cut' if held.layout is None else f'cut by {held.layout}'}",
        "family": f"{'not known' if held.family is None else held.family}, giving {head}",
        "weights": f"{found.num_parameters:,} parameters in {len(found.weights)} tensors: {weights}",
    }
    if held.progress is not None:
        rows["optimizer"] = f"{held.progress.num_steps} steps taken, next learning rate {held.progress.learning_rate:g}"
    if found.adapter is not None:
        rows["adapter"] = "LoRA, " + " ".join(f"{key}={found.adapter[key]}" for key in _SAID if found.adapter.get(key))
    for kind, tensors in held.tensors.items():
        if kind != WEIGHT:
            sizes = dtypes(tensors.values()).items()
            rows[kind] = f"{len(tensors)} tensors: " + ", ".join(
                f"{format_bytes(size)} {dtype}" for dtype, size in sizes
            )
    rows["files"] = f"{len(found.files)}, {format_bytes(sum(found.files.values()))}"
    if held.written_by:
        rows["written by"] = ", ".join(f"{name} {version}" for name, version in held.written_by.items())
    rows["settings"] = " ".join(f"{key}={_short(value)}" for key, value in _settings(held.model).items())
    rows["checked"] = "headers and sizes alone; --verify reads everything" if found.verified is None else found.verified
    lines = []
    for name, text in rows.items():
        lines += textwrap.wrap(
            text, 110, initial_indent=f"  {name:<12}", subsequent_indent=" " * 14, break_on_hyphens=False
        )
    return "\n".join(lines)


def _settings(model: ModelConfig) -> dict[str, Any]:
    """Return the settings that differ from their defaults."""
    defaults = {each.name: each.default for each in dataclasses.fields(model)}
    return {key: value for key, value in to_dict(model).items() if defaults[key] != getattr(model, key)}


def _short(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_short(each)}" for key, each in value.items() if each not in (None, [])) + "}"
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}…"


def _tree(found: Contents, every_tensor: bool) -> str:
    if every_tensor:
        rows = [
            (name if kind == WEIGHT else f"{kind}:{name}", entry)
            for kind, tensors in found.held.tensors.items()
            for name, entry in tensors.items()
        ]
    else:
        rows = collapse(found.weights)
    names = max((len(name) for name, _ in rows), default=0)
    shapes = max((len(str(list(entry.shape))) for _, entry in rows), default=0)
    return "\n".join(f"  {name:<{names}}  {list(entry.shape)!s:<{shapes}}  {entry.dtype}" for name, entry in rows)


def collapse(tensors: Mapping[str, TensorEntry]) -> list[tuple[str, TensorEntry]]:
    """Merge tensors of one shape and dtype whose names differ only in numbers into one row: ``layers.0-31.mlp``.

    A row with several ranges stands for all their combinations.
    """
    groups: dict[tuple[tuple[str, ...], TensorEntry], list[tuple[int, ...]]] = {}
    for name, entry in tensors.items():
        words = name.split(".")
        key = tuple("" if word.isdecimal() else word for word in words)
        numbers = tuple(int(word) for word in words if word.isdecimal())
        groups.setdefault((key, TensorEntry(*entry)), []).append(numbers)
    rows: list[tuple[str, TensorEntry]] = []
    for (pattern, entry), found in groups.items():
        for ranges in _ranges(found):
            left = iter(ranges)
            rows.append((".".join(word or next(left) for word in pattern), entry))
    return rows


def _ranges(numbers: list[tuple[int, ...]]) -> list[list[str]]:
    """Split tuples of numbers into products of ranges; first numbers with equal rests are merged."""
    if not numbers[0]:
        return [[]]
    rests: dict[int, list[tuple[int, ...]]] = {}
    for each in sorted(numbers):
        rests.setdefault(each[0], []).append(each[1:])
    firsts: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for first, found in rests.items():
        firsts.setdefault(tuple(found), []).append(first)
    return [[format_ranks(those), *words] for rest, those in firsts.items() for words in _ranges(list(rest))]
