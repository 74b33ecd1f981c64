"""What a run makes of the checkpoints that it finds."""

from types import SimpleNamespace

import pytest

from hybridflow.checkpoint.store import complete_step
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.parallel.coordinator import Coordinator
from hybridflow.recipe.load import load_recipe
from hybridflow.recipe.run_dir import check_new
from hybridflow.sections import to_dict
from hybridflow.trainer.checkpoints import _check_problems, find_resume_point
from hybridflow.trainer.validations import Validations

SETTINGS = ["seed=1", "trainer.global_batch_size=256", "trainer.mini_batch_size=64"]


def test_a_new_run_is_refused_at_once_where_an_earlier_one_has_a_checkpoint(tmp_path):
    check_new(tmp_path)
    (tmp_path / "checkpoints/step_000003.tmp").mkdir(parents=True)
    check_new(tmp_path)
    complete_step(tmp_path, 3, {}, {}, keep_last=1)
    with pytest.raises(ConfigError, match="checkpoint of step 3; add --resume"):
        check_new(tmp_path)


def test_a_new_run_is_refused_within_another_and_around_one(tmp_path):
    """As of a namespace and a run without one that have the same name."""
    run, other = tmp_path / "search-rl", tmp_path / "other"
    for folder in (run, other):
        folder.mkdir()
        check_new(folder)
    (run / "starts.jsonl").touch()
    for folder in (run, other):
        check_new(folder)
    with pytest.raises(ConfigError, match=f"{run} is another run's directory"):
        check_new(run / "grpo")
    with pytest.raises(ConfigError, match=f"{run} is another run's directory"):
        check_new(tmp_path)


def job_of(tmp_path, change=""):
    recipe = load_recipe("quickstart", [f"run_dir={tmp_path}", *SETTINGS, *filter(None, change.split("; "))])
    world = SimpleNamespace(coordinator=lambda ranks: Coordinator(0, (0,), None), rank=0)
    return SimpleNamespace(recipe=recipe, world=world, meshes={"job": SimpleNamespace(ranks=(0,))})


def test_another_recipe_does_not_go_on_from_a_checkpoint(tmp_path):
    complete_step(tmp_path, 3, {"recipe": to_dict(job_of(tmp_path).recipe)}, {}, keep_last=1)
    with pytest.raises(CheckpointError, match="written with seed=1, the recipe now has 2"):
        find_resume_point(job_of(tmp_path, "seed=2"), resume=True)


def test_where_and_how_fast_it_is_computed_may_change(tmp_path):
    complete_step(tmp_path, 3, {"recipe": to_dict(job_of(tmp_path).recipe)}, {}, keep_last=1)
    placement = "cluster.ranks=8; actor.ranks=[0,1,2,3]; critic.ranks=[4,5,6,7]; reference.ranks=[3,2,1,0]"
    checkpoint = find_resume_point(job_of(tmp_path, f"{placement}; actor.optimizer.lr=1e-5"), resume=True).checkpoint
    assert checkpoint is not None and checkpoint.step == 3


def test_keys_that_came_later_say_nothing(tmp_path):
    saved = to_dict(job_of(tmp_path).recipe)
    del saved["model"]["qk_norm"]
    saved["model"]["of_old"] = 1
    complete_step(tmp_path, 3, {"recipe": saved}, {}, keep_last=1)
    assert find_resume_point(job_of(tmp_path), resume=True).checkpoint.step == 3


def test_a_start_without_resume_takes_up_nothing_and_each_has_a_name_of_its_own(tmp_path):
    one, other = (find_resume_point(job_of(tmp_path), resume=resume) for resume in (True, False))
    assert one.checkpoint is None and other.checkpoint is None and one.token != other.token


@pytest.mark.parametrize(
    ("known", "says"),
    [
        ({"problems_sha256": "a", "problems_seed": 1}, None),
        ({}, None),
        ({"problems_sha256": "b", "problems_seed": 1}, "holds other problems than when .* found sha256 a, expected b"),
        ({"problems_sha256": "a", "problems_seed": 2}, "in the order of seed=1, and was in that of seed=2 when"),
    ],
)
def test_problems_and_their_order_are_those_of_the_checkpoint(tmp_path, known, says):
    job = job_of(tmp_path)
    job.train = SimpleNamespace(sha256="a", seed=1)
    checkpoint = SimpleNamespace(path=tmp_path, state=known)
    if says is None:
        _check_problems(job, checkpoint)
        return
    with pytest.raises(CheckpointError, match=says):
        _check_problems(job, checkpoint)


@pytest.mark.parametrize(
    ("file", "score"), [("held.jsonl", 0.5), ("./held.jsonl", 0.5), ("HERE/held.jsonl", 0.5), ("a.jsonl", None)]
)
def test_the_best_validation_counts_for_its_own_held_out_file_alone(tmp_path, monkeypatch, file, score):
    monkeypatch.chdir(tmp_path)
    saved = job_of(tmp_path, "data.held_out=held.jsonl")
    state = {"recipe": to_dict(saved.recipe), "validations": {"step": 3, "best_step": 3, "best_score": 0.5}}
    job = job_of(tmp_path, f"data.held_out={file.replace('HERE', str(tmp_path))}")
    found = Validations.of_checkpoint(SimpleNamespace(step=3, state=state), job.recipe)
    assert found.best_score == score


@pytest.mark.parametrize(
    ("before", "after", "best"), [(False, True, (3, 0.25)), (True, True, (2, 0.5)), (False, False, (2, 0.5))]
)
def test_a_best_checkpoint_that_was_not_kept_is_not_the_best(tmp_path, before, after, best):
    saved, job = (job_of(tmp_path, f"trainer.keep_best={str(each).lower()}") for each in (before, after))
    validations = {"step": 3, "score": 0.25, "best_step": 2, "best_score": 0.5, "num_since_best": 1}
    state = {"recipe": to_dict(saved.recipe), "validations": validations}
    found = Validations.of_checkpoint(SimpleNamespace(step=3, state=state), job.recipe)
    assert (found.best_step, found.best_score) == best
