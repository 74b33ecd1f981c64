"""The reward's role: what a program gave in its place, and what is told of calls over all ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hybridflow.config.rewards import RewardConfig
from hybridflow.data.prompts import Example
from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.errors import ConfigError, RewardError
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.rewards import batched
from hybridflow.roles.reward import Reward
from tests.multi.jobs import make_job, tiny_recipe
from tests.support.ranks import run_ranks

LETTERS = "abcdefgh"


def last_letter(prompt, response, answer):
    """The place of the last letter; c has none, and d is on the first try not there."""
    if response.endswith("c"):
        raise ValueError("no c")
    return LETTERS.index(response[-1]) + len(answer)


async def last_letter_later(prompt, response, answer):
    return last_letter(prompt, response, answer)


@batched
def last_letters(prompts, responses, answers):
    return [math.nan if each.endswith("c") else last_letter("", each, "xx") for each in responses]


class Scorer:
    def scores(self, prompts, responses, answers):
        return last_letters(prompts, responses, answers)


def reward_job(world, objects, **settings):
    recipe = replace(tiny_recipe(ParallelLayout(dp=world.size), "grpo"), reward=RewardConfig(**settings))
    job, _ = make_job(world, recipe)
    tokenizer = SimpleNamespace(
        **vars(job.tokenizer) | {"decode": lambda ids: "".join(LETTERS[each - 3] for each in ids)}
    )

    def example(prompt_index):
        row, place = {"level": prompt_index + 7}, f"d.jsonl:{prompt_index + 1}"
        return Example(prompt=f"p{prompt_index}", answer="xx", place=place, row=row)

    return replace(job, tokenizer=tokenizer, train=SimpleNamespace(example=example), objects=objects)


def batch_of(rank, endings):
    """One token of a prompt and two of a response each; token 3 is a."""
    ids = torch.arange(len(endings)) * 2 + rank
    tokens = [[3, 3, 3 + LETTERS.index(each)] for each in endings]
    columns = {
        "tokens": Ragged.from_list(tokens, torch.int64),
        "prompt_lengths": torch.ones(len(ids), dtype=torch.int64),
        "prompt_indices": ids,
    }
    return Batch(ids, columns)


def score(world, given, settings):
    job = reward_job(world, {"reward": given}, **settings)
    reward = Reward(job)
    endings = ["abba", "bcd"][world.rank]
    scores = [reward.score(batch_of(world.rank, endings), {}).columns["scores"].tolist() for _ in range(2)]
    return scores, reward.metrics


@pytest.mark.parametrize("given", [last_letter, last_letter_later, last_letters, Scorer, Scorer()], ids=lambda each: "")
def test_what_was_given_scores_and_what_fails_is_counted_over_all_ranks(given):
    found = run_ranks(score, 2, given, {"on_failure": "score", "failure_score": -1.0, "cache": 9, "retries": 0})
    assert [scores for scores, _ in found] == [[[2, 3, 3, 2]] * 2, [[3, -1, 5]] * 2]
    # Of the second rollout of the step all are known but the one that fails; prompts differ, so none is known before.
    for _, metrics in found:
        assert metrics["reward/failed"] == 2 and metrics["reward/retried"] == 0
        assert metrics["reward/cached"] == pytest.approx(6 / 14)
        assert 0 <= metrics["reward/call_s"] <= metrics["reward/call_longest_s"] < 30


def refused(world):
    job = reward_job(world, {"reward": last_letter}, on_failure="drop")
    reward = Reward(job)
    # All of one rank may fail, not all of all.
    few = reward.score(batch_of(world.rank, "cc" if world.rank else "ab"), {}).columns["scores"].tolist()
    with pytest.raises(RewardError, match=r"no sample has a score: reward 'last_letter' .*on d.jsonl:\d .*no c"):
        reward.score(batch_of(world.rank, "cc"), {})
    plain = Reward(reward_job(world, {"reward": last_letter}))
    plain.score(batch_of(world.rank, "ab"), {})
    assert plain.metrics == {}, "there is nothing to tell of a function that is called in place"
    for given in (3, object()):
        with pytest.raises(ConfigError, match="expected a function"):
            Reward(reward_job(world, {"reward": given}))
    with pytest.raises(ConfigError, match="reward.retries: exact_match neither waits nor fails"):
        Reward(reward_job(world, {}, retries=1))
    return few


def test_where_all_fail_it_is_an_error_on_all_ranks():
    first, second = run_ranks(refused, 2)
    assert first == [2, 3] and all(map(math.isnan, second))


def told(world):
    seen = []

    def note(prompt, response, answer, level):
        seen.append((prompt, response, answer, level))
        return float(len(seen))

    reward = Reward(reward_job(world, {"reward": note}))
    columns = {
        "tokens": Ragged.from_list([[4, 5, 6, 7], [8, 9, 10]], torch.int64),
        "prompt_lengths": torch.tensor([1, 2]),
        "prompt_indices": torch.tensor([3, 1]),
    }
    batch = Batch(torch.tensor([6, 2]), columns)
    scored = [reward.score(batch, {})]
    # Of a conversation the last turn is scored.
    scored.append(reward.score(batch.with_columns({"last_turn_lengths": torch.tensor([2, 0])}), {}))
    return seen, [(each.ids.tolist(), each.columns["scores"].tolist()) for each in scored]


def test_a_function_is_told_the_response_and_its_row():
    ((seen, scored),) = run_ranks(told, 1)
    # Token 3 is a. Prompts are those of the row, not the tokens that the model had.
    assert seen == [("p3", "cde", "xx", 10), ("p1", "h", "xx", 8), ("p3", "de", "xx", 10), ("p1", "", "xx", 8)]
    assert scored == [([6, 2], [1.0, 2.0]), ([6, 2], [3.0, 4.0])]
