"""The reverse KL over vocabulary-parallel logits, and an actor's steps on it, against plain torch in fp64."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridflow.config.roles import OptimizerConfig
from hybridflow.dataflow.batch import Batch, Ragged
from hybridflow.errors import ConfigError
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models import distillation
from hybridflow.models.distillation import top_log_probs, vocab_parallel_reverse_kl
from hybridflow.models.weights import local_shards
from hybridflow.parallel.world import World
from hybridflow.roles.actor import Actor
from hybridflow.roles.advantage import KLCoefficient
from hybridflow.roles.teacher import Teacher
from tests.multi import models
from tests.multi.jobs import add_noise, inner_of, make_batch, make_job, outer_of, tiny_recipe, watch
from tests.multi.models import place
from tests.multi.test_reference_step import MODELS, transformer
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


MODEL, MINI_BATCH = MODELS["ppo"], 6


def student_of(world: World, layout: ParallelLayout) -> Actor:
    """An actor whose steps move no weight of fp32: both mini-batches meet the first weights."""
    optimizer = OptimizerConfig(lr=1e-12, clip_grad=0.0, distributed=False)
    recipe = tiny_recipe(layout, "grpo", model=MODEL, micro_batch_tokens=60, optimizer=optimizer)
    actor = Actor(make_job(world, recipe)[0], KLCoefficient(recipe))
    add_noise(actor.model, actor.spec, world.rank, seed=3)
    actor.trainable.reload_weights()
    return actor


def taught(top_k: int) -> Batch:
    """Samples with what a teacher says of each response token: of the whole vocabulary, or of so many and the rest."""
    batch, generator = make_batch(), torch.Generator().manual_seed(4)
    log_probs, ids = [], []
    for length in batch.columns["response_mask"].lengths.tolist():
        row = torch.randn(length, models.VOCAB, generator=generator).log_softmax(-1)
        if top_k:
            order = row.argsort(-1, descending=True)
            best, others = order[:, :top_k], order[:, top_k:]
            ids.append(best)
            row = torch.cat([row.gather(1, best), row.gather(1, others).logsumexp(-1, keepdim=True)], dim=1)
        log_probs.append(row)
    columns = {"teacher_log_probs": Ragged.from_list(log_probs, torch.float32)}
    if top_k:
        columns["teacher_ids"] = Ragged.from_list(ids, torch.int64)
    return batch.with_columns(columns)


def learned(world: World, layout: ParallelLayout, top_k: int) -> Any:
    """Gradients of two steps, and what was measured."""
    actor, batch = student_of(world, layout), taught(top_k)
    gradients, _ = watch(actor, world.rank)
    dp = actor.model.mesh.coordinate(world.rank).dp
    mine = batch.select((batch.ids % layout.dp == dp).nonzero()[:, 0])
    for index in range(2):
        actor.distill(mine, {"actor_mini_batch": {"epoch": 0, "index": index}})
    return gradients, dict(actor.metrics)


def plain_steps(world: World, top_k: int) -> Any:
    """As ``learned``, with the sum of the KL and the tokens of either mini-batch in the place of metrics."""
    actor, batch = student_of(world, ParallelLayout()), taught(top_k)
    shards = local_shards(actor.model.transformer, actor.spec, actor.model.mesh, 0)
    weights = {name: local[inner_of(part)].detach().double().requires_grad_() for name, (local, part) in shards.items()}
    output = weights.get("output_layer.weight", weights["embedding.word_embeddings.weight"])
    rows = {name: column.to_list() for name, column in batch.columns.items() if isinstance(column, Ragged)}
    gradients, sums = [], []
    for start in (0, MINI_BATCH):
        total, count = torch.zeros((), dtype=torch.float64), 0.0
        for sample in range(start, start + MINI_BATCH):
            tokens, prompt = rows["tokens"][sample], int(batch.columns["prompt_lengths"][sample])
            heads = MODEL.num_attention_heads
            states = transformer(weights, tokens, heads, MODEL.num_query_groups or heads, MODEL.num_layers)
            student = (states[prompt - 1 : -1] @ output.T / 0.8).log_softmax(-1)
            if top_k:
                ids = rows["teacher_ids"][sample]
                rest = student.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
                student = torch.cat([student.gather(1, ids), rest], dim=1)
            mask = rows["response_mask"][sample] > 0
            kl = (student.exp() * (student - rows["teacher_log_probs"][sample].double())).sum(-1)
            total, count = total + kl[mask].sum(), count + float(mask.sum())
        found = torch.autograd.grad(total / count, list(weights.values()))
        gradients.append(dict(zip(weights, [each.numpy() for each in found], strict=True)))
        sums.append((float(total), count))
    return gradients, sums


@pytest.mark.parametrize(("layout", "top_k"), [("tp2.dp2", 3), ("cp2", 0)])
def test_an_actor_learns_the_mean_over_the_tokens_that_count(layout, top_k):
    parsed = ParallelLayout.parse(layout)
    ((expected, sums),) = run_ranks(plain_steps, 1, top_k)
    for gradients, metrics in run_ranks(learned, parsed.world_size, parsed, top_k):
        assert metrics["distill/kl"] == pytest.approx(sum(kl for kl, _ in sums) / sum(count for _, count in sums))
        assert metrics["response/length_mean"] == pytest.approx(sum(count for _, count in sums) / 12)
        # The mean of both updates.
        assert metrics["actor/loss"] == pytest.approx(sum(kl / count for kl, count in sums) / 2)
        for step, plain in zip(gradients, expected, strict=True):
            for name, (values, part) in step.items():
                whole = plain[name]
                error = np.linalg.norm(values - whole[outer_of(part)])
                assert error < 1e-5 * np.linalg.norm(whole), name


@pytest.mark.parametrize("top_k", [45, 46])
def test_a_teacher_leaves_a_token_beside_the_likeliest(top_k):
    job = SimpleNamespace(recipe=SimpleNamespace(teacher=SimpleNamespace(top_k=top_k)), vocab_size=45)
    with pytest.raises(ConfigError, match=rf"teacher\.top_k={top_k}: the vocabulary has 45 tokens; choose less, or 0"):
        Teacher(job)
