"""What is asked of an engine, and what it answers: the one interface of ours and of other engines. Light at import."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from hybridflow.data.images import FIRST_ID
from hybridflow.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

PURPOSES = {"rollout": 1, "validation": 2}
"""Purposes of samples: each has noise of its own."""

LOOK_STEPS = 16
"""Every so many steps generating looks up: what is finished is handed over, and it may be told to stop."""

FinishReason = Literal["stop", "length", "paused", "failed"]
"""A stop token or text, the most tokens; ``paused``: not yet; ``failed``: something went wrong."""

TopLogProbs = list[tuple[int, float]]
"""Token ids with their log-probabilities, the likeliest first."""

SampleKey = tuple[int, int]
"""Prompt index and index of a sample."""

MOST = 10_000.0
"""Largest temperature, penalty and bias, and one over the smallest temperature: within fp32 whatever the logits."""

MOST_TOP = 20
"""Most of the likeliest tokens that are told of a token."""

MOST_ENTRIES, MOST_IDS, MOST_CHARACTERS = 1024, 64, 1024
"""Most entries of a list, tokens of a forbidden sequence, and characters of a stop or forbidden text."""


OBSERVED = -1
"""In what is kept of a run, version of a token that no weights sampled: what an environment said."""

VLLM_RANGES = {"temperature": (0.01, MOST), "presence_penalty": (-2.0, 2.0), "frequency_penalty": (-2.0, 2.0)}
"""Values that vLLM and servers of its interface take. vLLM raises a lower temperature silently."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a response is sampled: penalties, biases, what is forbidden, temperature, then cuts, in this order.

    Attributes:
        max_new_tokens: Most tokens of a response, the stop token included.
        min_new_tokens: Fewest, unless something fails: before, ``stop_ids`` are not sampled, and stop strings not
            looked for.
        temperature: Divides the logits.
        top_k: Keep the k most likely tokens, and those as likely as the last of them; 0 keeps all.
        top_p: Of these keep the smallest set of most likely ones whose share reaches this; 1 keeps all.
        min_p: Keep tokens at least this times as likely as the likeliest; 0 keeps all.
        repetition_penalty: Logits of tokens of the prompt and the response are divided by this if positive, else
            multiplied (arXiv 1909.05858).
        presence_penalty: Taken from the logits of the response's tokens.
        frequency_penalty: Taken from the logits of the response's tokens, times how often each was sampled.
        logit_bias: Pairs of token id and what is added to its logit.
        bad_ids: Sequences of tokens that are never completed by sampling; the first ones may stand in the prompt.
        stop_ids: Tokens that end a response, and are part of it.
        stop: Texts that end a response, which then ends with the token that completes one of them. The name of a
            special token is in no text: ``texts.with_stop_tokens`` makes it one of ``stop_ids``.
        bad: Texts that no token of a response completes: one that would is forbidden there, and another sampled. A
            special token is in no text, and is forbidden by ``bad_ids``.
        greedy: Take the most likely token, without noise.
        seed: Replaces the engine's own seed; None: that.
        with_prompt_log_probs: Whether log-probabilities of the prompt's tokens are wanted.
        num_top_log_probs: So many of the likeliest tokens are told of each token that is sampled or, of the prompt,
            has its log-probability told.

    Raises:
        DataError: A value is not allowed.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_ids: tuple[tuple[int, ...], ...] = ()
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    bad: tuple[str, ...] = ()
    greedy: bool = False
    seed: int | None = None
    with_prompt_log_probs: bool = False
    num_top_log_probs: int = 0

    def __post_init__(self) -> None:
        for name, (is_allowed, expected) in _ALLOWED.items():
            value = getattr(self, name)
            if not is_allowed(value):
                # What is long, or hostile, is cut.
                raise DataError(f"SamplingParams.{name}: found {value!r:.80}, expected {expected}")
        if self.min_new_tokens > self.max_new_tokens:
            raise DataError(
                f"SamplingParams.min_new_tokens: found {self.min_new_tokens}, expected at most "
                f"max_new_tokens={self.max_new_tokens}"
            )

    @property
    def has_texts(self) -> bool:
        """Return whether the response's text has to be looked at while it is sampled."""
        return bool(self.stop or self.bad)

    @property
    def largest_id(self) -> int:
        """Return the largest token id that is biased or forbidden, or -1 if there is none."""
        return max((*(token for token, _ in self.logit_bias), *(max(ids) for ids in self.bad_ids)), default=-1)


