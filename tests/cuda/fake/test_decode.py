"""A step of decoding: how often it asks the host, how many kernels it starts, how much memory it reads."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hybridflow.config.roles import LoRAConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.mapping.memory import joined_bytes
from hybridflow.models import cuda_attention
from hybridflow.models.gpt import build_transformer
from hybridflow.models.shapes import known_models, model_spec
from hybridflow.rollout.blocks import BLOCK_TOKENS
from hybridflow.rollout.gpu import decode, prompts
from hybridflow.rollout.gpu.cache import GpuAttention
from hybridflow.rollout.gpu.transformer import GpuTransformer
from tests.cuda.fake.machine import DEVICE, Launches, fake_cuda, place

QWEN2_7B, QWEN3_5_9B = known_models()["qwen2.5-7b"], replace(known_models()["qwen3.5-9b"], rotary_dim=64)
LLAMA3_70B = replace(known_models()["llama3-70b"], max_context=8192)
# Of 48 and 94 layers.
QWEN3_30B, QWEN3_235B = (replace(known_models()[name], num_layers=4) for name in ("qwen3-30b-a3b", "qwen3-235b-a22b"))
QWEN3_5_35B = replace(
    QWEN3_5_9B,
    # Of 40 layers.
    num_layers=4,
    hidden_size=2048,
    ffn_hidden_size=512,
    num_query_groups=2,
    linear_layers=(0, 1, 2),
    num_experts=256,
    experts_per_token=8,
    shared_ffn_hidden_size=512,
    shared_expert_gate=True,
)
GLM_4_5_AIR = replace(
    QWEN3_30B,
    # Of 46 layers.
    hidden_size=4096,
    ffn_hidden_size=1408,
    num_attention_heads=96,
    num_query_groups=8,
    rotary_dim=64,
    vocab_size=151552,
    qkv_bias=True,
    qk_norm=False,
    num_dense_layers=1,
    dense_ffn_hidden_size=10944,
    shared_ffn_hidden_size=1408,
    router_score="sigmoid",
    router_bias=True,
)
OLMO3_7B = replace(
    known_models()["olmo2-7b"],
    vocab_size=100278,
    window=4096,
    window_layers=tuple(layer for layer in range(32) if layer % 4 != 3),
)
MINIMAX_M2 = replace(
    QWEN3_30B,
    # Of 62 layers.
    hidden_size=3072,
    ffn_hidden_size=1536,
    num_attention_heads=48,
    num_query_groups=8,
    rotary_dim=64,
    vocab_size=200064,
    qk_norm_over="projection",
    num_experts=256,
    router_score="sigmoid",
    router_bias=True,
)
DEEPSEEK_V3 = replace(
    known_models()["deepseek-v3"],
    # Of 61 layers.
    num_layers=4,
    num_dense_layers=1,
    router_groups=8,
    router_groups_per_token=4,
    routed_scaling=2.5,
)
GPT_OSS_20B = replace(
    known_models()["gpt-oss-20b"],
    # Of 24 layers.
    num_layers=4,
    qkv_bias=True,
    window=128,
    window_layers=(0, 2),
    activation="quick_gelu",
    glu_clamp=7.0,
    glu_offset=1.0,
)
GEMMA4_31B, GEMMA4_26B = (
    # Of 60 and 30 layers.
    replace(known_models()[name], num_layers=6, window_layers=(0, 1, 2, 3, 4), max_context=4096, dtype="bf16")
    for name in ("gemma4-31b", "gemma4-26b-a4b")
)

LORA = LoRAConfig(rank=16, alpha=32.0)


def on_the_device(self, *shape, dtype):
    """Make both tensors of a pair without memory."""
    return torch.zeros(shape, dtype=dtype, device=DEVICE), torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("model", "layout", "rows", "launches_per_layer", "is_edited", "lora"),
    [
        pytest.param(QWEN2_7B, "tp1", 64, 12, False, None, id="7B, batch 64"),
        pytest.param(QWEN2_7B, "tp1", 64, 20, False, LORA, id="7B, batch 64, adapters"),
        pytest.param(QWEN2_7B, "tp1", 8, 12, True, None, id="7B, batch 8, keys split, edited logits"),
        pytest.param(LLAMA3_70B, "tp8", 64, 12, False, None, id="70B, one rank of tp8"),
        pytest.param(LLAMA3_70B, "tp8", 64, 20, False, LORA, id="70B, one rank of tp8, adapters"),
        pytest.param(QWEN3_30B, "tp1", 64, 14, False, None, id="30B of 128 experts"),
        pytest.param(QWEN3_30B, "tp2", 8, 16, True, None, id="30B of 128 experts, one rank of tp2, edited logits"),
        pytest.param(QWEN3_5_35B, "tp1", 64, 17, False, None, id="35B with linear attention and a shared expert"),
        pytest.param(GLM_4_5_AIR, "tp2", 64, 19, False, None, id="106B with a shared expert, one rank of tp2"),
        pytest.param(GPT_OSS_20B, "tp1", 64, 12, False, None, id="20B with sinks and biases"),
        pytest.param(GPT_OSS_20B, "tp2", 8, 15, True, None, id="20B with sinks and biases, tp2, keys split"),
        pytest.param(OLMO3_7B, "tp1", 64, 10, False, None, id="7B with norms over all heads, none before a block"),
        pytest.param(MINIMAX_M2, "tp4", 64, 17, False, None, id="230B with norms over all heads, one rank of tp4"),
        pytest.param(DEEPSEEK_V3, "tp2", 64, 21, False, None, id="671B with latent attention, one rank of tp2"),
        pytest.param(GEMMA4_31B, "tp1", 64, 8, False, None, id="31B with other heads in some layers"),
        pytest.param(GEMMA4_26B, "tp1", 32, 26, False, None, id="26B with other heads and norms around experts"),
        pytest.param(QWEN3_235B, "tp8", 16, 17, False, None, id="235B, one rank of tp8, two of which share a key"),
        pytest.param(QWEN3_235B, "tp4.ep4.etp1", 16, 17, False, None, id="235B, one rank of tp4 and ep4"),
        pytest.param(QWEN3_5_35B, "tp4", 64, 20, False, None, id="35B, one rank of tp4, two of which share a key"),
        pytest.param(QWEN3_5_9B, "tp1", 64, 9, False, None, id="9B with linear attention"),
        pytest.param(QWEN3_5_9B, "tp4", 8, 16, True, LORA, id="9B with linear attention, one rank of tp4, adapters"),
    ],
)
def test_a_step_asks_nothing_of_the_host_and_starts_few_kernels(
    monkeypatch, model, layout, rows, launches_per_layer, is_edited, lora
):
    monkeypatch.setattr(decode._State, "pair", on_the_device)
    layout = ParallelLayout.parse(layout)
    tp = layout.tp
    with fake_cuda(monkeypatch, size=tp) as world, torch.inference_mode():
        mesh, groups = place(world, layout)
        built = build_transformer(model, layout, groups, DEVICE, vocab_size=model.vocab_size, lora=lora)
        transformer = GpuTransformer(built, groups.tp, model.vocab_size)
        decoder = decode.Decoder(
            transformer, groups.tp, max_rows=rows, max_steps=16, context=model.max_context, device=DEVICE
        )
        edits = decoder._edits_for(np.zeros((rows, 3, 2))) if is_edited else None
        with Launches() as launches:
            # A host synchronization would raise here.
            decoder.step(rows, edits, is_cut=tp == 1)
        with Launches() as cutting:
            decoder.step(rows, edits)
    copied = sum(each.nbytes for _, *pair in transformer._factors.values() for each in pair)
    spec = model_spec(model)
    assert copied == (0 if lora is None else joined_bytes(spec, lora, mesh, 0))
    # Beside the layers: the embedding, the output layer and sampling.
    assert sum(launches.names.values()) <= launches_per_layer * model.num_layers + 20, launches.names
    # The cache is read by address, and not counted: a program for each query group reads each key and value once. Nor
    # are states, which a program for each key head reads and writes once, and experts: a program for each expert and
    # some columns reads these once.
    weights = sum(each.nbytes for name, each in built.named_parameters() if ".experts." not in name)
    # A few rows of the embedding are read, but all are counted: once more where it is the output layer too.
    num_bytes = launches.num_bytes - (built.shared_embedding_or_output_weight().nbytes if model.tied_embeddings else 0)
    assert num_bytes <= 1.15 * weights, num_bytes / weights
    assert launches.names["delta_step"] == len(model.linear_layers)
    assert launches.names["sample_part"] == 1 and launches.names["settle"] == 1
    # With cuts: find the edges, for which several ranks gather the logits, and lay them row by row (a view here).
    assert cutting.names["find_floors"] == 1 and launches.names["find_floors"] == (tp == 1)
    assert sum(cutting.names.values()) == sum(launches.names.values()) + (0 if tp == 1 else 2)
    for name in ("penalize", "add_rules", "remember"):
        assert launches.names[name] == is_edited


@pytest.mark.parametrize("model", [replace(QWEN2_7B, num_layers=2), replace(QWEN3_5_9B, num_layers=4)])
def test_a_step_behind_images_asks_nothing_of_the_host_and_starts_the_same_kernels(monkeypatch, model):
    monkeypatch.setattr(decode._State, "pair", on_the_device)
    found = []
    with fake_cuda(monkeypatch) as world, torch.inference_mode():
        groups = place(world, ParallelLayout())[1]
        built = build_transformer(model, ParallelLayout(), groups, DEVICE, vocab_size=model.vocab_size)
        transformer = GpuTransformer(built, groups.tp, model.vocab_size)
        decoder = decode.Decoder(transformer, groups.tp, max_rows=64, max_steps=16, context=4096, device=DEVICE)
        for images in (None, SimpleNamespace()):
            built.images = images
            with Launches() as launches:
                decoder.step(64)
            found.append(launches)
    assert found[0].names == found[1].names
    assert found[1].num_bytes - found[0].num_bytes == 64 * 8 * found[0].names["store"], "a shift for each row"


def test_prompts_of_latent_attention_go_through_kernels_of_training(monkeypatch):
    """Beside rows of sequences that go on, which attend to compressed vectors; nothing is asked of the device."""
    model, lengths, layout = replace(DEEPSEEK_V3, num_layers=2), [700, 1, 300, 1], ParallelLayout(tp=8)
    with fake_cuda(monkeypatch, size=8) as world, torch.inference_mode():
        _, groups = place(world, layout)
        built = build_transformer(model, layout, groups, DEVICE, vocab_size=model.vocab_size)
        transformer = GpuTransformer(built, groups.tp, model.vocab_size)
        # Real tensors cannot be copied to a device that is not there.
        for module in (prompts, cuda_attention):
            monkeypatch.setattr(
                module, "to_device", lambda each, at: torch.empty(each.shape, dtype=each.dtype, device=at)
            )
        sequences = np.repeat(np.arange(4), lengths)
        # The third goes on behind 48 tokens in the cache.
        begins = np.array([0, 90, 48, 5])
        positions = np.concatenate([begin + np.arange(count) for begin, count in zip(begins, lengths, strict=True)])
        vectors = torch.empty(512 * BLOCK_TOKENS, 576, dtype=torch.bfloat16, device=DEVICE)
        plan = prompts.plan_prompts(lambda layer: vectors, np.zeros((4, 64), np.int32), sequences, positions, DEVICE)
        assert (len(plan.rows), len(plan.others), len(plan.places)) == (1000, 2, 1048)
        rows = torch.empty(2, 1002, dtype=torch.int64, device=DEVICE)
        tables = torch.empty(4, 64, dtype=torch.int32, device=DEVICE)
        attention = GpuAttention(torch.empty(2, 2, dtype=torch.int64, device=DEVICE), tables, *rows, prompts=plan)
        with Launches() as launches:
            logits = transformer(rows[0], attention, torch.empty(4, dtype=torch.int64, device=DEVICE))
    assert logits.device == DEVICE and launches.names["_varlen_attn"] == launches.names["attend_latent"] == 2
    # Only queries of the other rows are taken into the space of compressed vectors, and back.
    assert launches.names["store_latent"] == 2 and launches.names["bmm"] == 4


class Stream:
    """Stands for a stream of a GPU; notes how many there are."""

    made = 0

    def __init__(self, device):
        Stream.made += 1

    def wait_stream(self, other):
        pass


def test_all_graphs_are_captured_on_one_stream_which_their_first_steps_ran_on(monkeypatch):
    entered = []

    def enter(stream):
        entered.append(stream)
        return contextlib.nullcontext()

    def capture(graph, *, pool, stream, capture_error_mode):
        return enter(stream)

    monkeypatch.setattr(decode._State, "pair", on_the_device)
    monkeypatch.setattr(Stream, "made", 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream.__new__(Stream))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(pool=lambda: None))
    small = replace(QWEN2_7B, num_layers=1)
    with fake_cuda(monkeypatch) as world, torch.inference_mode():
        groups = place(world, ParallelLayout())[1]
        model = build_transformer(small, ParallelLayout(), groups, DEVICE, vocab_size=small.vocab_size)
        transformer = GpuTransformer(model, groups.tp, small.vocab_size)
        decoder = decode.Decoder(transformer, groups.tp, max_rows=8, max_steps=4, context=64, device=DEVICE)
        for rows in (1, 2, 8, 2):
            decoder._graph(rows, None, True)
        decoder.let_go()
        decoder._graph(8, None, True)
    # Each of four captures: the first steps, then the capture.
    assert len(entered) == 8 and len(set(map(id, entered))) == 1 and Stream.made == 1
