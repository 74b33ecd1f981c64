"""Mixtures: a pure function of the prompt index, in proportion over any window, each source in epochs of its own."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.config.data import DataConfig, DataSourceConfig, SpoolConfig, check_data
from hybridflow.data.mixture import source_of, whole_weights
from hybridflow.data.problems import Stores
from hybridflow.errors import ConfigError

WEIGHTS = st.lists(st.integers(1, 50), min_size=1, max_size=6)


def test_weights_are_taken_as_they_are_written():
    assert whole_weights([0.7, 0.3]) == (7, 3)
    assert whole_weights([2, 1, 1e-1]) == (20, 10, 1)
    assert whole_weights([5.0]) == (1,)


def test_three_sources_by_hand():
    """Weights 2, 1, 1: halves (2) and (1, 1) take turns, the second one first, since 1 · 2 / 4 has no whole part."""
    assert [source_of(prompt_index, (2, 1, 1)) for prompt_index in range(8)] == [
        *((2, 0), (0, 0), (1, 0), (0, 1)),
        *((2, 1), (0, 2), (1, 1), (0, 3)),
    ]


@given(WEIGHTS, st.integers(0, 10**9))
def test_rows_of_a_source_are_counted_without_a_gap(weights, first):
    """Each source's count goes up by one with each of its prompts, so its own epochs miss and repeat nothing."""
    last = {}
    for prompt_index in range(first, first + 200):
        source, count = source_of(prompt_index, weights)
        assert count == last.get(source, count - 1) + 1
        last[source] = count


@given(WEIGHTS, st.integers(0, 10**9), st.integers(1, 500))
def test_every_window_has_the_proportion(weights, first, length):
    found = Counter(source_of(prompt_index, weights)[0] for prompt_index in range(first, first + length))
    halvings = (len(weights) - 1).bit_length()
    for source, weight in enumerate(weights):
        assert abs(found[source] - length * weight / sum(weights)) <= 2 * halvings


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(0, 3))
def test_without_weights_all_rows_come_once_in_so_many_draws(sizes, epoch):
    stores, total = Stores([range(size) for size in sizes], [None] * len(sizes), seed=7), sum(sizes)
    found = [stores.place(prompt_index) for prompt_index in range(epoch * total, (epoch + 1) * total)]
    assert sorted(found) == [(source, row) for source, size in enumerate(sizes) for row in range(size)]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (dict(), "data.train: missing; give one of data.train, data.mixture"),
        (dict(train="a", mixture=(DataSourceConfig(path="b"),)), "there are data.train and data.mixture; give one"),
        (dict(train="a", spool=SpoolConfig(path="b")), "there are data.train and data.spool; give one"),
        (
            dict(mixture=(DataSourceConfig(path="a", weight=2.0), DataSourceConfig(path="b"))),
            "some sources have a weight and some",
        ),
    ],
)
def test_data_that_is_nowhere_or_in_two_places(data, says):
    with pytest.raises(ConfigError) as caught:
        check_data(DataConfig(held_out="h", **data))
    assert says in str(caught.value)
