"""What the layers of each family keep for the backward pass, beside what is planned."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.mapping import activations
from hybridflow.models.gpt import build_transformer
from hybridflow.models.lora import Dropout
from tests.cuda.fake.batches import shared_prompts
from tests.cuda.fake.machine import DEVICE, Peak, fake_cuda, place
from tests.cuda.fake.shapes import FAMILIES, family_model


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in (*FAMILIES, "gemma4_text")),
        # All without the window. Where there is no GPU, torch has no kernel for heads of 512.
        ("gemma4_text", {"window_layers": (), "head_dim": 128, "global_head_dim": 256}),
        (
            "gemma4_text",
            {
                **{"hidden_size": 2816, "num_attention_heads": 16, "num_query_groups": 8, "ffn_hidden_size": 704},
                **{"num_experts": 128, "experts_per_token": 8, "shared_ffn_hidden_size": 2112, "expert_norms": True},
            },
        ),
    ],
)
def test_a_layer_keeps_what_is_planned(monkeypatch, name, changes):
    # So that all layers are alike.
    model = replace(family_model(name), **{"num_layers": 3, "window_layers": None, **changes})
    layout = ParallelLayout()
    with fake_cuda(monkeypatch) as world:
        mesh, groups = place(world, layout)
        batch = shared_prompts(8, 1, 8, 1016)
        kept = []
        for num_layers in (1, 3):
            cut = replace(model, num_layers=num_layers)
            built = build_transformer(cut, layout, groups, DEVICE, vocab_size=model.vocab_size)
            with Peak() as peak:
                output = built(batch.tokens, batch.attention, batch.rows)
            kept.append(peak.held_bytes)
            del output
    tokens = len(batch.tokens)
    planned = [activations.training_bytes(replace(model, num_layers=each), mesh, 0, tokens) for each in (1, 3)]
    assert 0.95 * (planned[1] - planned[0]) <= kept[1] - kept[0] <= planned[1] - planned[0]


@pytest.mark.parametrize("is_linear", [False, True])
def test_layers_of_both_kinds_of_attention_keep_what_is_planned(monkeypatch, is_linear):
    model, layout = family_model("qwen3_5_text"), ParallelLayout()
    kept, planned = [], []
    with fake_cuda(monkeypatch) as world:
        mesh, groups = place(world, layout)
        batch = shared_prompts(8, 1, 8, 1016)
        for num_layers in (2, 4):
            # One layer of the other kind in both.
            linear = range(num_layers - 1) if is_linear else (0,)
            cut = replace(model, num_layers=num_layers, linear_layers=tuple(linear))
            built = build_transformer(cut, layout, groups, DEVICE, vocab_size=model.vocab_size)
            with Peak() as peak:
                output = built(batch.tokens, batch.attention, batch.rows)
            kept.append(peak.held_bytes)
            planned.append(activations.training_bytes(cut, mesh, 0, len(batch.tokens)))
            del output
    assert 0.95 * (planned[1] - planned[0]) <= kept[1] - kept[0] <= planned[1] - planned[0]


def test_a_mask_of_dropout_is_drawn_in_parts(monkeypatch):
    # The last layer of a feed-forward block of 7B.
    tokens, width = 16_384, 18_944
    with fake_cuda(monkeypatch):
        dropout = Dropout(0.05, seed=1)
        keys = torch.empty(tokens, dtype=torch.int64, device=DEVICE)
        # A stand-in: the sums over tokens so far come from a plan on the host.
        attention = SimpleNamespace(positions=keys, sums_so_far=lambda values: values)
        monkeypatch.setattr("hybridflow.models.lora.PackedAttention", SimpleNamespace)
        dropout.begin(keys, attention)
        inputs = torch.empty(tokens, 1, width, dtype=torch.bfloat16, device=DEVICE)
        with Peak() as peak:
            output = dropout(inputs, "layer", 0)
    assert output.shape == inputs.shape
    assert peak.most_bytes <= 2 * inputs.nbytes + 128 * 2**20
