"""Forward passes in training on a fake GPU: every family, on one device, with little memory and no question to it."""

from __future__ import annotations

from dataclasses import replace

import megatron.core.tensor_parallel.layers as megatron_layers
import pytest
import torch

from hybridflow.config.roles import LoRAConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models import cuda_attention
from hybridflow.models.attention import PackedAttention
from hybridflow.models.gpt import build_transformer
from hybridflow.models.log_probs import vocab_parallel_log_probs
from hybridflow.models.routing import NUM_SUMS
from hybridflow.models.scoring import Scoring
from hybridflow.parallel import accelerators
from tests.cuda.fake.batches import one_sequence, routed, shared_prompts
from tests.cuda.fake.machine import DEVICE, Launches, fake_cuda, place
from tests.cuda.fake.shapes import FAMILIES, family_model

ATTENTION = {"_varlen_attn", "packed_attention"}
LAUNCHES_PER_LAYER, LAUNCHES_OF_OTHERS, LAUNCHES_OF_BOTH = 20, 65, 80
LAUNCHES_OF_TWO_KINDS = 30
"""In a forward pass. The others have experts, also a shared one; norms around 1, of four launches each; or norms over
all heads. Some have experts and such norms, or experts with biases."""
WITH_BOTH = {"olmoe", "minimax_m2", "gpt_oss"}
PLAIN = {"llama", "mistral", "qwen2", "qwen3", "phi3", "glm", "glm4", "seed_oss"}


def build(world, model, **given):
    groups = place(world, ParallelLayout())[1]
    return groups, build_transformer(model, ParallelLayout(), groups, DEVICE, vocab_size=model.vocab_size, **given)


def log_probs_on_device(monkeypatch, model):
    """Return the launches of log-probabilities of samples that share prompts; all that they make is on the device."""
    with fake_cuda(monkeypatch) as world:
        groups, built = build(world, model)
        batch = shared_prompts(3, 4, 900, 300)
        with Launches() as launches:
            logits = built(batch.tokens, batch.attention, batch.rows)
            found = vocab_parallel_log_probs(logits, batch.targets, group=groups.tp, vocab_size=model.vocab_size)
    assert logits.shape == (len(batch.rows), model.vocab_size) and logits.dtype == torch.bfloat16
    assert all(each.device == DEVICE and each.requires_grad for each in (logits, *found))
    assert {each.device for each in built.parameters()} == {DEVICE}
    return launches


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_log_probabilities(monkeypatch, name):
    model = family_model(name)
    launches = log_probs_on_device(monkeypatch, model)
    used = {each: count for each, count in launches.names.items() if each in ATTENTION}
    assert sum(used.values()) == model.num_layers
    assert launches.names["packed_attention"] == model.num_layers * bool(
        model.attention_softcap or model.attention_sinks
    )
    most = LAUNCHES_PER_LAYER if name in PLAIN else LAUNCHES_OF_BOTH if name in WITH_BOTH else LAUNCHES_OF_OTHERS
    assert sum(launches.names.values()) <= most * model.num_layers + 40, launches.names
    assert launches.names["_grouped_mm"] == (2 * model.num_layers if model.num_experts else 0)


def test_linear_attention_is_computed_on_the_device(monkeypatch):
    """Beside a layer with attention, whose output has gates; of shared prompts, which make rectangles."""
    model = family_model("qwen3_5_text")
    launches = log_probs_on_device(monkeypatch, model)
    assert sum(count for each, count in launches.names.items() if each in ATTENTION) == 1


@pytest.mark.parametrize("has_experts", [False, True])
def test_two_kinds_of_heads_are_computed_on_the_device(monkeypatch, has_experts):
    """Of Gemma 4, whose wide heads are half as wide here: torch has no kernel for more where there is no GPU."""
    experts = dict(num_experts=128, experts_per_token=8, ffn_hidden_size=704, shared_ffn_hidden_size=2112)
    changes = {**experts, "expert_norms": True} if has_experts else {}
    model = replace(family_model("gemma4_text"), head_dim=128, global_head_dim=256, **changes)
    launches = log_probs_on_device(monkeypatch, model)
    assert sum(count for each, count in launches.names.items() if each in ATTENTION) == model.num_layers
    most = LAUNCHES_OF_BOTH if has_experts else LAUNCHES_OF_TWO_KINDS
    assert sum(launches.names.values()) <= most * model.num_layers + 40, launches.names
    assert launches.names["_grouped_mm"] == (2 * model.num_layers if has_experts else 0)


