"""What reward functions are called with, by their signatures, and what is said of those that ask for something else."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from hybridflow.config.rewards import RewardConfig
from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards import batched
from hybridflow.rewards.functions import as_function
from hybridflow.rewards.kinds import make_kind
from hybridflow.rewards.sample import Sample, Unscored
from hybridflow.rewards.scorer import Scorer
from hybridflow.rewards.total import total_of

ROWS: list[dict[str, Any]] = [{"prompt": "p", "level": 3, "data_source": "gsm8k"}, {"prompt": "q", "level": 4}]
SAMPLES = [
    Sample("P", "yes", {"value": 1}, "rows.jsonl:1", ROWS[0]),
    Sample("Q", "no!!", [2], "rows.jsonl:2", ROWS[1]),
]


def called(function: Any) -> list[Any]:
    """What the function gives, as the scorer calls it."""
    found = as_function(function, "reward.function='mine:f'")
    values: list[Any] = []
    for part in [SAMPLES] if found.is_batched else [[each] for each in SAMPLES]:
        value = found.call(part)
        values += asyncio.run(value) if found.is_async else value
    return values


def by_name(answer, response):
    return response, answer


def other_words(question, text, truth):
    return question, text, truth


def with_field(prompt, response, answer, level):
    return prompt, response, answer, level


def field_in_the_place_of_the_answer(prompt, response, level):
    return response, level


def keyword_only(response, *, level, absent=7):
    return response, level, absent


def with_rest(response, **kwargs):
    return response, kwargs["level"], kwargs["answer"], kwargs["prompt"]


def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    return solution_str, ground_truth, extra_info


async def awaited(response, level):
    return response, level


def whatever(*texts):
    return texts


def with_more_places(response, *more):
    return response, more


ONE = {
    with_more_places: [("yes", ()), ("no!!", ())],
    by_name: [("yes", {"value": 1}), ("no!!", [2])],
    other_words: [("P", "yes", {"value": 1}), ("Q", "no!!", [2])],
    with_field: [("P", "yes", {"value": 1}, 3), ("Q", "no!!", [2], 4)],
    field_in_the_place_of_the_answer: [("yes", 3), ("no!!", 4)],
    keyword_only: [("yes", 3, 7), ("no!!", 4, 7)],
    with_rest: [("yes", 3, {"value": 1}, "P"), ("no!!", 4, [2], "Q")],
    of_verl: [("yes", {"value": 1}, None), ("no!!", [2], None)],
    awaited: [("yes", 3), ("no!!", 4)],
    whatever: [("P", "yes", {"value": 1}), ("Q", "no!!", [2])],
    partial(with_field, level=0): [("P", "yes", {"value": 1}, 3), ("Q", "no!!", [2], 4)],
}


def name_of(function):
    """A name without an address, which would differ from process to process."""
    return getattr(function, "__name__", type(function).__name__)


@pytest.mark.parametrize("function", ONE, ids=name_of)
def test_a_parameter_gets_what_its_name_says(function):
    assert called(function) == ONE[function]


def of_trl(completions, **kwargs):
    assert kwargs["prompts"] == ["P", "Q"] and kwargs["data_source"] == ["gsm8k", None]
    return [len(each) + level for each, level in zip(completions, kwargs["level"], strict=True)]


def of_trl_with_columns(prompts, completions, level):
    return [len(prompt + each) + more for prompt, each, more in zip(prompts, completions, level, strict=True)]


def of_many(prompts, responses, answers):
    return [len(each) for each in responses]


def of_rows_that_differ(responses, data_source):
    return [(each, source) for each, source in zip(responses, data_source, strict=True)]


@batched
def marked(prompt, response, level):
    return [len(each) + more for each, more in zip(response, level, strict=True)]


class Object:
    def scores(self, prompts, responses, answers, level):
        return [len(each) + more for each, more in zip(responses, level, strict=True)]


async def awaited_of_many(completions, level):
    return [len(each) + more for each, more in zip(completions, level, strict=True)]


MANY = {of_trl: [6, 8], of_trl_with_columns: [7, 9], of_many: [3, 4], marked: [6, 8], Object: [6, 8]}
MANY[of_rows_that_differ] = [("yes", "gsm8k"), ("no!!", None)]


@pytest.mark.parametrize("function", [*MANY, awaited_of_many], ids=name_of)
def test_who_names_many_is_called_once_with_lists(function):
    assert as_function(function, "reward").is_batched
    assert called(function) == MANY.get(function, [6, 8])


def test_a_sum_has_fields_too():
    assert called(total_of([of_trl, lambda response, level: level, "length"], "rewards")) == [6 + 3 + 3, 8 + 4 + 4]


def test_token_ids_of_trl_are_not_taken_for_the_answer():
    def f(prompts, completions, completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    with pytest.raises(Unscored, match="asks for 'completion_ids', and the row"):
        called(f)
    assert called(lambda prompts, completions, trainer_state=None: [trainer_state] * 2) == [None, None]


def no_response(prompt, answer):
    return 1.0


@pytest.mark.parametrize("function", [no_response, lambda text: 1.0, lambda: 1.0, lambda *, level: 1.0])
def test_one_that_does_not_ask_for_the_response_is_refused_by_file_and_signature(function):
    with pytest.raises(ConfigError) as raised:
        as_function(function, "reward.function='mine:f'")
    message = str(raised.value)
    assert message.startswith("reward.function='mine:f': ") and "does not ask for the response" in message
    assert "test_arguments.py:" in message and "(prompt, response, answer) -> number" in message
    assert "(completions, **kwargs) -> list of numbers" in message


def asks_for_too_much(response, difficulty):
    return 1.0


def gives_text(response, answer):
    return "right"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (asks_for_too_much, ["asks for 'difficulty', and the row has the fields ['data_source', 'level', 'prompt']"]),
        (gives_text, ["returned 'right'; expected a finite number"]),
        (lambda completions: 1.0, ["returned 1.0; expected a list of 2 scores"]),
    ],
)
def test_what_fails_names_file_function_and_signatures(function, words):
    settings = RewardConfig()
    with pytest.raises(RewardError) as raised:
        Scorer(make_kind(settings, "reward", function), settings, "reward").scores(SAMPLES)
    message = str(raised.value)
    place = f"test_arguments.py:{function.__code__.co_firstlineno}"
    for word in (
        *words,
        function.__qualname__,
        place,
        "on rows.jsonl:1",
        "one of (prompt, response, answer) -> number",
    ):
        assert word in message


@pytest.mark.parametrize(
    ("answer", "response", "score"),
    [(62, "62", 1), (2.5, " 2.5", 1), (True, "true", 1), ([1, 2], "[1, 2]", 1), ("62", "62 ", 1), (62, "63", 0)],
)
def test_built_in_rewards_compare_other_json_as_it_is_written(answer, response, score):
    for settings in (RewardConfig(), RewardConfig(function="regex", pattern=r"^(.*\S)\s*$")):
        made = Scorer(make_kind(settings, "reward"), settings, "reward")
        assert made.scores([Sample("", response, answer, "rows.jsonl:1")]) == [score]


def test_a_field_makes_another_sample_of_the_cache():
    settings = RewardConfig(cache=10)
    made = Scorer(make_kind(settings, "reward", lambda response, level: level), settings, "reward")
    samples = [Sample("p", "r", "a", "f:1", {"level": level}) for level in (1, 2, 1)]
    assert made.scores(samples) == [1, 2, 1] and made.counts.calls == 2
