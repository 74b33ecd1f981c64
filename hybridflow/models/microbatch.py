"""Cutting a rank's samples into micro-batches by a token budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hybridflow.models.attention import PackedAttention
from hybridflow.models.flops import sequence_pairs


def split_by_tokens(
    lengths: list[int], budget_tokens: int, *, prompts: list[int] | None = None, group_size: int = 1
) -> list[list[int]]:
    """Group samples so that each group has at most ``budget_tokens`` tokens; a longer sample stands alone.

    Samples of one prompt come together, so that it need be computed once; else those of like length, which wastes least
    where a kernel pads.

    Args:
        lengths: Tokens of each sample.
        budget_tokens: Most tokens in one micro-batch; shared ones count for every sample that has them.
        prompts: For each sample the first that has its prompt, as of ``first_of_prompt``; None: all have their own.
        group_size: So many samples, one after the other, stay together, as if they were one.

    Returns:
        Indices of samples, each exactly once.
    """
    micro_batches: list[list[int]] = []
    room = 0
    sums = [sum(lengths[start : start + group_size]) for start in range(0, len(lengths), group_size)]
    firsts = list(range(len(sums))) if prompts is None else prompts[::group_size]
    longest: dict[int, int] = {}
    for first, length in zip(firsts, sums, strict=True):
        longest[first] = max(length, longest.get(first, 0))
    for index in sorted(range(len(sums)), key=lambda i: (longest[firsts[i]], firsts[i], sums[i], i)):
        if not micro_batches or sums[index] > room:
            micro_batches.append([])
            room = budget_tokens
        micro_batches[-1].extend(range(index * group_size, (index + 1) * group_size))
        room -= sums[index]
    return micro_batches


def first_of_prompt(sequences: list[Tensor], prompt_lengths: list[int]) -> list[int]:
    """Return for each sample the first sample of the batch with the same prompt.

    Args:
        sequences: Prompt and response of every sample, each ``[tokens]`` int64, in host memory.
        prompt_lengths: Prompt tokens of every sample.
    """
    firsts: dict[bytes, int] = {}
    return [
        firsts.setdefault(sequence[:length].numpy().tobytes(), index)
        for index, (sequence, length) in enumerate(zip(sequences, prompt_lengths, strict=True))
    ]


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Some samples, packed, with where their responses stand. A prompt that several of them have is there once.

    Attributes:
        samples: Indices of the samples in the rank's batch.
        tokens: ``[tokens]`` int64, on the model's device.
        lengths: Tokens of each sample.
        places: Where each sample's tokens stand in ``tokens``, ``[length]`` int64 in host memory.
        response_lengths: Response tokens of each sample.
        rows: Places whose output predicts a response token, ``[responses]`` int64.
        targets: The response tokens, ``[responses]`` int64.
        attention: Which token sees which.
        num_pairs: Pairs of a token and one that it sees.
    """

    samples: list[int]
    tokens: Tensor
    lengths: list[int]
    places: list[Tensor]
    response_lengths: list[int]
    rows: Tensor
    targets: Tensor
    attention: PackedAttention
    num_pairs: int = 0

    @property
    def is_blank(self) -> bool:
        """Return whether it holds no sample, see ``blank``."""
        return not self.samples

    def by_response(self, values: Tensor) -> list[Tensor]:
        """Split values of response tokens, ``[responses, ...]``, by sample; differentiable."""
        return list(values.split(self.response_lengths))

    def pad(self, values: Tensor) -> Tensor:
        """Pad values of response tokens, ``[responses]``, to ``[samples, tokens]``; differentiable."""
        return pad_sequence(self.by_response(values), batch_first=True)


def pack(samples: list[int], sequences: list[Tensor], prompt_lengths: list[int], device: torch.device) -> MicroBatch:
    """Pack some samples of a rank's batch.

    Args:
        samples: Which ones.
        sequences: Prompt and response of every sample of the batch, each ``[tokens]`` int64, in host memory.
        prompt_lengths: Prompt tokens of every sample of the batch, at least 1.
        device: Where the model lives.
    """
    chosen, prompts = [sequences[index] for index in samples], [prompt_lengths[index] for index in samples]
    pieces: list[Tensor] = []
    places: list[Tensor] = []
    num_tokens = num_pairs = 0
    for sequence, prompt, first in zip(chosen, prompts, first_of_prompt(chosen, prompts), strict=True):
        begun = places[first][:prompt] if first < len(places) else torch.empty(0, dtype=torch.int64)
        pieces.append(sequence[len(begun) :])
        places.append(torch.cat([begun, torch.arange(num_tokens, num_tokens + len(pieces[-1]))]))
        num_tokens += len(pieces[-1])
        num_pairs += sequence_pairs(len(sequence), len(begun))
    # The output at token t predicts token t + 1.
    rows = [place[prompt - 1 : -1] for place, prompt in zip(places, prompts, strict=True)]
    targets = [sequence[prompt:] for sequence, prompt in zip(chosen, prompts, strict=True)]
    lengths = [len(sequence) for sequence in chosen]
    none = torch.empty(0, dtype=torch.int64)
    return MicroBatch(
        samples=samples,
        tokens=torch.cat([none, *pieces]).to(device),
        lengths=lengths,
        places=places,
        response_lengths=[len(target) for target in targets],
        rows=torch.cat([none, *rows]).to(device),
        targets=torch.cat([none, *targets]).to(device),
        attention=PackedAttention(lengths, device, torch.cat([none, *places])),
        num_pairs=num_pairs,
    )


def blank(device: torch.device) -> MicroBatch:
    """Return a micro-batch without samples, for a rank that takes part in collectives of the others' micro-batches.

    Its one token predicts nothing. ``training.run_schedule`` gives it a loss of zero and keeps nothing of it.
    """
    none = torch.empty(0, dtype=torch.int64, device=device)
    return MicroBatch(
        samples=[],
        tokens=torch.zeros(1, dtype=torch.int64, device=device),
        lengths=[],
        places=[],
        response_lengths=[],
        rows=none,
        targets=none,
        attention=PackedAttention([1], device),
    )
