"""Training steps of the families of the GPU kit on a fake GPU, at the kit's sizes: forward and backward passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpu_checks.families import model_of
from torch._subclasses.fake_tensor import FakeTensor

from hybridflow.config.roles import LoRAConfig
from hybridflow.families.tables import FAMILIES
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models import cuda_attention
from hybridflow.models.gpt import build_transformer
from hybridflow.models.log_probs import vocab_parallel_log_probs
from tests.cuda.fake.backward import go_back
from tests.cuda.fake.batches import shared_prompts
from tests.cuda.fake.machine import DEVICE, fake_cuda, place
from tests.cuda.fake.test_forward import memory_efficient_attention

TOKENS = 78
"""Of two prompts of 6, and of 10, 11 and 12 behind each."""


def step(monkeypatch, model, lora=None):
    """Return the parameters that are trained, and the gradients of a loss of log-probabilities and entropies."""
    monkeypatch.setattr(cuda_attention, "scaled_dot_product_attention", memory_efficient_attention)
    with fake_cuda(monkeypatch) as world:
        groups = place(world, ParallelLayout())[1]
        built = build_transformer(model, ParallelLayout(), groups, DEVICE, vocab_size=model.vocab_size, lora=lora)
        batch = shared_prompts(2, 3, 6, 10)
        logits = built(batch.tokens, batch.attention, batch.rows)
        log_probs, entropies = vocab_parallel_log_probs(
            logits, batch.targets, group=groups.tp, vocab_size=model.vocab_size
        )
        gradients = go_back(-(log_probs + 0.1 * entropies).mean())
    return {name: each for name, each in built.named_parameters() if each.requires_grad}, gradients


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_parameter_of_a_family_has_a_gradient(monkeypatch, name, dtype):
    """Without a question to the device, but for experts that are computed one after the other, in fp32."""
    model = replace(model_of(name), dtype=dtype)
    if model.num_experts is not None and dtype == "fp32":
        # How many tokens each expert has.
        counts = [0] * (model.num_experts - 1) + [TOKENS * model.experts_per_token]
        monkeypatch.setattr(FakeTensor, "tolist", lambda each: counts)
    trained, gradients = step(monkeypatch, model)
    without = {name for name, each in trained.items() if id(each) not in gradients}
    # It chooses experts, and is stepped by itself.
    assert not {each for each in without if not each.endswith("expert_bias")}
    for each in trained.values():
        if id(each) in gradients:
            found = gradients[id(each)]
            assert (found.device, found.shape, found.dtype) == (DEVICE, each.shape, each.dtype)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_text", "glm4_moe_lite"])
def test_every_factor_of_adapters_with_dropout_has_a_gradient(monkeypatch, name):
    lora = LoRAConfig(rank=4, alpha=8.0, dropout=0.1)
    trained, gradients = step(monkeypatch, replace(model_of(name), dtype="bf16"), lora)
    assert trained and {id(each) for each in trained.values()} == gradients.keys()
