"""From a recipe's section, or what a Python program gave in its place, to a way to score. No torch."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from hybridflow.config.rewards import REWARD_POLICY, JudgeConfig, RewardConfig, SandboxConfig
from hybridflow.errors import ConfigError
from hybridflow.rewards.code import CodeTests
from hybridflow.rewards.functions import BUILT_IN, Function, as_function, find_function, name_of, regex
from hybridflow.rewards.maths import Maths
from hybridflow.rewards.runners import InLoop, InPlace, Runner
from hybridflow.rewards.sample import Sample
from hybridflow.rewards.sandbox import check_sandbox
from hybridflow.rewards.scorer import Kind
from hybridflow.rewards.service import Endpoint, Judge, Service
from hybridflow.rollout.calls import MAX_THREADS, Calls
from hybridflow.rollout.engines.wire import CONNECT_TIMEOUT_S
from hybridflow.sections import changed_keys

_ASKED_S = 60.0
_MATHS_S = 10.0
_GRACE_S = 1.0


def make_kind(settings: RewardConfig, key: str, user_reward: Any = None, *, sharing: int = 1) -> Kind:
    """Return how samples are scored.

    Args:
        settings: The recipe's section, which names no model.
        key: Of the section: ``reward`` or ``cost``.
        user_reward: A function or an object with ``scores``, instead of the section's scorer; None: the section's.
        sharing: Ranks that score on this node, and share its cores.

    Raises:
        ConfigError: It cannot be found, made or asked, or the section has keys that it would ignore.
    """
    if user_reward is not None:
        return _of_function(as_function(user_reward, key), settings, name_of(user_reward))
    asked = settings.judge if settings.service is None else settings.service
    if asked is not None:
        timeout_s = _ASKED_S if settings.timeout_s is None else settings.timeout_s
        endpoint = Endpoint(asked, f"{key}.{'judge' if settings.service is None else 'service'}", timeout_s)
        return Kind(
            name=asked.urls[0],
            call=Judge(endpoint, asked) if isinstance(asked, JudgeConfig) else Service(endpoint),
            # Calls end by themselves, unless the system blocks them.
            runner=Calls(timeout_s + CONNECT_TIMEOUT_S + _GRACE_S, settings.max_in_flight),
            most_samples=1 if isinstance(asked, JudgeConfig) else asked.batch_size,
            close=endpoint.close,
        )
    return _of_name("exact_match" if settings.function is None else settings.function, settings, key, sharing)


def _of_name(name: str, settings: RewardConfig, key: str, sharing: int) -> Kind:
    if name == "maths":
        timeout_s = _MATHS_S if settings.timeout_s is None else settings.timeout_s
        maths = Maths(timeout_s, f"{key}.function")
        return Kind(name=name, call=maths, runner=_processes(settings, sharing), close=maths.close)
    if name == "code":
        sandbox = SandboxConfig() if settings.sandbox is None else settings.sandbox
        is_protected = check_sandbox(sandbox, f"{key}.sandbox")
        tests = CodeTests(sandbox, is_protected=is_protected)
        return Kind(name=name, call=tests, runner=_processes(settings, sharing), idle_stops=lambda: tests.idle_stops)
    if name == "regex":
        assert settings.pattern is not None, "checked with the recipe"
        return _sure(name, regex(settings.pattern), settings, key)
    if name in BUILT_IN:
        return _sure(name, BUILT_IN[name], settings, key)
    return _of_function(as_function(find_function(name, f"{key}.function"), f"{key}.function={name!r}"), settings, name)


def _sure(name: str, function: Any, settings: RewardConfig, key: str) -> Kind:
    """Return the kind of a built-in function that neither waits nor fails."""
    for ignored in changed_keys(settings, REWARD_POLICY):
        raise ConfigError(f"{key}.{ignored}: {name} neither waits nor fails; remove the key")

    def call(samples: Sequence[Sample]) -> list[float]:
        return [function(each.prompt, each.response, each.answer_text) for each in samples]

    return Kind(name=name, call=call, runner=InPlace(), most_samples=None)


def _of_function(function: Function, settings: RewardConfig, name: str) -> Kind:
    deadline_s = math.inf if settings.timeout_s is None else settings.timeout_s
    runner: Runner
    if function.is_async:
        runner = InLoop(deadline_s, MAX_THREADS if settings.max_in_flight is None else settings.max_in_flight)
    elif settings.timeout_s is not None or settings.max_in_flight is not None:
        runner = Calls(deadline_s, settings.max_in_flight)
    else:
        runner = InPlace()
    return Kind(
        name=name,
        source=function.source,
        call=function.call,
        runner=runner,
        is_async=function.is_async,
        most_samples=None if function.is_batched else 1,
    )


def _processes(settings: RewardConfig, sharing: int) -> Calls:
    """Return the runner for calls that each wait for a process, which is ended in time."""
    num_cores = max(len(os.sched_getaffinity(0)) // sharing, 1)
    return Calls(math.inf, num_cores if settings.max_in_flight is None else settings.max_in_flight)
