"""Every rule of sampling for one row, in plain Python and fp64: what the batched, split one is held to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hybridflow.rollout.request import SamplingParams
from hybridflow.rollout.sampling import gumbel_noise, row_keys, sequence_key

NEVER = -math.inf


def log_softmax(values: Sequence[float]) -> list[float]:
    top = max(values)
    normalizer = top + math.log(math.fsum(math.exp(value - top) for value in values))
    return [value - normalizer for value in values]


def edited_by_hand(
    logits: Sequence[float], prompt: Sequence[int], response: Sequence[int], params: SamplingParams
) -> list[float]:
    """Logits over temperature after penalties, biases and what is forbidden, before the cuts."""
    values = list(logits)
    for token in {*prompt, *response}:
        values[token] *= params.repetition_penalty if values[token] <= 0 else 1 / params.repetition_penalty
    for token in set(response):
        values[token] -= params.presence_penalty + params.frequency_penalty * list(response).count(token)
    for token, amount in params.logit_bias:
        values[token] += amount
    before = [*prompt, *response]
    for *first, last in params.bad_ids:
        if before[len(before) - len(first) :] == first:
            values[last] = NEVER
    if len(response) + 1 < params.min_new_tokens:
        for token in params.stop_ids:
            values[token] = NEVER
    return [value / params.temperature for value in values]


def kept_by_hand(scaled: Sequence[float], params: SamplingParams) -> tuple[set[int], float]:
    """The tokens that the cuts leave, and how near another choice was: in logits, or of top p in probability."""
    order = sorted((token for token in range(len(scaled)) if scaled[token] > NEVER), key=lambda token: -scaled[token])
    margins = [math.inf]
    least = NEVER
    if 0 < params.top_k < len(order):
        least = scaled[order[params.top_k - 1]]
        margins.append(least - scaled[order[params.top_k]])
    left = [token for token in order if scaled[token] >= least]
    if params.top_p < 1:
        shares = [math.exp(value) for value in log_softmax([scaled[token] for token in left])]
        reached = 0.0
        for token, share in zip(left, shares, strict=True):
            margins.append(abs(reached - params.top_p))
            if reached >= params.top_p:
                break
            reached, least = reached + share, scaled[token]
    if params.min_p > 0:
        edge = scaled[order[0]] + math.log(params.min_p)
        margins += [abs(value - edge) for value in scaled if value > NEVER]
        least = max(least, edge)
    return {token for token in order if scaled[token] >= least}, min(margins)


def log_probs_by_hand(
    logits: Sequence[float], prompt: Sequence[int], response: Sequence[int], params: SamplingParams
) -> tuple[list[float], list[float]]:
    """Of each token: the trainer's log-probability, and that of the distribution that is sampled from."""
    scaled = edited_by_hand(logits, prompt, response, params)
    kept, _ = kept_by_hand(scaled, params)
    if params.greedy:
        kept = {max(range(len(scaled)), key=scaled.__getitem__)}
    left = log_softmax([value if token in kept else NEVER for token, value in enumerate(scaled)])
    return log_softmax([value / params.temperature for value in logits]), left


def choice_by_hand(
    logits: Sequence[float],
    prompt: Sequence[int],
    response: Sequence[int],
    params: SamplingParams,
    *,
    seed: int,
    prompt_index: int,
    index: int,
) -> tuple[int, float]:
    """The token that is sampled, and the margin: the perturbed top-two gap, or the distance to a cut's edge."""
    scaled = edited_by_hand(logits, prompt, response, params)
    kept, margin = (set(range(len(scaled))), math.inf) if params.greedy else kept_by_hand(scaled, params)
    key = sequence_key(seed if params.seed is None else params.seed, "rollout", prompt_index, index)
    keys = row_keys(torch.tensor([key]), torch.tensor([len(prompt) + len(response)]))
    noise = gumbel_noise(keys, 0, len(scaled))[0].tolist()
    scores = {token: scaled[token] + (0.0 if params.greedy else noise[token]) for token in kept}
    best, *others = sorted(scores, key=lambda token: -scores[token])
    return best, min(margin, scores[best] - scores[others[0]] if others else math.inf)
