"""Steps of more than one rollout: which of their groups, the responses to one prompt, become the batch.

What comes next depends on scores, and is decided on all ranks alike: each rollout's scores are gathered over the job.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from hybridflow.dataflow.batch import Batch
from hybridflow.dataflow.move import Mover
from hybridflow.dataflow.role import Role
from hybridflow.dataflow.schedule import Move
from hybridflow.errors import DataError
from hybridflow.placement.job import Job
from hybridflow.sampling.shaping import shaped

Turn = dict[str, Any]
"""One rollout of a step: ``number`` from 1, ``first_prompt_index``, ``num_prompts``, ``is_greedy``."""

Scores = list[tuple[int, float]]
"""Prompt index and score of each sample of a rollout."""

Share = Callable[[Scores], list[Scores] | None]
"""Gathers what every rank passes over all ranks of the job; None: they leave the step. Collective: all ranks."""


class Groups(Role, ABC):
    """Keeps rollouts of a step on the rollout mesh, and takes the batch from them. Made on all ranks of the job.

    Attributes:
        scores: Prompt index, index and score of every sample that was scored since they were taken, those that are not
            learned from too; on one rank of each replica, where samples are archived.
        next_prompt_index: Where the prompts of the next step begin in the data order, once a step's rollouts are done.
    """

    call_names = ("keep", "take")

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.scores: list[tuple[int, int, float]] = []
        self.next_prompt_index = 0
        self._job = job
        self._mesh = job.meshes["actor.rollout"]
        self._rollouts: list[Batch] = []
        self._prompt_indices: list[int] = []

    @property
    def num_samples(self) -> int:
        """Return the number of samples of the step's batch, once its rollouts are done."""
        return len(self._prompt_indices) * self._job.recipe.rollout.group_size

    @abstractmethod
    def turns(self, first_prompt_index: int, num_prompts: int, share: Share) -> Iterator[Turn]:
        """Yield the rollouts of one step; keep each before the next is asked for; the same on every rank.

        Collective: all ranks of the job, through ``share``.

        Args:
            first_prompt_index: Its first prompt in the data order.
            num_prompts: Groups of a batch.
            share: Gathers scores.
        """

    def keep(self, batch: Batch, decided: Mapping[str, Any]) -> None:
        """Take in a rollout with its ``scores``."""
        if self._job.recipe.archives and self._mesh.speaks(self._job.world.rank):
            size = self._job.recipe.rollout.group_size
            prompt_indices = batch.dense("prompt_indices").tolist()
            scores = batch.dense("scores").tolist()
            # A greedy response stands behind its group.
            indices = [
                number - prompt_index * size
                for number, prompt_index in zip(batch.ids.tolist(), prompt_indices, strict=True)
            ]
            self.scores += [
                each
                for each in zip(prompt_indices, indices, scores, strict=True)
                if self._job.recipe.archives_prompt(each[0])
            ]
        self._rollouts.append(self._kept(batch, decided))

    def take(self, batch: Batch, decided: Mapping[str, Any]) -> Batch:
        """Return the step's batch, a source. Whole groups go to the replicas in turn. Collective: the rollout mesh."""
        own = Batch.concat([self._finished(each) for each in self._rollouts])
        chosen = torch.tensor(self._prompt_indices, dtype=torch.int64)
        own = own.select(torch.isin(own.dense("prompt_indices"), chosen).nonzero()[:, 0])
        self._rollouts = []
        if self._mesh.layout.dp == 1:
            return own
        place = self._mesh.coordinate(self._job.world.rank).dp
        size = self._job.recipe.rollout.group_size
        home = [
            prompt_index * size + index
            for prompt_index in self._prompt_indices[place :: self._mesh.layout.dp]
            for index in range(size)
        ]
        names = tuple(own.columns)
        mover = Mover(self._job.world, self._job.meshes, chunk=max(1, len(self._prompt_indices) * size))
        move = Move(columns=names, source=self._mesh.name, destination=self._mesh.name)
        moved = mover.move(move, own, Batch(torch.tensor(home, dtype=torch.int64), {}))
        assert moved is not None, "called outside the rollout mesh"
        return moved.only(names)

    def _kept(self, batch: Batch, decided: Mapping[str, Any]) -> Batch:
        """Return the part of a rollout that is kept."""
        return batch

    def _finished(self, rollout: Batch) -> Batch:
        """Return a rollout with all columns of the batch."""
        return rollout

    def _begin(self) -> None:
        self._rollouts, self._prompt_indices = [], []

    def _own_scores(self) -> Scores:
        """Return the scores of the last rollout, on one rank of each replica, without samples that have none.

        Whether a sample is learned from is decided elsewhere.
        """
        if not self._mesh.speaks(self._job.world.rank):
            return []
        rollout = self._rollouts[-1]
        prompt_indices, scores = rollout.dense("prompt_indices"), rollout.dense("scores")
        scored = zip(prompt_indices.tolist(), scores.tolist(), strict=True)
        return [(prompt_index, score) for prompt_index, score in scored if not math.isnan(score)]


