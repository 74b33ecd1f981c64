"""What every trainer is asked for: the batch of a step, and the operations that it takes. No torch."""

from __future__ import annotations

from rollout_bench.cases import Lengths, Shape, tailed_lengths

SIZE = "5m"
NUM_PROMPTS, GROUP_SIZE, PROMPT_TOKENS = 8, 8, 32
MAX_NEW_TOKENS = 512
KL_COEF, LEARNING_RATE = 0.04, 1e-6
"""Of the loss; and so small that weights stay what they are, and all trainers do the same work in every round."""

TRAINED_ROWS = 4096
"""Rows of the matrix products that the machine's rate is measured with: those of a micro-batch."""


def lengths_of(case: str) -> Lengths:
    """Tokens of each sample: 64 in each response, or a log-normal tail."""
    num = NUM_PROMPTS * GROUP_SIZE
    if case == "tailed":
        return tailed_lengths(num, middle=64, most=MAX_NEW_TOKENS)
    return Lengths(prompts=(PROMPT_TOKENS,) * num, responses=(64,) * num)


def step_flops(shape: Shape, lengths: Lengths) -> dict[str, int]:
    """Operations of the products with weights, by phase; no sample shares anything with another.

    The reference goes forward through all tokens and projects what predicts a response; so does the update, and twice
    as much backward. Of a response the last token is sampled, and goes through no model in generating.
    """
    layers = shape.layers * shape.layer_matrix
    num_tokens = sum(lengths.prompts) + lengths.num_tokens
    forward = 2 * (num_tokens * layers + lengths.num_tokens * shape.output_matrix)
    generated = forward - 2 * len(lengths.prompts) * layers
    return {"rollout": generated, "log_probs": forward, "update": 3 * forward}
