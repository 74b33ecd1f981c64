"""Preferences from files: rows, tokens, pairs that are compared, and made-up ones."""

import json
from dataclasses import replace

import pytest

from hybridflow.api.feed import GivenProblems
from hybridflow.config.data import ArithmeticConfig, DataConfig
from hybridflow.data.arithmetic import ensure_files, make_problems, wrong_carry
from hybridflow.data.pieces import train_tokenizer
from hybridflow.data.preferences import (
    JudgedResponse,
    check_imitable,
    encode_responses,
    pairs_of,
)
from hybridflow.data.prompts import Example, Judged
from hybridflow.errors import DataError
from hybridflow.models.microbatch import split_by_tokens
from tests.support.row_files import examples_of_file

DATA = DataConfig(train="train.jsonl", held_out="held_out.jsonl")
SPEC = ArithmeticConfig(num_train=300, num_held_out=50, mistake_share=0.5)
PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "12"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "digits.model"
    return train_tokenizer(["0123456789+="], path=path, vocab_size=64)


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_pairs_are_read_with_their_margin_and_place(tmp_path):
    named = {"q": "2+2=", "good": "4", "bad": "14", "gap": 2, "solution": "4!"}
    path = write(tmp_path / "rows.jsonl", {"q": "1+1=", "good": "2", "bad": "12"}, named)
    fields = dict(prompt_field="q", chosen_field="good", rejected_field="bad", margin_field="gap")
    data = DataConfig(train="", held_out="", **fields)
    assert examples_of_file(path, data, "pairs") == (
        Example(
            prompt="1+1=",
            answer="2",
            responses=(Judged("2", True), Judged("12", False)),
            margin=0.0,
            place=f"{path}:1",
        ),
        Example(
            prompt="2+2=",
            answer="4",
            solution="4!",
            responses=(Judged("4", True), Judged("14", False)),
            margin=2.0,
            place=f"{path}:2",
        ),
    )


def test_a_row_is_one_response_or_gives_two(tmp_path):
    single = {"prompt": "3+3=", "completion": "16", "wanted": False}
    # A pair may have a field of that name too.
    path = write(tmp_path / "rows.jsonl", {**PAIR, "response": "3"}, single)
    found = examples_of_file(path, DATA, "preferences")
    assert [(each.prompt, each.responses, each.margin, each.place) for each in found] == [
        ("1+1=", (Judged("2", True),), 0.0, f"{path}:1"),
        ("1+1=", (Judged("12", False),), 0.0, f"{path}:1"),
        ("3+3=", (Judged("16", False),), 0.0, f"{path}:2"),
    ]
    # What the warm start imitates of a pair is the better response, whichever of the two is drawn.
    assert [each.turns for each in found[:2]] == [("2",), ("2",)]
    check_imitable(found[0], DATA)
    check_imitable(found[1], DATA)
    with pytest.raises(DataError, match=r"rows\.jsonl:2: there is nothing to imitate.*'solution'"):
        check_imitable(found[2], DATA)
    check_imitable(replace(found[2], solution="6"), DATA)
    # A response that ends at once can be wanted.
    check_imitable(replace(found[2], responses=(Judged("", True),)), DATA)


@pytest.mark.parametrize(
    ("row", "is_paired", "says"),
    [
        ({"prompt": "1", "chosen": "2"}, True, "rows.jsonl:2: no field 'rejected'; found ['chosen', 'prompt']"),
        (
            {"chosen": "2", "rejected": "3"},
            True,
            "rows.jsonl:2: no field 'prompt'; found ['chosen', 'rejected']; add it, or set data.prompt_field to its "
            "name here; only messages may begin with the prompt in 'chosen' and 'rejected'",
        ),
        ({**PAIR, "prompt": ""}, True, "rows.jsonl:2: field 'prompt' is empty"),
        ({**PAIR, "chosen": 2}, True, "rows.jsonl:2: field 'chosen': expected text, found 2"),
        ({**PAIR, "chosen": "12"}, True, "rows.jsonl:2: fields 'chosen' and 'rejected' are the same text"),
        ({**PAIR, "margin": "1"}, True, "rows.jsonl:2: field 'margin': expected a finite number, found '1'"),
        ({**PAIR, "margin": True}, True, "rows.jsonl:2: field 'margin': expected a finite number, found True"),
        ({**PAIR, "margin": float("nan")}, True, "rows.jsonl:2: field 'margin': expected a finite number, found nan"),
        ({"prompt": "1", "completion": "2", "wanted": True}, True, "rows.jsonl:2: no field 'chosen'"),
        ({"prompt": "1"}, False, "rows.jsonl:2: neither field 'completion' nor 'chosen'; found ['prompt']"),
        ({"prompt": "1", "completion": "2"}, False, "rows.jsonl:2: field 'wanted': expected true or false, found None"),
        ({"prompt": "1", "completion": "2", "wanted": 1}, False, "'wanted': expected true or false, found 1"),
        ({**PAIR, "completion": "2"}, False, "rows.jsonl:2: has field 'completion' and 'chosen'"),
        ([1], False, "rows.jsonl:2: expected a JSON object, found list"),
    ],
)
def test_bad_row_is_named_by_file_and_line(tmp_path, row, is_paired, says):
    path = write(tmp_path / "rows.jsonl", PAIR, row)
    with pytest.raises(DataError) as caught:
        examples_of_file(path, DATA, "pairs" if is_paired else "preferences")
    assert says in str(caught.value)


