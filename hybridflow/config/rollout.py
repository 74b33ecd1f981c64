"""``rollout``: how responses are sampled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from hybridflow.config.types import Score, StopText, Variable
from hybridflow.sections import FILLED_IN, MAY_CHANGE, Bounds, Count, CountOrZero, Positive, Seconds, Share


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Answer the policy's responses, so that a sample is a conversation of several turns.

    Attributes:
        name: ``calculator``, or ``package.module:Class`` of a ``hybridflow.rollout.environment.Environment``.
        max_turns: Most responses of a sample.
        step_deadline_s: Longest time that the environment may take to answer, in seconds.
        failure_reward: Reward of a turn in which the environment raises, misses the deadline or gives an invalid
            answer. The sample ends there and stays in the batch. Refused where ``reward`` names what scores.
    """

    EXAMPLE: ClassVar[str] = "{name: calculator}"

    name: str
    max_turns: Count = 4
    step_deadline_s: Seconds = 30.0
    failure_reward: Score = 0.0


@dataclass(frozen=True, kw_only=True)
class SamplingEngineConfig:
    """Choose the engine that generates. All engines but ``megatron`` need ``actor.rollout`` with tp, pp and ep of 1.

    Attributes:
        kind: ``megatron`` is our own engine, on the weights being trained. ``vllm`` runs vLLM within each rollout rank,
            and gives it the weights before each rollout. ``openai`` asks a server that completes token ids at
            ``/v1/completions``, such as ``vllm serve``. ``tgi`` asks a server with ``/generate``. Servers do not get
            new weights.
        urls: Servers of one model, ``http://host:port`` each, asked in turn.
        model: Name of the model on the servers. None is for servers with only one model.
        auth_env: Environment variable that holds the token. None is for servers that ask for no token.
        log_probs: Distribution of a server's log-probabilities. ``raw`` is the model's own. ``processed`` is the one
            that was sampled from, after temperature and cuts (vLLM with ``--logprobs-mode processed_logprobs``, TGI
            always).
        off_policy: Allow training on a server's samples, although the server's weights do not change.
        max_in_flight: Requests that a rank has at the servers at one time.
        retries: How often a request is sent again after a server fails.
        read_timeout_s: Longest wait for an answer, in seconds.
        deadline_s: Longest time for a request with all its tries, in seconds.
        memory_share: Share of a GPU's memory that ``vllm`` takes.
    """

    kind: Literal["megatron", "vllm", "openai", "tgi"] = "megatron"
    urls: tuple[str, ...] = field(default=(), metadata=MAY_CHANGE)
    model: str | None = None
    auth_env: Variable | None = field(default=None, metadata=MAY_CHANGE)
    log_probs: Literal["raw", "processed"] = "raw"
    off_policy: bool = False
    max_in_flight: Count = field(default=64, metadata=MAY_CHANGE)
    retries: CountOrZero = field(default=5, metadata=MAY_CHANGE)
    read_timeout_s: Seconds = field(default=600.0, metadata=MAY_CHANGE)
    deadline_s: Seconds = field(default=1800.0, metadata=MAY_CHANGE)
    memory_share: Annotated[float, Bounds(low=0, high=1, above=True)] = field(default=0.4, metadata=MAY_CHANGE)

    @property
    def is_server(self) -> bool:
        """Return whether the engine is asked over HTTP."""
        return self.kind in ("openai", "tgi")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Set how responses are sampled. ``validation/score`` is always of greedy responses.

    Attributes:
        group_size: Responses to each prompt. A recipe that leaves its sizes to hybridflow has 8 where the algorithm
            compares them.
        max_new_tokens: Longest response in tokens. The end-of-sequence token counts. With an ``environment``, responses
            and observations count: all that follows the prompt. ``sft`` samples for validation alone, and needs no
            key: half of ``model.max_context``, at most 256.
        temperature: Divisor of the logits, in rollout and in training.
        top_k: Sample among this many of the likeliest tokens. 0 means all tokens.
        top_p: Sample among the likeliest tokens that together reach this probability.
        min_p: Sample among tokens at least this times as likely as the likeliest. 0 means all tokens.
        min_new_tokens: Shortest response in tokens. The end-of-sequence token counts.
        repetition_penalty: Divisor of positive logits, and factor of negative ones, for tokens of the prompt and the
            response. Only the sampler applies penalties. Training computes probabilities without them.
        presence_penalty: Number subtracted from the logits of tokens that the response has.
        frequency_penalty: Number subtracted from the logits of the response's tokens, once for each occurrence.
        stop: Texts that end a response, in addition to the end of sequence. The response ends with the token that
            completes a text. The name of a special token, such as ``<end_of_turn>``, stands for that token.
        max_concurrent: Samples that one replica decodes together.
        cache_memory: Most memory of each rank's key-value cache, states of linear attention included. Below 1, it is a
            share of the memory that is free when generating begins. From 1 on, it is bytes. Samples without room wait.
        partial_rollouts: Begin responses of the next step in free slots, and continue them with the new weights once
            all responses of this step are done. No replica then decodes a few long responses alone. Weights of a
            response may be one more update behind than ``trainer.max_staleness`` says.
        archive: Keep samples in HDF5: true keeps all, false none. None keeps those of the first two prompts of at most
            100 steps, evenly spaced. In any case, samples of a killed job are kept until they are used.
        replay: Directory of a run with an archive. The run learns from the archived samples and samples only for
            validation.
        environment: Environment that answers the responses. None means one response per sample.
        engine: Engine that generates.
    """

    group_size: Count = 1
    max_new_tokens: Count = field(metadata=FILLED_IN)
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
    archive: bool | None = field(default=None, metadata=MAY_CHANGE)
    replay: str | None = None
    environment: EnvironmentConfig | None = None
    engine: SamplingEngineConfig = SamplingEngineConfig()
