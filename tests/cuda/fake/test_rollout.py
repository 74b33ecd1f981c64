"""The GPU engine on a fake GPU: a prefill and a step of decoding of every family, without a question to the device."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.gpt import build_transformer
from hybridflow.rollout.blocks import BLOCK_TOKENS
from hybridflow.rollout.gpu import decode, recurrence
from hybridflow.rollout.gpu.cache import GpuAttention
from hybridflow.rollout.gpu.runner import runs_on_gpu
from hybridflow.rollout.gpu.transformer import GpuTransformer
from hybridflow.rollout.paged import empty_states
from tests.cuda.fake.machine import DEVICE, Launches, fake_cuda, place
from tests.cuda.fake.shapes import FAMILIES, family_model

ROWS = 64


def prefill_attention(tokens: int, transformer: GpuTransformer, context: int) -> GpuAttention:
    """Return the attention of four prompts."""
    tiles = {
        most: torch.empty(2, 4 * -(-tokens // 4 // most), dtype=torch.int32, device=DEVICE)
        for most in transformer.rows_per_tile
    }
    longs = torch.empty(2, tokens, dtype=torch.int64, device=DEVICE)
    ints = torch.empty(4, -(-context // BLOCK_TOKENS), dtype=torch.int32, device=DEVICE)
    addresses = torch.empty(2, 2, dtype=torch.int64, device=DEVICE)
    return GpuAttention(addresses, ints, *longs, tiles)


def prefilled(world, model):
    """Return the groups, the model in the engine, and the launches of a prefill of four prompts."""
    groups = place(world, ParallelLayout())[1]
    built = build_transformer(model, ParallelLayout(), groups, DEVICE, vocab_size=model.vocab_size)
    assert runs_on_gpu(built)
    transformer = GpuTransformer(built, groups.tp, model.vocab_size)
    tokens = torch.empty(800, dtype=torch.int64, device=DEVICE)
    attention = prefill_attention(800, transformer, model.max_context)
    with Launches() as prefill:
        logits = transformer(tokens, attention, torch.empty(4, dtype=torch.int64, device=DEVICE))
    assert logits.shape == (4, model.vocab_size) and logits.device == DEVICE
    return groups, transformer, prefill


def test_a_prefill_of_linear_attention_asks_nothing_of_the_device(monkeypatch):
    """Beside rows of sequences that go on, which the kernel computes."""
    model, lengths = family_model("qwen3_5_text"), [7, 1, 300, 9, 1]
    with fake_cuda(monkeypatch) as world, torch.inference_mode():
        groups = place(world, ParallelLayout())[1]
        built = build_transformer(model, ParallelLayout(), groups, DEVICE, vocab_size=model.vocab_size)
        assert runs_on_gpu(built)
        transformer = GpuTransformer(built, groups.tp, model.vocab_size)
        attention = prefill_attention(sum(lengths), transformer, model.max_context)
        slots = np.repeat(np.arange(5), lengths)
        positions = np.concatenate([np.arange(each) if each > 1 else [40] for each in lengths])
        addresses = torch.empty(2, 2, dtype=torch.int64, device=DEVICE)
        # Real tensors cannot be copied to a device that is not there.
        monkeypatch.setattr(
            recurrence, "to_device", lambda each, at: torch.empty(each.shape, dtype=each.dtype, device=at)
        )
        attention.recurrence = recurrence.plan_recurrence(addresses, empty_states(built, 8), slots, positions, DEVICE)
        with Launches() as launches:
            tokens = torch.empty(sum(lengths), dtype=torch.int64, device=DEVICE)
            logits = transformer(tokens, attention, torch.empty(5, dtype=torch.int64, device=DEVICE))
    assert logits.device == DEVICE and launches.names["delta_step"] == 1
    # The two short ones are computed together.
    assert launches.names["recurred"] == 2, launches.names


class Seen:
    """Stands for the tokens of images in a prefill; notes behind which layers the tower adds something."""

    reader = SimpleNamespace(settings=SimpleNamespace(token_id=7, num_deep=1))

    def __init__(self, tokens: int, pairs: int) -> None:
        self.positions = torch.empty(tokens, pairs, dtype=torch.int64, device=DEVICE)
        self.layers: list[int] = []

    def put(self, embedded: Tensor, first: int) -> Tensor:
        assert first == 0
        return embedded + 1

    def add(self, hidden: Tensor, layer: int, first: int) -> Tensor:
        assert first == 0
        self.layers.append(layer)
        return hidden + 1


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_prefill_with_images_asks_nothing_of_the_device(monkeypatch, name):
    model = family_model(name)
    with fake_cuda(monkeypatch) as world, torch.inference_mode():
        groups = place(world, ParallelLayout())[1]
        built = build_transformer(model, ParallelLayout(), groups, DEVICE, vocab_size=model.vocab_size)
        transformer = GpuTransformer(built, groups.tp, model.vocab_size)
        attention = prefill_attention(800, transformer, model.max_context)
        attention.images = Seen(800, len(built.rotary_pos_emb.inv_freq))
        rows = torch.empty(4, dtype=torch.int64, device=DEVICE)
        logits = transformer(torch.empty(800, dtype=torch.int64, device=DEVICE), attention, rows)
    assert logits.device == DEVICE and attention.images.layers == [1]


@pytest.mark.parametrize("name", [*FAMILIES, "gemma4_text"])
def test_prefill_and_a_step_ask_nothing_of_the_device(monkeypatch, name):
    model = family_model(name)
    monkeypatch.setattr(
        decode._State,
        "pair",
        lambda self, *shape, dtype: (torch.zeros(shape, dtype=dtype, device=DEVICE), torch.zeros(shape, dtype=dtype)),
    )
    with fake_cuda(monkeypatch) as world, torch.inference_mode():
        groups, transformer, prefill = prefilled(world, model)
        decoder = decode.Decoder(
            transformer, groups.tp, max_rows=ROWS, max_steps=16, context=model.max_context, device=DEVICE
        )
        with Launches() as step:
            decoder.step(ROWS)
    assert transformer.is_capturable
    assert prefill.names["attend"] == step.names["attend"] == model.num_layers
    for launches in (prefill, step):
        assert sum(launches.names.values()) <= 12 * model.num_layers + 20, launches.names
