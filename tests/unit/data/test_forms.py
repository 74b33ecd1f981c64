"""The forms of rows that are recognized without a key, by what they are read for."""

from __future__ import annotations

from typing import Any

import pytest

from hybridflow.config.data import DataConfig
from hybridflow.data.prompts import Example
from hybridflow.data.shaping import Shape, Shaper, examples_of
from hybridflow.errors import DataError

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ASKED = [{"role": "user", "content": "q"}]


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


CALLED = [*said("call"), {"role": "tool", "content": "3"}]
CALLED_PROMPT = "[user]q[assistant]call[tool]3[assistant]"
TOLD = [{"role": "system", "content": "s"}]


def shaped(row: dict[str, Any], *, of: str, **data: Any) -> tuple[Example, ...]:
    """What a row gives to SFT (``sft``), to an algorithm that samples, with or without answers, or of preferences."""
    kind = {"sft": "problems", "samples": "problems", "compares": "problems"}.get(of, of)
    shape = Shape(
        data=DataConfig(train="rows.jsonl", **data),
        kind=kind,
        is_imitating=of == "sft",
        needs_answer=of == "compares",
        template=TEMPLATE,
    )
    shaper = Shaper(shape)
    try:
        found = shaper(row, "f:1")
        assert found is not None
        return examples_of(found.row, "f:1", found.begins, shape)
    finally:
        shaper.close()


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "q", "completion": "a"}, "q"),
        ({"prompt": "q", "response": "a"}, "q"),
        ({"prompt": "q", "answer": "a"}, "q"),
        ({"prompt": "q", "solution": "a", "answer": "other"}, "q"),
        ({"prompt": "q", "solution": "a", "answer": ""}, "q"),
        ({"messages": [*ASKED, *said("a")]}, "[user]q[assistant]"),
        ({"prompt": ASKED, "completion": said("a")}, "[user]q[assistant]"),
        ({"prompt": "q", "completion": said("a")}, "[user]q[assistant]"),
        ({"prompt": ASKED, "response": "a"}, "[user]q[assistant]"),
        ({"prompt": "q", "completion": [*CALLED, *said("a")]}, CALLED_PROMPT),
    ],
)
def test_sft_imitates_what_the_row_calls_its_response(row, prompt):
    (one,) = shaped(row, of="sft")
    assert (one.prompt, one.turns) == (prompt, ("a",))


def test_sft_imitates_a_response_that_ends_at_once_and_a_number():
    (one,) = shaped({"prompt": "q", "answer": ""}, of="sft")
    assert one.turns == ("",)
    (one,) = shaped({"prompt": "q", "answer": 0}, of="sft")
    assert one.turns == ("0",)


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"prompt": "q"}, ""),
        ({"prompt": "q", "answer": None}, ""),
        ({"prompt": "q", "answer": 62}, 62),
        ({"prompt": "q", "answer": {"tests": ["a", 1]}}, {"tests": ["a", 1]}),
        ({"prompt": "q", "completion": "a"}, "a"),
        ({"prompt": "q", "response": "a", "answer": "b"}, "b"),
        ({"prompt": ASKED}, ""),
        ({"messages": ASKED}, ""),
        ({"messages": [*ASKED, *said("a")]}, "a"),
    ],
)
def test_an_answer_is_any_json_and_may_be_missing(row, answer):
    (one,) = shaped(row, of="samples")
    assert one.answer == answer and one.prompt in ("q", "[user]q[assistant]")


CALL = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}]


@pytest.mark.parametrize("of", ["samples", "compares"])
@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"prompt": ASKED, "completion": said("a")}, "a"),
        ({"prompt": ASKED, "completion": CALL, "answer": "b"}, "b"),
        ({"prompt": ASKED, "completion": said("a"), "response": CALL}, "a"),
        ({"prompt": ASKED, "chosen": ASKED, "rejected": CALL, "answer": "b"}, "b"),
        ({"prompt": ASKED, "response": [*ASKED, *said("a")], "answer": "b"}, "b"),
    ],
)
def test_a_response_that_an_algorithm_that_samples_does_not_need_stays_as_it_is(of, row, answer):
    (one,) = shaped(row, of=of)
    assert (one.prompt, one.answer) == ("[user]q[assistant]", answer)
    needed = {} if "answer" in row else {"completion": "a"}
    assert one.row == {**row, "prompt": "[user]q[assistant]", **needed}


