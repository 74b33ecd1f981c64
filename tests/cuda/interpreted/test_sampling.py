"""Sampling by kernels: the tokens of the reference, and its log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hybridflow.rollout import sampling
from hybridflow.rollout.request import SamplingParams
from hybridflow.rollout.sampling import Sampler

KINDS = [{}, {"greedy": True}, {"temperature": 0.6}, {"temperature": 2.0, "top_k": 7}, {"top_p": 0.7, "min_p": 0.01}]


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def sampled(logits, vocab_size: int):
    """Sample rows in turn as the kinds say, in the order of their slots."""
    rows = len(logits)
    sampler = Sampler(rows, dist.group.WORLD, vocab_size, torch.device("cpu"))
    for row in range(rows):
        key = sampling.sequence_key(3, "rollout", row, 1)
        sampler.seat(row, SamplingParams(max_new_tokens=9, **KINDS[row % len(KINDS)]), key, 4)
    return sampler.sample(logits, torch.arange(rows), torch.arange(rows) % 50 + 4, np.zeros((rows, 60), np.int32))


@pytest.mark.parametrize(("rows", "width", "vocab_size"), [(1, 1, 1), (40, 61, 57), (10, 9000, 8999)])
def test_tokens_are_those_of_the_reference(monkeypatch, rows, width, vocab_size):
    logits = 3 * torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
    wanted = sampled(logits, vocab_size)
    monkeypatch.setattr(sampling, "uses_kernels", lambda logits: True)
    found = sampled(logits, vocab_size)
    assert found.tokens.tolist() == wanted.tokens.tolist()
    torch.testing.assert_close(found.log_probs, wanted.log_probs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.sampled_log_probs, wanted.sampled_log_probs, rtol=1e-5, atol=1e-5)
