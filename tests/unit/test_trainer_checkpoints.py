"""What a run makes of the checkpoints that it finds."""

from types import SimpleNamespace

import pytest

from hybridflow.checkpoint.store import begin_step, complete_step
from hybridflow.config import load_recipe
from hybridflow.errors import CheckpointError
from hybridflow.sections import to_dict
from hybridflow.trainer.checkpoints import check_new, load


def test_a_new_run_is_refused_at_once_where_an_earlier_one_has_a_checkpoint(tmp_path):
    check_new(tmp_path)
    begin_step(tmp_path, 3)
    check_new(tmp_path)
    complete_step(tmp_path, 3, {}, [], keep_last=1)
    with pytest.raises(CheckpointError, match="checkpoint of step 3; add --resume"):
        check_new(tmp_path)


@pytest.mark.parametrize(
    "change, says",
    [
        ("trainer.global_batch_size=128", "written with trainer.global_batch_size=256, the recipe now has 128"),
        ("seed=2", "written with seed=1, the recipe now has 2"),
        ("tokenizer.vocab_size=50", "written with tokenizer="),
        ("cluster.ranks=8 actor.ranks=[0,1,2,3] critic.ranks=[0,1,2,3]", "written with actor="),
    ],
)
def test_another_recipe_does_not_go_on_from_a_checkpoint(tmp_path, change, says):
    settings = [f"run_dir={tmp_path}", "seed=1", "trainer.global_batch_size=256", "trainer.mini_batch_size=64"]
    begin_step(tmp_path, 3)
    complete_step(tmp_path, 3, {"recipe": to_dict(load_recipe("quickstart", settings))}, [], keep_last=1)
    job = SimpleNamespace(recipe=load_recipe("quickstart", [*settings, *change.split()]))
    with pytest.raises(CheckpointError) as caught:
        load(job, {})
    assert says in str(caught.value)
