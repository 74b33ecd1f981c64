"""Which rollouts a step asks for, and which groups it takes, worked out by hand for scores that are given."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from hybridflow.config.losses import DynamicSamplingConfig
from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.errors import DataError
from hybridflow.sampling.groups import GreedyBaselines, InformativeGroups, make_groups

NAN = math.nan


def make(kind, **settings):
    """On the only rank of a job with groups of two."""
    mesh = SimpleNamespace(speaks=lambda rank: True, layout=SimpleNamespace(dp=1))
    recipe = SimpleNamespace(
        dynamic_sampling=DynamicSamplingConfig(**settings),
        rollout=SimpleNamespace(group_size=2),
        shaping=SimpleNamespace(overlong_buffer=0),
        archives=False,
    )
    return kind(SimpleNamespace(meshes={"actor.rollout": mesh}, world=SimpleNamespace(rank=0), recipe=recipe))


def asked(groups, num_prompts, scores, *, elsewhere=()):
    """Prompts of each rollout of a step that begins with prompt 10; samples get these scores, by prompt index."""
    found = []
    for turn in groups.turns(10, num_prompts, lambda mine: [mine, list(elsewhere)]):
        prompt_indices = range(turn["first_prompt_index"], turn["first_prompt_index"] + turn["num_prompts"])
        assert turn["number"] == len(found) + 1 and not turn["is_greedy"]
        found.append([*prompt_indices])
        own = [(index, score) for index in prompt_indices for score in scores.get(index, (0.0, 0.0))]
        columns = {"prompt_indices": torch.tensor([index for index, _ in own])}
        columns["scores"] = torch.tensor([score for _, score in own])
        groups.keep(Batch(torch.arange(len(own)), columns), {"fill": turn})
    return found


def test_so_many_are_asked_for_as_will_do_if_all_are_like_those_before():
    groups = make(InformativeGroups)
    differ = (0.0, 1.0)
    # Three of four teach something, so one more takes ceil(1 · 4/3) = 2 prompts, of which the second is not used. The
    # fourth's group is half on another rank.
    scores = {10: differ, 11: (1.0, 1.0), 12: differ, 13: (0.0,), 14: differ, 15: differ}
    assert asked(groups, 4, scores, elsewhere=[(13, 0.5)]) == [[10, 11, 12, 13], [14, 15]]
    assert groups._prompt_indices == [10, 12, 13, 14]
    assert (groups.next_prompt_index, groups.num_samples) == (15, 8)
    assert groups.metrics["groups/tries"] == 2.0 and groups.metrics["groups/kept_share"] == 5 / 6
    # The next step begins with none of them.
    assert asked(groups, 1, {10: differ}) == [[10]] and groups._prompt_indices == [10]
    # The order is that of the data, whoever has which prompt.
    assert asked(groups, 2, {10: (), 11: differ}, elsewhere=[(10, 0.0), (10, 1.0)]) == [[10, 11]]
    assert groups._prompt_indices == [10, 11]


def test_no_rollout_is_larger_than_a_batch_and_samples_without_a_score_teach_nothing():
    groups = make(InformativeGroups)
    scores = {10: (NAN, 1.0), 11: (0.5, 2.0), 12: (NAN, NAN), 13: (0.0, 1.0), 14: (0.0, 1.0)}
    # One of three: two more would take six.
    assert asked(groups, 3, scores) == [[10, 11, 12], [13, 14, 15]]
    assert groups._prompt_indices == [11, 13, 14] and groups.next_prompt_index == 15
    # 1, 0.5 and 2 of the first rollout; 0 and 0, 0 and 1, 0 and 1 of the second.
    assert groups.metrics["groups/reward_mean"] == pytest.approx(5.5 / 9)


@pytest.mark.parametrize(("scores", "kept"), [({11: (0.0, 1.0)}, [11]), ({}, [])])
def test_a_step_of_too_few_groups_is_an_error_or_a_smaller_batch(scores, kept):
    strict = make(InformativeGroups, max_tries=2)
    with pytest.raises(DataError, match=rf"after 2 rollouts the scores differ within {len(kept)} of 4 groups, 2 are"):
        asked(strict, 2, scores)
    with pytest.raises(DataError, match="after 2 rollouts the scores differ within 0 of 4 groups"):
        asked(strict, 2, dict.fromkeys(range(10, 14), (NAN, NAN)))
    lenient = make(InformativeGroups, max_tries=2, when_short="train")
    if not kept:
        with pytest.raises(DataError, match="within 0 of 4 groups"):
            asked(lenient, 2, scores)
        return
    assert asked(lenient, 2, scores) == [[10, 11], [12, 13]]
    # All prompts that were tried are behind it.
    assert (lenient._prompt_indices, lenient.next_prompt_index, lenient.num_samples) == (kept, 14, 2)


def test_a_greedy_rollout_gives_the_baselines_of_the_sampled_one():
    groups = make(GreedyBaselines)
    groups._job.recipe.shaping = SimpleNamespace(overlong_buffer=2, overlong_factor=1.0)
    groups._job.recipe.rollout.max_new_tokens = 4
    told = []
    # The second step finds nothing of the first.
    for _ in range(2):
        for turn in groups.turns(10, 2, lambda mine: [mine]):
            told.append((turn["number"], turn["is_greedy"]))
            scores = torch.tensor([0.25, NAN] if turn["is_greedy"] else [1.0, 2.0, 3.0, 4.0])
            columns = {"prompt_indices": torch.arange(10, 12).repeat_interleave(len(scores) // 2), "scores": scores}
            mask = Ragged.from_list([torch.ones(3)] * len(scores), torch.float32)
            groups.keep(Batch(torch.arange(len(scores)), {**columns, "response_mask": mask}), {"fill": turn})
    assert told == [(1, True), (2, False)] * 2
    assert (groups._prompt_indices, groups.next_prompt_index) == ([10, 11], 12)
    (rollout,) = groups._rollouts
    # Three tokens of four, two of which are paid for: half of the penalty. The others are shaped later.
    baselines = groups._finished(rollout).dense("baselines").tolist()
    assert baselines[:2] == [-0.25, -0.25] and all(map(math.isnan, baselines[2:])), "a greedy response has no score"
    assert rollout.dense("scores").tolist() == [1.0, 2.0, 3.0, 4.0]
    groups._job.recipe.shaping = SimpleNamespace(overlong_buffer=0)
    assert groups._kept(rollout, {"fill": {"is_greedy": True}}).dense("scores").tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_step_that_is_left_takes_nothing():
    for kind in (InformativeGroups, GreedyBaselines):
        groups = make(kind)
        # Of the step before.
        groups._prompt_indices = [8, 9]
        turns = groups.turns(10, 2, lambda mine: None)
        next(turns)
        columns = {"prompt_indices": torch.tensor([10]), "scores": torch.tensor([1.0])}
        groups._rollouts.append(Batch(torch.arange(1), columns))
        assert next(turns, None) is None and groups.num_samples == 0 and not groups.metrics


def rollout(prompt_indices, ids, scores):
    columns = {"prompt_indices": torch.tensor(prompt_indices), "scores": torch.tensor(scores)}
    return Batch(torch.tensor(ids), columns)


def test_the_batch_is_the_chosen_groups_of_the_rollouts_of_this_step():
    groups = make(InformativeGroups)
    for told in ([], [[(10, 0.0), (10, 1.0)]]):
        turns = groups.turns(10, 1, lambda mine, told=told: told or None)
        next(turns)
        groups.keep(rollout([10, 10, 11, 11], [20, 21, 22, 23], [0.0, 1.0, 2.0, 3.0]), {})
        # The first time the step is left, and begins anew.
        assert next(turns, None) is None
    batch = groups.take(Batch.empty(), {})
    assert batch.ids.tolist() == [20, 21] and batch.dense("scores").tolist() == [0.0, 1.0]
    assert groups._rollouts == [] and groups.scores == []


def test_scores_are_told_by_one_rank_of_a_replica():
    groups = make(GreedyBaselines)
    groups._job.recipe.archives, groups._job.recipe.archives_prompt = True, lambda prompt_index: prompt_index != 11
    decided = {"fill": {"is_greedy": False}}
    # A greedy response of prompt 12 stands behind its group of two.
    sampled = rollout([10, 10, 11, 12], [20, 21, 22, 26], [0.5, 1.5, 2.5, NAN])
    groups.keep(sampled, decided)
    assert (
        groups.scores[:2] == [(10, 0, 0.5), (10, 1, 1.5)]
        and groups.scores[2][:2] == (12, 2)
        and len(groups.scores) == 3
    )
    assert groups._own_scores() == [(10, 0.5), (10, 1.5), (11, 2.5)]
    groups._mesh.speaks, groups.scores = lambda rank: False, []
    groups.keep(sampled, decided)
    assert groups.scores == [] == groups._own_scores()


def test_which_algorithms_have_several_rollouts():
    job = make(InformativeGroups)._job
    for algorithm, kind in (("dapo", InformativeGroups), ("remax", GreedyBaselines), ("grpo", type(None))):
        job.recipe.algorithm = algorithm
        assert type(make_groups(job)) is kind
