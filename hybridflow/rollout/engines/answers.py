"""From what another engine answered to a ``Response``, or to a reason why it cannot be one."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hybridflow.rollout.engines.wire import BadAnswer
from hybridflow.rollout.request import VLLM_RANGES, Request, Response, RolloutStopped, SamplingParams

LogProbsKind = Literal["raw", "processed"]
"""Log-probabilities of the model's own distribution, or of the one sampled from, after temperature and cuts."""

_ROUNDING = 1e-3
"""A log-probability may be so much above 0."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Answer of an engine, as it says what it sampled.

    Attributes:
        tokens: Ids, as they came.
        log_probs: Of each of them, as they came; ``lacks_last``: but the last.
        finish: Why it ended.
        kind: Distribution of the log-probabilities.
        lacks_last: The last token's log-probability is not told.
        prompt_log_probs: Of the prompt's tokens but the first; None: not asked for.
    """

    tokens: Any
    log_probs: Any
    finish: Literal["stop", "length"]
    kind: LogProbsKind
    lacks_last: bool = False
    prompt_log_probs: Any = None


def is_cut(params: SamplingParams) -> bool:
    """Return whether penalties, biases or cuts change the tempered distribution."""
    neutral = SamplingParams(max_new_tokens=1)
    names = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
    return params.min_new_tokens > 0 or any(getattr(params, name) != getattr(neutral, name) for name in names)


def num_left(request: Request) -> int:
    """Return the number of tokens that may still be sampled."""
    return request.params.max_new_tokens - num_begun(request)


def num_begun(request: Request) -> int:
    """Return the number of tokens that were sampled before."""
    return 0 if request.begun is None else len(request.begun.tokens)


def num_before_stop(request: Request) -> int:
    """Return the fewest tokens to sample before a stop token, which other engines do not count."""
    return max(0, request.params.min_new_tokens - num_begun(request) - 1)


def known_tokens(request: Request) -> list[int]:
    """Return the prompt and what was sampled before."""
    begun = [] if request.begun is None else request.begun.tokens.tolist()
    return [*request.prompt.tolist(), *begun]


def request_seed(seed: int, purpose: str, request: Request) -> int:
    """Return a request's own seed, under 2^53 for JSON readers; a continued request gets another."""
    seed = seed if request.params.seed is None else request.params.seed
    text = f"{seed}:{purpose}:{request.prompt_index}:{request.index}:{num_begun(request)}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 11


def failed(request: Request, error: str) -> Response:
    """Return a failed response: what was sampled before, and the error."""
    return _join(request, [], [], [], version=0, finish="failed", error=error)


def unfinished(request: Request) -> Response:
    """Return what was sampled before as a response to continue from."""
    return _join(request, [], [], [], version=0, finish="paused")


def stopped(requests: Sequence[Request], found: Container[int]) -> RolloutStopped:
    """Return what ends generating early: the other requests begin anew.

    Args:
        requests: All requests.
        found: Numbers of those that are answered.
    """
    others = [request for number, request in enumerate(requests) if number not in found]
    return RolloutStopped([(request, unfinished(request)) for request in others])


def response_of(request: Request, answer: Answer, *, version: int, vocab_size: int | None) -> Response:
    """Return the response of an answer, cut behind the first stop token, wherever the engine ended.

    A log-probability that the engine did not report is NaN: see ``Answer.kind``. Raw ones equal those of ``log_probs``
    only at temperature 1, processed ones only where nothing was cut.

    Raises:
        BadAnswer: It is not what was asked for.
    """
    params, tokens = request.params, answer.tokens
    _check_tokens(tokens, num_left(request), vocab_size)
    values = _numbers(answer.log_probs, "log-probabilities", len(tokens) - answer.lacks_last)
    values += [math.nan] * answer.lacks_last
    first = num_before_stop(request)
    at = next((at for at, token in enumerate(tokens) if at >= first and token in params.stop_ids), None)
    finish = answer.finish if at is None else "stop"
    tokens, values = (tokens, values) if at is None else (tokens[: at + 1], values[: at + 1])
    if finish == "length" and len(tokens) != num_left(request):
        raise BadAnswer(
            f"found {len(tokens)} tokens and the end 'length', expected {num_left(request)}; does "
            "the server's context end there?"
        )
    if finish == "stop" and at is None and not params.stop:
        raise BadAnswer(
            f"it stopped at token {tokens[-1]}, which is none of stop_ids={list(params.stop_ids)}; the server has an "
            "end of its own: leave that out of its generation config, or add it to the tokenizer's ends"
        )
    prompt_log_probs = None
    if params.with_prompt_log_probs:
        prompt_log_probs = torch.tensor(
            _numbers(answer.prompt_log_probs, "log-probabilities of the prompt", len(request.prompt) - 1)
        )
    is_tempered = params.temperature != 1 and not params.greedy
    nothing = [math.nan] * len(values)
    untruncated = values if not (is_tempered if answer.kind == "raw" else is_cut(params)) else nothing
    sampled = values if answer.kind == "processed" or not (is_tempered or is_cut(params)) else nothing
    return _join(
        request, tokens, untruncated, sampled, version=version, finish=finish, prompt_log_probs=prompt_log_probs
    )


