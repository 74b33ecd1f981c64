"""The reward, or the cost: a function of problem and response, called for each sample on one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from hybridflow.data.prompts import Example
from hybridflow.dataflow.batch import Batch
from hybridflow.errors import ConfigError, RewardError
from hybridflow.plugins import find_plugin
from hybridflow.roles.job import Job
from hybridflow.roles.judging import measure
from hybridflow.roles.placed import column_rows
from hybridflow.rollout.environment import text_of

RewardFunction = Callable[[str, str, str], float]
"""``(prompt, response, answer) -> score``."""


def exact_match(prompt: str, response: str, answer: str) -> float:
    """1 if the response is the answer, but for spaces around it; else 0."""
    return float(response.strip() == answer.strip())


def length(prompt: str, response: str, answer: str) -> float:
    """The number of characters of the response."""
    return float(len(response))


BUILT_IN: dict[str, RewardFunction] = {"exact_match": exact_match, "length": length}

SCORES = {"reward": "scores", "cost": "costs"}
"""Role -> the column that it writes."""


def find_function(name: str, role: str = "reward") -> RewardFunction:
    """A built-in reward by name, or ``package.module:function`` by import.

    Raises:
        ConfigError: There is no such function.
    """
    found = find_plugin(name, BUILT_IN, key=f"{role}.function", kind="function")
    if not callable(found):
        raise ConfigError(f"{role}.function={name!r}: found {type(found).__name__}, expected a function")
    return cast(RewardFunction, found)


class Reward:
    """Scores responses on its mesh, one data-parallel replica a rank, so that each sample is scored once.

    Args:
        job: The job.
        role: ``reward``, or ``cost``: which section of the recipe it is, and which mesh.

    Attributes:
        metrics: What the last calls measured, over the global batch; emptied by the trainer each step.
    """

    def __init__(self, job: Job, role: str = "reward") -> None:
        self.metrics: dict[str, float] = {}
        self._job = job
        self._role = role
        name = getattr(job.recipe, role).function
        self._takes_rewards = name is None and job.recipe.rollout.environment is not None
        self._name = "exact_match" if name is None else name
        given = job.objects.get(role)
        self._function = find_function(self._name, role) if given is None else given

    def score(self, batch: Batch, decided: Mapping[str, Any]) -> Batch:
        """``scores``, or ``costs``, of responses to training problems.

        Raises:
            RewardError: The function raised, or gave something other than a finite number; names the problem.
        """
        return Batch(batch.ids, {SCORES[self._role]: self._scores(batch, self._job.train.example)})

    def judge(self, batch: Batch, decided: Mapping[str, Any]) -> None:
        """Measure ``validation/accuracy``: the mean score of greedy responses to held-out problems; and pass@k.

        Collective: the reward's mesh.
        """
        scores = self._scores(batch, lambda row: self._job.held_out[row][0])
        judges = self._job.world.coordinator(self._job.meshes["reward"].ranks)
        self.metrics |= measure(self._job, judges, batch.ids, scores)

    def _scores(self, batch: Batch, example_of: Callable[[int], Example]) -> torch.Tensor:
        if self._takes_rewards:
            return batch.columns["environment_rewards"]
        draws = batch.columns["draws"].tolist()
        prompt_lengths = batch.columns["prompt_lengths"].tolist()
        responses = [
            sequence[length:] for sequence, length in zip(column_rows(batch, "tokens"), prompt_lengths, strict=True)
        ]
        if "response_mask" in batch.columns:
            masks = column_rows(batch, "response_mask")
            responses = [_last_turn(*each) for each in zip(responses, masks, strict=True)]
        scores = [
            self._score(example_of(draw), response.tolist()) for response, draw in zip(responses, draws, strict=True)
        ]
        return torch.tensor(scores, dtype=torch.float32)

    def _score(self, example: Example, tokens: list[int]) -> float:
        response = text_of(self._job.tokenizer, tokens)
        where = f"{self._role} {self._name!r} on {example.place} with response {response!r}"
        try:
            score = float(self._function(example.prompt, response, example.answer))
        # A user's function may raise anything, or call sys.exit; whatever it is, the message must name the sample.
        except (Exception, SystemExit) as error:
            raise RewardError(f"{where}: {type(error).__name__}: {error}; mend the function or the sample") from error
        if not math.isfinite(score):
            raise RewardError(f"{where}: returned {score}; expected a finite number")
        return score


def _last_turn(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What the policy said behind the last that it observed, ``[turn]`` of ``[response]`` each."""
    observed = (mask == 0).nonzero()
    return tokens[int(observed[-1]) + 1 :] if len(observed) else tokens
