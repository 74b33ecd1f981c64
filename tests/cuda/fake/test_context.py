"""Attention over a context-parallel group's keys, on fake CUDA tensors."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hybridflow.models.context import ContextAttention, ContextShare
from hybridflow.models.scoring import Scoring
from tests.cuda.fake.machine import DEVICE, fake_cuda


def test_values_may_be_narrower_than_keys(monkeypatch):
    """Those of latent attention are, and the kernels want them as wide."""
    with fake_cuda(monkeypatch, size=1):
        query, key = (torch.empty(512, 8, 192, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
        value = torch.empty(512, 8, 128, dtype=torch.bfloat16, device=DEVICE)
        with unset_fake_temporarily():
            cpu, alone = torch.device("cpu"), SimpleNamespace(size=lambda: 1, rank=lambda: 0)
            share = ContextShare([512], alone, cpu)
            view = ContextAttention([512], cpu, torch.arange(512), share)._view(None)
            sequences = view._sequences
        sequences._taken = None if sequences._taken is None else torch.empty(512, dtype=torch.int64, device=DEVICE)
        sequences.query_starts, sequences.key_starts = (
            torch.empty(3, dtype=torch.int32, device=DEVICE) for _ in range(2)
        )
        scoring = Scoring(scale=0.1)
        assert sequences.backend(query, scoring) != "rectangles"
        assert view.attend(query, key, value, scoring).shape == value.shape
