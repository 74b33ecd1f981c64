"""Rows to train on from an archive's samples, by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.data import DataConfig
from hybridflow.data.chat import is_plain
from hybridflow.data.pieces import train_tokenizer
from hybridflow.data.prompts import encode_solution
from hybridflow.data.shaping import Shape, ends_of, read_examples
from hybridflow.data.tokenizer import open_tokenizer, start_of
from hybridflow.errors import ConfigError, DataError
from hybridflow.rollout.archive import Archived
from hybridflow.rollout.export import Export, as_lines
from hybridflow.rollout.request import OBSERVED
from tests.support.row_files import examples_of_file


class Letters:
    """A tokenizer whose tokens are characters; 1 begins a sequence, 2 ends it, 3 is a mark that no text has."""

    path, vocab_size, eos_id, stop_ids, pad_id, bos_id = Path("letters"), 0x110000, 2, (2,), 0, 1

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(each) for each in ids if each > 3)

    def pieces(self) -> dict[int, str]:
        return {}

    def special_id(self, name: str) -> int | None:
        return None


def sample(
    step: int, prompt_index: int, index: int, text: str, score: float, prompt: str = "", finish: str = "stop"
) -> Archived:
    tokens = [ord(letter) for letter in text] + [2] * (finish == "stop")
    return Archived(
        step=step,
        prompt_index=prompt_index,
        index=index,
        finish=finish,
        score=score,
        prompt=[1, *map(ord, prompt or f"p{prompt_index}")],
        response=tokens,
        log_probs=[0.0] * len(tokens),
        versions=[0] * len(tokens),
        sampled_log_probs=[0.0] * len(tokens),
    )


SAMPLES = [
    sample(1, 0, 0, "bad", 0.0),
    sample(1, 0, 1, "good", 1.0),
    sample(1, 0, 2, "cut", 2.0, finish="length"),
    sample(1, 1, 0, "same", 0.5),
    sample(1, 1, 1, "equal", 0.5),
    sample(1, 1, 2, "unknown", math.nan),
    # The second epoch has the first prompt once more.
    sample(2, 2, 0, "better", 1.0, prompt="p0"),
    sample(2, 2, 1, "worst", -1.0, prompt="p0"),
]


def exported(kind: str, min_score: float | None = None) -> tuple[list[dict[str, Any]], dict[str, int]]:
    export = Export(kind, Letters(), min_score)
    rows = export.rows(SAMPLES)
    return [json.loads(line) for line in as_lines(rows)], dict(export.left_out)


def test_of_each_prompt_the_best_is_imitated():
    rows, left_out = exported("sft")
    assert [(row["prompt"], row["answer"], row["score"], row["step"]) for row in rows] == [
        ("p0", "better", 1.0, 2),
        ("p1", "same", 0.5, 1),
    ]
    assert left_out == {"cut at the most tokens": 1, "without a score": 1}
    rows, left_out = exported("sft", 0.6)
    assert [row["prompt"] for row in rows] == ["p0"] and left_out["prompts whose best is below --min-score"] == 1


def test_of_each_group_the_best_and_the_worst_are_a_pair():
    rows, left_out = exported("dpo")
    assert [(row["chosen"], row["rejected"], row["margin"], row["prompt_index"]) for row in rows] == [
        ("good", "bad", 1.0, 0),
        ("better", "worst", 2.0, 2),
    ]
    assert left_out["groups in which nothing is better than the rest"] == 1


def test_every_response_is_wanted_or_not():
    rows, _ = exported("kto", 0.5)
    assert [(row["completion"], row["wanted"]) for row in rows] == [
        *(("bad", False), ("good", True), ("same", True), ("equal", True), ("better", True), ("worst", False)),
    ]
    with pytest.raises(ConfigError, match="--min-score"):
        Export("kto", Letters())


def test_what_ended_a_response_is_no_part_of_its_row():
    samples = [sample(1, 0, 0, "4\nProblem:", 1.0), sample(1, 0, 1, "5. Problem: 1+1", 0.0)]
    # The first ends with the token that completes the stop text, the second with an end that has a text of its own.
    samples[0].response.pop()
    samples[1].response[-1] = ord("E")
    letters = Letters()
    letters.stop_ids = (2, ord("E"))
    for kind, texts in (("sft", ["4"]), ("dpo", ["4", "5. Problem: 1+1"]), ("kto", ["4", "5. Problem: 1+1"])):
        rows = Export(kind, letters, 0.5, stop=["\nProblem:"]).rows(samples)
        names = ("answer", "chosen", "rejected", "completion")
        assert [row[name] for row in rows for name in names if name in row] == texts


def test_training_reads_the_rows(tmp_path: Path):
    path, data = tmp_path / "rows.jsonl", DataConfig(train="a", held_out="b")
    for kind, read_as in (("sft", "problems"), ("dpo", "pairs"), ("kto", "preferences")):
        path.write_bytes(b"".join(as_lines(Export(kind, Letters(), 0.5).rows(SAMPLES))))
        found = examples_of_file(path, data, read_as)
        if kind == "sft":
            assert [each.answer for each in found] == ["better", "same"]
        else:
            assert [each.margin for each in found] == ([1.0, 2.0] if kind == "dpo" else [0.0] * 6)


def test_a_conversation_with_an_environment_is_no_pair_and_no_verdict():
    talk = sample(1, 5, 0, "ask;heard", 3.0)
    talk = talk._replace(versions=[0] * 4 + [-1] * 5 + [0])
    for kind in ("dpo", "kto"):
        export = Export(kind, Letters(), 0.5, has_environment=True)
        assert "heard" not in str(export.rows([*SAMPLES, talk]))
        assert export.left_out["conversations with an environment, which only --as sft gives"] == 1


STOP = ("+=", "<user>")
"""A text, and the name of a token, that end a response beside the tokenizer's own."""
# What is written and observed; a number is the id of the token behind a text.
TALKS: dict[str, list[tuple[str, list[tuple[str, int]]]]] = {
    "turns": [("written", [("1+2", 0)]), ("observed", [("45+6", -1)]), ("written", [("3", 0)])],
    "observed first": [
        ("observed", [("8", -1)]),
        ("written", [("3", 0)]),
        ("observed", [("9", -1)]),
        ("written", [("", 0)]),
    ],
    "nothing observed": [("written", [("1+2", 0), ("3", 0), ("", 0), ("45", 0)])],
    "a text that ends": [("written", [("1+=", -1)]), ("observed", [("45", -1)]), ("written", [("6+=", -1)])],
    "a token that ends": [("written", [("1", 40)]), ("observed", [("<user>45", -1)]), ("written", [("6", 2)])],
    "one turn": [("written", [("1+2", 0)])],
}


