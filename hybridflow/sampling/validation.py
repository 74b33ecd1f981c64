"""What scores of responses to held-out problems tell."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from hybridflow.algorithms.pass_at_k import pass_at_k
from hybridflow.errors import RewardError
from hybridflow.parallel.coordinator import Coordinator
from hybridflow.placement.job import Job

RIGHT = 1.0
"""A sample is right if its score is at least this."""


def validation_id(job: Job, row: int, index: int) -> int:
    """Return the id of a response to a held-out problem: index 0 is the greedy one, sampled ones follow."""
    return row * (1 + job.recipe.trainer.validation_samples) + index


def measure(job: Job, judges: Coordinator, ids: Tensor, scores: Tensor) -> dict[str, float]:
    """Measure ``validation/accuracy``, and pass@1 and pass@k where responses are sampled, over all held-out problems.

    A response without a score is left out of the accuracy, and is not right.

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
    is_scored = is_greedy & ~scores.isnan()
    share = [float(scores[is_scored].double().sum()), int(is_scored.sum()), list(right.items())]
    shares = judges.gather(share, "validation")
    num_scored = sum(count for _, count, _ in shares)
    if num_scored == 0:
        raise RewardError("no response to a held-out problem has a score; mend what scores, or set on_failure=error")
    accuracy = sum(total for total, _, _ in shares) / num_scored
    if trainer.validation_samples == 0:
        return {"validation/accuracy": accuracy}
    # The responses to a problem may lie on several ranks.
    whole: Counter[int] = Counter()
    for _, _, found in shares:
        for row, count in found:
            whole[row] += count
    num_right = torch.tensor(list(whole.values()))
    k = trainer.validation_samples if trainer.pass_k is None else trainer.pass_k
    return {
        "validation/accuracy": accuracy,
        "validation/pass_at_1": float(pass_at_k(num_right, trainer.validation_samples, 1).mean()),
        "validation/pass_at_k": float(pass_at_k(num_right, trainer.validation_samples, k).mean()),
    }
