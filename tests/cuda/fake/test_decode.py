"""A step of decoding: how often it asks the host, how many kernels it starts, how much memory it reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridflow.config.roles import LoRAConfig
from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.mapping.memory import joined_bytes
from hybridflow.models.gpt import build_transformer
from hybridflow.models.shapes import model_spec, shape_of
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
QWEN3_30B = ModelConfig(
    # Of 48 layers.
    num_layers=4,
    hidden_size=2048,
    ffn_hidden_size=768,
    num_attention_heads=32,
    num_query_groups=4,
    head_dim=128,
    max_context=4096,
    vocab_size=151936,
    rotary_base=1e6,
    qk_norm=True,
    num_experts=128,
    experts_per_token=8,
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

LORA = LoRAConfig(rank=16, alpha=32.0)


@pytest.mark.parametrize(
    ("model", "tp", "rows", "launches_per_layer", "is_edited", "lora"),
    [
        pytest.param(QWEN2_7B, 1, 64, 12, False, None, id="7B, batch 64"),
        pytest.param(QWEN2_7B, 1, 64, 20, False, LORA, id="7B, batch 64, adapters"),
        pytest.param(QWEN2_7B, 1, 8, 12, True, None, id="7B, batch 8, keys split, edited logits"),
        pytest.param(LLAMA3_70B, 8, 64, 12, False, None, id="70B, one rank of tp8"),
        pytest.param(LLAMA3_70B, 8, 64, 20, False, LORA, id="70B, one rank of tp8, adapters"),
        pytest.param(QWEN3_30B, 1, 64, 14, False, None, id="30B of 128 experts"),
        pytest.param(QWEN3_30B, 2, 8, 16, True, None, id="30B of 128 experts, one rank of tp2, edited logits"),
    ],
)
def test_a_step_asks_nothing_of_the_host_and_starts_few_kernels(
    monkeypatch, model, tp, rows, launches_per_layer, is_edited, lora
):
    monkeypatch.setattr(
        decode._State,
        "pair",
        lambda self, *shape, dtype: (torch.zeros(shape, dtype=dtype, device=DEVICE), torch.zeros(shape, dtype=dtype)),
    )
    with fake_cuda(monkeypatch, size=tp) as world, torch.inference_mode():
        layout = ParallelLayout(tp=tp)
        mesh, groups = place(world, layout)
        built = build_transformer(model, layout, groups, DEVICE, vocab_size=model.vocab_size, lora=lora)
        transformer = GpuTransformer(built, groups.tp, model.vocab_size)
        decoder = decode.Decoder(
            transformer, groups.tp, max_rows=rows, max_steps=16, context=model.max_context, device=DEVICE
        )
        edits = decoder._edits_for(np.zeros((rows, 3, 2))) if is_edited else None
        with Launches() as launches:
            # A host synchronization would raise here.
            decoder.step(rows, edits)
    copied = sum(each.nbytes for _, *pair in transformer._factors.values() for each in pair)
    spec = model_spec(shape_of(model))
    assert copied == (0 if lora is None else joined_bytes(spec, lora, mesh, 0))
    # Beside the layers: the embedding, the output layer and sampling.
    assert sum(launches.names.values()) <= launches_per_layer * model.num_layers + 20, launches.names
    # The cache is read by address, and not counted: a program for each query group reads each key and value once. Nor
    # are experts: a program for each expert and some columns reads these once.
    weights = sum(each.nbytes for name, each in built.named_parameters() if ".experts." not in name)
    assert launches.num_bytes <= 1.15 * weights, launches.num_bytes / weights
    assert launches.names["sample_part"] == 1 and launches.names["settle"] == 1
    for name in ("penalize", "add_rules", "remember"):
        assert launches.names[name] == is_edited