def test_sft_and_preferences_leave_responses_of_the_other_kind():
    (one,) = shaped({"prompt": ASKED, "completion": said("a"), "chosen": ASKED}, of="sft")
    assert one.turns == ("a",) and one.row["chosen"] == ASKED
    (one,) = shaped({"prompt": ASKED, "chosen": "a", "rejected": "b", "response": CALL}, of="pairs")
    assert one.responses == (("a", True), ("b", False)) and one.row["response"] == CALL


@pytest.mark.parametrize("name", ["answer", "solution"])
def test_sft_imitates_messages_of_the_field_that_is_named(name):
    (one,) = shaped({"prompt": "q", name: said("a")}, of="sft", completion_field=name)
    assert (one.prompt, one.turns) == ("[user]q[assistant]", ("a",))


def test_fields_of_fields_have_dotted_names():
    row = {"data": {"question": ASKED}, "reward_model": {"ground_truth": [1, 2]}, "extra": {"index": 3}}
    (one,) = shaped(row, of="compares", prompt_field="data.question", answer_field="reward_model.ground_truth")
    assert (one.prompt, one.answer, one.row["extra"]) == ("[user]q[assistant]", [1, 2], {"index": 3})
    (one,) = shaped({"chat": {"turns": [*ASKED, *said("a")]}}, of="compares", messages_field="chat.turns")
    assert (one.prompt, one.answer) == ("[user]q[assistant]", "a")
    (one,) = shaped({"a.b": "q", "a": {"b": "no"}}, of="samples", prompt_field="a.b")
    assert one.prompt == "q", "a field of that very name comes first"
    with pytest.raises(DataError, match=r"f:1: no field 'reward_model.truth'; found \['prompt', 'reward_model'\]"):
        shaped({"prompt": "q", "reward_model": {}}, of="samples", answer_field="reward_model.truth")


def test_who_compares_with_an_answer_needs_one():
    with pytest.raises(DataError) as raised:
        shaped({"prompt": "q", "level": 1}, of="compares")
    message = str(raised.value)
    assert message.startswith("f:1: no field 'answer'; found ['level', 'prompt'], and the reward compares with it")
    assert "set data.answer_field to its name here, or choose a reward that needs none" in message
    # As columns of numbers have it where a value is missing.
    with pytest.raises(DataError, match="f:1: field 'answer': found nan, which is no answer"):
        shaped({"prompt": "q", "answer": float("nan")}, of="compares")
    (one,) = shaped({"prompt": "q", "answer": float("nan")}, of="samples")
    assert one.answer != one.answer


PAIRED = [
    ({"prompt": "q", "chosen": "a", "rejected": "b"}, "q"),
    ({"prompt": ASKED, "chosen": said("a"), "rejected": said("b")}, "[user]q[assistant]"),
    ({"prompt": "q", "chosen": said("a"), "rejected": said("b")}, "[user]q[assistant]"),
    ({"chosen": [*ASKED, *said("a")], "rejected": [*ASKED, *said("b")]}, "[user]q[assistant]"),
    ({"prompt": "q", "chosen": [*ASKED, *said("a")], "rejected": [*ASKED, *said("b")]}, "[user]q[assistant]"),
    ({"prompt": ASKED, "chosen": [*ASKED, *said("a")], "rejected": [*ASKED, *said("b")]}, "[user]q[assistant]"),
    ({"messages": ASKED, "chosen": "a", "rejected": "b"}, "[user]q[assistant]"),
    # Messages before the last one go on from the prompt, or repeat it.
    ({"prompt": "q", "chosen": [*CALLED, *said("a")], "rejected": [*CALLED, *said("b")]}, CALLED_PROMPT),
    ({"prompt": ASKED, "chosen": [*CALLED, *said("a")], "rejected": [*CALLED, *said("b")]}, CALLED_PROMPT),
    ({"messages": ASKED, "chosen": [*CALLED, *said("a")], "rejected": [*CALLED, *said("b")]}, CALLED_PROMPT),
    (
        {"prompt": "q", "chosen": [*ASKED, *CALLED, *said("a")], "rejected": [*ASKED, *CALLED, *said("b")]},
        CALLED_PROMPT,
    ),
    (
        {"prompt": "q", "chosen": [*TOLD, *ASKED, *said("a")], "rejected": [*TOLD, *ASKED, *said("b")]},
        "[system]s[user]q[assistant]",
    ),
    ({"messages": [*ASKED, *said("a")], "chosen": [*ASKED, *said("a")], "rejected": said("b")}, "[user]q[assistant]"),
]