def test_responses_end_and_fit_exactly_or_are_named(tokenizer):
    responses = (Judged("2", True), Judged("123", False))
    example = Example(prompt="1+1=", answer="2", responses=responses, margin=0.5, place="f:1")
    prompt = (tokenizer.bos_id, *tokenizer.encode("1+1="))
    first, second = encode_responses(example, tokenizer, max_context=9)
    assert first == JudgedResponse(prompt, (*tokenizer.encode("2"), tokenizer.eos_id), True, 0.5)
    assert second == JudgedResponse(prompt, (*tokenizer.encode("123"), tokenizer.eos_id), False, 0.5)
    with pytest.raises(DataError, match=r"f:1: prompt of 5 tokens \+ response of 4 = 9 exceeds model.max_context=8"):
        encode_responses(example, tokenizer, max_context=8)


def test_single_responses_are_compared_in_the_order_of_the_file():
    def response(number, is_wanted):
        return (JudgedResponse((1,), (number,), is_wanted, 0.0),)

    rows = [response(0, True), response(1, False), response(2, False), response(3, True), response(4, True)]
    pairs = pairs_of(rows, "held_out.jsonl")
    assert [(one.tokens, other.tokens) for one, other in pairs] == [((0,), (1,)), ((3,), (2,))]
    whole = (*response(7, True), *response(8, False))
    # Neither of a pair is compared with a single response.
    assert pairs_of([whole, rows[0]], "") == pairs_of([whole, rows[1]], "") == (whole,)
    with pytest.raises(DataError, match=r"held_out.jsonl: holds 1 responses that are wanted and 0 that are not"):
        pairs_of(rows[:1], "held_out.jsonl")


def test_made_up_preferences_have_the_right_answer_and_the_slip(tmp_path):
    train, held_out = make_problems(SPEC, has_preferences=True)
    problems = make_problems(SPEC)
    assert [row["prompt"] for row in train + held_out] == [row["prompt"] for row in problems[0] + problems[1]]
    for row in train + held_out:
        left, right = map(int, row["prompt"].removesuffix("=").split("+"))
        assert (row["chosen"], row["rejected"]) == (str(left + right), str(wrong_carry(left, right)))
    assert [row["solution"] for row in train] == [row["solution"] for row in problems[0]]
    assert len({row["prompt"] for row in train} & {row["prompt"] for row in held_out}) == 0
    paths = tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    ensure_files(SPEC, train=paths[0], held_out=paths[1], has_preferences=True)
    assert len(examples_of_file(paths[0], DATA, "pairs")) == 300
    assert len(examples_of_file(paths[1], DATA, "preferences")) == 2 * 50
    with pytest.raises(DataError, match="is not what data.arithmetic describes"):
        ensure_files(SPEC, train=paths[0], held_out=paths[1])


def test_what_was_preferred_is_part_of_the_data(tmp_path):
    """A run goes on with the same preferences, not only with the same prompts."""

    def sha256(*rows):
        path = write(tmp_path / "rows.jsonl", *rows)
        return GivenProblems(examples=examples_of_file(path, DATA, "pairs"), prompts=(), seed=1).sha256

    first = sha256(PAIR)
    assert first == sha256(PAIR) == sha256({**PAIR, "margin": 0})
    assert len({first, sha256({**PAIR, "rejected": "3"}), sha256({**PAIR, "margin": 1})}) == 3


def test_what_belongs_together_stays_in_one_micro_batch():
    """Pairs of 7, 4, 12 and 3 tokens in batches of 8: the smallest two fit one, the largest has one of its own."""
    lengths = [3, 4, 2, 2, 6, 6, 1, 2]
    assert split_by_tokens(lengths, 8, group_size=2) == [[6, 7, 2, 3], [0, 1], [4, 5]]
    assert split_by_tokens([5, 5], 3, group_size=2) == [[0, 1]]
    assert split_by_tokens([], 3, group_size=2) == []
