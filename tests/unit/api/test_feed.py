"""Prompts that a program gives: rows with any fields, answers of any kind, messages."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridflow.api.feed import Feed, GivenProblems, prompts_of
from hybridflow.data.prompts import Example
from hybridflow.data.tokenizer import open_tokenizer
from hybridflow.errors import DataError
from tests.support.hf_models import write_tokenizer

TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def feed(tmp_path_factory: pytest.TempPathFactory) -> Feed:
    folder: Path = tmp_path_factory.mktemp("feed")
    write_tokenizer(folder, chat_template=TEMPLATE)
    return Feed(open_tokenizer(folder), 100)


ASKED = [{"role": "user", "content": "1+1="}]
FORMS: list[tuple[Any, str, Any]] = [
    ("1+1=", "1+1=", ""),
    ({"prompt": "1+1=", "answer": 2, "level": 3}, "1+1=", 2),
    ({"prompt": ASKED, "answer": {"value": 2}, "level": 3}, "[user]1+1=", {"value": 2}),
    ({"messages": ASKED, "level": 3}, "[user]1+1=", ""),
    ({"messages": [*ASKED, {"role": "assistant", "content": "2"}], "level": 3}, "[user]1+1=", "2"),
    ({"prompt": "1+1=", "answer": None, "level": 3}, "1+1=", ""),
    # As a frame of pandas has a value that is missing.
    ({"prompt": "1+1=", "answer": math.nan, "level": 3}, "1+1=", ""),
    ({"prompt": "1+1=", "completion": "2", "level": 3}, "1+1=", "2"),
    ({"prompt": "1+1=", "response": "2", "level": 3}, "1+1=", "2"),
    ({"prompt": "1+1=", "solution": "1+1=2", "response": "2", "level": 3}, "1+1=", ""),
]


@pytest.mark.parametrize(("row", "prompt", "answer"), FORMS)
def test_a_row_gives_prompt_answer_and_fields(feed, row, prompt, answer):
    (index,) = feed.add(prompts_of([row]), 0)
    example = feed.example(index)
    assert (example.prompt, example.answer) == (prompt, answer)
    assert example.row.get("level") == (None if isinstance(row, str) else 3)


def test_columns_are_fields_too(feed):
    indices = feed.add(prompts_of({"prompt": ["1", "2"], "answer": [[1], None], "level": [3, 4]}), 10)
    found = [feed.example(index) for index in indices]
    assert [(each.prompt, each.answer, each.row["level"]) for each in found] == [("1", [1], 3), ("2", "", 4)]


class DatasetDict(dict[str, Any]):
    """As that of the package datasets, whose import starts threads."""

    column_names: dict[str, list[str]] = {}


SPLIT = SimpleNamespace(column_names=["prompt"])


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ([{"prompt": 7}], r"prompts\[0\]: found .*; expected a text, or a row with a text or messages as 'prompt'"),
        ([{"prompt": "1", "answer": {1}}], r"prompts\[0\]: 'answer' is \{1\}.*value that JSON can hold"),
        ("rows.jsonl", r"prompts: str; expected a list of texts .* for a file DataProvider\(data_path=…\)"),
        (
            DatasetDict(train=SPLIT, test=SPLIT),
            r"DatasetDict of splits; give one.* dataset\['train'\], dataset\['test'\]",
        ),
        ({"prompt": ["1"], "level": [1, 2]}, "columns of unequal length, {'prompt': 1, 'level': 2}"),
    ],
)
def test_what_cannot_be_a_prompt(batch, says):
    with pytest.raises(DataError, match=says):
        prompts_of(batch)


def test_each_prompt_needs_its_answer(tmp_path):
    write_tokenizer(tmp_path, chat_template=TEMPLATE)
    feed = Feed(open_tokenizer(tmp_path), 100, needs_answer=True)
    answered = [{"prompt": "1+1=", "answer": 2}, {"prompt": "1", "answer": ""}, FORMS[4][0]]
    feed.add(prompts_of(answered), 0)
    for missing in ("1+1=", {"prompt": ASKED}):
        with pytest.raises(DataError, match=r"prompts\[3\]: has no answer, with which the reward compares"):
            feed.add(prompts_of([*answered, missing]), 0)


def test_each_epoch_draws_each_example_once_in_a_new_order():
    examples = tuple(Example(prompt=f"{n}", answer="", place=f"file:{n}") for n in range(50))
    given, other = (GivenProblems(examples=examples, prompts=(), seed=seed) for seed in (3, 4))
    epochs = [[given.row(prompt_index) for prompt_index in range(50 * epoch, 50 * (epoch + 1))] for epoch in range(3)]
    assert all(sorted(rows) == list(range(50)) for rows in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert given.example(60) is examples[epochs[1][10]]
    assert [other.row(prompt_index) for prompt_index in range(50)] != epochs[0]
