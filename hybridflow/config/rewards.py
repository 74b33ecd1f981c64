"""``reward`` and ``cost``: what scores a response."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from hybridflow.config.types import Score, Variable
from hybridflow.errors import ConfigError
from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.sections import (
    MAY_CHANGE,
    Count,
    CountOrZero,
    NotNegative,
    Positive,
)


@dataclass(frozen=True, kw_only=True)
class RewardServiceConfig:
    """A service that scores, asked over HTTP. docs/rewards.md says what it is sent and answers.

    Attributes:
        urls: Where samples are posted, ``http://host:port/path`` each, asked in turn.
        auth_env: Environment variable that holds the token to show; None: none is asked for.
        batch_size: Most samples of one request.
    """

    urls: tuple[str, ...] = field(metadata=MAY_CHANGE)
    auth_env: Variable | None = field(default=None, metadata=MAY_CHANGE)
    batch_size: Count = field(default=64, metadata=MAY_CHANGE)


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """A language model that is asked for a score, at ``/v1/chat/completions`` of servers such as ``vllm serve``.

    Attributes:
        urls: Of servers of one model, ``http://host:port`` each, asked in turn.
        template: What it is asked: ``{prompt}``, ``{response}`` and ``{answer}`` stand for those of the sample.
        model: What the servers call the model; None: they have only one.
        auth_env: Environment variable that holds the token to show; None: none is asked for.
        pattern: Finds the number in what it says: the first group of the last match.
        low: The least score that it may give; another one is a failure.
        high: The most.
        max_new_tokens: Longest answer in tokens.
        temperature: Of its sampling.
    """

    urls: tuple[str, ...] = field(metadata=MAY_CHANGE)
    template: str
    model: str | None = None
    auth_env: Variable | None = field(default=None, metadata=MAY_CHANGE)
    pattern: str = r"(?i)score\D{0,20}?([-+]?\d+(?:\.\d+)?)"
    low: Score = 0.0
    high: Score = 10.0
    max_new_tokens: Count = 512
    temperature: NotNegative = 0.0


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """Limits of a program that a response is, and what it may see.

    Attributes:
        wall_s: Longest time, from when it is begun, waiting for a core included.
        cpu_s: Longest time of each of its processes on a core.
        memory_mib: Most memory, of each of its processes and of all together.
        processes: Most processes and threads.
        files_mib: Most room for files.
        output_kib: Most that it may print.
        readable: Directories that it may read, beside those of the system and of Python's standard library.
        allow_unprotected: Run it with limits alone where the machine cannot keep it apart: it then reads and writes
            what the job may, and the network is open to it.
    """

    wall_s: Positive = 10.0
    cpu_s: Count = 10
    memory_mib: Count = 512
    processes: Count = 16
    files_mib: Count = 64
    output_kib: Count = 256
    readable: tuple[str, ...] = ()
    allow_unprotected: bool = field(default=False, metadata=MAY_CHANGE)


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What scores a response, or tells its cost: a function, a model, a service, or a judge. docs/rewards.md.

    Attributes:
        function: ``exact_match``; ``length`` in characters; ``regex``; ``maths``: whether response and answer are the
            same expression; ``code``: whether the response is a program that passes the answer's tests; or
            ``package.module:function`` of ``(prompt, response, answer)``, all text, which gives a finite number. With
            ``rollout.environment`` the response is that of the last turn. None, of the reward alone, where nothing else
            scores: the sum of the environment's rewards, ``exact_match`` without one.
        pattern: Of ``regex``: the first group of its last match in the response is to be the answer; without a group,
            it is to match.
        sandbox: Of ``code``: what the program may do.
        model: A scorer with one label, which ``path`` names; its number at the last token is the score.
        service: A service of yours.
        judge: A language model that is asked for a score.
        ranks: Global ranks, in mesh order; None: of a model the actor's, of all others those of the rollout. These
            need no accelerator: their ranks may be those of no model.
        layout: Of the model: how it is cut; None: as the actor's update layout.
        offload: Keep the model's weights in host memory while it is not asked.
        timeout_s: Longest time of a call, from its beginning; None: of a function none, 60 of a service or judge, 10 of
            ``maths``.
        retries: How often a call that failed is made again.
        on_failure: What becomes of a sample whose calls all failed. ``error``: the run ends; ``score``: it gets
            ``failure_score``; ``drop``: nothing is learned from it.
        failure_score: With ``on_failure=score``.
        cache: Scores that each rank keeps, by prompt, response and answer, so as not to ask twice; 0: none.
        max_in_flight: Calls that a rank has under way together; None: 64, one of a function without ``timeout_s``, and
            of ``maths`` and ``code`` its share of the node's cores.
    """

    function: str | None = None
    pattern: str | None = None
    sandbox: SandboxConfig | None = None
    model: ModelConfig | None = None
    service: RewardServiceConfig | None = None
    judge: JudgeConfig | None = None
    ranks: tuple[int, ...] | None = field(default=None, metadata=MAY_CHANGE)
    layout: ParallelLayout | None = field(default=None, metadata=MAY_CHANGE)
    offload: bool = field(default=False, metadata=MAY_CHANGE)
    timeout_s: Positive | None = field(default=None, metadata=MAY_CHANGE)
    retries: CountOrZero = field(default=0, metadata=MAY_CHANGE)
    on_failure: Literal["error", "score", "drop"] = "error"
    failure_score: Score = 0.0
    cache: CountOrZero = field(default=0, metadata=MAY_CHANGE)
    max_in_flight: Count | None = field(default=None, metadata=MAY_CHANGE)

    @property
    def kind(self) -> str | None:
        """What scores: a key of this section; None: nothing is named."""
        return next((name for name in REWARD_KINDS if getattr(self, name) is not None), None)