class InformativeGroups(Groups):
    """DAPO's dynamic sampling: groups whose scores are all equal are left out, and others are sampled in their place.

    The batch is the first groups in the data order whose scores differ. What was sampled beyond it is not used; the
    next step begins with the prompt behind the last used one, so that no other prompt than those left out is skipped.

    Paper: arXiv 2503.14476.
    """

    def turns(self, first_prompt_index: int, num_prompts: int, share: Share) -> Iterator[Turn]:
        """See ``Groups.turns``.

        Raises:
            DataError: After ``dynamic_sampling.max_tries`` rollouts there are too few groups, or none at all.
        """
        self._begin()
        settings = self._job.recipe.dynamic_sampling
        kept: list[int] = []
        scores: list[float] = []
        prompt_index, number = first_prompt_index, 0
        while len(kept) < num_prompts and number < settings.max_tries:
            number += 1
            # As many as will do if the prompts to come are like those before, and a whole batch at most.
            expected = (
                math.ceil((num_prompts - len(kept)) * (prompt_index - first_prompt_index) / len(kept))
                if kept
                else num_prompts
            )
            count = min(num_prompts, expected)
            yield {"number": number, "first_prompt_index": prompt_index, "num_prompts": count, "is_greedy": False}
            shares = share(self._own_scores())
            if shares is None:
                return
            prompt_index += count
            kept += _informative(shares)
            scores += [score for own in shares for _, score in own]
        self.metrics |= {
            "groups/tries": float(number),
            "groups/kept_share": len(kept) / (prompt_index - first_prompt_index),
        }
        if scores:
            # Exact sums are the same in any order: which rank has which sample is a matter of the layout.
            self.metrics["groups/reward_mean"] = math.fsum(scores) / len(scores)
        if not kept or (len(kept) < num_prompts and settings.when_short == "error"):
            raise DataError(
                f"after {number} rollouts the scores differ within {len(kept)} of "
                f"{prompt_index - first_prompt_index} groups, {num_prompts} are wanted; raise "
                "dynamic_sampling.max_tries, choose problems that are neither too easy nor too hard"
                + (", or set dynamic_sampling.when_short=train" if kept else "")
            )
        self._prompt_indices = kept[:num_prompts]
        self.next_prompt_index = prompt_index if len(kept) < num_prompts else self._prompt_indices[-1] + 1


class GreedyBaselines(Groups):
    """ReMax's two rollouts: a greedy response to each prompt, whose score is the baseline, and the sampled ones.

    Paper: arXiv 2310.10505.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._baselines: dict[int, float] = {}

    def turns(self, first_prompt_index: int, num_prompts: int, share: Share) -> Iterator[Turn]:
        """See ``Groups.turns``."""
        self._begin()
        about = {"first_prompt_index": first_prompt_index, "num_prompts": num_prompts}
        yield {"number": 1, **about, "is_greedy": True}
        shares = share(self._own_scores())
        if shares is None:
            return
        self._baselines = {prompt_index: score for each in shares for prompt_index, score in each}
        # Greedy responses are not learned from.
        self._rollouts = []
        yield {"number": 2, **about, "is_greedy": False}
        self._prompt_indices = list(range(first_prompt_index, first_prompt_index + num_prompts))
        self.next_prompt_index = first_prompt_index + num_prompts

    def _kept(self, batch: Batch, decided: Mapping[str, Any]) -> Batch:
        """Shape the scores of a greedy rollout like the scores that they are compared with."""
        if not decided["fill"]["is_greedy"]:
            return batch
        scores = shaped(self._job.recipe, batch.dense("scores"), batch.ragged("response_mask").lengths)
        return batch.with_columns({"scores": scores})

    def _finished(self, rollout: Batch) -> Batch:
        # Of a step that is left there may be none; of a greedy response that has no score neither.
        baselines = [
            self._baselines.get(prompt_index, math.nan) for prompt_index in rollout.dense("prompt_indices").tolist()
        ]
        return rollout.with_columns({"baselines": torch.tensor(baselines, dtype=torch.float32)})


def make_groups(job: Job) -> Groups | None:
    """Make what decides on a step's batch, for algorithms with more than one rollout in a step; else None."""
    kinds = {"dapo": InformativeGroups, "remax": GreedyBaselines}
    kind = kinds.get(job.recipe.algorithm)
    return None if kind is None else kind(job)


def _informative(shares: list[Scores]) -> list[int]:
    """Return prompt indices, in order, of groups whose scores differ; a group may be split over several shares."""
    scores: dict[int, set[float]] = {}
    for share in shares:
        for prompt_index, score in share:
            scores.setdefault(prompt_index, set()).add(score)
    return sorted(prompt_index for prompt_index, found in scores.items() if len(found) > 1)
