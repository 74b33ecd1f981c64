"""``trainer`` and ``profile``: the training loop."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.sections import (
    Count,
    CountOrZero,
)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The loop.

    Attributes:
        steps: Training steps, each a rollout and the updates on it; 0: the warm start alone, if any, and validation.
        global_batch_size: Samples of one step.
        mini_batch_size: Samples of one optimizer step; None: the global batch.
        micro_batch_tokens: Token budget of one forward.
        save_every: Steps between checkpoints; 0: only at the end.
        keep_last: Newest checkpoints that stay; older ones are removed.
        keep_every: Checkpoints of steps that are a multiple of this stay beside them, for ever; 0: none.
        validate_every: Steps between validations; 0: only before and after.
        num_validation: Held-out problems used; None: the whole file.
        validation_samples: Responses to each of them that are sampled as in the rollout, beside the greedy one, to
            measure pass@1 and pass@k with; one is right if its score is at least 1.
        pass_k: The k of pass@k; None: all of these.
        keep_best: Save when a validation is the best so far, and keep that checkpoint beside the newest.
        patience: End the training after so many validations in a row without a better one; 0: never.
        max_staleness: How many updates the weights that sampled a batch may be behind those that learn from it. Above 0
            the next batches are generated while one is learned from, for which ``actor.rollout_ranks`` are needed.
        max_idle_starts: After so many starts in a row that went on from the same checkpoint and made no other, a run
            is not begun again: what stops it is not a matter of luck.
    """

    steps: CountOrZero
    global_batch_size: Count
    mini_batch_size: Count | None = None
    micro_batch_tokens: Count = 4096
    save_every: CountOrZero = 0
    keep_last: Count = 2
    keep_every: CountOrZero = 0
    validate_every: CountOrZero = 0
    num_validation: Count | None = None
    validation_samples: CountOrZero = 0
    pass_k: Count | None = None
    keep_best: bool = False
    patience: CountOrZero = 0
    max_staleness: CountOrZero = 0
    max_idle_starts: Count = 3


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Which steps are looked at closely, and where.

    Attributes:
        steps: Training steps of which a trace of torch's profiler is written; none: nothing is traced.
        ranks: The ranks that write one.
    """

    steps: tuple[Count, ...] = ()
    ranks: tuple[CountOrZero, ...] = (0,)
