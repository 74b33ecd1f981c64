"""``reward`` and ``cost``: what scores a response."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from hybridflow.config.types import Offload, Score, Variable
from hybridflow.errors import ConfigError
from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.sections import MAY_CHANGE, Count, CountOrZero, NotNegative, Seconds, changed_keys


@dataclass(frozen=True, kw_only=True)
class RewardServiceConfig:
    """Score with a service over HTTP. docs/rewards.md shows request and response.

    Attributes:
        urls: Addresses that samples are posted to, ``http://host:port/path`` each, in turn.
        auth_env: Environment variable that holds the token. None is for services that ask for no token.
        batch_size: Most samples of one request.
    """

    urls: tuple[str, ...] = field(metadata=MAY_CHANGE)
    auth_env: Variable | None = field(default=None, metadata=MAY_CHANGE)
    batch_size: Count = field(default=64, metadata=MAY_CHANGE)


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """Score with an LLM judge at ``/v1/chat/completions`` of servers such as ``vllm serve``.

    Attributes:
        urls: Servers of one model, ``http://host:port`` each, asked in turn.
        template: Prompt for the judge. ``{prompt}``, ``{response}`` and ``{answer}`` stand for those of the sample.
        model: Name of the model on the servers. None is for servers with only one model.
        auth_env: Environment variable that holds the token. None is for servers that ask for no token.
        pattern: Regular expression that finds the score. The first group of the last match is the score.
        low: Lowest valid score. A score outside the bounds is a failure.
        high: Highest valid score.
        max_new_tokens: Longest answer, in tokens.
        temperature: Sampling temperature of the judge.
    """

    urls: tuple[str, ...] = field(metadata=MAY_CHANGE)
    template: str
    model: str | None = None
    auth_env: Variable | None = field(default=None, metadata=MAY_CHANGE)
    pattern: str = r"""(?i)score[*"'\s]*(?:\([^()\n]*\)[*"'\s]*)?[:=][*"'\s]*([-+]?\d*\.?\d+)"""
    low: Score = 0.0
    high: Score = 10.0
    max_new_tokens: Count = 512
    temperature: NotNegative = 0.0


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """Limit a program that a response contains, and what it may see.

    Attributes:
        wall_s: Longest run time from the start of the program, in seconds. Waiting for a core counts.
        cpu_s: Longest CPU time of each process, in seconds.
        memory_mib: Most memory of each process, and of all processes together, in MiB.
        processes: Most processes and threads.
        files_mib: Most space for files, in MiB.
        output_kib: Most output, in KiB.
        readable: Directories that the program may read, in addition to those of the system and of Python's standard
            library.
        allow_unprotected: Run the program with limits alone on a machine that cannot isolate it. The program can then
            read and write what the job can, and it has network access.
    """

    wall_s: Seconds = 10.0
    cpu_s: Count = 10
    memory_mib: Count = 512
    processes: Count = 16
    files_mib: Count = 64
    output_kib: Count = 256
    readable: tuple[str, ...] = ()
    allow_unprotected: bool = field(default=False, metadata=MAY_CHANGE)


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Score responses, or their cost, with a function, a model, a service or an LLM judge. See docs/rewards.md.

    Attributes:
        function: ``exact_match`` compares the response with the answer. ``length`` counts characters. ``regex`` uses
            ``pattern``. ``maths`` tells whether response and answer are the same expression. ``code`` tells whether the
            response is a program that passes the answer's tests. ``package.module:function`` takes ``(prompt, response,
            answer)``, or lists as in ``(completions, **kwargs)``, with fields of the row by their names, and returns
            finite numbers. With ``rollout.environment`` the response is that of the
            last turn. In ``reward`` without a model, service or judge, None means the sum of the environment's rewards,
            or ``exact_match`` without an environment. For ``sft`` None means that validation scores nothing.
        pattern: For ``regex``. With a group, the first group of the last match in the response must be the answer.
            Without a group, the pattern must match.
        sandbox: Limits of the program, for ``code``.
        model: Scorer with one label, named by ``path``. The score is its number at the last token.
        service: Your own service.
        judge: LLM judge.
        ranks: Global ranks, in mesh order. None means the actor's ranks for a model and the rollout's ranks for all
            else. Only a model needs an accelerator: the ranks of other rewards may hold no model.
        layout: Layout of the model. None means the actor's update layout.
        batch_size: Most samples that the model scores in one forward pass. None leaves the bound to
            ``trainer.micro_batch_tokens``, which holds too.
        offload: Keep the model's weights in host memory while it is not in use. ``always`` (under FSDP) brings one
            layer at a time to the accelerator.
        timeout_s: Longest time of a call from its beginning, in seconds. None means 60 for a service or judge, and 10
            for ``maths``. A function without it has ``cluster.deadline_s``, which ends the job.
        retries: How often a failed call is repeated.
        on_failure: What happens to a sample whose calls all failed. ``error`` ends the run. ``score`` gives it
            ``failure_score``. ``drop`` leaves it out of learning.
        failure_score: Score of a failed sample with ``on_failure: score``.
        cache: Scores that each rank keeps, by prompt, response and row. 0 keeps no scores.
        max_in_flight: Calls that a rank has under way together. None means 64. For a function without ``timeout_s``
            None means 1. For ``maths`` and ``code`` None means the rank's share of the node's cores.
    """

    function: str | None = None
    pattern: str | None = None
    sandbox: SandboxConfig | None = None
    model: ModelConfig | None = None
    service: RewardServiceConfig | None = None
    judge: JudgeConfig | None = None
    ranks: tuple[int, ...] | None = field(default=None, metadata=MAY_CHANGE)
    layout: ParallelLayout | None = field(default=None, metadata=MAY_CHANGE)
    batch_size: Count | None = field(default=None, metadata=MAY_CHANGE)
    offload: Offload = field(default=False, metadata=MAY_CHANGE)
    timeout_s: Seconds | None = field(default=None, metadata=MAY_CHANGE)
    retries: CountOrZero = field(default=0, metadata=MAY_CHANGE)
    on_failure: Literal["error", "score", "drop"] = field(default="error", metadata=MAY_CHANGE)
    failure_score: Score = field(default=0.0, metadata=MAY_CHANGE)
    cache: CountOrZero = field(default=0, metadata=MAY_CHANGE)
    max_in_flight: Count | None = field(default=None, metadata=MAY_CHANGE)

    @property
    def kind(self) -> str | None:
        """Return the key of this section that names the scorer, or None if none does."""
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
        for name in changed_keys(reward, ("layout", "offload")):
            raise ConfigError(f"{key}.{name}: a function has no weights; remove the key, or give {key}.model.path")
        if reward.batch_size is not None:
            raise ConfigError(
                f"{key}.batch_size={reward.batch_size}: only a model scores several samples at once; remove the key, "
                f"or give {key}.model.path"
            )
    elif reward.model is not None and reward.model.path is None and not is_in_memory:
        raise ConfigError(f"{key}.model.path: missing; a model that was not trained scores nothing, name its directory")
    _check_reward_policy(reward, key)
    _check_reward_function(reward, key)
    if reward.service is not None:
        check_urls(reward.service.urls, f"{key}.service.urls")
    if reward.judge is not None:
        _check_judge(reward.judge, f"{key}.judge")


def _check_reward_policy(reward: RewardConfig, key: str) -> None:
    """Refuse keys that calls ignore because they cannot fail, or are bounded elsewhere."""
    what = "a model" if reward.model is not None else reward.function
    for name in changed_keys(reward, REWARD_POLICY) if what in ("a model", *SURE_FUNCTIONS) else ():
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
    """Return the number of groups of a regular expression."""
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
