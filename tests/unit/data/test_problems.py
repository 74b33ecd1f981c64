"""Problems, prompts, tokens and their order."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.config.data import ArithmeticConfig, DataConfig
from hybridflow.data.arithmetic import ensure_files, make_problems, wrong_carry
from hybridflow.data.order import permuted
from hybridflow.data.pieces import PieceTokenizer, train_tokenizer
from hybridflow.data.prompts import Example, encode_prompt, encode_solution
from hybridflow.errors import DataError
from hybridflow.rollout.calculator import Calculator
from tests.support.row_files import examples_of_file

ROOT = Path(__file__).parents[3]
DATA = DataConfig(train="train.jsonl", held_out="held_out.jsonl")
SPEC = ArithmeticConfig(num_train=4000, num_held_out=250, mistake_share=0.6)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    lines = (row["prompt"] + row["answer"] for row in make_problems(SPEC)[0])
    return train_tokenizer(lines, path=tmp_path_factory.mktemp("tokenizer") / "arithmetic.model", vocab_size=64)


@given(st.integers(1, 300), st.lists(st.integers(0, 2**64), max_size=3).map(tuple))
def test_permuted_is_a_permutation(size, key):
    assert sorted(permuted(index, size=size, key=key) for index in range(size)) == list(range(size))


def test_every_place_is_equally_likely():
    # 6 000 keys over 6 places of 6 items: 1 000 expected in each cell, standard deviation sqrt(1000 · 5/6) = 29.
    cells = Counter((index, permuted(index, size=6, key=(key,))) for key in range(6000) for index in range(6))
    assert len(cells) == 36 and all(abs(count - 1000) < 5 * 29 for count in cells.values())


def test_order_is_pinned():
    """A resumed run must meet the order of the run before it, whatever the version."""
    assert [permuted(index, size=10, key=(1, 0)) for index in range(10)] == [4, 2, 9, 1, 0, 3, 5, 7, 6, 8]


def test_problems_are_disjoint_and_only_carries_are_wrong():
    train, held_out = make_problems(SPEC)
    assert (len(train), len(held_out)) == (4000, 250)

    def operands(row):
        return [int(number) for number in row["prompt"].removesuffix("=").split("+")]

    pairs = [tuple(sorted(operands(row))) for row in train + held_out]
    assert len(set(pairs)) == 4250
    assert all(row["answer"] == str(sum(operands(row))) for row in train + held_out)
    assert all("solution" not in row for row in held_out)
    wrong = [row for row in train if row["solution"] != row["answer"]]
    for row in wrong:
        has_carry = sum(number % 10 for number in operands(row)) >= 10
        assert int(row["solution"]) == int(row["answer"]) + (-10 if has_carry else 10)
    # Standard deviation of the share: sqrt(0.6 · 0.4 / 4 000) = 0.008.
    assert abs(len(wrong) / len(train) - 0.6) < 0.04
    assert {(left > right) - (left < right) for left, right in map(operands, train)} == {-1, 0, 1}


def test_problems_depend_on_the_specification_alone():
    assert make_problems(SPEC) == make_problems(SPEC)
    other = ArithmeticConfig(num_train=4000, num_held_out=250, mistake_share=0.6, seed=2)
    assert make_problems(SPEC)[1] != make_problems(other)[1]


def test_all_problems_of_small_operands():
    """Operands 0 to 2 make 3 · 4 / 2 = 6 pairs."""
    train, held_out = make_problems(ArithmeticConfig(num_train=5, num_held_out=1, max_operand=2))
    assert sorted(int(row["answer"]) for row in train + held_out) == [0, 1, 2, 2, 3, 4]
    with pytest.raises(DataError, match=r"6 \+ num_held_out=1 = 7 problems.*max_operand=2 make only 6"):
        make_problems(ArithmeticConfig(num_train=6, num_held_out=1, max_operand=2))


def test_wrong_carry():
    assert [wrong_carry(27, 35), wrong_carry(21, 35), wrong_carry(5, 7)] == [52, 66, 2]


def test_files_are_made_once_and_never_silently_kept_when_they_differ(tmp_path):
    spec = ArithmeticConfig(num_train=20, num_held_out=5)
    train, held_out = tmp_path / "new" / "train.jsonl", tmp_path / "held_out.jsonl"
    ensure_files(spec, train=train, held_out=held_out)
    before = train.stat().st_mtime_ns
    ensure_files(spec, train=train, held_out=held_out)
    assert train.stat().st_mtime_ns == before
    assert [path.name for path in train.parent.iterdir()] == ["train.jsonl"]
    with pytest.raises(DataError, match=r"train\.jsonl: is there already.*data\.arithmetic=null"):
        ensure_files(ArithmeticConfig(num_train=20, num_held_out=5, seed=2), train=train, held_out=held_out)


def test_tokenizer_keeps_digits_single_and_round_trips(tokenizer):
    ids = tokenizer.encode("12+34=46")
    assert len(ids) == 8 and tokenizer.decode(ids) == "12+34=46"
    assert tokenizer.vocab_size == 4 + len("0123456789+=")
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    assert tokenizer.decode([1, *ids, 2, 0]) == "12+34=46"
    # A model may have more rows than the tokenizer has tokens, and sample one of them.
    assert tokenizer.decode([*ids[:3], tokenizer.vocab_size, *ids[3:], 10**6]) == "12+34=46"


@given(st.text("0123456789+="))
def test_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_words_and_spaces_survive_the_tokenizer(tmp_path):
    text = " two  and 22 is\tödd "
    words = train_tokenizer([text, "and two"], path=tmp_path / "words.model", vocab_size=64)
    assert words.decode(words.encode(text)) == text


def test_training_a_tokenizer_is_deterministic(tmp_path, tokenizer):
    lines = [row["prompt"] + row["answer"] + "\n" for row in make_problems(SPEC)[0]]
    again = train_tokenizer(lines, path=tmp_path / "again.model", vocab_size=64)
    assert again.path.read_bytes() == tokenizer.path.read_bytes()


@pytest.mark.parametrize(("lines", "vocab_size"), [([], 64), (["abcdefgh"], 5)])
def test_tokenizer_that_cannot_be_trained(tmp_path, lines, vocab_size):
    with pytest.raises(DataError, match=rf"vocab_size={vocab_size}"):
        train_tokenizer(lines, path=tmp_path / "none.model", vocab_size=vocab_size)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        (b"", "is not a sentencepiece model"),
        (b"\x80garbage" * 9, "is not a sentencepiece model"),
    ],
)
def test_tokenizer_that_cannot_be_loaded(tmp_path, content, says):
    path = tmp_path / "bad.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=rf"bad\.model: {says}"):
        PieceTokenizer(path)


def test_truncated_tokenizer(tmp_path, tokenizer):
    path = tmp_path / "cut.model"
    path.write_bytes(tokenizer.path.read_bytes()[:-20])
    with pytest.raises(DataError, match="not a sentencepiece model"):
        PieceTokenizer(path)


def test_rows_are_read_in_order_with_their_place(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"q": "1+1=", "answer": "2", "solution": "3"}\n\n{"q": "2+2=", "answer": "4"}\n')
    with path.open("a") as file:
        file.write('{"q": "3+3=", "answer": "6", "solution": ["[3+3]", "6;", "6"]}\n')
    data = DataConfig(train="", held_out="", prompt_field="q")
    assert examples_of_file(path, data) == (
        Example(prompt="1+1=", answer="2", solution="3", place=f"{path}:1"),
        Example(prompt="2+2=", answer="4", place=f"{path}:3"),
        Example(prompt="3+3=", answer="6", solution=("[3+3]", "6;", "6"), place=f"{path}:4"),
    )


GOOD = b'{"prompt": "1+1=", "answer": "2"}\n'


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\n\n", "rows.jsonl: holds no rows"),
        (GOOD + b'{"prompt": "1", "answer": "\\udc00"}', "rows.jsonl:2: field 'answer': half of a surrogate pair"),
        (GOOD + b'{"prompt": "1", "answer": "2", "solution": 7}', "rows.jsonl:2: field 'solution': expected text"),
        (GOOD + b'{"prompt": "1", "answer": "2", "solution": ["1", "2"]}', "'solution': a list of 2 texts; a conv"),
        (GOOD + b'{"prompt": "1", "answer": "2", "solution": []}', "'solution': a list of 0 texts; a conversation"),
        (GOOD + b'{"prompt": "1", "answer": "2", "solution": [7]}', "field 'solution[0]': expected text, found 7"),
        (GOOD + b'{"prompt": "\\ud800", "answer": "2"}', "rows.jsonl:2: field 'prompt': half of a surrogate pair"),
        (None, "rows.jsonl: cannot be read"),
    ],
)
def test_bad_row_is_named_by_file_and_line(tmp_path, content, says):
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        examples_of_file(path, DATA)
    assert says in str(caught.value)


def test_prompts_fit_exactly_or_are_named(tokenizer):
    example = Example(prompt="10+1=", answer="11", place="f:2")
    prompt = encode_prompt(example, tokenizer, max_new_tokens=4, max_context=10)
    assert prompt == (tokenizer.bos_id, *tokenizer.encode("10+1="))
    with pytest.raises(
        DataError,
        match=r"f:2: prompt of 6 tokens.*=4 = 10 exceeds model.max_context=9; .* to 5 tokens.*max_prompt_tokens=5",
    ):
        encode_prompt(example, tokenizer, max_new_tokens=4, max_context=9)


def test_solutions_end_and_fit_exactly_or_are_named(tokenizer):
    examples = [
        Example(prompt="1+1=", answer="2", place="f:1"),
        Example(prompt="8+8=", answer="16", solution="6", place="f:2"),
    ]
    pairs = [encode_solution(each, tokenizer, max_context=7) for each in examples]
    assert [pair.tokens for pair in pairs] == [(*tokenizer.encode(text), tokenizer.eos_id) for text in ("2", "6")]
    assert all(all(pair.is_written) and len(pair.is_written) == len(pair.tokens) for pair in pairs)
    assert pairs[0].prompt == encode_prompt(examples[0], tokenizer, max_new_tokens=1, max_context=7)
    with pytest.raises(DataError, match=r"f:1: prompt of 5 tokens \+ solution of 2 = 7 exceeds model.max_context=6"):
        encode_solution(examples[0], tokenizer, max_context=6)


def test_a_conversation_to_imitate_has_ends_where_the_policy_ends(tokenizer):
    one = Example(prompt="1+1=", answer="2", solution=("=1+1", "2+", "2"), place="f:1")
    found = encode_solution(one, tokenizer, max_context=20)
    written, observed, last = (tokenizer.encode(text) for text in one.solution)
    assert found.tokens == (*written, tokenizer.eos_id, *observed, *last, tokenizer.eos_id)
    assert found.is_written == (True,) * 5 + (False,) * 2 + (True,) * 2
    # 5 of the prompt, with its beginning, and these 9.
    with pytest.raises(DataError, match=r"solution of 9 = 14 exceeds model.max_context=13"):
        encode_solution(one, tokenizer, max_context=13)


def test_products_of_which_some_ask_the_calculator():
    spec = ArithmeticConfig(num_train=2000, num_held_out=50, operation="multiply", tool_share=0.25)
    train, held_out = make_problems(spec)
    asking = [row for row in train if isinstance(row["solution"], list)]
    # Standard deviation of the share: sqrt(0.25 · 0.75 / 2 000) = 0.01.
    assert abs(len(asking) / len(train) - 0.25) < 0.05
    for row in train + held_out:
        left, right = row["prompt"].removesuffix("=").split("*")
        assert row["answer"] == str(int(left) * int(right))
    for row in asking:
        problem = row["prompt"].removesuffix("=")
        calculator = Calculator()
        calculator.reset(row["prompt"], row["answer"])
        ask, observed, answer = row["solution"]
        assert ask == f"[{problem}]" and calculator.step(ask) == (observed, 0.0, False)
        assert calculator.step(answer)[1:] == (1.0, True)
    assert all(row["solution"] == row["answer"] for row in train if row not in asking)


def test_tool_makes_the_files(tmp_path):
    command = [sys.executable, str(ROOT / "tools/make_arithmetic.py"), "--train", "t.jsonl", "--held-out", "h.jsonl"]
    command += ["--num-train", "9", "--num-held-out", "4"]

    def run(*more):
        return subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True, check=False)

    shown = run("--dry-run")
    assert shown.returncode == 0 and "t.jsonl: 9 problems, not written" in shown.stdout and not list(tmp_path.iterdir())
    assert run().returncode == 0
    assert len((tmp_path / "t.jsonl").read_text().splitlines()) == 9
    assert json.loads((tmp_path / "h.jsonl").read_text().splitlines()[0]).keys() == {"prompt", "answer"}
    refused = run("--mistake-share", "2")
    assert refused.returncode == 2 and "mistake_share: expected a number of at least 0" in refused.stderr
