"""Micro-batches: how values of response tokens are laid out by sample."""

from __future__ import annotations

import torch

from hybridflow.models.microbatch import pack


def test_padding_is_that_of_torch_and_so_is_its_gradient():
    samples = [torch.arange(each) for each in (5, 3, 9)]
    batch = pack([0, 1, 2], samples, [2, 2, 4], torch.device("cpu"))
    values = torch.randn(9, requires_grad=True)
    padded = batch.pad(values)
    expected = torch.nn.utils.rnn.pad_sequence(list(values.split([3, 1, 5])), batch_first=True)
    assert torch.equal(padded, expected)
    weight = torch.arange(15.0).view(3, 5)
    ours, theirs = (torch.autograd.grad((each * weight).sum(), values)[0] for each in (padded, expected))
    assert torch.equal(ours, theirs)
