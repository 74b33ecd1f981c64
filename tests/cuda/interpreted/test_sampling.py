"""Sampling by kernels: the tokens of the reference, and its log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hybridflow.models.log_probs import Columns
from hybridflow.rollout import sampling
from hybridflow.rollout.gpu.choose import choose
from hybridflow.rollout.gpu.edits import GpuEdits
from hybridflow.rollout.request import SamplingParams
from hybridflow.rollout.sampling import NOTHING_LEFT, Sampler

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


EDITS = [
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.3, "temperature": 0.8},
    {"frequency_penalty": -0.4, "logit_bias": ((3, 4.0), (11, -2.5), (5, 1.0)), "bad_ids": ((5,),)},
    {"bad_ids": ((1, 2), (2, 3, 4), (7,), *((token, 8) for token in range(0, 23, 2))), "top_k": 9},
    {"stop_ids": (0, 3, 6), "min_new_tokens": 5, "top_p": 0.8, "repetition_penalty": 1.2},
    {"greedy": True, "presence_penalty": 3.0, "logit_bias": ((3, 2.0),)},
    {"bad_ids": tuple((token,) for token in range(23))},
    {},
]


@dataclass
class Sequences:
    """Rows whose requests ask for edits in turn, with the tokens that they know."""

    rows: int
    vocab_size: int

    def __post_init__(self) -> None:
        self.slots = np.arange(self.rows)
        self.known = np.random.default_rng(4).integers(0, self.vocab_size, (self.rows, 40), np.int32)
        num_prompt = 3 + self.slots % 3
        # Some have sampled tokens before.
        self.lengths = num_prompt + self.slots % 4
        self.sampler = Sampler(self.rows, dist.group.WORLD, self.vocab_size, torch.device("cpu"))
        self.stops = np.full((self.rows, 3), -1, np.int32)
        self.no_stop_before = num_prompt.copy()
        for row in range(self.rows):
            params = SamplingParams(max_new_tokens=30, **EDITS[row % len(EDITS)])
            self.sampler.seat(row, params, sampling.sequence_key(3, "rollout", row, 1), int(num_prompt[row]))
            self.stops[row, : len(params.stop_ids)] = params.stop_ids
            self.no_stop_before[row] += params.min_new_tokens
        self.arrays = {**self.sampler.arrays(self.slots), "tokens": self.known, "lengths": self.lengths}

    def edits(self, width: int, columns) -> GpuEdits:
        made = GpuEdits(
            self.rows, width, columns, 40, lambda *shape, dtype: (torch.zeros(shape, dtype=dtype) for _ in range(2))
        )
        assert made.widen(*self.arrays["rules"].shape[1:])
        made.fill(self.slots, torch.tensor(self.lengths), torch.tensor(self.arrays["num_prompt"]), self.arrays)
        return made

    def apply(self, edits: GpuEdits, logits):
        given = (torch.tensor(each) for each in (self.lengths, self.no_stop_before, self.stops))
        return edits.apply(logits, *given, 0.0)

    def add(self, tokens) -> None:
        self.known[self.slots, self.lengths] = tokens
        self.lengths += 1


@pytest.mark.parametrize(("rows", "width", "vocab_size", "steps"), [(16, 25, 23, 3), (3, 5000, 4999, 1)])
def test_edited_tokens_are_those_of_the_reference(rows, width, vocab_size, steps):
    those = Sequences(rows, vocab_size)
    edits = those.edits(width, Columns(width, dist.group.WORLD, vocab_size))
    names = "keys", "temperatures", "greedy", "top_k", "top_p", "min_p"
    keys, temperatures, quiet, *cuts = (torch.from_numpy(those.arrays[name]) for name in names)
    generator = torch.Generator().manual_seed(rows)
    for _ in range(steps):
        logits, lengths = 2 * torch.randn(rows, width, generator=generator), torch.tensor(those.lengths)
        wanted = those.sampler.sample(logits, torch.arange(rows), lengths, those.known)
        edited = those.apply(edits, logits)
        found = choose(
            logits, keys, lengths, temperatures, quiet, dist.group.WORLD, vocab_size, 0.0, tuple(cuts), edited
        )
        assert found[0].tolist() == wanted.tokens.tolist()
        is_there = wanted.tokens >= 0
        for ours, theirs in zip(found[1:], (wanted.log_probs, wanted.sampled_log_probs), strict=True):
            torch.testing.assert_close(ours[is_there], theirs[is_there], rtol=1e-5, atol=1e-5)
        edits.remember(found[0], lengths, torch.zeros(rows, dtype=torch.int64))
        those.add(wanted.tokens.clamp(min=0).numpy())
    assert vocab_size > 23 or NOTHING_LEFT in found[0]


def test_a_rank_edits_its_own_columns_as_one_with_all_would():
    rows, width, vocab_size = 8, 12, 23
    those = Sequences(rows, vocab_size)
    whole = those.edits(2 * width, Columns(2 * width, dist.group.WORLD, vocab_size))
    shards = []
    for rank in range(2):
        columns = Columns(width, dist.group.WORLD, vocab_size)
        columns.first, columns.num_real = rank * width, min(width, vocab_size - rank * width)
        shards.append(those.edits(width, columns))
    for _ in range(3):
        logits = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(1))
        parts = [those.apply(each, part.contiguous()) for each, part in zip(shards, logits.chunk(2, 1), strict=True)]
        assert torch.equal(torch.cat(parts, 1), those.apply(whole, logits))
        tokens, lengths = torch.arange(rows) * 3 % vocab_size, torch.tensor(those.lengths)
        for each in (whole, *shards):
            each.remember(tokens, lengths, torch.zeros(rows, dtype=torch.int64))
        those.add(tokens.numpy())
