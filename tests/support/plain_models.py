"""What a model's logits say of tokens, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

NEAR_TIE = 1e-3
"""Logits closer than this may be the other way round in another order of summation."""


def token_log_probs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each token but the first, of the logits ``[tokens, vocab]`` of all."""
    return (logits[:-1] / temperature).log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


def greedy(
    logits_of: Callable[[Tensor], Any], prompt: Sequence[int], num_tokens: int, eos: int | None
) -> tuple[list[int], bool]:
    """The likeliest tokens one after the other, and whether two were as good as equal, where they end."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        with torch.no_grad():
            best = logits_of(torch.tensor([tokens]))[0, -1].topk(2)
        if best.values[0] - best.values[1] < NEAR_TIE:
            return tokens[len(prompt) :], True
        tokens.append(int(best.indices[0]))
        if tokens[-1] == eos:
            break
    return tokens[len(prompt) :], False