@pytest.mark.parametrize("kind", ["pairs", "preferences"])
@pytest.mark.parametrize(("row", "prompt"), PAIRED)
def test_pairs_of_texts_and_of_messages(kind, row, prompt):
    found = shaped(row, of=kind)
    assert {each.prompt for each in found} == {prompt}
    assert [judged for each in found for judged in each.responses] == [("a", True), ("b", False)]


@pytest.mark.parametrize("name", ["completion", "response"])
@pytest.mark.parametrize("label", ["wanted", "label"])
def test_single_responses_have_either_name(name, label):
    (one,) = shaped({"prompt": "q", name: "a", label: False}, of="preferences")
    assert one.responses == (("a", False),)
    # A label beside the field of that name is something else.
    (one,) = shaped({"prompt": "q", name: "a", "wanted": True, "label": 0}, of="preferences")
    assert one.responses == (("a", True),)
    (one,) = shaped({"prompt": ASKED, name: said("a"), label: True}, of="preferences")
    assert (one.prompt, one.responses) == ("[user]q[assistant]", (("a", True),))


@pytest.mark.parametrize(
    ("row", "of", "says"),
    [
        (
            {"prompt": "q"},
            "sft",
            "f:1: there is nothing to imitate: the answer is empty, and there is no field 'solution'",
        ),
        (
            {"messages": [{"role": "human", "content": "q"}, {"role": "gpt", "content": "a"}]},
            "sft",
            "f:1: there is nothing to imitate: the last of its messages is of 'gpt', not of 'assistant', and there",
        ),
        (
            {"prompt": "q", "answer": said("a")},
            "sft",
            "f:1: field 'answer': found messages, expected text; give them as 'completion', or set data.completion_fie",
        ),
        ({"prompt": "q", "solution": said("a")}, "samples", "f:1: field 'solution': found messages, expected text; gi"),
        (
            {"prompt": "q", "text": "a"},
            "sft",
            "'completion'; found ['prompt', 'text']; add it, set data.solution_field",
        ),
        (
            {"prompt": "q", "completion": "a", "label": 1},
            "preferences",
            "field 'label': expected true or false, found 1",
        ),
        (
            {"chosen": [*ASKED, *said("a")], "rejected": [{"role": "user", "content": "r"}, *said("b")]},
            "pairs",
            "f:1: fields 'chosen' and 'rejected' begin with different messages; give responses to one prompt",
        ),
        (
            {"prompt": "q", "chosen": [*CALLED, *said("a")], "rejected": said("b")},
            "pairs",
            "f:1: fields 'chosen' and 'rejected' begin with different messages; give responses to one prompt",
        ),
        (
            {"prompt": "other", "completion": [*ASKED, *said("a")]},
            "sft",
            "f:1: field 'completion': begins with a message of 'user', and does not have the prompt's messages; give",
        ),
        ({"chosen": "qa", "rejected": "qb"}, "pairs", "f:1: no field 'prompt'; found ['chosen', 'rejected']"),
    ],
)
def test_what_is_missing_is_named(row, of, says):
    with pytest.raises(DataError) as raised:
        shaped(row, of=of)
    assert says in str(raised.value)