REWARD_KINDS = ("model", "service", "judge", "function")
"""Keys of ``Reward`` that name what scores."""


def check_reward(reward: RewardConfig, key: str, *, is_in_memory: bool = False) -> None:
    """Refuse a reward, or a cost, whose keys contradict each other. Raises ConfigError."""
    kind = reward.kind
    others = [name for name in REWARD_KINDS if getattr(reward, name) is not None and name != kind]
    for name in others:
        found = f"={reward.function!r}: would not be called" if name == "function" else ": would not be asked"
        raise ConfigError(f"{key}.{name}{found}, {key}.{kind} scores; remove one of the two")
    if kind != "model":
        for name in ("layout", "offload"):
            if getattr(reward, name) != getattr(RewardConfig(), name):
                raise ConfigError(f"{key}.{name}: a function has no weights; remove the key, or give {key}.model.path")
    elif reward.model is not None and reward.model.path is None and not is_in_memory:
        raise ConfigError(f"{key}.model.path: missing; a model that was not trained scores nothing, name its directory")
    _check_reward_policy(reward, key)
    _check_reward_function(reward, key)
    if reward.service is not None:
        check_urls(reward.service.urls, f"{key}.service.urls")
    if reward.judge is not None:
        _check_judge(reward.judge, f"{key}.judge")


def _check_reward_policy(reward: RewardConfig, key: str) -> None:
    """What calls that cannot fail, or are bounded elsewhere, would ignore."""
    what = "a model" if reward.model is not None else reward.function
    for name in REWARD_POLICY:
        is_in_memory = getattr(reward, name) != getattr(RewardConfig(), name)
        if is_in_memory and what in ("a model", *SURE_FUNCTIONS):
            raise ConfigError(f"{key}.{name}: {what} neither waits nor fails; remove the key")
    if reward.function == "code" and reward.timeout_s is not None:
        raise ConfigError(f"{key}.timeout_s: {key}.sandbox.wall_s is the limit of a program; remove the key, set that")
    if reward.on_failure != "score" and reward.failure_score != RewardConfig().failure_score:
        raise ConfigError(
            f"{key}.failure_score={reward.failure_score:g}: {key}.on_failure={reward.on_failure} gives none; set it to "
            "score, or remove the key"
        )


REWARD_POLICY = ("timeout_s", "retries", "on_failure", "failure_score", "cache", "max_in_flight")
"""Keys of ``Reward`` for what may wait or fail."""


SURE_FUNCTIONS = ("exact_match", "length", "regex")
"""Functions of ours that neither wait nor fail."""


def _check_reward_function(reward: RewardConfig, key: str) -> None:
    for name, function in (("pattern", "regex"), ("sandbox", "code")):
        if getattr(reward, name) is not None and reward.function != function:
            raise ConfigError(f"{key}.{name}: only {function} reads it; remove it, or set {key}.function={function}")
    for path in () if reward.sandbox is None else reward.sandbox.readable:
        if not path.startswith("/") or not path.strip("/."):
            raise ConfigError(f"{key}.sandbox.readable: found {path!r}, expected a directory's path from / on")
    if reward.function == "regex":
        if reward.pattern is None:
            raise ConfigError(f"{key}.pattern: missing; {key}.function=regex needs one, such as 'answer is (.+)'")
        _check_pattern(reward.pattern, f"{key}.pattern")


def _check_judge(judge: JudgeConfig, key: str) -> None:
    check_urls(judge.urls, f"{key}.urls")
    if "{response}" not in judge.template:
        raise ConfigError(f"{key}.template: has no {{response}}, so that it would judge none; say where it stands")
    if _check_pattern(judge.pattern, f"{key}.pattern") == 0:
        raise ConfigError(f"{key}.pattern={judge.pattern!r}: has no group; put parentheses around the number")
    if judge.low >= judge.high:
        raise ConfigError(f"{key}.low={judge.low:g} is not below {key}.high={judge.high:g}; no score would be right")


def check_urls(urls: Sequence[str], key: str) -> None:
    """Refuse an empty list of servers, and addresses that are none. Raises ConfigError."""
    if not urls:
        raise ConfigError(f"{key}: missing; give at least one, as http://host:port")
    for url in urls:
        check_url(url, key)


def _check_pattern(pattern: str, key: str) -> int:
    """The number of groups of a regular expression."""
    try:
        return re.compile(pattern).groups
    except re.error as error:
        raise ConfigError(f"{key}={pattern!r}: is no regular expression: {error}; mend it") from None


def check_url(url: str, key: str) -> None:
    """Refuse what is no plain address of a server.

    Raises:
        ConfigError: It has no host, another scheme, or a user, query or fragment; a secret is not repeated.
    """
    if "@" in url:
        raise ConfigError(
            f"{key}: an address has a user or password, which would be kept in the run's recipe; put the token into an "
            "environment variable, and name that in auth_env"
        )
    try:
        parts = urlsplit(url)
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        raise ConfigError(f"{key}: {url!r} is no address; expected http://host:port") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not has_port or parts.query or parts.fragment:
        raise ConfigError(f"{key}: found {url!r}, expected http://host:port or https://host, with a path at most")
