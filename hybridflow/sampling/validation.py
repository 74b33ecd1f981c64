"""What scores of responses to held-out problems tell, and which responses a person is shown."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms.pass_at_k import pass_at_k
from hybridflow.data.prompts import Example
from hybridflow.dataflow.batch import Batch
from hybridflow.errors import RewardError
from hybridflow.parallel.coordinator import Coordinator
from hybridflow.placement.job import Job
from hybridflow.rollout.environment import text_of
from hybridflow.sampling.rollout_buffer import ASKED_BY, asked

RIGHT = 1.0
"""A sample is right if its score is at least this."""

NUM_SHOWN = 3
"""Held-out problems whose responses a person is shown."""

NUM_TRAINING_SHOWN = 2
"""Prompts of the first and of the last step whose responses a person is shown where no data is held out."""


def validation_id(job: Job, row: int, index: int) -> int:
    """Return the id of a response to a held-out problem: index 0 is the greedy one, sampled ones follow."""
    return row * (1 + job.recipe.trainer.validation_samples) + index


def measure(job: Job, judges: Coordinator, ids: Tensor, scores: Tensor) -> dict[str, float]:
    """Measure ``validation/score``, and mean@k, pass@1 and pass@k where responses are sampled, over all problems.

    The score is the mean over greedy responses; where each is 0 or 1, it is ``validation/accuracy`` too. Mean@k is that
    over sampled ones. A response without a score is left out of these, and is not right.

    Collective: the judges.

    Args:
        job: The job.
        judges: The ranks that have scores.
        ids: Ids of the responses here, ``[samples]``, from ``validation_id``; each is on one rank.
        scores: Theirs, ``[samples]``; NaN: it has none.

    Raises:
        RewardError: No greedy response has one, on all ranks.
    """
    trainer = job.recipe.trainer
    size = 1 + trainer.validation_samples
    is_greedy = ids % size == 0
    right: Counter[int] = Counter({row: 0 for row in (ids[~is_greedy] // size).tolist()})
    right.update((ids[~is_greedy & (scores >= RIGHT)] // size).tolist())
    is_scored = ~scores.isnan()
    known, sampled = (scores[is_scored & kind].double() for kind in (is_greedy, ~is_greedy))
    sums = [float(known.sum()), len(known), float(sampled.sum()), len(sampled)]
    share = [sums, bool(((known == 0) | (known == 1)).all()), list(right.items())]
    shares = judges.gather(share, "validation")
    total, num_scored, sampled_total, num_sampled = map(sum, zip(*(sums for sums, _, _ in shares), strict=True))
    if num_scored == 0:
        raise RewardError("no response to a held-out problem has a score; mend what scores")
    score = total / num_scored
    found = {"validation/score": score}
    if all(is_binary for _, is_binary, _ in shares):
        found["validation/accuracy"] = score
    if trainer.validation_samples == 0:
        return found
    # The responses to a problem may lie on several ranks.
    whole: Counter[int] = Counter()
    for *_, counts in shares:
        for row, count in counts:
            whole[row] += count
    num_right = torch.tensor(list(whole.values()))
    k = trainer.validation_samples if trainer.pass_k is None else trainer.pass_k
    if num_sampled:
        found["validation/mean_at_k"] = sampled_total / num_sampled
    return found | {
        "validation/pass_at_1": float(pass_at_k(num_right, trainer.validation_samples, 1).mean()),
        "validation/pass_at_k": float(pass_at_k(num_right, trainer.validation_samples, k).mean()),
    }


def shown_samples(job: Job, batch: Batch, scores: Tensor) -> list[dict[str, Any]]:
    """Return the greedy responses here to the first held-out problems, for a person.

    Args:
        job: The job.
        batch: Responses to held-out problems, with ids from ``validation_id``.
        scores: Theirs, ``[samples]``; NaN: it has none.

    Returns:
        For each its ``row``, ``prompt``, ``response``, ``answer`` and ``score`` (None: it has none).
    """
    size = 1 + job.recipe.trainer.validation_samples
    rows = {place: number // size for place, number in enumerate(batch.ids.tolist()) if number % size == 0}
    places = [place for place, row in rows.items() if row < NUM_SHOWN]
    return _told(job, batch, scores, {place: (rows[place], job.held_out[rows[place]][0]) for place in places})


def shown_training_samples(job: Job, batch: Batch, scores: Tensor, decided: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one response here to each of the first prompts of the run's first and last step, for a person.

    Where data is held out, responses to that are shown instead.

    Args:
        job: The job.
        batch: Responses to training problems.
        scores: Theirs, ``[samples]``; NaN: it has none.
        decided: Decisions that led to the batch.

    Returns:
        As ``shown_samples``, where ``row`` is the prompt index, and in addition the ``step``.
    """
    if job.recipe.data.held_out is not None or not any(name in decided for name in ASKED_BY):
        return []
    about = asked(decided)
    if about["step"] not in (1, job.recipe.trainer.known_steps) or about.get("is_greedy", False):
        return []
    prompt_indices = batch.dense("prompt_indices").tolist()
    # The last of a reversed list is the first.
    first = {row: place for place, row in reversed(list(enumerate(prompt_indices)))}
    rows = sorted(first)[:NUM_TRAINING_SHOWN]
    told = _told(job, batch, scores, {first[row]: (row, job.train.example(row)) for row in rows})
    return [{**each, "step": about["step"]} for each in told]


def _told(job: Job, batch: Batch, scores: Tensor, chosen: Mapping[int, tuple[int, Example]]) -> list[dict[str, Any]]:
    """Return samples for a person: those at these places of the batch, each with its row and its problem."""
    sequences = batch.ragged("tokens").select(torch.tensor(list(chosen), dtype=torch.long)).to_list()
    lengths = batch.dense("prompt_lengths")
    shown = []
    for (place, (row, example)), tokens in zip(chosen.items(), sequences, strict=True):
        score = float(scores[place])
        response = text_of(job.tokenizer, tokens[int(lengths[place]) :].tolist())
        told = {"row": row, "prompt": example.prompt, "response": response, "answer": example.answer}
        shown.append({**told, "score": None if math.isnan(score) else score})
    return shown
