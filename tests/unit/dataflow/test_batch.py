"""Batches: padding, selection and joining change nothing; a column that does not fit its ids is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.errors import DataError

ROWS = st.lists(st.lists(st.integers(-9, 9), max_size=5), max_size=6)


def batch_of(rows: list[list[int]], first_id: int = 0) -> Batch:
    ids = torch.arange(first_id, first_id + len(rows))
    return Batch(ids, {"tokens": Ragged.from_list(rows, torch.int64), "scores": ids.float() / 2})


def rows_of(batch: Batch) -> list[list[int]]:
    tokens = batch.columns["tokens"]
    assert isinstance(tokens, Ragged)
    return [row.tolist() for row in tokens.to_list()]


@given(ROWS)
def test_rows_survive_joining_and_padding(rows: list[list[int]]) -> None:
    ragged = Ragged.from_list(rows, torch.int64)
    assert [row.tolist() for row in ragged.to_list()] == rows
    padded = ragged.pad(-1)
    assert padded.shape == (len(rows), max((len(row) for row in rows), default=0))
    again = Ragged.from_padded(padded, ragged.lengths)
    assert torch.equal(again.values, ragged.values) and torch.equal(again.lengths, ragged.lengths)


@given(ROWS, st.randoms(use_true_random=False))
def test_selection_takes_rows_in_the_order_asked_for(rows: list[list[int]], random) -> None:
    index = [position for position in range(len(rows)) if random.random() < 0.7]
    random.shuffle(index)
    chosen = batch_of(rows).select(torch.tensor(index, dtype=torch.int64))
    assert rows_of(chosen) == [rows[position] for position in index]
    assert chosen.ids.tolist() == index and chosen.columns["scores"].tolist() == [position / 2 for position in index]


@given(ROWS, ROWS)
@settings(max_examples=30)
def test_concat_then_select_gives_the_parts_back(left: list[list[int]], right: list[list[int]]) -> None:
    whole = Batch.concat([batch_of(left), batch_of(right, first_id=len(left))])
    assert rows_of(whole) == left + right
    assert rows_of(whole.select(torch.arange(len(left), len(whole)))) == right


def test_padding_holds_trailing_dimensions_and_fill() -> None:
    ragged = Ragged(torch.arange(6.0).view(3, 2), torch.tensor([1, 0, 2]))
    assert ragged.pad(-1.0).tolist() == [[[0, 1], [-1, -1]], [[-1, -1], [-1, -1]], [[2, 3], [4, 5]]]


def test_no_samples_keep_their_types() -> None:
    empty = Batch(
        torch.empty(0, dtype=torch.int64),
        {"tokens": Ragged.from_list([], torch.int32), "scores": torch.empty(0, dtype=torch.bfloat16)},
    )
    both = Batch.concat([empty, empty.select(torch.empty(0, dtype=torch.int64))])
    assert len(both) == 0 and both.columns["tokens"].values.dtype == torch.int32
    assert both.columns["scores"].dtype == torch.bfloat16 and both.columns["tokens"].pad(0).shape == (0, 0)


def test_columns_are_added_replaced_and_chosen_by_name() -> None:
    batch = batch_of([[1], [2, 3]]).with_columns({"scores": torch.ones(2), "values": torch.zeros(2)})
    assert list(batch.columns) == ["tokens", "scores", "values"] and batch.columns["scores"].tolist() == [1, 1]
    assert list(batch.only(["values"]).columns) == ["values"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ragged(torch.zeros(3), torch.tensor([1, 1])), r"lengths summing to 2; give values \[total"),
        (lambda: Ragged(torch.zeros(1), torch.tensor([2, -1])), "non-negative"),
        (lambda: Ragged(torch.zeros(1), torch.tensor([1.0])), "give int64"),
        (lambda: Batch(torch.tensor([0, 1]), {"scores": torch.zeros(3)}), "'scores' has 3 rows for 2 samples"),
        (lambda: Batch(torch.tensor([0, 1]), {"scores": [1.0, 2.0]}), "'scores' is list; give a tensor with a row"),
        (lambda: Batch(torch.tensor([0]), {"kl": torch.tensor(1.0)}), "'kl' has None rows"),
        (lambda: Batch(torch.tensor([4, 4]), {}), "only 1 distinct ids"),
        (lambda: Batch(torch.tensor([0.5]), {}), "give int64"),
        (lambda: Batch(torch.tensor([0]), {"scores": torch.zeros(1, device="meta")}), "live in host memory"),
        (lambda: Ragged(torch.zeros(1, device="meta"), torch.tensor([1])), "live in host memory"),
        (lambda: Batch.concat([]), "give at least one"),
        (lambda: Batch.concat([batch_of([[1]]), Batch(torch.tensor([5]), {})]), "give equal columns"),
        (
            lambda: Batch.concat(
                [
                    Batch(torch.tensor([0]), {"a": torch.zeros(1)}),
                    Batch(torch.tensor([1]), {"a": Ragged.from_list([[1]], torch.float32)}),
                ]
            ),
            "dense in one batch and ragged in another",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make()
