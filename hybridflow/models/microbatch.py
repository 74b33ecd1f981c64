"""Cutting a rank's samples into micro-batches by a token budget."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.data.images import FIRST_ID
from hybridflow.models.attention import PackedAttention
from hybridflow.models.context import ContextAttention, ContextShare, Dealt
from hybridflow.models.flops import sequence_pairs
from hybridflow.models.images import ImageReader, ImageRows
from hybridflow.parallel.copies import to_device


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

    Under context parallelism a rank has some of the tokens and of the rows; it computes with these, and ``gathered``
    and ``local`` lead from there to the values of all response tokens and back.

    Attributes:
        samples: Indices of the samples in the rank's batch.
        tokens: This rank's, ``[tokens]`` int64, on the model's device.
        lengths: Tokens of each sample.
        places: Where each sample's tokens stand in ``all_tokens``, ``[length]`` int64 in host memory.
        response_lengths: Response tokens of each sample.
        rows: Places in ``tokens`` whose output predicts a response token, ``[local responses]`` int64.
        targets: These response tokens, ``[local responses]`` int64.
        attention: Which token sees which.
        all_tokens: Those of all ranks, ``[tokens]`` int64, on the model's device.
        num_pairs: Pairs of a token and one that it sees.
        share: How the tokens are dealt to the context-parallel ranks; None: there is one.
        dealt: How the rows are.
    """

    samples: list[int]
    tokens: Tensor
    lengths: list[int]
    places: list[Tensor]
    response_lengths: list[int]
    rows: Tensor
    targets: Tensor
    attention: PackedAttention
    all_tokens: Tensor
    num_pairs: int = 0
    share: ContextShare | None = None
    dealt: Dealt | None = None

    @property
    def is_blank(self) -> bool:
        """Return whether it holds no sample, see ``blank``."""
        return not self.samples

    def gathered(self, values: Tensor) -> Tensor:
        """Return values of all rows from those of this rank's, ``[local responses, …]``; differentiable.

        The gradient of a rank's rows is its own alone: every rank computes the same loss from all values.

        Collective: cp, forward only.
        """
        return values if self.dealt is None else self.dealt.gather(values)

    def local(self, values: Tensor) -> Tensor:
        """Return the values of this rank's rows from those of all, ``[responses, …]``."""
        if self.dealt is None:
            return values
        return values[self.dealt.host_mine if values.device.type == "cpu" else self.dealt.mine]

    def places_here(self, places: Tensor) -> Tensor:
        """Return where tokens stand in ``tokens``, of those at ``[some]`` places in ``all_tokens``; -1: elsewhere."""
        if self.share is None:
            return places
        mine = self.share.tokens.host_mine
        return torch.full((len(self.all_tokens),), -1).index_copy_(0, mine, torch.arange(len(mine)))[places]

    def with_rows(self, places: Tensor) -> MicroBatch:
        """Return the micro-batch with other rows.

        Args:
            places: Places of them in ``all_tokens``, ``[rows]`` int64 in host memory.
        """
        if self.share is None:
            return replace(self, rows=to_device(places, self.tokens.device))
        rows, dealt = self.share.rows(places)
        return replace(self, rows=rows, dealt=dealt)

    def by_response(self, values: Tensor) -> list[Tensor]:
        """Split values of response tokens, ``[responses, ...]``, by sample; differentiable."""
        return list(values.split(self.response_lengths))

    def pad(self, values: Tensor) -> Tensor:
        """Pad values of response tokens, ``[responses]``, to ``[samples, tokens]``; differentiable."""
        lengths = torch.tensor(self.response_lengths)
        width = max(self.response_lengths, default=0)
        # One copy for all samples, and one gradient.
        is_there = torch.arange(width) < lengths[:, None]
        cells = to_device(is_there.flatten().nonzero()[:, 0], values.device)
        return values.new_zeros(is_there.numel()).index_copy(0, cells, values).view(is_there.shape)


def pack(
    samples: list[int],
    sequences: list[Tensor],
    prompt_lengths: list[int],
    device: torch.device,
    context: dist.ProcessGroup | None = None,
    images: ImageReader | None = None,
) -> MicroBatch:
    """Pack some samples of a rank's batch.

    What the device reads is copied there without waiting for it, so that the host can be ahead of a GPU.

    Args:
        samples: Which ones.
        sequences: Prompt and response of every sample of the batch, each ``[tokens]`` int64, in host memory.
        prompt_lengths: Prompt tokens of every sample of the batch, at least 1.
        device: Where the model lives.
        context: The context-parallel ranks that share each sample; None: this rank has them whole.
        images: What knows images in prompts; None: there are none.
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
    host_tokens, at = torch.cat([none, *pieces]), torch.cat([none, *places])
    tokens = to_device(host_tokens, device)
    whole = MicroBatch(
        samples=samples,
        tokens=tokens,
        lengths=lengths,
        places=places,
        response_lengths=[len(target) for target in targets],
        rows=torch.cat([none, *rows]),
        targets=to_device(torch.cat([none, *targets]), device),
        attention=PackedAttention(lengths, device, at),
        all_tokens=tokens,
        num_pairs=num_pairs,
    )
    part = _shared(whole, [len(piece) for piece in pieces], at, context)
    if images is not None:
        mine = slice(None) if part.share is None else part.share.tokens.host_mine
        part.attention.images = _image_rows(images, chosen, host_tokens, at, mine, device)
    return part


def _image_rows(
    images: ImageReader,
    sequences: list[Tensor],
    tokens: Tensor,
    places: Tensor,
    mine: slice | Tensor,
    device: torch.device,
) -> ImageRows | None:
    """Return this rank's tokens of images; None: no sequence has any."""
    if not bool((tokens >= FIRST_ID).any()):
        return None
    turns = torch.cat([images.turns(sequence) for sequence in sequences])
    whole = torch.empty(len(tokens), 3, dtype=torch.int64).index_copy_(0, places, turns)
    return images.rows(tokens[mine], whole[mine], device)


def blank(device: torch.device, context: dist.ProcessGroup | None = None) -> MicroBatch:
    """Return a micro-batch without samples, for a rank that takes part in collectives of the others' micro-batches.

    Its one token predicts nothing. ``training.run_schedule`` gives it a loss of zero and keeps nothing of it.
    """
    none, token = torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64, device=device)
    whole = MicroBatch(
        samples=[],
        tokens=token,
        lengths=[],
        places=[],
        response_lengths=[],
        rows=none,
        targets=none.to(device),
        attention=PackedAttention([1], device),
        all_tokens=token,
    )
    return _shared(whole, [1], torch.zeros(1, dtype=torch.int64), context)


def _shared(whole: MicroBatch, counts: list[int], places: Tensor, context: dist.ProcessGroup | None) -> MicroBatch:
    """Return this rank's part of a micro-batch.

    Args:
        whole: All of it, its rows in host memory.
        counts: Tokens of each sample that no sample before it has.
        places: Where the tokens of all samples stand, in host memory.
        context: The context-parallel ranks.
    """
    device = whole.tokens.device
    if context is None or context.size() == 1:
        return whole.with_rows(whole.rows)
    share = ContextShare(counts, context, device)
    part = replace(whole, share=share).with_rows(whole.rows)
    lengths = whole.lengths or counts
    return replace(
        part,
        tokens=whole.tokens[share.tokens.mine],
        targets=part.local(whole.targets),
        attention=ContextAttention(lengths, device, places, share),
    )
