"""Log-probabilities and entropy by kernels, with their gradients: against autograd in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hybridflow.models import log_probs, vocab_kernels


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def expected(logits, targets, vocab_size: int, temperature: float, of_log_prob, of_entropy):
    """Return log-probabilities, entropies and the gradient of their weighted sum, in fp64."""
    exact = logits.double().requires_grad_()
    log_p = (exact[:, :vocab_size] / temperature).log_softmax(-1)
    log_prob, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    (log_prob @ of_log_prob.double() + entropy @ of_entropy.double()).backward()
    return log_prob.detach(), entropy.detach(), exact.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "width", "vocab_size"),
    [(0, 7, 7), (1, 5, 3), (9, 100, 97), (3, 2 * vocab_kernels.BLOCK_COLUMNS + 8, 2 * vocab_kernels.BLOCK_COLUMNS + 1)],
)
def test_they_are_those_of_autograd(monkeypatch, group, dtype, tokens, width, vocab_size):
    monkeypatch.setattr(log_probs, "uses_kernels", lambda logits: True)
    generator = torch.Generator().manual_seed(tokens)
    logits = (4 * torch.randn(tokens, width, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab_size, (tokens,), generator=generator)
    weights = torch.randn(2, tokens, generator=generator)
    found = log_probs.vocab_parallel_log_probs(logits, targets, group=group, vocab_size=vocab_size, temperature=0.7)
    (found[0] @ weights[0] + found[1] @ weights[1]).backward()
    *values, gradient = expected(logits.detach(), targets, vocab_size, 0.7, *weights)
    for ours, theirs in zip(found, values, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=2e-5)
    # A gradient in bf16 is rounded once; the interpreter cuts digits off where a GPU rounds.
    bound = 1e-5 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(logits.grad.double(), gradient, rtol=bound, atol=2e-5)
    assert not logits.grad[:, vocab_size:].any()


def test_parts_of_the_vocabulary_on_several_ranks_are_those_of_the_whole(group):
    """The terms of each rank's columns, brought together by hand, for what the sums over the group do."""
    generator = torch.Generator().manual_seed(0)
    logits, targets = 3 * torch.randn(6, 90, generator=generator), torch.tensor([0, 29, 30, 59, 60, 88])
    # The last rank has padding: columns 89 and on.
    parts = [
        vocab_kernels.vocab_terms(logits[:, first : first + 30].contiguous(), targets, first, min(30, 89 - first), 1.3)
        for first in (0, 30, 60)
    ]
    own, total, weighted, target = torch.stack(parts).double().unbind(1)
    normalizer = (own + total.log()).logsumexp(0)
    entropy = normalizer - (weighted * (own - normalizer).exp()).sum(0)
    log_prob, wanted, _ = expected(logits, targets, 89, 1.3, torch.zeros(6), torch.zeros(6))
    torch.testing.assert_close(target.sum(0) - normalizer, log_prob, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, wanted, rtol=1e-5, atol=1e-5)


def test_a_logit_of_minus_infinity_has_no_part_in_the_entropy(monkeypatch, group):
    monkeypatch.setattr(log_probs, "uses_kernels", lambda logits: True)
    logits = torch.tensor([[0.0, -torch.inf, 0.0]], requires_grad=True)
    found, entropy = log_probs.vocab_parallel_log_probs(logits, torch.tensor([2]), group=group, vocab_size=3)
    (found + entropy).sum().backward()
    # Two tokens of probability a half: both are minus and plus ln 2.
    torch.testing.assert_close(torch.stack([-found, entropy]), torch.full((2, 1), 0.6931472))
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.5, 0.0, 0.5]]))
