"""Hugging Face tensors into the view of a logical tensor, and back, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.families.family import Form
from hybridflow.families.model import ModelConfig
from hybridflow.reshard.spec import Box


def to_logical(form: Form, tensors: list[Tensor], model: ModelConfig) -> Tensor:
    """Return the logical tensor that some Hugging Face tensors make.

    Args:
        form: See ``families.family.Form``.
        tensors: In the order of the rule.
        model: Gives the number of heads and query groups.
    """
    if form == "same":
        return tensors[0]
    if form == "stack":
        return torch.stack(tensors)
    if form == "halves":
        halves: Tensor = tensors[0].unflatten(0, (2, -1))
        return halves
    if form == "transposed":
        return tensors[0].t()
    if form == "transposed_halves":
        rows_of_both: Tensor = tensors[0].t().unflatten(0, (2, -1))
        return rows_of_both
    if form == "interleaved":
        by_turns: Tensor = tensors[0].unflatten(-1, (-1, 2))
        return by_turns.permute(*reversed(range(by_turns.dim())))
    groups, head = model.query_groups, model.head_size
    queries = model.num_attention_heads * head
    if form == "fused_qkv":
        tensors = list(tensors[0].split([queries, groups * head, groups * head]))
    rows: Tensor = torch.cat([tensor.unflatten(0, (groups, -1)) for tensor in tensors], 1).flatten(0, 1)
    return rows


def part_box(form: Form, box: Box) -> Box | None:
    """Return the box of each Hugging Face tensor that a box of the logical tensor needs, gate and up both.

    Args:
        form: See ``families.family.Form``.
        box: In the logical tensor.

    Returns:
        None where no one box of the tensors makes it.
    """
    if form == "same":
        return box
    if form == "stack":
        return box[1:]
    if form == "transposed":
        return box[::-1]
    if form == "interleaved":
        (start, stop), *others = box[1:]
        return (*others, (2 * start, 2 * stop))
    return None


def from_logical(form: Form, tensor: Tensor, model: ModelConfig) -> list[Tensor]:
    """Split a logical tensor into Hugging Face tensors; the inverse of ``to_logical``."""
    if form == "same":
        return [tensor]
    if form == "stack":
        return list(tensor)
    if form == "halves":
        return [tensor.flatten(0, 1)]
    if form == "transposed":
        return [tensor.t()]
    if form == "transposed_halves":
        return [tensor.flatten(0, 1).t()]
    if form == "interleaved":
        return [tensor.permute(*reversed(range(tensor.dim()))).flatten(-2)]
    groups, head = model.query_groups, model.head_size
    per_group = model.num_attention_heads // groups * head
    parts = [part.flatten(0, 1) for part in tensor.unflatten(0, (groups, -1)).split([per_group, head, head], 1)]
    return [torch.cat(parts)] if form == "fused_qkv" else parts


def part_shapes(form: Form, shape: tuple[int, ...], model: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of what ``from_logical`` gives, by arithmetic alone, so that absurd sizes cost nothing."""
    if form in ("same", "fused_qkv"):
        return (shape,)
    if form == "stack":
        return (shape[1:], shape[1:])
    if form == "halves":
        return ((2 * shape[1], *shape[2:]),)
    if form == "transposed":
        return (shape[::-1],)
    if form in ("interleaved", "transposed_halves"):
        return ((*shape[2:], 2 * shape[1]),)
    queries, keys = model.num_attention_heads * model.head_size, model.query_groups * model.head_size
    return tuple((rows, *shape[1:]) for rows in (queries, keys, keys))
