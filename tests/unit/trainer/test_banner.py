"""What a run says at its end."""

import shlex

import pytest

from hybridflow.recipe.load import load_recipe
from hybridflow.reshard.spec import ModelSpec
from hybridflow.trainer.banner import banner, farewell


def test_the_beginning_tells_of_prompts_what_there_is_to_say():
    told = {"device": "CPU", "num_rows": 3, "num_held_out": 1}
    for prompts in (None, "plain text"):
        text = banner(load_recipe("sft"), {}, ModelSpec(tensors=(), num_layers=0), **told, prompts=prompts)
        assert ("\n  prompts  plain text\n" in text) is (prompts is not None)


@pytest.mark.parametrize(("steps", "words"), [(1, "done: 1 step in 2 s"), (2000, "done: 2,000 steps in 2 s")])
def test_the_end_counts_steps(steps, words):
    recipe = load_recipe("quickstart", ["run_dir=runs/x"])
    assert farewell(recipe, {"steps": steps}, saved_step=None, seconds=2.0).splitlines()[0] == words


@pytest.mark.parametrize("keeps", [True, False])
def test_the_end_names_the_best_checkpoint_where_one_is_kept_and_exports_it(keeps):
    recipe = load_recipe("quickstart", ["run_dir=runs/x", f"trainer.keep_best={keeps}", "trainer.patience=3"])
    summary = {"steps": 9, "accuracy_before_rl": 0.25, "accuracy_after_rl": 0.5, "best_step": 6, "best_score": 0.75}
    head, *lines = farewell(recipe, summary, saved_step=9, seconds=2.0).splitlines()
    assert head.startswith("done: 9 steps in 2 s; held-out accuracy 25.0% → 50.0%")
    assert head.endswith("; best 75.0% after step 6") is keeps
    last, best = "runs/x/checkpoints/step_000009", "runs/x/checkpoints/step_000006"
    assert lines[0] == f"  checkpoint  {last}" and (f"  best        {best}" in lines) is keeps
    assert f"  export      hybridflow convert {best if keeps else last}/actor out/x --to hf" in lines


def test_the_command_at_the_end_can_be_copied_from_a_run_directory_with_spaces():
    recipe = load_recipe("quickstart", ["run_dir=runs/it's a/x y"])
    told = farewell(recipe, {"steps": 1}, saved_step=1, seconds=2.0)
    (line,) = [line for line in told.splitlines() if line.startswith("  export")]
    words = ["hybridflow", "convert", "runs/it's a/x y/checkpoints/step_000001/actor", "out/x y", "--to", "hf"]
    assert shlex.split(line)[1:] == words


def test_an_export_does_not_go_into_the_run_directory():
    told = farewell(load_recipe("quickstart", ["run_dir=out/x"]), {"steps": 1}, saved_step=1, seconds=2.0)
    assert "hybridflow convert out/x/checkpoints/step_000001/actor out/x-hf --to hf" in told
