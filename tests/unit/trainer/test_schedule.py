"""Learning rates, validations and pass@k: constants worked out by hand, and brute force."""

from itertools import combinations
from math import cos, nan, pi
from types import SimpleNamespace

import pytest
import torch

from hybridflow.algorithms.pass_at_k import pass_at_k
from hybridflow.config.roles import OptimizerConfig
from hybridflow.errors import RewardError
from hybridflow.recipe.load import load_recipe
from hybridflow.sampling.validation import measure
from hybridflow.trainer.progress import Progress
from hybridflow.trainer.schedule import learning_rate, learning_rates
from hybridflow.trainer.trainer import Trainer
from hybridflow.trainer.validations import Validations


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (dict(), [1.0] * 6),
        (dict(warmup_steps=4), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        # From 1 at step 1 down by fifths of 0.9 to 0.1 at step 6.
        (dict(schedule="linear", min_lr=0.1), [1.0, 0.82, 0.64, 0.46, 0.28, 0.1]),
        (dict(schedule="linear", warmup_steps=2), [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]),
        # 0.2 + 0.8 · (1 + cos(π · k/4)) / 2 for k = 1 to 4: (1 + √½)/2 = 0.8536, 1/2, (1 − √½)/2 = 0.1464, 0.
        (dict(schedule="cosine", warmup_steps=2, min_lr=0.2), [0.5, 1.0, 0.88284, 0.6, 0.31716, 0.2]),
        (dict(schedule="cosine", warmup_steps=6), [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1.0]),
    ],
)
def test_rate_of_each_step(settings, expected):
    found = [learning_rate(OptimizerConfig(lr=1.0, **settings), step, 6) for step in range(1, 7)]
    assert found == pytest.approx(expected, abs=1e-5)


def test_rate_outside_of_the_ordinary():
    falling = OptimizerConfig(lr=2.0, schedule="cosine", min_lr=0.5)
    assert learning_rate(falling, 1, 1) == 2.0, "one step is the first, not the last"
    assert learning_rate(falling, 9, 6) == 0.5, "a run that was asked for fewer steps"
    assert learning_rate(OptimizerConfig(lr=2.0, schedule="linear", warmup_steps=3, min_lr=0.5), 4, 3) == 0.5
    assert learning_rate(falling, 4, 10) == pytest.approx(0.5 + 1.5 * (1 + cos(pi / 3)) / 2)


@pytest.mark.parametrize(("num_samples", "k"), [(1, 1), (5, 1), (5, 3), (5, 5), (7, 4)])
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(num_samples, k):
    found = pass_at_k(torch.arange(num_samples + 1), num_samples, k)
    for num_right in range(num_samples + 1):
        is_right = [index < num_right for index in range(num_samples)]
        choices = [any(chosen) for chosen in combinations(is_right, k)]
        assert float(found[num_right]) == pytest.approx(sum(choices) / len(choices), abs=1e-12)


def test_the_first_of_equal_validations_is_the_best():
    validations = Validations()
    for step, accuracy in ((0, 0.25), (2, 0.5), (4, 0.5), (6, 0.25), (6, 1.0)):
        validations.take(step, accuracy)
    assert (validations.best_step, validations.best_score, validations.num_since_best) == (2, 0.5, 2)
    validations.take(8, 0.75)
    assert (validations.best_step, validations.num_since_best) == (8, 0)
    validations.take(10, 0.5, is_learning=False)
    assert (validations.best_step, validations.num_since_best) == (8, 0)


def test_the_actors_rate_begins_when_the_critic_has_warmed_up():
    changes = ["critic.warmup_steps=3", "trainer.steps=7", "actor.optimizer.warmup_steps=2", "actor.optimizer.lr=1.0"]
    recipe = load_recipe("quickstart", [*changes, "actor.optimizer.schedule=linear"])
    rates = [learning_rates(recipe, step, Progress(recipe).num_critic_steps)["actor"] for step in range(1, 8)]
    assert rates == pytest.approx([0.5, 0.5, 0.5, 0.5, 1.0, 0.5, 0.0])


class Together:
    """Two ranks that judge: what the other one says is known."""

    def __init__(self, other):
        self.other = other

    def gather(self, share, what):
        return [share, self.other]


