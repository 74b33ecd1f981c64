"""Micro-batches on the fake machine: indices are worked out on real tensors, as on a host, and then brought there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hybridflow.families.model import ModelConfig
from hybridflow.models.attention import PackedAttention
from hybridflow.models.microbatch import MicroBatch, pack
from hybridflow.models.routing import PackedRouting, choice_dtype
from tests.cuda.fake.machine import DEVICE


def on_device(value: Tensor) -> Tensor:
    """Return a tensor like a real one."""
    return torch.empty(value.shape, dtype=value.dtype, device=DEVICE)


def _bring(holder: Any) -> None:
    for name, value in vars(holder).items():
        if isinstance(value, Tensor):
            setattr(holder, name, on_device(value))


def shared_prompts(prompts: int, samples: int, prompt_tokens: int, response_tokens: int) -> MicroBatch:
    """Pack some samples of each of some prompts."""
    with unset_fake_temporarily():
        sequences = [
            torch.cat([torch.full((prompt_tokens,), prompt), torch.full((response_tokens + sample,), sample)])
            for prompt in range(prompts)
            for sample in range(samples)
        ]
        lengths = [prompt_tokens] * len(sequences)
        batch = pack(list(range(len(sequences))), sequences, lengths, torch.device("cpu"))
        holders = batch.attention._sequences, batch.attention._rectangles
    for holder in (batch.attention, *holders):
        _bring(holder)
    return replace(batch, tokens=on_device(batch.tokens), rows=on_device(batch.rows), targets=on_device(batch.targets))


def routed(batch: MicroBatch, model: ModelConfig, *, is_replayed: bool = False) -> MicroBatch:
    """Let the routers of a mixture tell of a micro-batch, next to what the rollout chose in it."""
    with unset_fake_temporarily():
        shape = len(batch.tokens), model.num_layers, model.experts_per_token
        routing = PackedRouting(
            replace(batch, tokens=torch.zeros(len(batch.tokens))),
            choices=torch.zeros(shape, dtype=choice_dtype(model.num_experts)),
            is_replayed=is_replayed,
        )
        routing.weights = 0.1, 0.1
    _bring(routing)
    batch.attention.routing = routing
    return batch


def one_sequence(tokens: int) -> PackedAttention:
    """Return the attention of a single sequence."""
    return shared_prompts(1, 1, tokens // 2, tokens // 2).attention
