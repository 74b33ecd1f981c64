"""What programs give ``HybridActor``: rows with padding, labels, and the arguments of ``generate``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.api.generation import generation_of
from hybridflow.api.token_rows import IGNORED, labelled, token_rows
from hybridflow.errors import DataError
from hybridflow.families.assets import CONFIG, GENERATION, Ends, ends_in
from tests.support.complaints import complains

VOCAB = 20
ROWS = st.lists(st.tuples(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5), st.integers(0, 3)), min_size=1)


@given(rows=ROWS, is_left=st.booleans())
def test_padding_comes_and_goes(rows: list[tuple[list[int], int]], is_left: bool) -> None:
    width = max(len(tokens) for tokens, _ in rows) + 1
    ids, mask = [], []
    for tokens, filler in rows:
        padding = [filler] * (width - len(tokens))
        ids.append(padding + tokens if is_left else tokens + padding)
        kept, left_out = [1] * len(tokens), [0] * len(padding)
        mask.append(left_out + kept if is_left else kept + left_out)
    found = token_rows(ids, mask, vocab_size=VOCAB, most_tokens=5)
    assert [each.tolist() for each in found.sequences] == [tokens for tokens, _ in rows]
    again = found.side_by_side(found.sequences, fill=-1)
    assert again.tolist() == torch.where(torch.tensor(mask).bool(), torch.tensor(ids), -1).tolist()
    labels = labelled(found, ids, vocab_size=VOCAB, is_needed=False)
    assert [row.tolist() for row in labels.labels] == [tokens[1:] for tokens, _ in rows]
    assert labels.num_labels == sum(len(tokens) - 1 for tokens, _ in rows)


def test_one_row_alone() -> None:
    found = token_rows([3, 4, 5], None, vocab_size=VOCAB, most_tokens=3)
    assert found.padded.tolist() == [[3, 4, 5]] and found.starts == [0]


@pytest.mark.parametrize(
    ("ids", "mask", "words"),
    [
        ([[1, 2]], [[1]], "attention_mask of shape [1, 1]"),
        ([[1, 2]], [[0, 0]], "input_ids[0]: no token"),
        ([[1, 2, 3]], [[1, 0, 1]], "attention_mask[0]: has 0 between tokens"),
        ([[1, 2, 3, 4]], None, "input_ids[0]: 4 tokens; at most 3"),
        ([[1, VOCAB]], None, f"token {VOCAB}; the model knows 0 to {VOCAB - 1}"),
        ([[1, -1]], None, "token -1"),
        ([[1.0]], None, "torch.float32"),
        ([], None, "of shape"),
        ([[1, 2], [3]], None, "give ids [rows, tokens]"),
        ("1+1=", None, "give ids [rows, tokens]"),
        (torch.zeros(1, 1, 1, dtype=torch.int64), None, "of shape [1, 1, 1]"),
    ],
)
def test_rows_refused(ids: Any, mask: Any, words: str) -> None:
    complains(lambda: token_rows(ids, mask, vocab_size=VOCAB, most_tokens=3), [words], DataError)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([[1, 2]], "labels of shape [1, 2]"),
        ([[IGNORED] * 3, [5, IGNORED, 7]], "there is no loss"),
        ([[IGNORED] * 3, [5, -1, 7]], "labels[1][1]: -1"),
        ([[IGNORED] * 3, [5, VOCAB, 7]], f"labels[1][1]: {VOCAB}"),
    ],
)
def test_labels_refused(labels: Any, words: str) -> None:
    rows = token_rows([[1, 2, 3], [4, 5, 6]], [[1, 1, 1], [1, 1, 0]], vocab_size=VOCAB, most_tokens=3)
    complains(lambda: labelled(rows, labels, vocab_size=VOCAB), [words], DataError)


ENDS = Ends((0, 3), 2)


def test_greedy_unless_asked() -> None:
    found = generation_of({"max_length": 12, "temperature": 0.0, "top_k": 5}, ENDS, longest_prompt=4)
    assert found.params.greedy and found.params.max_new_tokens == 8 and found.params.top_k == 0
    assert found.params.stop_ids == (0, 3) and (found.num_samples, found.pad_id) == (1, 2)


@pytest.mark.parametrize(("fewest", "expected"), [(0, 0), (5, 6), (8, 8)])
def test_fewest_tokens_are_counted_without_the_one_that_stops(fewest: int, expected: int) -> None:
    found = generation_of({"max_new_tokens": 8, "min_new_tokens": fewest}, ENDS, longest_prompt=4)
    assert found.params.min_new_tokens == expected


def test_sampling() -> None:
    asked = {
        "max_new_tokens": 3,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "num_return_sequences": 4,
        "eos_token_id": 7,
        "pad_token_id": 0,
        "stop_strings": "=",
        "bad_words_ids": [[4], [5, 6]],
        "seed": 9,
        "use_cache": True,
        "token_type_ids": None,
    }
    found = generation_of(asked, ENDS, longest_prompt=4)
    params = found.params
    assert not params.greedy and (params.temperature, params.top_p, params.seed) == (0.7, 0.9, 9)
    assert (params.stop_ids, params.stop, params.bad_ids) == ((7,), ("=",), ((4,), (5, 6)))
    assert (found.num_samples, found.pad_id) == (4, 0)
    assert generation_of({"max_new_tokens": 1, "eos_token_id": [8, 9]}, Ends((), None), longest_prompt=1).pad_id == 8
    assert generation_of({"max_new_tokens": 1}, Ends((), None), longest_prompt=1).pad_id == 0


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, "give max_new_tokens"),
        ({"max_length": 4}, "max_length=4"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 4, "num_beams": 2}, "num_return_sequences"),
        ({"max_new_tokens": 4, "temprature": 1.0}, "did you mean temperature?"),
        ({"max_new_tokens": 4, "num_return_sequences": 2}, "do_sample=True"),
        ({"max_new_tokens": 4, "num_return_sequences": 0}, "give 1 or more"),
        ({"max_new_tokens": 4, "do_sample": True, "temperature": 0}, "do_sample=False"),
        ({"max_new_tokens": 4, "do_sample": True, "top_p": 0.0}, "top_p"),
    ],
)
def test_arguments_refused(asked: dict[str, Any], words: str) -> None:
    complains(lambda: generation_of(asked, ENDS, longest_prompt=4), [words], DataError)


def test_ends() -> None:
    config, generation = b'{"eos_token_id": 1, "pad_token_id": 4}', b'{"eos_token_id": [2, 3], "pad_token_id": null}'
    assert ends_in({CONFIG: config, GENERATION: generation}) == Ends((2, 3), 4)
    assert ends_in({CONFIG: config}) == Ends((1,), 4) and ends_in({}) == Ends((), None)
