"""A model in training whose weights are written from outside."""

from __future__ import annotations

from dataclasses import replace

import torch

from hybridflow.config import Optimizer
from hybridflow.models.microbatch import pack
from hybridflow.models.training import Trainable
from hybridflow.parallel.layout import ParallelLayout
from tests.multi.models import TINY, make_model, samples
from tests.ranks import run_ranks


def step_from_ones(world, dtype: str, distributed: bool, clip_grad: float) -> float:
    """The largest distance from 1 after one small step of a model whose weights were all set to 1."""
    model, _, groups, _ = make_model(world, ParallelLayout(dp=2), model=replace(TINY, num_layers=2, dtype=dtype))
    trainable = Trainable(model, groups, Optimizer(lr=1e-6, distributed=distributed, clip_grad=clip_grad))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    trainable.reload_weights()
    sequences, prompts = samples(4)
    trainable.accumulate(
        [pack([0, 1, 2, 3], sequences, prompts, world.device)], lambda output, _: (output.float().mean(), None)
    )
    assert trainable.step() >= 0
    return max(float((parameter - 1).abs().max()) for parameter in model.parameters())


def cases(world):
    return {
        case: step_from_ones(world, *case)
        for case in [("fp32", True, 1.0), ("fp32", False, 0.0), ("bf16", True, 1.0), ("bf16", False, 0.0)]
    }


def test_a_step_goes_on_from_weights_that_were_written_from_outside():
    for case, distance in run_ranks(cases, 2)[0].items():
        assert distance < 1e-5, (case, distance)
