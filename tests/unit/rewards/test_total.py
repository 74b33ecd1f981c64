"""Several reward functions are added up, whichever way they are called."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from hybridflow.errors import ConfigError
from hybridflow.rewards.functions import as_function, batched
from hybridflow.rewards.sample import Sample, Unscored
from hybridflow.rewards.total import total_of


def letters(prompt: str, response: str, answer: str) -> int:
    return len(response) + 10 * len(prompt)


async def waiting(prompt: str, response: str, answer: str) -> float:
    await asyncio.sleep(0)
    return 0.5 * len(answer)


@batched
def many(prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
    return [100.0 * len(response) for response in responses]


class Judge:
    async def scores(self, prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
        return [1000.0 * len(answer) for answer in answers]


SAMPLES = [Sample("p", "yes", "no", "file:1"), Sample("pp", "no", "no", "file:2"), Sample("", "", "x", "file:3")]
WORTH: list[tuple[Any, Callable[[Sample], float]]] = [
    (letters, lambda each: len(each.response) + 10 * len(each.prompt)),
    (waiting, lambda each: 0.5 * len(each.answer)),
    (many, lambda each: 100 * len(each.response)),
    (Judge(), lambda each: 1000 * len(each.answer)),
    ("exact_match", lambda each: float(each.response == each.answer)),
    ("length", lambda each: len(each.response)),
]


def scored(given: list[Any], samples: list[Sample]) -> list[float]:
    """As the scorer asks."""
    function = as_function(total_of(given, "reward_models"), "reward")
    found: list[float] = []
    for part in [samples] if function.is_batched else [[sample] for sample in samples]:
        value = function.call(part)
        found += asyncio.run(value) if function.is_async else value
    return found


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_the_total_is_the_sum_of_all(count: int) -> None:
    for chosen in itertools.combinations(WORTH, count):
        expected = [sum(worth(sample) for _, worth in chosen) for sample in SAMPLES]
        assert scored([given for given, _ in chosen], SAMPLES) == expected


@pytest.mark.parametrize("wrong", [lambda *_: float("nan"), lambda *_: "1", batched(lambda *_: [1.0])])
def test_what_is_no_score_is_not_added(wrong: Any) -> None:
    for other in (letters, waiting, many):
        with pytest.raises(Unscored, match="returned"):
            scored([other, wrong], SAMPLES)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("maths", r"reward_models\[1\]='maths'.*give it alone"),
        ("lenght", r"reward_models\[1\]='lenght'.*exact_match, length"),
        (3, r"reward_models\[1\]: found int"),
    ],
)
def test_what_cannot_be_added_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        total_of([letters, given], "reward_models")
