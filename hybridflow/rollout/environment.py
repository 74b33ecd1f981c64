"""Samples of several turns: what the policy says is answered by an environment, and both go on as one sequence.

Environments run in threads on the first rank of a replica, many at once and each call within a deadline, while the
replica goes on decoding. After each step of it that rank tells the others what came back, so that all make the same
calls of the session. A turn is a request whose prompt is the whole conversation so far: the session finds its keys and
values by content, and noise goes by position, so that no turn repeats another's.
"""

from __future__ import annotations

import inspect
import math
import numbers
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridflow.config.rollout import EnvironmentConfig as Settings
from hybridflow.data.prompts import Example
from hybridflow.data.tokenizer import Tokenizer, marked_text, special_names
from hybridflow.errors import ConfigError
from hybridflow.parallel.coordinator import Coordinator
from hybridflow.plugins import find_plugin, source_of
from hybridflow.rollout.calculator import Calculator
from hybridflow.rollout.calls import CallFailed, Calls
from hybridflow.rollout.engine import MegatronEngine
from hybridflow.rollout.request import OBSERVED, Request, Response, RolloutStopped, check_requests
from hybridflow.rollout.session import FEW_STEPS

MAX_CHARACTERS_PER_TOKEN = 32
"""An observation of more characters than this for each token that has room is not read at all."""
_WAIT_S = 0.1
"""How long the first rank waits for an answer when there is nothing to decode, before all look up."""


class Environment(Protocol):
    """Answers the responses of one sample. Made anew for each, without arguments; its calls come one after another.

    Samples have threads of their own: what they share must bear that. A call may wait, for a tool or a server.
    """

    def reset(self, prompt: str, answer: Any) -> str | None:
        """Begin.

        Args:
            prompt: The problem's text, which the policy has been given.
            answer: The right answer.

        Returns:
            What the policy observes behind the prompt, before its first response; None: nothing.
        """

    def step(self, response: str) -> tuple[str, float, bool]:
        """Answer a response of the policy, without the token that ended it; other special tokens are their names.

        Returns:
            What the policy observes next, the reward of this turn, and whether the conversation is at its end, where
            the observation is not used.
        """


BUILT_IN: dict[str, Callable[[], Environment]] = {"calculator": Calculator}


def find_environment(name: str) -> Callable[[], Environment]:
    """Return the maker of a sample's environment: built in, or ``package.module:Class`` by import.

    Raises:
        ConfigError: There is none of that name, it has not the two methods, or one of them is ``async``.
    """
    found: Callable[[], Environment] = find_plugin(name, BUILT_IN, key="rollout.environment.name", kind="Class")
    missing = [method for method in ("reset", "step") if not callable(getattr(found, method, None))]
    if not callable(found) or missing:
        lacks = f"has no {' and no '.join(missing)}" if missing else "is no class"
        raise ConfigError(
            f"rollout.environment.name={name!r}: {lacks}; give a class with reset(prompt, answer) and step(response)"
        )
    awaited = [method for method in ("reset", "step") if inspect.iscoroutinefunction(getattr(found, method))]
    if awaited:
        raise ConfigError(
            f"rollout.environment.name={name!r}: {' and '.join(awaited)} must not be async def; write def and wait "
            "inside: the calls of other samples run in other threads meanwhile"
        )
    return found


def ask_first(make: Callable[[], Environment], example: Example) -> tuple[Environment, str]:
    """Make an environment and reset it; return it, and what is observed first. Raises TypeError: that is no text."""
    environment = make()
    first = environment.reset(example.prompt, example.answer)
    observation, *_ = _checked("" if first is None else first, 0.0, False)
    return environment, observation


def ask(environment: Environment, response: str) -> tuple[str, float, bool]:
    """Return an environment's answer: observation, reward, and whether it is the end.

    Raises:
        TypeError: It is of another type than it should be.
        ValueError: The reward is not finite.
    """
    answer = environment.step(response)
    if not isinstance(answer, tuple) or len(answer) != 3:
        raise TypeError(f"step gave {answer!r:.100}; expected (observation, reward, done)")
    return _checked(*answer)


def _checked(observation: object, reward: object, is_done: object) -> tuple[str, float, bool]:
    if isinstance(reward, bool) or not isinstance(reward, numbers.Real):
        raise TypeError(f"the reward is {type(reward).__name__} {reward!r:.100}; expected a number")
    if not math.isfinite(reward) or abs(float(reward)) > _LARGEST_REWARD:
        raise ValueError(f"the reward is {reward}; expected a finite number of at most {_LARGEST_REWARD:g}")
    if is_done not in (True, False):
        raise TypeError(f"done is {type(is_done).__name__} {is_done!r:.100}; expected True or False")
    if is_done:
        return "", float(reward), True
    if not isinstance(observation, str):
        raise TypeError(f"the observation is {type(observation).__name__} {observation!r:.100}; expected text")
    return observation, float(reward), False


