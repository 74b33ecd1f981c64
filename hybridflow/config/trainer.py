"""``trainer`` and ``profile``: the training loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridflow.sections import (
    MAY_CHANGE,
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

    steps: CountOrZero = field(metadata=MAY_CHANGE)
    global_batch_size: Count
    mini_batch_size: Count | None = None
    micro_batch_tokens: Count = field(default=4096, metadata=MAY_CHANGE)
    save_every: CountOrZero = field(default=0, metadata=MAY_CHANGE)
    keep_last: Count = field(default=2, metadata=MAY_CHANGE)
    keep_every: CountOrZero = field(default=0, metadata=MAY_CHANGE)
    validate_every: CountOrZero = field(default=0, metadata=MAY_CHANGE)
    num_validation: Count | None = field(default=None, metadata=MAY_CHANGE)
    validation_samples: CountOrZero = field(default=0, metadata=MAY_CHANGE)
    pass_k: Count | None = field(default=None, metadata=MAY_CHANGE)
    keep_best: bool = field(default=False, metadata=MAY_CHANGE)
    patience: CountOrZero = field(default=0, metadata=MAY_CHANGE)
    max_staleness: CountOrZero = 0
    max_idle_starts: Count = field(default=3, metadata=MAY_CHANGE)


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Which steps are looked at closely, and where.

    Attributes:
        steps: Training steps of which a trace of torch's profiler is written; none: nothing is traced.
        ranks: The ranks that write one.
    """

    steps: tuple[Count, ...] = ()
    ranks: tuple[CountOrZero, ...] = (0,)
