"""The best validation so far, and a bar that is put anew."""

from types import SimpleNamespace

import pytest

from hybridflow.trainer.validations import Validations


def test_the_first_of_equals_is_the_best():
    found = Validations()
    for step, score in ((0, 0.25), (2, 0.5), (4, 0.5), (6, 0.25)):
        found.take(step, score)
    assert found == Validations(step=6, score=0.25, best_step=2, best_score=0.5, num_since_best=2)


def test_the_least_loss_is_the_best():
    found = Validations()
    for step, loss in ((0, 2.5), (2, 1.5), (4, 1.5), (6, 1.75)):
        found.take(step, loss, result="loss")
    assert found == Validations(step=6, score=1.75, result="loss", best_step=2, best_score=1.5, num_since_best=2)


def test_a_restart_keeps_the_last_validation_as_the_best_where_its_checkpoint_is_there():
    found = Validations(step=6, score=0.25, best_step=2, best_score=0.5, num_since_best=2)
    found.restart(6)
    assert found == Validations(step=6, score=0.25, best_step=6, best_score=0.25, num_since_best=0)
    found.restart(7)
    assert found == Validations(step=6, score=0.25)
    found.take(8, 0.125)
    assert (found.best_step, found.best_score) == (8, 0.125)


@pytest.mark.parametrize(
    ("saved", "scores_held_out", "is_kept"),
    [
        ({"result": "loss"}, False, True),
        ({"result": "score"}, True, True),
        ({"result": "score"}, False, False),
        # As an earlier version wrote it.
        ({"is_accuracy": True}, False, False),
        ({"is_accuracy": True}, True, True),
    ],
)
def test_a_checkpoint_with_a_score_has_no_best_for_losses(saved, scores_held_out, is_kept):
    known = {"step": 6, "score": 0.25, "best_step": 2, "best_score": 0.5, "num_since_best": 2}
    trainer = {"num_validation": None, "keep_best": False}
    recipe = {"data": {"held_out": "h.jsonl"}, "trainer": trainer}
    checkpoint = SimpleNamespace(step=6, state={"validations": known | saved, "recipe": recipe})
    now = SimpleNamespace(
        data=SimpleNamespace(held_out="h.jsonl"),
        trainer=SimpleNamespace(**trainer),
        traits=SimpleNamespace(imitates=True),
        scores_held_out=scores_held_out,
    )
    assert Validations.of_checkpoint(checkpoint, now).best_step == (2 if is_kept else None)
