"""What is learned from data alone: the rows of a step, dealt to the replicas of the update mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hybridflow.data.preferences import JudgedResponse
from hybridflow.data.prompts import Solution
from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.dataflow.move import balance
from hybridflow.dataflow.role import Role
from hybridflow.placement.job import Job


class OfflineSamples(Role):
    """Sources of samples that are read and not sampled. What a step has is a function of its number.

    A rank reads the rows that its replica learns from, and for the dealing, which is by tokens, its share of the
    others. An id is the sample's place among all that are ever drawn: the two responses of a pair stand next to each
    other, the better one first, and go to the same replica. Collective: the update mesh.
    """

    call_names = ("solutions", "pairs", "completions", "held_out_solutions", "held_out_pairs")

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job
        self._mini_batch = job.recipe.trainer.samples_per_update

    def solutions(self, batch: Batch, decided: Mapping[str, Any]) -> Batch:
        """Return solutions to imitate: ``response_mask`` is 1 on tokens to be written, 0 on observed ones."""
        problems, prompt_indices = self._job.train, _prompt_indices(decided)
        lengths = self._lengths(prompt_indices, lambda prompt_index: (problems.solution(prompt_index),))
        dealt = [prompt_indices[index] for index in self._dealt(lengths, self._mini_batch)]
        return _to_imitate([problems.solution(prompt_index) for prompt_index in dealt], dealt)

    def pairs(self, batch: Batch, decided: Mapping[str, Any]) -> Batch:
        """Return the responses of pairs; ``margins`` are those of their pair."""
        problems, prompt_indices = self._job.train, _prompt_indices(decided)
        lengths = self._lengths(prompt_indices, problems.responses)
        dealt = [prompt_indices[index] for index in self._dealt(lengths, self._mini_batch // 2)]
        pairs = [problems.responses(prompt_index) for prompt_index in dealt]
        margins = [each.margin for pair in pairs for each in pair]
        return _batch(list(zip(pairs, dealt, strict=True))).with_columns(
            {"margins": torch.tensor(margins, dtype=torch.float32)}
        )

    def completions(self, batch: Batch, decided: Mapping[str, Any]) -> Batch:
        """Return responses, their ``wanted``, and each prompt with the completion of the sample before it.

        The sample before it is in the same mini-batch.

        ``mismatched_tokens`` are cut to the model's context.
        """
        problems, prompt_indices, size = self._job.train, _prompt_indices(decided), self._mini_batch
        chosen = self._dealt(self._lengths(prompt_indices, problems.responses), size)
        rows = [problems.responses(prompt_indices[index])[0] for index in chosen]
        before = [
            problems.responses(prompt_indices[index - 1 if index % size else index + size - 1])[0].tokens
            for index in chosen
        ]
        context = self._job.recipe.model.max_context
        rotated = [(row.prompt + tokens)[:context] for row, tokens in zip(rows, before, strict=True)]
        return _batch([((row,), prompt_indices[index]) for row, index in zip(rows, chosen, strict=True)]).with_columns(
            {
                "wanted": torch.tensor([float(row.is_wanted) for row in rows], dtype=torch.float32),
                "mismatched_tokens": Ragged.from_list(rotated, torch.int64),
            }
        )

    def held_out_solutions(self, batch: Batch, decided: Mapping[str, Any]) -> Batch:
        """Return the solutions of the held-out rows, or of the first of them, as ``solutions`` does."""
        rows = self._job.held_out_solutions[: self._job.recipe.trainer.num_validation]
        dealt = self._dealt([_sizes(row)[0] for row in rows], len(rows))
        return _to_imitate([rows[index] for index in dealt], dealt)

    def held_out_pairs(self, batch: Batch, decided: Mapping[str, Any]) -> Batch:
        """Return the responses of the held-out pairs, or of the first of them."""
        pairs = self._job.held_out_pairs[: self._job.recipe.trainer.num_validation]
        lengths = [sum(_sizes(each)[0] for each in pair) for pair in pairs]
        return _batch([(pairs[index], index) for index in self._dealt(lengths, len(pairs))])

    def _lengths(self, prompt_indices: range, read: Callable[[int], Sequence[JudgedResponse | Solution]]) -> list[int]:
        """Return the tokens of each prompt index, prompts and responses, and set the length metrics."""
        sizes = row_stats(self._job, prompt_indices, lambda prompt_index: [_sizes(each) for each in read(prompt_index)])
        responses = [length for row in sizes for _, length in row]
        lengths = [sum(length for length, _ in row) for row in sizes]
        self.metrics |= {
            "batch/num_tokens": float(sum(lengths)),
            "response/length_mean": sum(responses) / len(responses),
        }
        if self._job.world.rank == min(self._job.meshes["actor.update"].ranks):
            self.sample_stats = {"length": [float(length) for length in responses]}
        return lengths

    def _dealt(self, lengths: Sequence[int], chunk: int) -> list[int]:
        """Return the places of the token counts that this rank's replica takes, in order."""
        mesh = self._job.meshes["actor.update"]
        parts = balance(lengths, mesh.layout.dp, chunk)
        dp = mesh.coordinate(self._job.world.rank).dp
        return [index for index, part in enumerate(parts) if part == dp]