def _is_integer(low: int, high: int = 2**31 - 1) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _is_number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and low <= value <= high


def _is_tuple(is_item: Callable[[Any], bool], most: int = MOST_ENTRIES) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, tuple) and len(value) <= most and all(map(is_item, value))


def _is_text(value: Any) -> bool:
    # U+FFFD stands for bytes that are no text, or not yet.
    return isinstance(value, str) and 0 < len(value) <= MOST_CHARACTERS and "\ufffd" not in value


def _is_bias(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and _is_id(value[0]) and _is_penalty(value[1])


def _are_biases(value: Any) -> bool:
    return _is_tuple(_is_bias)(value) and len({token for token, _ in value}) == len(value)


_is_bool = (lambda value: type(value) is bool, "true or false")
_is_id, _is_penalty = _is_integer(0), _is_number(-MOST, MOST)
_penalty = (_is_penalty, f"a number from {-MOST:g} to {MOST:g}")
_texts = (
    _is_tuple(_is_text),
    f"a tuple of at most {MOST_ENTRIES} texts of 1 to {MOST_CHARACTERS} characters without U+FFFD",
)
_ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (_is_integer(1), "an integer of at least 1"),
    "min_new_tokens": (_is_integer(0), "an integer of at least 0"),
    "temperature": (_is_number(1 / MOST, MOST), f"a number from {1 / MOST:g} to {MOST:g}; for 0 set greedy instead"),
    "top_k": (_is_integer(0), "an integer of at least 0; 0 keeps all"),
    "top_p": (lambda value: _is_number(0, 1)(value) and value > 0, "a number above 0 and at most 1"),
    "min_p": (_is_number(0, 1), "a number from 0 to 1"),
    "repetition_penalty": (_is_number(1 / MOST, MOST), f"a number from {1 / MOST:g} to {MOST:g}; 1 is none"),
    "presence_penalty": _penalty,
    "frequency_penalty": _penalty,
    "logit_bias": (
        _are_biases,
        f"a tuple of at most {MOST_ENTRIES} pairs of a token id, each once, and a number from {-MOST:g} to {MOST:g}",
    ),
    "bad_ids": (
        _is_tuple(lambda value: _is_tuple(_is_id, MOST_IDS)(value) and len(value) > 0),
        f"a tuple of at most {MOST_ENTRIES} tuples of 1 to {MOST_IDS} token ids",
    ),
    "stop_ids": (_is_tuple(_is_id), f"a tuple of at most {MOST_ENTRIES} token ids"),
    "stop": _texts,
    "bad": _texts,
    "greedy": _is_bool,
    "seed": (lambda value: value is None or _is_integer(-(2**63), 2**63 - 1)(value), "a 64-bit integer or null"),
    "with_prompt_log_probs": _is_bool,
    "num_top_log_probs": (_is_integer(0, MOST_TOP), f"an integer from 0 to {MOST_TOP}"),
}
"""Of each field of ``SamplingParams``: what is allowed, and how that is said."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One response wanted.

    Attributes:
        prompt: Token ids, ``[tokens]`` int64, at least one.
        params: How to sample it.
        prompt_index: Serial number of the prompt in the data order.
        index: Number of this sample among those of its prompt.
        begun: Tokens sampled before, to continue from; None: none.
    """

    prompt: Tensor
    params: SamplingParams
    prompt_index: int
    index: int = 0
    begun: Response | None = None

    @property
    def key(self) -> SampleKey:
        """Return what tells its sample from others."""
        return self.prompt_index, self.index


def expand(request: Request, n: int) -> list[Request]:
    """Return a request as ``n`` samples of their own, whose indices continue the request's own."""
    return [replace(request, index=request.index + index) for index in range(n)]


def length_refusal(request: Request, max_context: int | None, of: str = "model.max_context") -> str | None:
    """Return why a prompt's length rules a request out, or None if it does not.

    Args:
        request: The request.
        max_context: Longest sequence in tokens; None: it is not known.
        of: Name of the limit in messages.
    """
    num_prompt, most = len(request.prompt), request.params.max_new_tokens
    if num_prompt == 0:
        return "the prompt has no tokens; give at least one, such as the tokenizer's beginning of a sequence"
    if max_context is not None and num_prompt + most > max_context:
        return (
            f"the prompt has {num_prompt} tokens; with max_new_tokens={most} that exceeds {of}={max_context}; shorten "
            "it, ask for fewer tokens, or raise the context"
        )
    return None


