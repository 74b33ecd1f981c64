"""Published RL steps beside what is estimated of them."""

import sys

import pytest
import table_steps
from table_steps import STEPS, difference, estimated_phases, estimated_seconds

from hybridflow.mapping.accuracy import ERRORS
from hybridflow.mapping.sizes import model_size


def mean_difference(*, is_fitted):
    found = [abs(difference(one)) for one in STEPS if one.is_fitted == is_fitted]
    return sum(found) / len(found)


def test_steps_that_were_held_back_are_within_a_fifth_on_average():
    assert sum(not one.is_fitted for one in STEPS) >= 9
    assert mean_difference(is_fitted=False) <= 0.2 and mean_difference(is_fitted=True) <= 0.2


@pytest.mark.parametrize("is_mixture", [False, True])
def test_the_command_tells_the_largest_difference(is_mixture):
    percent, words = ERRORS["step of a mixture" if is_mixture else "step", "h100-sxm"]
    mine = [one for one in STEPS if (model_size(one.model).model.num_experts is not None) == is_mixture]
    number = {7: "seven", 8: "eight"}[len(mine)]
    assert words.startswith(f"{number} GRPO steps")
    assert 100 * max(abs(difference(one)) for one in mine) == pytest.approx(percent, abs=1)


def test_phases_add_up_to_the_step_and_overlap_where_samples_are_made_ahead():
    for one in STEPS:
        generated, scored, learned = estimated_phases(one)
        together = max(generated, scored + learned) if one.is_ahead else generated + scored + learned
        assert estimated_seconds(one) == pytest.approx(together)
        # What was published adds up too: the rest is refit and data.
        assert one.phases is None or 0.85 * one.seconds < sum(one.phases) < one.seconds


def test_layouts_have_the_gpus_that_were_published():
    assert [one.gpus for one in STEPS] == [8, 64, 64, 64, 32, 16, 32, 128, 256, 256, 16, 64, 32, 256, 512]


def test_a_line_for_each_step_and_the_mean_of_those_held_back(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["table_steps.py"])
    table_steps.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(STEPS) + 4
    assert "| 92.8 s |" in lines[7] and lines[-1].startswith("held back: mean difference")