def failure_of(name: str, make: Callable[[], Environment], example: Example, response: str | None, error: str) -> str:
    """Return what is told of a failed call, as of a reward's: what was called, where it is, and on what.

    Args:
        name: The environment's.
        make: Its maker.
        example: The problem.
        response: The response that it was to answer; None: it was to begin.
        error: What the call raised.
    """
    source = source_of(getattr(make, "reset" if response is None else "step"))
    of = f" ({source})" if source else ""
    said = "" if response is None else f" with response {response[:200]!r}"
    return f"environment {name!r}{of} on {example.place}{said}: {error}"


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """Return the text of a response, without the token that ended it."""
    is_stopped = tokens[-1:] and tokens[-1] in tokenizer.stop_ids
    return tokenizer.decode(tokens[:-1] if is_stopped else tokens)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A sample of several turns. It ends with a token that was sampled, if any was.

    Attributes:
        response: All that follows the prompt; log-probabilities of what was observed are 0.
        mask: 1 on what was sampled, 0 on what was observed, ``[response]`` fp32.
        reward: The sum over turns.
        num_turns: How many responses were sampled.
        last_turn: Tokens of the last of them.
        error: How the environment failed, and on what; None: it did not.
    """

    response: Response
    mask: Tensor
    reward: float
    num_turns: int
    last_turn: int
    error: str | None

    def kept(self) -> Response:
        """Return the response as an archive has it: what was observed has no weights' version."""
        return replace(self.response, versions=self.response.versions.masked_fill(self.mask == 0, OBSERVED))