def conversation(tokenizer: Any, parts: list[tuple[str, list[tuple[str, int]]]], score: float = 1.0) -> Archived:
    tokens: list[int] = []
    versions: list[int] = []
    for whose, texts in parts:
        for text, end in texts:
            part = tokenizer.encode(text) + [tokenizer.eos_id if end == 0 else end] * (end >= 0)
            tokens += part
            versions += [OBSERVED if whose == "observed" else 3] * len(part)
    prompt = [*start_of(tokenizer), *tokenizer.encode("1+2=")]
    return sample(1, 0, 0, "", score)._replace(prompt=prompt, response=tokens, versions=versions)


@pytest.fixture(params=["tokenizer.json", "tokenizer.model"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """One that parses the names of its special tokens, and has two that end a response; or one that does not."""
    if request.param == "tokenizer.model":
        return train_tokenizer(["1+2=3+45=67+8+9=="], path=tmp_path / request.param, vocab_size=64)
    pytest.importorskip("transformers")
    from tests.support.hf_models import write_tokenizer

    write_tokenizer(tmp_path, has_start=True, more=["<user>"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    return open_tokenizer(tmp_path)


@pytest.mark.parametrize("case", TALKS)
def test_training_reads_a_conversation_as_the_tokens_and_the_mask_that_it_had(tokenizer, case, tmp_path):
    if case == "a token that ends" and tokenizer.path.suffix == ".model":
        pytest.skip("it has one token that ends a response")
    talk = conversation(tokenizer, TALKS[case])
    (row,) = Export("sft", tokenizer, 0.5, STOP, has_environment=True).rows([talk])
    (tmp_path / "rows.jsonl").write_bytes(b"".join(as_lines([row])))
    data = DataConfig(train=str(tmp_path / "rows.jsonl"))
    lengths = {"max_context": 64, "max_new_tokens": 1}
    of = {"kind": "problems", "is_imitating": True, "needs_answer": False, "tokenizer": str(tokenizer.path)}
    shape = Shape(data=data, stop=STOP, **of, **lengths)
    (example,) = read_examples(data.sources[0], shape)
    found = encode_solution(example, tokenizer, max_context=64, ends=ends_of(example, shape, tokenizer))
    assert [*found.prompt, *found.tokens] == talk.prompt + talk.response
    mask = [False] * len(talk.prompt) + [version != OBSERVED for version in talk.versions]
    assert [False] * len(found.prompt) + [*found.is_written] == mask


def test_a_conversation_of_which_no_text_has_the_tokens_is_left_out(tokenizer):
    kept = conversation(tokenizer, TALKS["turns"], score=0.5)
    pair = next(text for text in tokenizer.pieces().values() if len(text) == 2 and tokenizer.encode(text[0] * 2))
    # Of two tokens that are one in the text; and with a text that ends no response where it is not named.
    tokens = [*tokenizer.encode(pair[0]), *tokenizer.encode(pair[1]), tokenizer.eos_id]
    split = kept._replace(response=tokens, versions=[3] * len(tokens), score=2.0)
    lone = conversation(tokenizer, TALKS["a text that ends"])
    export = Export("sft", tokenizer, 0.5, has_environment=True)
    (row,) = export.rows([kept, split, lone])
    assert len(tokenizer.encode(pair)) == 1 and row["score"] == 0.5, "the best of those that are read as they were"
    assert export.left_out == {"conversations whose texts would be read as other tokens": 2}


def test_what_gives_no_row_is_told():
    with pytest.raises(DataError, match="no sample gives a row for --as dpo: 1 groups in which nothing is better"):
        Export("dpo", Letters()).rows(SAMPLES[3:5])
    with pytest.raises(DataError, match="step 1, prompt 0: the prompt 'p0' would be read as other tokens"):
        Export("sft", Letters()).rows([SAMPLES[0]._replace(prompt=[1, 3, *map(ord, "p0")])])


@pytest.mark.parametrize("has_start", [False, True])
def test_a_prompt_that_a_chat_template_rendered_has_its_marks(tmp_path, has_start):
    pytest.importorskip("transformers")
    from tests.support.hf_models import END, PAD, write_tokenizer

    write_tokenizer(tmp_path, has_start=has_start, more=["<user>"])
    tokenizer = open_tokenizer(tmp_path)
    prompt = f"<user>12+34={END}{PAD}5 <user>"
    asked = SAMPLES[0]._replace(prompt=[*start_of(tokenizer), *tokenizer.encode(prompt)], response=[tokenizer.eos_id])
    (row,) = Export("sft", tokenizer).rows([asked])
    assert row["prompt"] == prompt
    assert not is_plain("12", False, tokenizer), "there is no template"
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": "{{ messages }}"}))
    assert [is_plain(*given, tokenizer) for given in (("12", False), ("12", True), (prompt, False))] == [
        True,
        False,
        False,
    ]
