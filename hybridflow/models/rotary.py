"""Rotary position embedding: how fast each pair of a head's dims turns, plain or stretched for longer contexts."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from hybridflow.families.model import ModelConfig, RotaryScaling


def rotary_frequencies(model: ModelConfig) -> Tensor:
    """Return the angle of each rotated pair of dims from one token to the next, ``[pairs]`` fp32 in host memory.

    LongRoPE has two sets of divisors. Which one a model uses is settled by its ``max_context``, once for all sequences,
    so that what was cached for the beginning of a sequence stays right as it grows, and training agrees with rollout.
    ``transformers`` chooses anew by the longest sequence of each batch instead.
    """
    scaling = model.rotary_scaling
    turns = torch.arange(0, model.rotary_size, 2, dtype=torch.float32) / model.rotary_size
    if scaling is None:
        return 1.0 / model.rotary_base**turns
    if scaling.kind == "longrope":
        divisors = scaling.long_factor if model.max_context > _original(scaling) else scaling.short_factor
        return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * model.rotary_base**turns)
    plain = 1.0 / model.rotary_base**turns
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "proportional":
        num_turning = int(scaling.rotated_share * model.head_size // 2)
        return torch.where(torch.arange(len(plain)) < num_turning, plain / scaling.factor, 0.0)
    kept = _kept_llama3(plain, scaling) if scaling.kind == "llama3" else _kept_yarn(model, scaling)
    return (1 - kept) * plain / scaling.factor + kept * plain


def all_frequencies(model: ModelConfig) -> Tensor:
    """Return ``rotary_frequencies``, and behind them those of other layers: with a window, or 0 without rotation."""
    frequencies = rotary_frequencies(_of_global(model))
    if model.no_rope_layers:
        return torch.cat([frequencies, torch.zeros_like(frequencies)])
    if model.local_rotary_base is None:
        return frequencies
    local = replace(model, rotary_base=model.local_rotary_base, rotary_scaling=None)
    return torch.cat([frequencies, rotary_frequencies(local)])


def rotated_pairs(model: ModelConfig) -> tuple[int, ...]:
    """Return the pairs of dims of each kind of layers, in the order of ``all_frequencies``."""
    pairs = _of_global(model).rotary_size // 2
    if model.no_rope_layers:
        return pairs, pairs
    return (pairs,) if model.local_rotary_base is None else (pairs, model.rotary_size // 2)


def _of_global(model: ModelConfig) -> ModelConfig:
    """Return the settings of layers without the window."""
    return model if model.global_head_dim is None else replace(model, head_dim=model.global_head_dim)


def rotary_factor(model: ModelConfig) -> float:
    """Return the factor on queries and keys that goes with the stretched frequencies; their scores get its square.

    Paper: arXiv 2309.00071 (YaRN), arXiv 2402.13753 (LongRoPE).
    """
    scaling = model.rotary_scaling
    if scaling is None or scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    if scaling.kind == "yarn":
        if scaling.mscale is None or scaling.mscale_all_dim is None:
            return _yarn_factor(scaling, 1.0)
        return _yarn_factor(scaling, scaling.mscale) / _yarn_factor(scaling, scaling.mscale_all_dim)
    return math.sqrt(1 + math.log(scaling.factor) / math.log(_original(scaling)))


def score_scale(model: ModelConfig) -> float:
    """Return the factor on attention scores, that of stretched frequencies included where it is on whole heads.

    Where a part of each head turns, ``rotary_factor`` is on that part alone.
    """
    scale = model.plain_scale
    if model.kv_lora_rank is None:
        return scale * rotary_factor(model) ** 2 if model.rotary_size == model.head_size else scale
    scaling = model.rotary_scaling
    if scaling is None or scaling.mscale_all_dim is None:
        return scale
    return scale * _yarn_factor(scaling, scaling.mscale_all_dim) ** 2


def _yarn_factor(scaling: RotaryScaling, weight: float) -> float:
    return 1 + 0.1 * weight * math.log(scaling.factor) if scaling.factor > 1 else 1.0


def _kept_llama3(plain: Tensor, scaling: RotaryScaling) -> Tensor:
    """Return the share of each frequency that is left alone: 1 for the fast, 0 for the slow, linear in between."""
    turned = _original(scaling) * plain / (2 * math.pi)
    share = (turned - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return share.clamp(0, 1)


def _kept_yarn(model: ModelConfig, scaling: RotaryScaling) -> Tensor:
    """Return the kept shares of YaRN: as for Llama 3.1, but linear in the index of the pair of dims."""

    def pair_that_turns(times: float) -> float:
        return (
            model.rotary_size * math.log(_original(scaling) / (times * 2 * math.pi)) / (2 * math.log(model.rotary_base))
        )

    fast, slow = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        fast, slow = math.floor(fast), math.ceil(slow)
    first, last = max(fast, 0), min(slow, model.rotary_size - 1)
    pairs = torch.arange(model.rotary_size // 2, dtype=torch.float32)
    return 1 - ((pairs - first) / (0.001 if last == first else last - first)).clamp(0, 1)


def _original(scaling: RotaryScaling) -> int:
    assert scaling.original_context is not None, "checked with the model's settings"
    return scaling.original_context


def rotary_table(frequencies: Tensor, context: int) -> Tensor:
    """Return cosines and sines of each position, ``[context, 2, head / 2]`` fp32, where the frequencies are."""
    angles = torch.outer(torch.arange(context, dtype=torch.float32, device=frequencies.device), frequencies)
    return torch.stack([angles.cos(), angles.sin()], dim=1).contiguous()
