"""What is asked of an engine, and what it answers: the one interface of ours and of other engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

PURPOSES = {"rollout": 1, "validation": 2}
"""What samples are for: each purpose has noise of its own."""
FinishReason = Literal["stop", "length", "paused", "failed"]
"""A stop token or text, the most tokens; ``paused``: not yet; ``failed``: something went wrong."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a response is sampled.

    Attributes:
        max_new_tokens: Most tokens of a response, the stop token included.
        min_new_tokens: Tokens before which it does not stop: ``stop_ids`` are not sampled, stop strings not looked for.
        temperature: Divides the logits.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all.
        min_p: Keep tokens at least this times as likely as the likeliest; 0 keeps all.
        repetition_penalty: Logits of tokens of the prompt and the response are divided by this if positive, else
            multiplied (arXiv 1909.05858).
        presence_penalty: Taken from the logits of the response's tokens.
        frequency_penalty: Taken from the logits of the response's tokens, times how often each was sampled.
        logit_bias: Pairs of token id and what is added to its logit.
        bad_ids: Sequences of tokens that are never sampled.
        stop_ids: Tokens that end a response, and are part of it.
        stop: Texts that end a response, which then ends with the token that completes one of them.
        bad: Texts that a response does not contain: the token that would complete one is sampled anew.
        greedy: Take the most likely token, without noise.
        seed: Replaces the engine's own seed; None: that.
        with_prompt_log_probs: Whether log-probabilities of the prompt's tokens are wanted.
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


@dataclass(frozen=True, kw_only=True)
class Request:
    """One response wanted.

    Attributes:
        prompt: Token ids, ``[tokens]`` int64, at least one.
        params: How to sample it.
        draw: Serial number of the prompt in the data order.
        index: Number of this sample among those of its prompt.
        begun: What was sampled of it before, to go on from; None: nothing.
    """

    prompt: Tensor
    params: SamplingParams
    draw: int
    index: int = 0
    begun: Response | None = None


@dataclass(frozen=True, kw_only=True)
class Response:
    """What was sampled, in host memory.

    Attributes:
        tokens: ``[response]`` int64, the stop token included.
        log_probs: ``[response]`` fp32 under ``softmax(logits / temperature)``, before penalties and cuts: what the
            trainer computes.
        sampled_log_probs: ``[response]`` fp32 of the distribution that was sampled from, penalties and cuts included.
        versions: ``[response]`` int32, which weights sampled each token.
        prompt_log_probs: ``[prompt - 1]`` fp32 of the prompt's tokens but the first; None: not asked for.
        finish: Why it ended.
        error: What went wrong, where ``finish`` is ``failed``.
    """

    tokens: Tensor
    log_probs: Tensor
    sampled_log_probs: Tensor
    versions: Tensor
    prompt_log_probs: Tensor | None = None
    finish: FinishReason
    error: str | None = None


class Progress(Protocol):
    """What goes on beside generating. Called at the same points of decoding on all ranks of a replica."""

    def finished(self, pairs: list[tuple[Request, Response]]) -> None:
        """Take responses that have just been finished, each once; at least one."""

    def is_stopping(self) -> bool:
        """Whether to end early; the same answer on all ranks of the replica. Collective: tp, pp."""


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
        """One response for each request, in their order."""