@pytest.mark.parametrize("is_replayed", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_routers_ask_nothing_of_the_host(monkeypatch, name, is_replayed):
    model = family_model(name)
    with fake_cuda(monkeypatch) as world:
        _, built = build(world, model)
        batch = routed(shared_prompts(3, 4, 90, 30), model, is_replayed=is_replayed)
        built(batch.tokens, batch.attention, batch.rows)
        told = batch.attention.routing.told(model.num_layers, model.num_experts)
    assert told.device == DEVICE and told.shape == (model.num_layers, model.num_experts + NUM_SUMS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_weight_gradient_is_added_to_its_sums_by_one_product(monkeypatch, dtype):
    monkeypatch.delattr(megatron_layers, "fused_weight_gradient_mlp_cuda", raising=False)
    with fake_cuda(monkeypatch) as world:
        _, built = build(world, family_model("qwen2"))
        accelerators.fuse_weight_gradients(built.modules())
        inputs, gradients = (torch.empty(64, width, dtype=dtype, device=DEVICE) for width in (32, 48))
        sums = torch.zeros(48, 32, device=DEVICE)
        with Launches() as launches:
            megatron_layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(inputs, gradients, sums)
    assert sum(launches.names.values()) == 1 and launches.made_bytes == 0, launches.names
    kinds = megatron_layers.ColumnParallelLinear, megatron_layers.RowParallelLinear
    linears = [each for each in built.modules() if isinstance(each, kinds)]
    # Four of each layer, and the output.
    assert len(linears) == 4 * family_model("qwen2").num_layers + 1
    assert all(each.gradient_accumulation_fusion for each in linears)


def test_a_critic_gives_values(monkeypatch):
    with fake_cuda(monkeypatch) as world:
        _, built = build(world, family_model("llama"), has_value_head=True)
        batch = shared_prompts(2, 2, 100, 50)
        values = built(batch.tokens, batch.attention, batch.rows)
    assert values.shape == (len(batch.rows), 1) and values.device == DEVICE and values.requires_grad


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_adapters_alone_are_trained(monkeypatch, name):
    with fake_cuda(monkeypatch) as world:
        lora = LoRAConfig(rank=8, alpha=16.0)
        _, built = build(world, family_model(name), lora=lora)
        batch = shared_prompts(2, 2, 100, 50)
        logits = built(batch.tokens, batch.attention, batch.rows)
    trained = [each for each in built.parameters() if each.requires_grad]
    assert trained and {each.device for each in trained} == {DEVICE}
    assert len(trained) < len(list(built.parameters())) and logits.requires_grad


def memory_efficient_attention(query, key, value, *, attn_mask, is_causal, scale):
    """Call the kernel without scores of all pairs, if it can take this. Which kernel torch takes it asks the device."""
    assert attn_mask is None and is_causal and query.shape == key.shape and query.shape[3] % 8 == 0
    assert not torch.backends.cuda.math_sdp_enabled() and not torch.backends.cuda.cudnn_sdp_enabled()
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, None, True, is_causal=True, scale=scale)[0]


KINDS = {
    "plain": (Scoring(scale=0.1), 128, torch.bfloat16),
    "window": (Scoring(scale=0.1, window=64), 128, torch.bfloat16),
    "cap": (Scoring(scale=0.1, softcap=50.0), 256, torch.bfloat16),
    "cap and window": (Scoring(scale=0.1, softcap=50.0, window=64), 256, torch.bfloat16),
    "fp32 with a window": (Scoring(scale=0.1, window=64), 128, torch.float32),
    "fp32": (Scoring(scale=0.1), 128, torch.float32),
    "odd heads": (Scoring(scale=0.1), 100, torch.bfloat16),
    "wide heads": (Scoring(scale=0.1), 320, torch.bfloat16),
}


@pytest.mark.parametrize("kind", KINDS)
def test_memory_of_attention_does_not_grow_with_the_square_of_tokens(monkeypatch, kind):
    monkeypatch.setattr(cuda_attention, "scaled_dot_product_attention", memory_efficient_attention)
    scoring, head, dtype = KINDS[kind]
    made = []
    for tokens in (8192, 16384):
        with fake_cuda(monkeypatch):
            attention: PackedAttention = one_sequence(tokens)
            query, key, value = (
                torch.empty(tokens, heads, head, dtype=dtype, device=DEVICE, requires_grad=True) for heads in (8, 2, 2)
            )
            with Launches() as launches:
                context = attention.attend(0, query, key, value, scoring)
        assert context.shape == query.shape and context.dtype == dtype and context.requires_grad
        made.append(launches.made_bytes)
    assert made[1] <= 2.01 * made[0], launches.names
    assert made[0] <= 16 * query.nbytes


def test_prompts_that_samples_share_are_computed_once(monkeypatch):
    made = {}
    for samples in (1, 8):
        with fake_cuda(monkeypatch):
            batch = shared_prompts(1, samples, 4096, 16)
            tokens = len(batch.tokens)
            query, key, value = (
                torch.empty(tokens, heads, 128, dtype=torch.bfloat16, device=DEVICE) for heads in (8, 2, 2)
            )
            with Launches() as launches:
                assert batch.attention.attend(0, query, key, value, Scoring(scale=0.1)).shape == query.shape
            made[samples] = launches.made_bytes - 2 * key.nbytes / tokens * sum(batch.lengths) * (samples > 1)
    # But for keys and values, which are gathered for each sample.
    assert made[8] <= 1.1 * made[1]


def test_a_model_in_fp32_needs_no_scores_of_all_pairs(monkeypatch):
    monkeypatch.setattr(cuda_attention, "scaled_dot_product_attention", memory_efficient_attention)
    with fake_cuda(monkeypatch) as world:
        _, built = build(world, replace(family_model("llama"), dtype="fp32"))
        batch = shared_prompts(2, 2, 100, 50)
        with Launches() as launches:
            built(batch.tokens, batch.attention, batch.rows)
    assert launches.names["_scaled_dot_product_efficient_attention"] == 2
