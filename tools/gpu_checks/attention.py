"""Attention in training, of samples that share their prompts, with gradients, beside plain torch on the same device.

A shared prompt is there once. So most samples have fewer queries than keys, and their last query sees their last key.
"""

from __future__ import annotations

import math
import traceback
from typing import Any

from gpu_checks.common import find_device, relative_gap, result, run

_BOUNDS = {"bfloat16": 2.0**-6, "float32": 1e-4}
"""Largest difference over the largest value."""

_CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "plain": ("bfloat16", 128, {}),
    "window": ("bfloat16", 128, {"window": 150}),
    "cap": ("bfloat16", 256, {"softcap": 3.0}),
    "fp32": ("float32", 128, {}),
    "window in fp32": ("float32", 128, {"window": 150}),
    "odd heads": ("bfloat16", 100, {}),
    "wide heads": ("bfloat16", 320, {}),
}
"""Format, width of a head, and scoring: together all the code that may be chosen."""


def main(argument: str, is_dry: bool) -> dict[str, Any]:
    """Compute each case with the code that training would choose."""
    sizes = (2, 180, 30) if is_dry else (3, 700, 250)
    figures: dict[str, dict[str, Any]] = {}
    bounds: dict[str, tuple[float, str, float]] = {}
    texts = []
    for name, (dtype, head, scoring) in _CASES.items():
        # A CPU makes capped scores in the format of the queries.
        dtype = "float32" if is_dry else dtype
        try:
            backend, apart = _check(dtype, head, scoring, *_sequences(*sizes))
        except Exception:  # the others tell more
            traceback.print_exc()
            backend, apart = "nothing, since it failed", {"all": math.inf}
        figures[name] = {"backend": backend, **apart}
        bounds |= {f"{name}: difference of {what}": (gap, "<=", _BOUNDS[dtype]) for what, gap in apart.items()}
        texts.append(f"{name} {max(apart.values()):.2g} by {backend}")
    return result(f"largest relative differences: {', '.join(texts)}", bounds, figures)


def _sequences(num_prompts: int, prompt: int, response: int) -> tuple[list[int], list[int]]:
    """Return the tokens of each sequence, and which token of the micro-batch each of their tokens is.

    Each prompt has four samples of unequal lengths. The second one is the prompt alone, and has no query of its own.
    """
    lengths: list[int] = []
    places: list[int] = []
    num_tokens = 0
    for number in range(num_prompts):
        shared = list(range(num_tokens, num_tokens + prompt + number))
        num_tokens += len(shared)
        for sample in (1, 0, 2, 3):
            own = range(num_tokens, num_tokens + sample * response // 3 + (sample > 0))
            num_tokens += len(own)
            lengths.append(len(shared) + len(own))
            places += [*shared, *own]
    return lengths, places


def _check(
    dtype: str, head: int, settings: dict[str, Any], lengths: list[int], places: list[int]
) -> tuple[str, dict[str, float]]:
    """Return which code was chosen, and how far its output and gradients are from those of plain torch."""
    import torch

    from hybridflow.models.attention import PackedAttention
    from hybridflow.models.scoring import Scoring

    device, generator = find_device(), torch.Generator().manual_seed(head)
    scoring = Scoring(scale=head**-0.5, **settings)
    given, exact = [], []
    for heads in (8, 2, 2):
        values = torch.randn(max(places) + 1, heads, head, generator=generator).to(device, getattr(torch, dtype))
        given.append(values.clone().requires_grad_())
        exact.append(values.double().requires_grad_())
    attention = PackedAttention(lengths, device, torch.tensor(places))
    backend = attention._sequences.backend(given[0], scoring) if device.type == "cuda" else "rectangles"
    found, expected = attention.attend(0, *given, scoring), _attend(exact, lengths, places, scoring)
    weight = torch.randn(expected.shape, generator=generator).to(found)
    gradients = torch.autograd.grad(found, given, weight), torch.autograd.grad(expected, exact, weight.double())
    names = "outputs", "gradients of queries", "gradients of keys", "gradients of values"
    pairs = zip(names, (found, *gradients[0]), (expected, *gradients[1]), strict=True)
    return backend, {name: relative_gap(*pair) for name, *pair in pairs}


def _attend(packed: list[Any], lengths: list[int], places: list[int], scoring: Any) -> Any:
    """Attend as ``PackedAttention.attend`` does, one sequence after the other, with scores of all pairs."""
    import torch

    outputs, num_done, first = [], 0, 0
    for length in lengths:
        taken = torch.tensor(places[first : first + length], device=packed[0].device)
        first += length
        # Tokens that an earlier sequence has are keys alone.
        num_keys_alone = int((taken < num_done).sum())
        num_done = max(num_done, int(taken[-1]) + 1)
        query, key, value = (each[taken].transpose(0, 1) for each in packed)
        sharers = len(query) // len(key)
        key, value = (each.repeat_interleave(sharers, 0) for each in (key, value))
        scores = scoring.scale * query[:, num_keys_alone:] @ key.transpose(1, 2)
        if scoring.softcap:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        behind = _behind(length, num_keys_alone).to(taken.device)
        is_hidden = (behind < 0) | (behind >= (scoring.window or length))
        outputs.append((scores.masked_fill(is_hidden, -math.inf).softmax(-1) @ value).transpose(0, 1))
    return torch.cat(outputs)


def _behind(num_keys: int, num_keys_alone: int) -> Any:
    """Return how far each key is behind each query, ``[queries, keys]``: the last query sees the last key."""
    import torch

    places = torch.arange(num_keys)
    return places[num_keys_alone:, None] - places


if __name__ == "__main__":
    run(main)
