"""What many numbers are like, held against numpy; and that it does not matter which rank told which of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.observe.distribution import measure_distributions, quantile
from hybridflow.trainer.step_metrics import DISTRIBUTIONS, Share, step_metrics

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


@given(NUMBERS, st.floats(0, 1))
def test_a_quantile_is_numpys(numbers: list[float], share: float):
    assert quantile(sorted(numbers), share) == pytest.approx(np.quantile(numbers, share), rel=1e-9, abs=1e-6)


@given(NUMBERS)
def test_measures_are_numpys(numbers: list[float]):
    asked = {
        name: ("it", name) for name in ("mean", "std", "min", "max", "min_share", "max_share", "p10", "p50", "p99")
    }
    found = measure_distributions({"it": numbers}, asked)
    array = np.array(numbers)
    expected = [array.mean(), array.std(), array.min(), array.max()]
    expected += [(array == array.min()).mean(), (array == array.max()).mean()]
    expected += [np.quantile(array, share) for share in (0.1, 0.5, 0.99)]
    assert list(found) == list(asked) and list(found.values()) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_by_hand():
    # Of 1, 2, 3, 10 the place of p90 is 2.7: 3 + 0.7 · 7; the mean is 4, squares of what lies beside it 9, 4, 1, 36.
    asked = {"p90": ("it", "p90"), "std": ("it", "std"), "max_share": ("it", "max_share")}
    found = measure_distributions({"it": [10, 1, 3, 2], "nothing": []}, {**asked, "none": ("nothing", "p50")})
    assert found == pytest.approx({"p90": 7.9, "std": math.sqrt(12.5), "max_share": 0.25})


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-10, 10)), min_size=1, max_size=30))
def test_it_does_not_matter_who_tells(numbers: list[tuple[int, float]]):
    """Of ranks with unequal shares means of quantiles would be something else."""
    metrics = {"batch/num_tokens": 1.0}
    parts = [[number for rank, number in numbers if rank == each] for each in range(4)]
    found = step_metrics([Share(metrics, sample_stats={"reward": part, "latency_s": part}) for part in parts], 1.0)
    whole = [number for _, number in numbers]
    expected = measure_distributions({"reward": whole, "latency_s": whole}, DISTRIBUTIONS)
    assert {name: found[name] for name in expected} == expected and "rollout/latency_p99_s" in expected