def mismatched(batch: Batch) -> Batch:
    """Return the batch with ``mismatched_tokens`` as ``tokens``: each prompt with another's completion."""
    columns = {"tokens": batch.columns["mismatched_tokens"], "prompt_lengths": batch.columns["prompt_lengths"]}
    return Batch(batch.ids, columns)


def row_stats(job: Job, prompt_indices: range, tell: Callable[[int], Any]) -> list[Any]:
    """Return ``tell`` of the row of each prompt index.

    With several replicas each rank reads its share of the rows for it.

    Collective: the update mesh.

    Args:
        job: The job.
        prompt_indices: Serial numbers.
        tell: From one of them to JSON.
    """
    mesh = job.meshes["actor.update"]
    if mesh.layout.dp == 1:
        # Every rank learns from every row.
        return [tell(prompt_index) for prompt_index in prompt_indices]
    ranks = tuple(sorted(mesh.ranks))
    mine = [tell(prompt_index) for prompt_index in prompt_indices[ranks.index(job.world.rank) :: len(ranks)]]
    shares = job.world.coordinator(ranks).gather(mine, "the lengths of rows")
    return [shares[place % len(ranks)][place // len(ranks)] for place in range(len(prompt_indices))]


def _prompt_indices(decided: Mapping[str, Any]) -> range:
    about = decided["train_step"]
    return range(about["first_prompt_index"], about["first_prompt_index"] + about["num_prompts"])


def _sizes(row: JudgedResponse | Solution) -> tuple[int, int]:
    """Return the tokens of prompt and response, and those of the response without observed ones."""
    written = sum(row.is_written) if isinstance(row, Solution) else len(row.tokens)
    return len(row.prompt) + len(row.tokens), written


def _to_imitate(rows: Sequence[Solution], prompt_indices: Sequence[int]) -> Batch:
    """Return solutions with their ``response_mask``."""
    dealt = [((row,), prompt_index) for row, prompt_index in zip(rows, prompt_indices, strict=True)]
    masks = Ragged.from_list([row.is_written for row in rows], torch.float32)
    return _batch(dealt).with_columns({"response_mask": masks})


def _batch(dealt: Sequence[tuple[tuple[JudgedResponse | Solution, ...], int]]) -> Batch:
    """Return the responses of some prompt indices, equally many of each."""
    ids = [
        prompt_index * len(responses) + index for responses, prompt_index in dealt for index in range(len(responses))
    ]
    rows = [each for responses, _ in dealt for each in responses]
    return Batch(
        torch.tensor(ids, dtype=torch.int64),
        {
            "tokens": Ragged.from_list([each.prompt + each.tokens for each in rows], torch.int64),
            "prompt_lengths": torch.tensor([len(each.prompt) for each in rows], dtype=torch.int64),
        },
    )
