"""What was learned from archived samples: found by sample, one file for each stretch, gone where a run goes back."""

import numpy as np
import pytest

from hybridflow.data.arrays import read_arrays
from hybridflow.recipe.load import load_recipe
from hybridflow.rollout.learned import Learned, LearnedIndex, drop_learned, merge_learned, write_learned
from hybridflow.trainer.plan import training_step


def learned(value, length):
    return Learned(np.full(length, value, np.float32), np.full(length, -value, np.float32))


def write(folder, steps=(1, 2, 3), rank=0):
    """Two samples a step, of lengths 2 and 0, and of the next step's number."""
    for step in steps:
        rows = [(10 * step, 0, learned(step, 2)), (10 * step, 1, learned(0.0, 0)), (10 * step, 2, learned(-step, 1))]
        write_learned(folder, step, rank, rows)


def files(folder):
    return sorted(path.name for path in (folder / "learned").iterdir())


def found(folder, *keys):
    known = LearnedIndex(folder, {step for step, *_ in keys}).find(keys)
    return {key: (got.advantages.tolist(), got.old_log_probs.tolist()) for key, got in known.items()}


@pytest.mark.parametrize("is_merged", [False, True])
def test_what_was_learned_is_found_by_sample(tmp_path, is_merged):
    write(tmp_path)
    if is_merged:
        merge_learned(tmp_path, 0, 3)
        assert files(tmp_path) == ["step-000001-000003-rank-00000.h5"]
    keys = (2, 20, 0), (3, 30, 1), (3, 30, 2), (4, 40, 0)
    assert found(tmp_path, *keys) == {
        (2, 20, 0): ([2, 2], [-2, -2]),
        (3, 30, 1): ([], []),
        (3, 30, 2): ([-3], [3]),
    }


def test_only_a_rank_s_own_files_up_to_the_checkpoint_are_merged(tmp_path):
    write(tmp_path)
    write(tmp_path, (1, 2), rank=1)
    merge_learned(tmp_path, 0, 2)
    names = ("000001-000001-rank-00001", "000001-000002-rank-00000", "000002-000002-rank-00001")
    assert files(tmp_path) == [f"step-{name}.h5" for name in (*names, "000003-000003-rank-00000")]


def test_a_merge_that_was_killed_is_done_again_without_doubling(tmp_path):
    write(tmp_path, (1, 2))
    merge_learned(tmp_path, 0, 2)
    write(tmp_path, (2, 3, 4))  # step 2 is in both files
    merge_learned(tmp_path, 0, 4)
    assert files(tmp_path) == ["step-000001-000002-rank-00000.h5", "step-000003-000004-rank-00000.h5"]
    merge_learned(tmp_path, 0, 4)
    assert len(files(tmp_path)) == 2 and len(found(tmp_path, (1, 10, 0), (4, 40, 2))) == 2


def test_one_step_stays_as_it_is(tmp_path):
    write(tmp_path, (1,))
    merge_learned(tmp_path, 0, 1)
    assert found(tmp_path, (1, 10, 0)) == {(1, 10, 0): ([1, 1], [-1, -1])}


@pytest.mark.parametrize("after, left", [(None, []), (0, []), (2, ["step-000001-000002-rank-00000.h5"])])
def test_what_comes_after_a_checkpoint_is_dropped(tmp_path, after, left):
    write(tmp_path, (1, 2))
    merge_learned(tmp_path, 0, 2)
    write(tmp_path, (3,))
    (tmp_path / "learned/.step-000004-000004-rank-00000.h5.tmp").touch()
    drop_learned(tmp_path, after=after)
    assert files(tmp_path) == left


def test_nothing_is_written_of_no_token(tmp_path):
    write_learned(tmp_path, 1, 0, [(1, 0, learned(0.0, 0))])
    assert found(tmp_path, (1, 1, 0)) == {} and not (tmp_path / "learned").exists()


@pytest.mark.parametrize("archive, epochs, is_read", [("true", 2, True), ("false", 2, False), ("true", 1, False)])
def test_an_archive_has_the_trainer_s_log_probs_where_a_step_computes_them(archive, epochs, is_read):
    one_update = ["trainer.mini_batch_size=512", f"loss.epochs={epochs}", f"rollout.archive={archive}"]
    step = training_step(load_recipe("async", one_update))
    (advantage,) = [node for node in step.flow.nodes() if node.role == "advantage"]
    assert ("old_log_probs" in advantage.reads) == is_read and "ref_log_probs" not in advantage.reads


def test_a_list_of_samples_is_read_once_and_anew_where_the_run_has_merged_files(tmp_path, monkeypatch):
    write(tmp_path)
    write(tmp_path, rank=1)
    opened = []

    def read(path, *args):
        opened.append(path.name)
        return read_arrays(path, *args)

    monkeypatch.setattr("hybridflow.rollout.learned.read_arrays", read)
    index = LearnedIndex(tmp_path, [1, 3])
    for _ in range(2):
        assert index.find({(3, 30, 2)})[3, 30, 2].advantages.tolist() == [-3]
    assert len(opened) == len(set(opened)) == 4 and index.find({(2, 20, 0)}) == {}
    merge_learned(tmp_path, 0, 3)
    merge_learned(tmp_path, 1, 3)
    assert index.find({(1, 10, 0), (3, 30, 2)}).keys() == {(1, 10, 0), (3, 30, 2)}
