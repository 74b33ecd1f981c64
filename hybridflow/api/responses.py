"""Responses of an engine whose replicas lie on some ranks of a program, told to all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridflow.errors import DataError
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.parallel.world import World
from hybridflow.rollout.request import FinishReason, Request, SamplingParams, expand


class Told(NamedTuple):
    """A response, as all ranks know it; see ``rollout.request.Response``."""

    tokens: Tensor
    log_probs: Tensor
    finish: FinishReason
    error: str | None


def requests_to(
    prompts: Sequence[Tensor], params: SamplingParams, *, first_prompt_index: int, num_samples: int
) -> list[Request]:
    """Return the requests for so many samples of each prompt."""
    return [
        each
        for prompt_index, prompt in enumerate(prompts, first_prompt_index)
        for each in expand(Request(prompt=prompt, params=params, prompt_index=prompt_index), num_samples)
    ]


def respond(
    engine: Any, requests: Sequence[Request], mesh: DeviceMesh, world: World, *, group_size: int = 1
) -> list[Told]:
    """Return the responses to requests in their order, on all ranks. Collective: all ranks, with equal requests.

    Args:
        engine: As ``rollout.request.Engine``; None on a rank outside the mesh.
        requests: What is asked; each replica answers its share.
        mesh: Where the replicas are.
        world: This rank and the others.
        group_size: So many requests, one after the other, go to one replica.

    Raises:
        DataError: An engine cannot do what a request asks; on all ranks.
    """
    share: list[Any] = []
    refusal = None
    if world.rank in mesh:
        dp = mesh.coordinate(world.rank).dp
        numbers = [number for number in range(len(requests)) if number // group_size % mesh.layout.dp == dp]
        try:
            pairs = zip(numbers, engine.generate([requests[number] for number in numbers]), strict=True)
            # JSON has no other way to say that a number is not known.
            share = [
                [number, got.tokens.tolist(), [_known(each) for each in got.log_probs.tolist()], got.finish, got.error]
                for number, got in pairs
                if mesh.speaks(world.rank)
            ]
        except DataError as error:
            refusal = str(error)
    shares: list[Any] = world.everyone().gather([share, refusal], "responses")
    refusal = next((each for _, each in shares if each is not None), None)
    if refusal is not None:
        raise DataError(refusal)
    return [
        Told(
            torch.tensor(tokens, dtype=torch.int64),
            torch.tensor([math.nan if each is None else each for each in log_probs], dtype=torch.float32),
            finish,
            error,
        )
        for _, tokens, log_probs, finish, error in sorted(row for rows, _ in shares for row in rows)
    ]


def _known(number: float) -> float | None:
    return None if math.isnan(number) else number
