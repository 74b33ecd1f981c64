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
        model: Gives the number of heads and query groups; the settings of the tensor's own layer.
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
    if form in _DELTA:
        return _delta_to_logical(form, tensors, model)
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
    if form in _DELTA:
        return _delta_from_logical(form, tensor, model)
    groups, head = model.query_groups, model.head_size
    sizes = [model.query_rows // groups, *[head] * (1 if model.keys_as_values else 2)]
    parts = [part.flatten(0, 1) for part in tensor.unflatten(0, (groups, -1)).split(sizes, 1)]
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
    if form == "delta_conv":
        return ((shape[0], 1, *shape[1:]),)
    if form in _DELTA:
        values, heads = model.linear_values, model.linear_value_heads or 0
        rows: tuple[int, ...] = (model.linear_channels, values, heads, heads)
        if form == "fused_delta":
            rows = model.linear_channels + values, 2 * heads
    else:
        keys = model.query_groups * model.head_size
        rows = model.query_rows, *[keys] * (model.key_value_rows // keys)
    return tuple((each, *shape[1:]) for each in rows)


_DELTA = ("delta", "fused_delta", "delta_conv", "delta_channels")


def _delta_to_logical(form: Form, tensors: list[Tensor], model: ModelConfig) -> Tensor:
    """Return the tensor of linear attention that some Hugging Face tensors make, grouped by key head."""
    if form == "delta_conv":
        tensors = [tensors[0].squeeze(1)]
    if form != "fused_delta":
        channels, *others = tensors
        tensors = [*channels.split(_channel_rows(model)), *others]
    heads = model.linear_key_heads
    rows: Tensor = torch.cat([tensor.unflatten(0, (heads, -1)) for tensor in tensors], 1).flatten(0, 1)
    return rows


def _delta_from_logical(form: Form, tensor: Tensor, model: ModelConfig) -> list[Tensor]:
    """Split a tensor of linear attention into those of Hugging Face; the inverse of ``_delta_to_logical``."""
    heads, values, value_heads = model.linear_key_heads or 0, model.linear_values, model.linear_value_heads or 0
    rows = [*_channel_rows(model)]
    if form == "delta":
        rows += [values, value_heads, value_heads]
    elif form == "fused_delta":
        rows = [model.linear_channels + values, 2 * value_heads]
    grouped = tensor.unflatten(0, (heads, -1)).split([each // heads for each in rows], 1)
    parts = [part.flatten(0, 1) for part in grouped]
    if form == "fused_delta":
        return parts
    channels, others = torch.cat(parts[:3]), parts[3:]
    return [channels.unsqueeze(1)] if form == "delta_conv" else [channels, *others]


def _channel_rows(model: ModelConfig) -> tuple[int, int, int]:
    """Return how many queries, keys and values a token has in linear attention."""
    keys = (model.linear_channels - model.linear_values) // 2
    return keys, keys, model.linear_values
