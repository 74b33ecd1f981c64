"""The best validation so far, and a bar that is put anew."""

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
