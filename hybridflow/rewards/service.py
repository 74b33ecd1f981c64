"""Rewards that are asked for over HTTP: a service that scores samples, and a language model that judges. No torch."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.config.rewards import JudgeConfig as JudgeSettings
from hybridflow.config.rewards import RewardServiceConfig
from hybridflow.rewards.sample import Sample, Unscored
from hybridflow.rollout.engines.wire import BadAnswer, Lines, Refused, Unavailable, token_of

_MOST_BYTES = 1 << 22
"""No answer is longer."""
_JUDGE_PATH = "/v1/chat/completions"
_FIELD = re.compile(r"\{(prompt|response|answer)\}")


class Endpoint:
    """Servers that are asked in turn, over connections that stay open. Any thread may ask.

    Args:
        settings: Their section of the recipe.
        key: Of that section, for messages.
        timeout_s: Longest time of a try.

    Raises:
        ConfigError: The variable holds no token.
    """

    def __init__(self, settings: RewardServiceConfig | JudgeSettings, key: str, timeout_s: float) -> None:
        self._lines = Lines(settings.urls, token_of(settings.auth_env, f"{key}.auth_env"))
        self._timeout_s = timeout_s
        self._turns = itertools.count()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Post to the server whose turn it is, and return its JSON.

        Raises:
            Unscored: It answers none.
        """
        line, begin_s = self._lines.take(next(self._turns)), time.monotonic()
        # Who sends a byte now and then is never silent for long.
        late = threading.Timer(self._timeout_s, line.hang_up)
        late.daemon = True
        late.start()
        try:
            return line.ask("POST", path, body, timeout_s=self._timeout_s, most_bytes=_MOST_BYTES)
        except Unavailable as error:
            if time.monotonic() - begin_s >= self._timeout_s:
                raise Unscored(f"{line.url}: no answer within {self._timeout_s:g} s", is_passing=True) from None
            raise Unscored(str(error), is_passing=True, after_s=error.after_s) from None
        except Refused as error:
            raise Unscored(str(error), is_final=error.is_for_all) from None
        except BadAnswer as error:
            raise Unscored(str(error)) from None
        finally:
            late.cancel()
            self._lines.give_back(line)

    def close(self) -> None:
        """Hang up."""
        self._lines.close()


@dataclass(frozen=True)
class Service:
    """Scores samples by a ``POST`` of ``{"samples": [{"prompt", "response", "answer"}, …]}`` to a service.

    It answers ``{"scores": [number, …]}``, one for each, in their order.

    Attributes:
        endpoint: Of the service; its addresses are whole.
    """

    endpoint: Endpoint

    def __call__(self, samples: Sequence[Sample]) -> Any:
        """Return a list of scores, as the server sent them. Raises Unscored: there is none."""
        asked = [{"prompt": each.prompt, "response": each.response, "answer": each.answer} for each in samples]
        answer = self.endpoint.post("", {"samples": asked})
        if not isinstance(answer, dict) or not isinstance(answer.get("scores"), list):
            raise Unscored(f'answered {str(answer)[:200]!r}; expected {{"scores": [number, …]}}')
        return answer["scores"]


@dataclass(frozen=True)
class Judge:
    """Scores a sample by asking a language model, and reading the number that it gives.

    Attributes:
        endpoint: Of servers of it.
        settings: The recipe's.
    """

    endpoint: Endpoint
    settings: JudgeSettings

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Return the score of one sample. Raises Unscored: the model gives none."""
        (sample,) = samples
        settings = self.settings
        fields = {"prompt": sample.prompt, "response": sample.response, "answer": sample.answer_text}
        # At once, so that what is put in is not looked through for more.
        asked = _FIELD.sub(lambda match: fields[match[1]], settings.template)
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": asked}],
            "temperature": settings.temperature,
            "max_tokens": settings.max_new_tokens,
        }
        if settings.model is not None:
            body["model"] = settings.model
        return [self._number(self._said(self.endpoint.post(_JUDGE_PATH, body)))]

    def _said(self, answer: Any) -> str:
        """Return the text of a chat completion."""
        try:
            choice = answer["choices"][0]
            text, is_cut = choice["message"]["content"], choice.get("finish_reason") == "length"
        except (TypeError, KeyError, IndexError, AttributeError):
            text, is_cut = None, False
        if is_cut:
            raise Unscored(
                f"the judge's answer was cut at judge.max_new_tokens={self.settings.max_new_tokens}; raise it, or ask "
                "for a shorter answer in judge.template"
            )
        if not isinstance(text, str):
            raise Unscored(f"answered {str(answer)[:200]!r}; expected a chat completion with a text")
        return text

    def _number(self, text: str) -> float:
        """Return the number in the last match of the pattern."""
        found = list(re.finditer(self.settings.pattern, text))
        try:
            number = float(found[-1][1])
        except (IndexError, TypeError, ValueError):
            raise Unscored(f"the judge said {text[-200:]!r}, where {self.settings.pattern!r} finds no number") from None
        if not self.settings.low <= number <= self.settings.high:
            raise Unscored(
                f"the judge said {number:g}; expected a number from {self.settings.low:g} to {self.settings.high:g}"
            )
        return number
