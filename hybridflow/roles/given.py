"""What is learned from data alone: the rows of a step, dealt to the replicas of the update mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hybridflow.data.preferences import Response
from hybridflow.data.prompts import Solution
from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.dataflow.move import balance
from hybridflow.roles.job import Job
from hybridflow.roles.placed import mini_batch_size


class Given:
    """Sources of samples that are read and not sampled. What a step has is a function of its number.

    Every rank knows the whole batch, so no message is needed to deal it out by tokens. An id is the sample's place
    among all that are ever drawn: the two responses of a pair stand next to each other, the better one first, and go to
    the same replica.

    Attributes:
        metrics: What the last calls measured, over the global batch; emptied by the trainer each step.
        told: Numbers of each sample, on one rank, see ``step_metrics.DISTRIBUTIONS``; emptied alike.
    """

    def __init__(self, job: Job) -> None:
        self.metrics: dict[str, float] = {}
        self.told: dict[str, list[float]] = {}
        self._job = job

    def solutions(self, batch: Batch, decided: Mapping[str, Any]) -> Batch:
        """Solutions to imitate: ``response_mask`` is 1 on what is to be written, 0 on what is observed."""
        problems, draws = self._job.train, _draws(decided)
        rows = [problems.solution(draw) for draw in draws]
        chosen = self._dealt([_length(each) for each in rows], mini_batch_size(self._job))
        self._measure(rows)
        is_written = [rows[index].is_written for index in chosen]
        return _batch([((rows[index],), draws[index]) for index in chosen]).with_columns(
            {"response_mask": Ragged.from_list(is_written, torch.float32)}
        )

    def pairs(self, batch: Batch, decided: Mapping[str, Any]) -> Batch:
        """The responses of pairs; ``margins`` are their pair's."""
        problems, draws = self._job.train, _draws(decided)
        pairs = [problems.responses(draw) for draw in draws]
        self._measure([each for pair in pairs for each in pair])
        dealt = self._pairs(pairs, draws, mini_batch_size(self._job) // 2)
        margins = [each.margin for pair, _ in dealt for each in pair]
        return _batch(dealt).with_columns({"margins": torch.tensor(margins, dtype=torch.float32)})

    def completions(self, batch: Batch, decided: Mapping[str, Any]) -> Batch:
        """Responses, ``wanted`` or not, and each prompt with the completion of the sample before it in its mini-batch.

        These ``mismatched_tokens`` are cut where they exceed the model's context.
        """
        problems, draws, size = self._job.train, _draws(decided), mini_batch_size(self._job)
        rows = [problems.responses(draw)[0] for draw in draws]
        before = [rows[index - 1 if index % size else index + size - 1] for index in range(len(rows))]
        self._measure(rows)
        chosen = self._dealt([_length(each) for each in rows], size)
        context = self._job.recipe.model.max_context
        rotated = [(rows[index].prompt + before[index].tokens)[:context] for index in chosen]
        wanted = [float(rows[index].is_wanted) for index in chosen]
        return _batch([((rows[index],), draws[index]) for index in chosen]).with_columns(
            {
                "wanted": torch.tensor(wanted, dtype=torch.float32),
                "mismatched_tokens": Ragged.from_list(rotated, torch.int64),
            }
        )

    def held_out_pairs(self, batch: Batch, decided: Mapping[str, Any]) -> Batch:
        """The responses of the held-out pairs, or of the first of them."""
        pairs = self._job.held_out_pairs[: self._job.recipe.trainer.num_validation]
        return _batch(self._pairs(pairs, range(len(pairs)), len(pairs)))

    def _pairs(
        self, pairs: Sequence[tuple[Response, ...]], draws: Sequence[int], chunk: int
    ) -> list[tuple[tuple[Response, ...], int]]:
        lengths = [sum(map(_length, pair)) for pair in pairs]
        return [(pairs[index], draws[index]) for index in self._dealt(lengths, chunk)]

    def _dealt(self, lengths: Sequence[int], chunk: int) -> list[int]:
        """What of so many tokens each goes to this rank's replica, in order."""
        mesh = self._job.meshes["actor.update"]
        parts = balance(lengths, mesh.layout.dp, chunk)
        dp = mesh.coordinate(self._job.world.rank).dp
        return [index for index, part in enumerate(parts) if part == dp]

    def _measure(self, rows: Sequence[Response | Solution]) -> None:
        self.metrics |= {
            "batch/num_tokens": float(sum(map(_length, rows))),
            "response/length_mean": sum(len(each.tokens) for each in rows) / len(rows),
        }
        if self._job.world.rank == min(self._job.meshes["actor.update"].ranks):
            self.told = {"length": [float(len(each.tokens)) for each in rows]}


def _draws(decided: Mapping[str, Any]) -> range:
    about = decided["train_step"]
    return range(about["first_draw"], about["first_draw"] + about["num_prompts"])


def _length(row: Response | Solution) -> int:
    return len(row.prompt) + len(row.tokens)


def _batch(dealt: Sequence[tuple[tuple[Response | Solution, ...], int]]) -> Batch:
    """The responses of some draws, of equally many each."""
    ids = [draw * len(responses) + index for responses, draw in dealt for index in range(len(responses))]
    rows = [each for responses, _ in dealt for each in responses]
    return Batch(
        torch.tensor(ids, dtype=torch.int64),
        {
            "tokens": Ragged.from_list([each.prompt + each.tokens for each in rows], torch.int64),
            "prompt_lengths": torch.tensor([len(each.prompt) for each in rows], dtype=torch.int64),
        },
    )