def _check_tokens(tokens: Any, most: int, vocab_size: int | None) -> None:
    if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
        raise BadAnswer(f"tokens: found {_shown(tokens)}, expected a list of token ids")
    if not 1 <= len(tokens) <= most:
        raise BadAnswer(f"found {len(tokens)} tokens, expected 1 to {most}")
    if vocab_size is not None and max(tokens) >= vocab_size:
        raise BadAnswer(f"found token {max(tokens)}, expected ids below {vocab_size}; is it the same model?")


def _numbers(values: Any, what: str, count: int) -> list[float]:
    if not isinstance(values, list) or len(values) != count:
        found = f"{len(values)} of them" if isinstance(values, list) else _shown(values)
        raise BadAnswer(f"{what}: found {found}, expected {count}")
    for value in values:
        if type(value) not in (int, float) or not math.isfinite(value) or value > _ROUNDING:
            raise BadAnswer(f"{what}: found {_shown(value)}, expected finite numbers of at most 0")
    return [float(value) for value in values]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _join(
    request: Request,
    tokens: Sequence[int],
    log_probs: Sequence[float],
    sampled: Sequence[float],
    *,
    version: int,
    finish: Any,
    error: str | None = None,
    prompt_log_probs: torch.Tensor | None = None,
) -> Response:
    """Return a response that joins what was sampled before and now."""
    new = (
        torch.tensor(tokens, dtype=torch.int64),
        torch.tensor(log_probs, dtype=torch.float32),
        torch.tensor(sampled, dtype=torch.float32),
        torch.full((len(tokens),), version, dtype=torch.int32),
    )
    begun = request.begun
    if begun is not None:
        before = (begun.tokens, begun.log_probs, begun.sampled_log_probs, begun.versions)
        new = tuple(torch.cat(pair) for pair in zip(before, new, strict=True))  # type: ignore[assignment]
    return Response(
        tokens=new[0],
        log_probs=new[1],
        sampled_log_probs=new[2],
        versions=new[3],
        prompt_log_probs=prompt_log_probs,
        finish=finish,
        error=error,
    )


def other_refusal(request: Request) -> str | None:
    """Return why no engine but our own can meet a request, or None if others can.

    Such an engine takes what was sampled before as a part of the prompt.
    """
    params = request.params
    if num_left(request) < 1:
        return f"{num_begun(request)} tokens were sampled before, and max_new_tokens={params.max_new_tokens}"
    if num_begun(request) > 0 and (params.presence_penalty, params.frequency_penalty) != (0, 0):
        return "presence_penalty and frequency_penalty count the response, whose beginning would count as prompt"
    if num_begun(request) > 0 and params.with_prompt_log_probs:
        return "with_prompt_log_probs: ask for them where it begins"
    if params.num_top_log_probs:
        return "num_top_log_probs: the likeliest tokens are not asked of it; leave it out"
    return None


def range_refusal(params: SamplingParams) -> str | None:
    """Return why vLLM, or a server of its interface, cannot sample with such numbers, or None if it can."""
    far = [bias for _, bias in params.logit_bias if abs(bias) > 100]
    if far:
        return f"logit_bias={far[0]:g}: the engine takes -100 to 100"
    for name, (low, high) in VLLM_RANGES.items():
        if not low <= getattr(params, name) <= high and not (params.greedy and name == "temperature"):
            return f"{name}={getattr(params, name):g}: the engine takes {low:g} to {high:g}"
    return None