class Environments:
    """Leads conversations. All ranks of a replica make one with the same arguments, and the same calls.

    Args:
        settings: The recipe's.
        tokenizer: For responses and observations.
        replica: Over the ranks of the replica; environments run on its first.

    Raises:
        ConfigError: There is no such environment.
    """

    def __init__(self, settings: Settings, tokenizer: Tokenizer, replica: Coordinator) -> None:
        self._settings = settings
        self._replica = replica
        self._make = find_environment(settings.name)
        self._tokenizer = tokenizer
        self._names = special_names(tokenizer)
        self._calls = Calls(settings.step_deadline_s) if replica.is_lead else None

    @torch.inference_mode()
    def converse(
        self,
        engine: MegatronEngine,
        requests: Sequence[Request],
        examples: Sequence[Example],
        purpose: str = "rollout",
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> list[Conversation]:
        """Return a conversation for each request, in their order.

        Args:
            engine: Samples the responses.
            requests: Prompts; ``max_new_tokens`` is for all that follows, responses and observations.
            examples: The problem of each.
            purpose: Of the noise.
            is_stopping: Asked at the same points on all ranks, and answers the same on all. Collective: tp, pp.

        Collective: tp, pp.

        Raises:
            DataError: A prompt leaves no room for a response, in the model's context or in the cache.
            RolloutStopped: ``is_stopping`` said so, on all ranks; conversations that had begun are dropped.
        """
        talks = [_Talk(*each, engine.version) for each in zip(requests, examples, strict=True)]
        session = engine.open(requests, purpose)
        check_requests(requests, engine.refusal)
        for number, talk in enumerate(talks):
            self._begin(number, talk)
        # Of the conversations that are going on, some wait for their environment; others, by request, for the policy.
        waiting, asked = set(range(len(talks))), dict[int, int]()
        try:
            while waiting or asked:
                if (session.is_idle or session.looks_up()) and is_stopping():
                    session.pause()
                    engine.finish()
                    raise RolloutStopped([])
                # Who waits for an answer is to go on as soon as it is there.
                most = 1 if waiting else FEW_STEPS
                for request, response in [] if session.is_idle else session.step(most):
                    number = asked.pop(id(request))
                    if self._hear(number, talks[number], response):
                        waiting.add(number)
                if waiting:
                    answers = self._answers(_WAIT_S if session.is_idle else 0.0)
                    waiting.difference_update(number for number, _ in answers)
                    going = {number: self._told(talks[number], answer) for number, answer in answers}
                    requests_to_go = {number: request for number, request in going.items() if request is not None}
                    asked |= {id(request): number for number, request in requests_to_go.items()}
                    session.add(list(requests_to_go.values()))
            engine.finish()
        finally:
            engine.metrics = session.metrics()
            if self._calls is not None:
                self._calls.drop()
        return [talk.ended() for talk in talks]

    def _begin(self, number: int, talk: _Talk) -> None:
        if self._calls is None:
            return

        def begin() -> _Answer:
            talk.environment, first = ask_first(self._make, talk.example)
            return self._encoded(first, 0.0, False, talk.room)

        self._calls.submit(number, begin)

    def _hear(self, number: int, talk: _Talk, response: Response) -> bool:
        """Take in a sampled turn; return whether the environment is to answer."""
        talk.add(response)
        if response.finish == "failed":
            talk.end()
            return False
        if self._calls is None:
            return True
        text, environment = self._said(response), talk.environment
        assert environment is not None, "a response before the environment was made"

        def step() -> _Answer:
            return self._encoded(*ask(environment, text), talk.room)

        self._calls.submit(number, step)
        return True

    def _answers(self, wait_s: float) -> list[tuple[int, Any]]:
        """Return numbers of conversations and their environments' new answers: ``_Answer``, or the text of an error.

        Collective: tp, pp.
        """
        news = [] if self._calls is None else self._calls.ended(wait_s)
        told = [(number, str(answer) if isinstance(answer, CallFailed) else answer) for number, answer in news]
        answers: list[tuple[int, Any]] = self._replica.decide(
            "answers of environments", sorted(told, key=lambda each: each[0])
        )
        return answers

    def _told(self, talk: _Talk, answer: Any) -> Request | None:
        """Take in the environment's answer; return the request of the next turn, or None if there is none."""
        if isinstance(answer, str):
            talk.reward += self._settings.failure_reward
            said = None if talk.last is None else self._said(talk.last)
            talk.end(failure_of(self._settings.name, self._make, talk.example, said, answer))
            return None
        observed, reward, is_done = answer
        talk.reward += reward
        if is_done or observed is None or talk.num_turns == self._settings.max_turns:
            talk.end(is_full=not is_done and observed is None)
            return None
        return talk.observe(observed)

    def _said(self, response: Response) -> str:
        """Return the text of a response without the token that ended it, other special tokens as their names."""
        tokens = response.tokens.tolist()
        if tokens[-1:] and tokens[-1] in self._tokenizer.stop_ids:
            tokens.pop()
        return marked_text(tokens, self._tokenizer, self._names)

    def _encoded(self, observation: str, reward: float, is_done: bool, room: int) -> _Answer:
        """Return an environment's answer as it is sent to the ranks. Runs in a thread."""
        if is_done:
            return [], reward, True
        # Of an endless text not even the tokens are counted.
        fits = len(observation) <= MAX_CHARACTERS_PER_TOKEN * room
        tokens = self._tokenizer.encode(observation) if fits else None
        # Behind it there must be room for a response of one token at least.
        return tokens if tokens is not None and len(tokens) < room else None, reward, False


_Answer = tuple[list[int] | None, float, bool]
"""Tokens that are observed, None: there is no room for them; the reward; whether the conversation is at its end."""
_LARGEST_REWARD = 1e30
"""So that no sum of them leaves the range of fp32."""


class _Talk:
    """A conversation that is going on.

    Attributes:
        example: Its problem.
        environment: On the first rank of the replica.
        last: The last response that was sampled; None: there was none.
        reward: The sum up to now.
        num_turns: Responses that were sampled up to now.
        error: Text of an error; None: there was none.
    """

    def __init__(self, request: Request, example: Example, version: int) -> None:
        self.example = example
        self.environment: Environment | None = None
        self.last: Response | None = None
        self.reward, self.num_turns = 0.0, 0
        self.error: str | None = None
        self._is_full = False
        self._began_s, self._latency_s = time.perf_counter(), math.nan
        self._asked, self._version = request, version
        self._parts: list[Response] = []
        self._masks: list[Tensor] = []

    @property
    def room(self) -> int:
        """Return the number of tokens that may still follow."""
        return self._asked.params.max_new_tokens - sum(map(len, self._masks))

    def add(self, response: Response) -> None:
        """Add a response of the policy."""
        self._parts.append(response)
        self._masks.append(torch.ones(len(response.tokens)))
        self.last = response
        self.num_turns += 1

    def observe(self, tokens: list[int]) -> Request:
        """Add an observation, and return the request of the next turn.

        Its prompt is the whole conversation so far.
        """
        none = torch.zeros(len(tokens))
        self._parts.append(
            Response(
                tokens=torch.tensor(tokens, dtype=torch.int64),
                log_probs=none,
                sampled_log_probs=none,
                # A sample is as old as its oldest token, so an observation is not older than what is sampled behind it.
                versions=torch.full((len(tokens),), self._version, dtype=torch.int32),
                finish="paused",
            )
        )
        self._masks.append(none)
        params = self._asked.params
        return replace(
            self._asked,
            prompt=torch.cat([self._asked.prompt, *(part.tokens for part in self._parts)]),
            params=replace(params, max_new_tokens=self.room, min_new_tokens=min(params.min_new_tokens, self.room)),
        )

    def end(self, error: str | None = None, *, is_full: bool = False) -> None:
        """End the conversation, since it is over, failed, or has no room for what comes next."""
        self.error, self._is_full = error, is_full
        self._latency_s = time.perf_counter() - self._began_s

    def ended(self) -> Conversation:
        """Return the whole conversation."""
        parts, last = self._parts, self.last
        return Conversation(
            response=Response(
                tokens=torch.cat([torch.zeros(0, dtype=torch.int64), *(part.tokens for part in parts)]),
                log_probs=torch.cat([torch.zeros(0), *(part.log_probs for part in parts)]),
                sampled_log_probs=torch.cat([torch.zeros(0), *(part.sampled_log_probs for part in parts)]),
                versions=torch.cat([torch.zeros(0, dtype=torch.int32), *(part.versions for part in parts)]),
                finish="length" if last is None or self._is_full else last.finish,
                error=None if last is None else last.error,
                latency_s=self._latency_s,
            ),
            mask=torch.cat([torch.zeros(0), *self._masks]),
            reward=self.reward,
            num_turns=self.num_turns,
            last_turn=0 if last is None else len(last.tokens),
            error=self.error,
        )
