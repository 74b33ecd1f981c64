"""``trainer`` and ``profile``: the training loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridflow.sections import FILLED_IN, MAY_CHANGE, Count, CountOrZero

OPEN_END = 1_000_000
"""Steps of a program that runs its own loop, and says when it ends."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Set the training loop.

    Attributes:
        steps: Training steps. Each step is a rollout and the updates on it. 0 runs only validation, after the warm
            start if there is one.
        global_batch_size: Samples of one training step.
        mini_batch_size: Samples of one optimizer step. None means the global batch.
        micro_batch_tokens: Token budget of one forward pass. Left out, it is what fits into memory, from 1,024 to
            16,384 tokens, where a GPU or ``cluster.memory_budget_gb`` says how much that is.
        save_every: Steps between checkpoints. None saves after each step that ends 15 minutes or more after the last
            checkpoint. 0 saves only at the end.
        keep_last: Number of newest checkpoints to keep. Older ones are removed.
        keep_every: Checkpoints at multiples of this step are kept forever. 0 keeps no such checkpoints.
        validate_every: Steps between validations. 0 validates only before and after training.
        num_validation: Held-out problems to use. None means the whole file.
        validation_samples: Sampled responses to each held-out problem for mean@k, pass@1 and pass@k, in addition to the
            greedy one. They are sampled as in the rollout. A response is right if its score is at least 1.
        pass_k: k of pass@k. None means all sampled responses.
        keep_best: Save when a validation is the best so far, and keep that checkpoint in addition to the newest.
        patience: Validations in a row without a better one after which training ends. 0 means never.
        max_staleness: Updates by which the weights that sampled a batch may be behind the weights that learn from it.
            Above 0, the next batches are generated during the updates. This needs ``actor.rollout_ranks``.
        max_idle_starts: Starts in a row that resumed from the same checkpoint and saved no other. After this many, the
            run is not started again.
        deterministic: Repeat every number to the last bit on GPUs too, where the fastest operations add in any order.
            CPUs always do. It takes time. Torch warns of an operation that it cannot repeat.
    """

    steps: CountOrZero = field(metadata={**MAY_CHANGE, **FILLED_IN})
    global_batch_size: Count = field(metadata=FILLED_IN)
    mini_batch_size: Count | None = None
    micro_batch_tokens: Count = field(default=4096, metadata=MAY_CHANGE)
    save_every: CountOrZero | None = field(default=None, metadata=MAY_CHANGE)
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
    deterministic: bool = field(default=False, metadata=MAY_CHANGE)

    @property
    def known_steps(self) -> int | None:
        """Return the number of steps; None for a program that runs its own loop."""
        return None if self.steps == OPEN_END else self.steps

    @property
    def samples_per_update(self) -> int:
        """Return the number of samples of one optimizer step."""
        return self.global_batch_size if self.mini_batch_size is None else self.mini_batch_size


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Choose which steps and ranks write a trace of torch's profiler.

    Attributes:
        steps: Training steps to trace. An empty list traces nothing.
        ranks: Ranks that write a trace.
    """

    steps: tuple[Count, ...] = ()
    ranks: tuple[CountOrZero, ...] = (0,)
