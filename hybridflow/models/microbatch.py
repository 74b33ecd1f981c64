"""Cutting a rank's samples into micro-batches by a token budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.models.attention import PackedAttention


def split_by_tokens(lengths: list[int], budget_tokens: int, group_size: int = 1) -> list[list[int]]:
    """Group samples so that each group has at most ``budget_tokens`` tokens; a longer sample stands alone.

    Samples of like length come together, which wastes least where a kernel pads.

    Args:
        lengths: Tokens of each sample.
        budget_tokens: Most tokens in one micro-batch.
        group_size: So many samples, one after the other, stay together, as if they were one.

    Returns:
        Indices of samples, each exactly once.
    """
    micro_batches: list[list[int]] = []
    room = 0
    sums = [sum(lengths[start : start + group_size]) for start in range(0, len(lengths), group_size)]
    for index in sorted(range(len(sums)), key=lambda i: (sums[i], i)):
        if not micro_batches or sums[index] > room:
            micro_batches.append([])
            room = budget_tokens
        micro_batches[-1].extend(range(index * group_size, (index + 1) * group_size))
        room -= sums[index]
    return micro_batches


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Some samples, packed, with where their responses stand.

    Attributes:
        samples: Indices of the samples in the rank's batch.
        tokens: ``[tokens]`` int64, on the model's device.
        lengths: Tokens of each sample.
        response_lengths: Response tokens of each sample.
        rows: Places whose output predicts a response token, ``[responses]`` int64.
        targets: Those response tokens, ``[responses]`` int64.
        attention: Which token sees which.
    """

    samples: list[int]
    tokens: Tensor
    lengths: list[int]
    response_lengths: list[int]
    rows: Tensor
    targets: Tensor
    attention: PackedAttention


def pack(samples: list[int], sequences: list[Tensor], prompt_lengths: list[int], device: torch.device) -> MicroBatch:
    """Pack some samples of a rank's batch.

    Args:
        samples: Which ones.
        sequences: Prompt and response of every sample of the batch, each ``[tokens]`` int64, in host memory.
        prompt_lengths: Prompt tokens of every sample of the batch, at least 1.
        device: Where the model lives.
    """
    chosen = [sequences[index] for index in samples]
    lengths = [len(sequence) for sequence in chosen]
    responses = [length - prompt_lengths[index] for length, index in zip(lengths, samples, strict=True)]
    rows, start = [], 0
    for length, response in zip(lengths, responses, strict=True):
        # The output at token t predicts token t + 1.
        rows.append(torch.arange(start + length - response - 1, start + length - 1))
        start += length
    tokens = torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.int64)
    place = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
    return MicroBatch(
        samples=samples,
        tokens=tokens.to(device),
        lengths=lengths,
        response_lengths=responses,
        rows=place.to(device),
        targets=tokens[place + 1].to(device),
        attention=PackedAttention(lengths, device),
    )
