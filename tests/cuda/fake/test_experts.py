"""A layer of experts: what it asks of the host, and how many kernels it starts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.gpt import build_transformer
from tests.cuda.fake.machine import DEVICE, Launches, fake_cuda, place
from tests.multi.models import MIXTURE

TOKENS = 100


def run_layer(world, layout, num_experts):
    """Kernels that a layer starts, forward."""
    model = replace(MIXTURE, dtype="bf16", ffn_hidden_size=48, num_experts=num_experts)
    groups = place(world, layout)[1]
    layer = build_transformer(model, layout, groups, DEVICE, vocab_size=29).decoder.layers[0].mlp
    with Launches() as launches:
        output, _ = layer(torch.empty(TOKENS, 1, model.hidden_size, dtype=torch.bfloat16, device=DEVICE))
    assert output.shape == (TOKENS, 1, model.hidden_size)
    return launches


@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(tp=2)], ids=["1", "tp2"])
def test_a_layer_asks_nothing_of_the_host_and_its_kernels_do_not_grow_with_the_experts(monkeypatch, layout):
    with fake_cuda(monkeypatch, size=layout.world_size) as world:
        few, many = (run_layer(world, layout, num_experts) for num_experts in (4, 64))
    assert sum(few.names.values()) == sum(many.names.values()) <= 80, few.names
    assert many.names["_grouped_mm"] == 2, many.names


def test_ranks_that_exchange_tokens_ask_once(monkeypatch):
    asked = []

    def answer(tensor):
        asked.append(tuple(tensor.shape))
        return [[TOKENS, TOKENS], [TOKENS, TOKENS]]

    monkeypatch.setattr(FakeTensor, "tolist", answer)
    with fake_cuda(monkeypatch, size=2) as world:
        run_layer(world, ParallelLayout(dp=2, ep=2), 4)
    # Rows that go to each rank, and rows that come from each.
    assert asked == [(2, 2)]
