"""What a run says at its end."""

import pytest

from hybridflow.recipe.load import load_recipe
from hybridflow.trainer.banner import farewell


@pytest.mark.parametrize(("steps", "words"), [(1, "done: 1 step in 2 s"), (2000, "done: 2,000 steps in 2 s")])
def test_the_end_counts_steps(steps, words):
    recipe = load_recipe("quickstart", ["run_dir=runs/x"])
    assert farewell(recipe, {"steps": steps}, saved_step=None, seconds=2.0).splitlines()[0] == words
