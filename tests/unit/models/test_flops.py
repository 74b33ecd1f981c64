"""Operations of a model, held against what torch counts in Hugging Face's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hybridflow.families.model import ModelConfig
from hybridflow.models.flops import model_flops, sampling_flops, sequence_pairs
from hybridflow.models.microbatch import pack

SIZES = dict(hidden_size=32, num_attention_heads=4, head_dim=12)
LLAMA = ModelConfig(num_layers=3, ffn_hidden_size=48, num_query_groups=2, max_context=64, **SIZES)
MIXTURE = ModelConfig(num_layers=2, ffn_hidden_size=20, max_context=64, num_experts=6, experts_per_token=2, **SIZES)
GATED = replace(MIXTURE, shared_ffn_hidden_size=28, shared_expert_gate=True)
LATENT = ModelConfig(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    max_context=64,
    **dict(kv_lora_rank=12, q_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8),
    **dict(ffn_hidden_size=20, num_experts=6, experts_per_token=2, num_dense_layers=1, dense_ffn_hidden_size=40),
    **dict(shared_ffn_hidden_size=20, router_score="sigmoid", router_bias=True),
)
VOCAB, LENGTH = 29, 11


def transformers_model(model: ModelConfig) -> torch.nn.Module:
    known: dict[str, Any] = dict(
        **{**SIZES, "hidden_size": model.hidden_size},
        num_hidden_layers=model.num_layers,
        num_key_value_heads=model.query_groups,
        vocab_size=VOCAB,
        attn_implementation="eager",
    )
    if model.kv_lora_rank is not None:
        names = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        latent = {name: getattr(model, name) for name in names}
        experts = dict(n_routed_experts=model.num_experts, num_experts_per_tok=model.experts_per_token, n_group=1)
        experts |= dict(topk_group=1, moe_intermediate_size=model.ffn_hidden_size, first_k_dense_replace=1)
        width = model.dense_ffn_hidden_size
        del known["head_dim"]
        config = DeepseekV3Config(intermediate_size=width, experts_implementation="eager", **latent, **experts, **known)
        return DeepseekV3ForCausalLM(config)
    if model.num_experts is None:
        return LlamaForCausalLM(LlamaConfig(intermediate_size=model.ffn_hidden_size, **known))
    mixture = dict(
        num_experts=model.num_experts,
        num_experts_per_tok=model.experts_per_token,
        moe_intermediate_size=model.ffn_hidden_size,
        experts_implementation="eager",
    )
    if model.shared_expert_gate:
        width = model.shared_ffn_hidden_size
        return Qwen2MoeForCausalLM(Qwen2MoeConfig(shared_expert_intermediate_size=width, **mixture, **known))
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(intermediate_size=1, **mixture, **known))


def test_operations_of_linear_attention_are_what_torch_counts_and_three_products_with_the_state():
    linear = dict(linear_key_head_dim=6, linear_value_head_dim=10)
    model = ModelConfig(
        **dict(num_layers=3, ffn_hidden_size=48, num_query_groups=2, max_context=64, **SIZES, **linear),
        **dict(linear_layers=(0, 2), linear_key_heads=2, linear_value_heads=4, linear_conv_kernel=4),
        attention_output_gate=True,
    )
    config = Qwen3_5TextConfig(
        **dict(num_hidden_layers=3, intermediate_size=48, num_key_value_heads=2, vocab_size=VOCAB, **SIZES, **linear),
        **dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_conv_kernel_dim=4),
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        attn_implementation="eager",
    )
    with FlopCounterMode(display=False) as counter:
        Qwen3_5ForCausalLM(config)(torch.arange(LENGTH)[None])
    counted = counter.get_flop_counts()["Global"]
    products = sum(count for operation, count in counted.items() if str(operation) in ("aten.mm", "aten.addmm"))
    flops = model_flops(model, vocab_size=VOCAB)
    # Of two layers, four heads each: multiplied by a key, added to by a key and a value, multiplied by a query.
    states = 2 * 4 * 3 * 2 * 6 * 10
    assert flops.forward(LENGTH, 0, LENGTH) == products + LENGTH * states
    # Queries with keys and weights with values, in the layer between them alone.
    assert flops.per_pair == 2 * 4 * 2 * 12


def test_operations_of_two_kinds_of_heads_are_what_torch_counts():
    model = replace(
        LLAMA,
        **dict(window=4, window_layers=(0, 1), local_rotary_base=9.0, attention_scale=1.0),
        **dict(global_head_dim=16, global_query_groups=1, keys_as_values=True),
    )
    config = Gemma4TextConfig(
        **dict(num_hidden_layers=3, intermediate_size=48, num_key_value_heads=2, vocab_size=VOCAB, **SIZES),
        **dict(global_head_dim=16, num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=4),
        **dict(layer_types=["sliding_attention"] * 2 + ["full_attention"], hidden_size_per_layer_input=0),
        attn_implementation="eager",
    )
    with FlopCounterMode(display=False) as counter:
        Gemma4ForCausalLM(config)(torch.arange(LENGTH)[None])
    counted = counter.get_flop_counts()["Global"]
    products = sum(count for operation, count in counted.items() if str(operation) in ("aten.mm", "aten.addmm"))
    flops = model_flops(model, vocab_size=VOCAB)
    assert flops.forward(LENGTH, 0, LENGTH) == products
    # Queries with keys and weights with values: two layers of heads of 12, and one of 16.
    assert flops.per_pair == 2 * 4 * 2 * (12 + 12 + 16)
    # The first two layers alone have no such head.
    assert model_flops(replace(model, num_layers=2), vocab_size=VOCAB).per_pair == 2 * 4 * 2 * (12 + 12)


@pytest.mark.parametrize("model", [LLAMA, MIXTURE, GATED, LATENT], ids=["dense", "mixture", "gated", "latent"])
def test_operations_are_what_torch_counts(model: ModelConfig):
    torch.manual_seed(1)
    made = transformers_model(model)
    with FlopCounterMode(display=False) as counter:
        made(torch.arange(LENGTH)[None])
    counted = counter.get_flop_counts()["Global"]
    flops = model_flops(model, vocab_size=VOCAB)
    batched = sum(count for operation, count in counted.items() if "bmm" in str(operation))
    # There every token is compared with every other, and those to come are thrown away.
    assert batched == flops.per_pair * LENGTH**2
    assert sum(counted.values()) - batched == flops.forward(LENGTH, 0, LENGTH)


def test_training_is_three_times_as_much_and_frozen_weights_have_no_gradient():
    flops = model_flops(LLAMA, vocab_size=VOCAB)
    assert flops.training(7, 28, 5) == 3 * flops.forward(7, 28, 5)
    assert flops.training(7, 28, 5, is_frozen=True) == 2 * flops.forward(7, 0, 5) + 3 * flops.forward(0, 28, 0)
    assert model_flops(LLAMA, vocab_size=VOCAB, has_value_head=True).per_output == 2 * 32


def test_a_shared_prompt_is_counted_once():
    assert sequence_pairs(4) == 10 and sequence_pairs(4, 3) == 4
    sequences = [torch.tensor(each) for each in ([1, 2, 3, 4, 5], [1, 2, 3, 9], [7, 8])]
    part = pack([0, 1, 2], sequences, [3, 3, 1], torch.device("cpu"))
    # 1 to 5 of the first, 4 of the second behind its prompt, 1 and 2 of the third.
    assert len(part.tokens) == 5 + 1 + 2 and part.num_pairs == 15 + 4 + 3


def test_sampling_computes_a_prompt_once_and_no_last_token():
    flops = model_flops(LLAMA, vocab_size=VOCAB)
    # Two samples of a prompt of 3 tokens, with 2 tokens and 1; and one that ended before it began.
    found = sampling_flops(flops, [(5, 3, 2), (5, 3, 1), (6, 2, 0)])
    assert found == flops.forward(3 + 1 + 2, 6 + 4 + 3, 2 + 1)
