"""The reverse KL over vocabulary-parallel logits, against plain torch in fp64 on the whole vocabulary."""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models import distillation
from hybridflow.models.distillation import top_log_probs, vocab_parallel_reverse_kl
from hybridflow.parallel.world import World
from tests.multi.models import place
from tests.support.ranks import run_ranks

VOCAB, PADDED, TOKENS, TEMPERATURE = 29, 32, 7, 0.7
TOP = (0, 1, 5, 12, 28)
"""With four ranks of eight columns each, the likeliest twelve are more than a rank has, and 28 leave one token."""


def logits_of(seed: int) -> Tensor:
    """Rows of unlike spread (small enough for fp32), with padding that must not count, ``[TOKENS, PADDED]``."""
    drawn = torch.randn(TOKENS, PADDED, generator=torch.Generator().manual_seed(seed))
    logits = drawn * torch.linspace(0.1, 1.5, TOKENS)[:, None]
    logits[:, VOCAB:] = 50.0
    return logits


def weights() -> Tensor:
    return torch.linspace(-1.0, 2.0, TOKENS)


def case(world: World) -> list[tuple[np.ndarray, ...]]:
    """Of each number of likeliest tokens: ids, the teacher's log-probabilities, the KL, and this rank's gradient."""
    mesh, groups = place(world, ParallelLayout(tp=world.size))
    width, first = PADDED // world.size, PADDED // world.size * mesh.coordinate(world.rank).tp
    teacher, student = (logits_of(seed)[:, first : first + width] for seed in (1, 2))
    settings = dict(group=groups.tp, vocab_size=VOCAB, temperature=TEMPERATURE)
    found = []
    # Three chunks, the last of one row.
    with mock.patch.object(distillation, "CHUNK_TOKENS", 3):
        for top_k in TOP:
            told, *ids = top_log_probs(teacher, top_k, **settings)
            mine = student.clone().requires_grad_()
            kl = vocab_parallel_reverse_kl(mine, told, ids[0] if ids else None, **settings)
            (kl * weights()).sum().backward()
            found.append(tuple(each.detach().numpy() for each in (*ids, told, kl, mine.grad)))
    return found


def truth(top_k: int) -> tuple[Tensor, ...]:
    """As ``case``, in fp64 with autograd, on the whole vocabulary."""
    teacher = (logits_of(1)[:, :VOCAB].double() / TEMPERATURE).log_softmax(-1)
    logits = logits_of(2).double().requires_grad_()
    student = (logits[:, :VOCAB] / TEMPERATURE).log_softmax(-1)
    ids = teacher.argsort(-1, descending=True)[:, :top_k]
    if top_k:
        others = torch.ones_like(teacher, dtype=torch.bool).scatter(1, ids, False)
        teacher, student = (
            torch.cat([each.gather(1, ids), each.masked_fill(~others, -torch.inf).logsumexp(-1, keepdim=True)], dim=1)
            for each in (teacher, student)
        )
    kl = (student.exp() * (student - teacher)).sum(-1)
    (kl * weights()).sum().backward()
    return (*([ids] if top_k else []), teacher, kl.detach(), logits.grad)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_values_and_gradients_are_those_of_plain_torch(size):
    by_rank = run_ranks(case, size)
    for index, top_k in enumerate(TOP):
        *told, gradient = truth(top_k)
        for rank, found in enumerate(by_rank):
            for one, other in zip(found[index][:-1], told, strict=True):
                assert np.abs(one - other.numpy()).max() < 1e-6 * max(1.0, float(other.abs().max())), (top_k, rank)
            assert found[index][-2].min() > 0, "a KL of distributions"
        whole = np.concatenate([found[index][-1] for found in by_rank], axis=1)
        assert np.abs(whole - gradient.numpy()).max() < 1e-6, top_k
        assert gradient.abs().max() > 0.005 and np.abs(whole[:, VOCAB:]).max() == 0


def test_by_hand():
    """Teacher (1/2, 1/4, 1/4), student (1/4, 1/2, 1/4)."""
    # All: 1/4 log 1/2 + 1/2 log 2 + 1/4 log 1 = 1/4 log 2. The likeliest and the rest: 1/4 log 1/2 + 3/4 log 3/2.
    expected = [0.25 * math.log(2), -0.25 * math.log(2) + 0.75 * math.log(1.5)]
    (found,) = run_ranks(small, 1)
    assert found == pytest.approx(expected, abs=1e-6)


def small(world: World) -> list[float]:
    _, groups = place(world, ParallelLayout())
    teacher, student = (torch.tensor([row]).log() for row in ([2.0, 1.0, 1.0], [1.0, 2.0, 1.0]))
    settings = dict(group=groups.tp, vocab_size=3)
    found = []
    for top_k in (0, 1):
        told, *ids = top_log_probs(teacher, top_k, **settings)
        found.append(float(vocab_parallel_reverse_kl(student, told, ids[0] if ids else None, **settings)))
    return found
