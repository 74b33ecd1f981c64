"""``rollout``: how responses are sampled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from hybridflow.config.types import Score, StopText, Variable
from hybridflow.sections import (
    MAY_CHANGE,
    Bounds,
    Count,
    CountOrZero,
    Positive,
    Share,
)


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """What answers the policy's responses, so that a sample is a conversation of several turns.

    Attributes:
        name: ``calculator``, or ``package.module:Class`` of a ``hybridflow.rollout.environment.Environment``.
        max_turns: Most responses of a sample.
        step_deadline_s: Longest time that the environment may take to answer, in seconds.
        failure_reward: Reward of a turn in which the environment raises, does not answer in time, or answers something
            else than it should. The sample ends there, and is learned from like any other.
    """

    name: str
    max_turns: Count = 4
    step_deadline_s: Positive = 30.0
    failure_reward: Score = 0.0


@dataclass(frozen=True, kw_only=True)
class SamplingEngineConfig:
    """What generates the responses. All but ours need ``actor.rollout`` with tp, pp and ep of 1.

    Attributes:
        kind: ``megatron``: our own, on the weights being trained. ``vllm``: vLLM within each rollout rank, which is
            given the weights before each rollout. ``openai``: a server that completes token ids at ``/v1/completions``,
            such as ``vllm serve``. ``tgi``: a server with ``/generate``. The weights of a server do not follow.
        urls: Of servers of one model, ``http://host:port`` each, asked in turn.
        model: What the servers call the model; None: they have only one.
        auth_env: Environment variable that holds the token to show to the servers; None: they ask for none.
        log_probs: What a server's log-probabilities are of: the model's own distribution, or the one that was sampled
            from, after temperature and cuts (vLLM: ``--logprobs-mode processed_logprobs``; TGI always).
        off_policy: Train on what a server samples, though its weights stay what they are.
        max_in_flight: Requests that a rank has at the servers at one time.
        retries: How often a request is sent again when a server fails.
        read_timeout_s: Longest wait for an answer.
        deadline_s: Longest time for a request, all tries together.
        memory_share: With ``vllm`` on a GPU: share of its memory that vLLM takes.
    """

    kind: Literal["megatron", "vllm", "openai", "tgi"] = "megatron"
    urls: tuple[str, ...] = field(default=(), metadata=MAY_CHANGE)
    model: str | None = None
    auth_env: Variable | None = field(default=None, metadata=MAY_CHANGE)
    log_probs: Literal["raw", "processed"] = "raw"
    off_policy: bool = False
    max_in_flight: Count = field(default=64, metadata=MAY_CHANGE)
    retries: CountOrZero = field(default=5, metadata=MAY_CHANGE)
    read_timeout_s: Positive = field(default=600.0, metadata=MAY_CHANGE)
    deadline_s: Positive = field(default=1800.0, metadata=MAY_CHANGE)
    memory_share: Annotated[float, Bounds(low=0, high=1, above=True)] = field(default=0.4, metadata=MAY_CHANGE)

    @property
    def is_server(self) -> bool:
        """Whether it is asked over HTTP."""
        return self.kind in ("openai", "tgi")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are sampled. Validation is greedy whatever stands here.

    Attributes:
        group_size: Responses to each prompt.
        max_new_tokens: Longest response in tokens, its end-of-sequence token included; with an ``environment`` all that
            follows the prompt, responses and observations.
        temperature: Divides the logits, in rollout and in training alike.
        top_k: Sample among so many of the likeliest tokens; 0: all.
        top_p: Sample among the likeliest tokens that together reach this probability.
        min_p: Sample among tokens at least this times as likely as the likeliest; 0: all.
        min_new_tokens: Shortest response in tokens, its end-of-sequence token included.
        repetition_penalty: Divides the logits of tokens of the prompt and the response if positive, else multiplies
            them. Penalties are the sampler's alone: training computes probabilities without them.
        presence_penalty: Taken from the logits of tokens that the response has.
        frequency_penalty: Taken from the logits of the response's tokens, times how often each stands there.
        stop: Texts that end a response, beside the end of sequence; it ends with the token that completes one.
        max_concurrent: Samples that one replica decodes together.
        cache_memory: Most memory of each rank's key-value cache: a share of what is free when generating begins, or,
            from 1 on, bytes. What has no room waits.
        partial_rollouts: Begin responses of the next step where this step's leave room, and go on with them when they
            are all done and the weights have changed: no replica decodes a few long responses alone. Its weights may
            then be one more update behind than ``trainer.max_staleness`` says.
        archive: Keep what was sampled, in HDF5; what a killed job had sampled is kept until it is used in any case.
        replay: Directory of a run with an archive: learn from what it has sampled, and sample for validation alone.
        environment: What answers the responses; None: a sample is one response.
        engine: What generates them.
    """

    group_size: Count = 1
    max_new_tokens: Count
    temperature: Annotated[float, Bounds(low=1e-4, high=1e4)] = 1.0
    top_k: CountOrZero = 0
    top_p: Annotated[float, Bounds(low=0, high=1, above=True)] = 1.0
    min_p: Share = 0.0
    min_new_tokens: CountOrZero = 0
    repetition_penalty: Annotated[float, Bounds(low=1e-4, high=1e4)] = 1.0
    presence_penalty: Annotated[float, Bounds(low=-1e4, high=1e4)] = 0.0
    frequency_penalty: Annotated[float, Bounds(low=-1e4, high=1e4)] = 0.0
    stop: tuple[StopText, ...] = ()
    max_concurrent: Count = field(default=256, metadata=MAY_CHANGE)
    cache_memory: Positive = field(default=0.5, metadata=MAY_CHANGE)
    partial_rollouts: bool = False
    archive: bool = field(default=False, metadata=MAY_CHANGE)
    replay: str | None = None
    environment: EnvironmentConfig | None = None
    engine: SamplingEngineConfig = SamplingEngineConfig()
