"""A step of decoding: how often it asks the host, how many kernels it starts, how much memory it reads."""

from __future__ import annotations

import pytest
import torch

from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.gpt import build_transformer
from hybridflow.rollout.gpu import decode
from hybridflow.rollout.gpu.transformer import GpuTransformer
from tests.cuda.fake.machine import DEVICE, Launches, fake_cuda, place

QWEN2_7B = ModelConfig(
    num_layers=28,
    hidden_size=3584,
    ffn_hidden_size=18944,
    num_attention_heads=28,
    num_query_groups=4,
    max_context=4096,
    vocab_size=152064,
    rotary_base=1e6,
    qkv_bias=True,
    dtype="bf16",
)
LLAMA3_70B = ModelConfig(
    num_layers=80,
    hidden_size=8192,
    ffn_hidden_size=28672,
    num_attention_heads=64,
    num_query_groups=8,
    max_context=8192,
    vocab_size=128256,
    rotary_base=5e5,
    dtype="bf16",
)


@pytest.mark.parametrize(
    ("model", "tp", "rows"),
    [
        pytest.param(QWEN2_7B, 1, 64, id="7B, batch 64"),
        pytest.param(QWEN2_7B, 1, 8, id="7B, batch 8, keys split"),
        pytest.param(LLAMA3_70B, 8, 64, id="70B, one rank of tp8"),
    ],
)
def test_a_step_asks_nothing_of_the_host_and_starts_few_kernels(monkeypatch, model, tp, rows):
    monkeypatch.setattr(
        decode._State,
        "_pair",
        lambda self, *shape, dtype: (torch.zeros(shape, dtype=dtype, device=DEVICE), torch.zeros(shape, dtype=dtype)),
    )
    with fake_cuda(monkeypatch, size=tp) as world, torch.inference_mode():
        layout = ParallelLayout(tp=tp)
        groups = place(world, layout)[1]
        built = build_transformer(model, layout, groups, DEVICE, vocab_size=model.vocab_size)
        transformer = GpuTransformer(built, groups.tp, model.vocab_size)
        decoder = decode.Decoder(
            transformer, groups.tp, max_rows=rows, max_steps=16, context=model.max_context, device=DEVICE
        )
        with Launches() as launches:
            # A host synchronization would raise here.
            decoder.step(rows)
    # Beside the layers: the embedding, the output layer and sampling.
    assert sum(launches.names.values()) <= 12 * model.num_layers + 20, launches.names
    # The cache is read by address, and not counted: a program for each query group reads each key and value once.
    weights = sum(each.numel() * each.element_size() for each in built.parameters())
    assert launches.num_bytes <= 1.15 * weights, launches.num_bytes / weights
    assert launches.names["sample_part"] == 1 and launches.names["settle"] == 1
