"""What a job decides from one step to the next, by hand: what is sampled, learned from, validated and saved."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace

import pytest

from hybridflow.config.trainer import TrainerConfig
from hybridflow.data.problems import StoredProblems
from hybridflow.errors import DataError
from hybridflow.trainer.decisions import Decisions
from hybridflow.trainer.progress import Progress


def decisions(*, reason=None, epochs=1, warmup_steps=0, **trainer):
    """Of 12 samples in a step, in groups of 3, on the only rank of a job; it stops if there is a reason."""
    recipe = SimpleNamespace(
        trainer=TrainerConfig(global_batch_size=12, mini_batch_size=6, **{"steps": 10, **trainer}),
        samples_per_prompt=3,
        loss=SimpleNamespace(epochs=epochs),
        rollout=SimpleNamespace(partial_rollouts=False),
        critic=SimpleNamespace(warmup_steps=warmup_steps),
        cost_critic=None,
    )
    everyone = SimpleNamespace(gather=lambda value, name: [None, value], on_lead=lambda name, work: work())
    world = SimpleNamespace(coordinator=lambda ranks: everyone, rank=0)
    job = SimpleNamespace(recipe=recipe, world=world, train=None)
    stopping = SimpleNamespace(reason=reason, agree=lambda ranks: reason is not None)
    begun = []
    roles = SimpleNamespace(actor=SimpleNamespace(begin_validation=begun.append), begun=begun)
    return Decisions(job, {"job": SimpleNamespace(ranks=(0,))}, roles, Progress(recipe), stopping)


def sampled(found):
    return found and (found["step"], found["first_prompt_index"], found["num_prompts"], found["version"])


def test_a_step_samples_what_comes_next_in_the_data():
    made = decisions(steps=3)
    assert sampled(made.next_step()) == (1, 0, 4, 0)
    made._progress.step, made._progress.next_prompt_index = 2, 9
    assert sampled(made.next_step()) == (3, 9, 4, 2)
    made._progress.step = 3
    assert made.next_step() is None
    made = decisions(patience=2)
    made._progress.validations.num_since_best = 2
    assert made.next_step() is None is decisions(reason="a signal").next_step()
    made = decisions()
    made.shortage = "no prompts have come"
    assert made.next_step() is None


class Coming(StoredProblems):
    """Prompts that come while the job runs: it is asked for some, and answers so."""

    num_rows = None

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    def look(self, prompt_index, since_s, within_s):
        self.asked.append(prompt_index)
        answer = self.answers.pop(0)
        if isinstance(answer, DataError):
            raise answer
        return answer


def test_prompts_that_come_while_the_job_runs_are_waited_for():
    made = decisions(steps=2)
    made._job.train = Coming(False, True)
    assert sampled(made.next_step()) == (1, 0, 4, 0) and made._job.train.asked == [3, 3]
    # Responses to those of the next step begin too, if there is one.
    made._recipe.rollout.partial_rollouts, made._job.train = True, Coming(True, True)
    assert made.next_step() is not None
    made._progress.step, made._progress.next_prompt_index = 1, 4
    assert made.next_step() is not None and made._job.train.asked == [7, 7]
    made._stopping.agree, made._job.train = lambda ranks: True, Coming(False)
    assert made.next_step() is None and made.shortage is None
    made._job.train = Coming(DataError("prompt 7 did not come"))
    assert made.next_step() is None and made.shortage == "prompt 7 did not come"
    # What is short stays so, also where another rank has found it.
    made._job.train = Coming()
    assert made.next_step() is None
    made.shortage, made._everyone.gather = None, lambda value, name: ["of others", value]
    assert made.next_step() is None and made.shortage == "of others"


def test_samples_made_ahead_come_after_those_that_are_there():
    made = decisions(steps=4, max_staleness=2)
    made._progress.step, made._progress.next_prompt_index = 1, 4
    # Steps 2 and 3 wait; the next is the last.
    assert [sampled(each) for each in made._fill_steps()] == [(2, 4, 4, 1), (3, 8, 4, 1), None]
    assert sampled(made._sampling_ahead()) == (4, 12, 4, 1)
    made._progress.step = 2
    assert made._sampling_ahead() is None


def test_a_warm_start_asks_every_16_steps_whether_to_stop():
    made = decisions()
    made._recipe.warm_start = SimpleNamespace(steps=20)
    # Another rank tells of the loss.
    made._meshes["actor.update"] = SimpleNamespace(ranks=(0, 1), output_ranks=lambda dp: (1,))
    answers = [False, False, False, True]
    made._stopping.agree = lambda ranks: answers.pop(0)
    assert list(made._warm_steps()) == [*({"step": step} for step in range(20)), None] and len(answers) == 2
    assert not made.is_warm_start_cut
    assert list(made._warm_steps()) == [*({"step": step} for step in range(16)), None] and made.is_warm_start_cut
    made._recipe.warm_start = None
    assert list(made._warm_steps()) == [None]


def test_a_step_has_the_rollouts_that_its_groups_ask_for():
    made, asked = decisions(), []

    def turns(first_prompt_index, num_prompts, share):
        asked.append((first_prompt_index, num_prompts))
        yield {"number": 1}
        if len(asked) == 3:
            raise DataError("too few groups")

    made._roles.groups = SimpleNamespace(turns=turns)
    found = made._rollout_turns()
    made._progress.next_prompt_index = 7
    assert list(islice(found, 2)) == [{"number": 1}, None]
    # A program says itself where it goes on.
    made.first_prompt_index = 20
    assert list(islice(found, 2)) == [{"number": 1}, None] and made.shortage is None
    assert list(islice(found, 2)) == [{"number": 1}, None] and made.shortage == "too few groups"
    assert list(islice(found, 1)) == [None], "prompts are short"
    assert asked == [(7, 4), (20, 4), (20, 4), (20, 4)]


def test_a_batch_is_learned_from_in_mini_batches_by_the_actor_once_it_learns():
    made = decisions(epochs=2, warmup_steps=1)
    batch = [{"epoch": epoch, "index": index} for epoch in (0, 1) for index in (0, 1)]
    assert list(islice(made._mini_batches(), 10)) == [*batch, None] * 2
    turns = made._actor_mini_batches()
    assert next(turns) is None, "in the first step critics learn alone"
    made._progress.step = 1
    assert list(islice(turns, 10)) == [*batch, None] * 2


@pytest.mark.parametrize(("every", "due"), [(0, [6]), (2, [2, 4, 6]), (4, [4, 6])])
def test_validations_are_due_after_so_many_steps_and_at_the_end(every, due):
    made, found = decisions(steps=6, validate_every=every), []
    for made._progress.step in range(6):
        if made._is_validation_due():
            found.append(made._progress.step + 1)
    assert found == made._roles.begun == due
    stopped = decisions(steps=6, validate_every=1, reason="a signal")
    assert not stopped._is_validation_due() and stopped._roles.begun == []


def test_a_validation_that_a_stop_came_before_is_missed():
    made = decisions(validate_every=2)
    made._progress.step = 2
    assert made.has_missed_validation
    made._progress.validations.take(2, 0.5)
    assert not made.has_missed_validation
    made._progress.step = 3
    assert not made.has_missed_validation


def test_a_step_is_saved_where_it_is_due_the_best_or_the_last():
    def is_saved(step, reason=None, best=None, num_since_best=0, is_overdue=False, **trainer):
        made = decisions(reason=reason, **trainer)
        progress = made._progress
        progress.step, progress.is_save_overdue = step, is_overdue
        progress.validations.best_step, progress.validations.num_since_best = best, num_since_best
        return made._is_save_due()

    assert [step for step in range(1, 11) if is_saved(step, save_every=4)] == [4, 8, 10]
    assert [step for step in range(1, 11) if is_saved(step, save_every=0)] == [10]
    assert is_saved(3, save_every=0, reason="a signal") and is_saved(3, save_every=0, patience=2, num_since_best=2)
    assert is_saved(3, save_every=0, keep_best=True, best=3)
    assert not is_saved(3, save_every=0, keep_best=True, best=2) and not is_saved(3, save_every=0, best=3)
    # Without a number of steps the time counts.
    assert is_saved(3, is_overdue=True) and not is_saved(3) and not is_saved(3, is_overdue=True, save_every=4)