def test_samples_of_a_problem_may_be_judged_on_two_ranks():
    # Four samples to each of three problems behind the greedy one: ids 0 to 4, 5 to 9, 10 to 14.
    job = SimpleNamespace(recipe=SimpleNamespace(trainer=SimpleNamespace(validation_samples=4, pass_k=2)))
    scores = torch.tensor([0.5, 1.0, 0.0, 2.0, 0.9, 1.5, 0.0, 0.0, 0.0, 0.0, -1.0, 1.0, 1.0, 1.0, 1.0])
    here = torch.tensor([12, 0, 3, 7, 9, 2, 10])
    there = torch.tensor([each for each in range(15) if each not in here])

    told = []
    listening = SimpleNamespace(gather=lambda share, what: told.append(share) or [share])
    measure(job, listening, there, scores[there])
    found = measure(job, Together(told[0]), here, scores[here])

    # 2, 0 and 4 of 4 are right; a pair of the first misses both with probability (2 of 4, 2) = 1/6.
    assert found == {
        "validation/score": pytest.approx((0.5 + 1.5 - 1.0) / 3),
        "validation/mean_at_k": pytest.approx((3.9 + 0.0 + 4.0) / 12),
        "validation/pass_at_1": pytest.approx((0.5 + 0.0 + 1.0) / 3),
        "validation/pass_at_k": pytest.approx((5 / 6 + 0.0 + 1.0) / 3),
    }


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [
        # Greedy responses alone, which are right or wrong: 2 of 3, since the fourth has no score.
        ([1.0, nan], [0.0, 1.0], {"validation/score": 2 / 3, "validation/accuracy": 2 / 3}),
        # One rank has a score between.
        ([1.0, 0.0], [0.5, 1.0], {"validation/score": 2.5 / 4}),
        ([0.5, 1.0], [0.0, 1.0], {"validation/score": 2.5 / 4}),
    ],
)
def test_scores_of_greedy_responses_are_an_accuracy_where_each_is_right_or_wrong(here, there, expected):
    job = SimpleNamespace(recipe=SimpleNamespace(trainer=SimpleNamespace(validation_samples=0, pass_k=None)))
    told = []
    listening = SimpleNamespace(gather=lambda share, what: told.append(share) or [share])
    measure(job, listening, torch.tensor([1, 3]), torch.tensor(there))
    assert measure(job, Together(told[0]), torch.tensor([0, 2]), torch.tensor(here)) == pytest.approx(expected)


def test_samples_without_a_score_are_not_right_and_a_validation_without_any_is_an_error():
    job = SimpleNamespace(recipe=SimpleNamespace(trainer=SimpleNamespace(validation_samples=2, pass_k=None)))
    alone = SimpleNamespace(gather=lambda share, what: [share])
    # One of two samples is right: pass@2, since nothing else is asked for, is 1. The mean is over the one with a score.
    found = measure(job, alone, torch.arange(3), torch.tensor([0.0, nan, 1.0]))
    assert (found["validation/pass_at_1"], found["validation/pass_at_k"]) == (0.5, 1.0)
    assert found["validation/mean_at_k"] == 1.0
    none = measure(job, alone, torch.arange(3), torch.tensor([1.0, nan, nan]))
    assert none["validation/pass_at_1"] == 0.0 and "validation/mean_at_k" not in none
    with pytest.raises(RewardError, match="no response to a held-out problem has a score"):
        measure(job, alone, torch.arange(3), torch.tensor([nan, 1.0, 1.0]))


def test_nothing_adapts_while_the_critic_learns_alone():
    moved = []

    def note(name):
        return SimpleNamespace(advance=lambda *_: moved.append(name))

    progress = SimpleNamespace(step=2, is_critic_alone=lambda step: step <= 2)
    trainer = SimpleNamespace(
        progress=progress,
        roles=SimpleNamespace(groups=SimpleNamespace(num_samples=8)),
        kl_coef=note("KL"),
        _rollouts=note("rollouts"),
        _multiplier=note("multiplier"),
    )
    for step, expected in ((2, []), (3, ["KL", "rollouts", "multiplier"])):
        progress.step = step
        Trainer._adapt(trainer, {"kl/ref": 1.0, "cost/mean": 2.0})
        assert moved == expected