def model_refusal(
    request: Request, max_context: int | None, vocab_size: int | None, of: str = "model.max_context"
) -> str | None:
    """Return why the model rules a request out, by its context or its tokens, or None if it does not.

    Args:
        request: The request.
        max_context: As for ``length_refusal``.
        vocab_size: Ids that the model has; None: it is not known.
        of: As for ``length_refusal``.
    """
    if reason := length_refusal(request, max_context, of):
        return reason
    text = request.prompt.masked_fill(request.prompt >= FIRST_ID, 0)
    smallest, largest = (int(each) for each in text.aminmax())
    if smallest < 0 or (vocab_size is not None and largest >= vocab_size):
        wrong = smallest if smallest < 0 else largest
        expected = "0 or more" if vocab_size is None else f"0 to {vocab_size - 1}"
        return f"it has token {wrong}; expected {expected}, as the model's tokenizer makes them"
    if vocab_size is not None and request.params.largest_id >= vocab_size:
        return f"its logit_bias or bad_ids name token {request.params.largest_id}; expected 0 to {vocab_size - 1}"
    return None


def check_requests(requests: Iterable[Request], refusal: Callable[[Request], str | None], where: str = "") -> None:
    """Check that all requests can be met, before anything is sampled.

    Args:
        requests: The requests.
        refusal: Returns why a request cannot be met, or None if it can.
        where: Recipe section that the reason is about, with its colon and space.

    Raises:
        DataError: One cannot be met.
    """
    for request in requests:
        if reason := refusal(request):
            raise DataError(f"prompt {request.prompt_index}: {where}{reason}")


@dataclass(frozen=True, kw_only=True)
class Response:
    """Sampled tokens, in host memory.

    Attributes:
        tokens: ``[response]`` int64, the stop token included.
        log_probs: ``[response]`` fp32 under ``softmax(logits / temperature)``, before penalties and cuts: what the
            trainer computes.
        sampled_log_probs: ``[response]`` fp32 of the distribution that was sampled from, penalties, what is forbidden
            and cuts included; 0 where it was the likeliest that was wanted.
        versions: ``[response]`` int32, which weights sampled each token.
        prompt_log_probs: ``[prompt - 1]`` fp32 of the prompt's tokens but the first, at temperature 1; None: not asked
            for.
        top_log_probs: Of each of ``tokens`` the likeliest tokens, under the distribution of ``log_probs``; None: not
            asked for.
        prompt_top_log_probs: Of the prompt's tokens but the first the same, at temperature 1; None: not asked for.
        choices: Experts that each token of prompt and response was sent to, ``[tokens, layers, experts_per_token]``,
            or what ``models.routing.unknown_choice`` gives; None: they were not kept.
        finish: Why it ended.
        error: Text of the error, where ``finish`` is ``failed``.
        latency_s: Seconds from when the engine was asked for it until it had ended, waits for a slot included; NaN: not
            measured, since it was there before or is paused.
        first_token_s: The same until its first token was known; NaN too where the engine does not tell.
    """

    tokens: Tensor
    log_probs: Tensor
    sampled_log_probs: Tensor
    versions: Tensor
    prompt_log_probs: Tensor | None = None
    top_log_probs: list[TopLogProbs] | None = None
    prompt_top_log_probs: list[TopLogProbs] | None = None
    choices: Tensor | None = None
    finish: FinishReason
    error: str | None = None
    latency_s: float = field(default=math.nan, compare=False)
    first_token_s: float = field(default=math.nan, compare=False)


class Progress(Protocol):
    """Listener beside generating. Called at the same points of decoding on all ranks of a replica."""

    def finished(self, pairs: list[tuple[Request, Response]]) -> None:
        """Take responses that have just been finished, each once; at least one."""

    def is_stopping(self) -> bool:
        """Return whether to end early; the same answer on all ranks of the replica. Collective: tp, pp."""


class RolloutStopped(Exception):
    """Generating ended early because ``Progress.is_stopping`` said so, with all that was finished handed over.

    No error: nothing is wrong, and no rank of the replica waits for another.

    Attributes:
        unfinished: The other requests, each with what was sampled of it: ``Request.begun`` to go on from.
    """

    def __init__(self, unfinished: list[tuple[Request, Response]]) -> None:
        super().__init__()
        self.unfinished = unfinished


class Engine(Protocol):
    """Generates; ours and adapters to others alike."""

    def generate(
        self, requests: list[Request], purpose: str = "rollout", progress: Progress | None = None
    ) -> list[Response]:
        """Return one response for each request, in their order."""
