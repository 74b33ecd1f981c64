"""What arithmetic says of a model is what megatron-core's own model says; and the table's figures add up."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from hybridflow.config.roles import LoRAConfig
from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.adapters import whole_spec
from hybridflow.models.shapes import cached_token_bytes, known_models, model_spec
from hybridflow.models.specs import describe
from tests.support.described import describe_model
from tests.support.megatron_models import make_whole
from tests.support.ranks import run_ranks

# Parameters of each model as published with its weights (the total of the index of its safetensors files); an embedding
# tied to the output counts once.
PUBLISHED = {
    "llama3-1b": 1_235_814_400,
    "llama3-3b": 3_212_749_824,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    # Of the language model alone, as transformers counts it.
    "qwen3.5-9b": 8_953_803_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    # By hand, from the sizes in its paper (arXiv 2412.19437): see test_the_parameters_of_deepseek_v3_by_hand.
    "deepseek-v3": 671_026_419_200,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    # The larger three without vision tower and projection: 416_866_032 and 1152 * (hidden size + 1).
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 4_300_079_472 - 416_866_032 - 1152 * 2561,
    "gemma3-12b": 12_187_325_040 - 416_866_032 - 1152 * 3841,
    "gemma3-27b": 27_432_406_640 - 416_866_032 - 1152 * 5377,
    # Of the language model alone, as transformers counts it, and the numbers on outputs of layers: buffers there.
    "gemma4-31b": 30_697_345_280 + 60,
    "gemma4-26b-a4b": 25_233_141_760 + 30,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "glm4-9b": 9_400_279_040,
    "glm4-32b": 32_566_081_536,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


def test_known_models_have_the_published_number_of_parameters():
    counts = {
        name: sum(math.prod(tensor.shape) for tensor in model_spec(known).tensors)
        for name, known in known_models().items()
    }
    assert counts == PUBLISHED


def test_the_cache_of_two_kinds_of_heads_by_hand():
    known = known_models()["gemma4-31b"]
    # 50 layers with 16 key/value heads of 256, and 10 with 4 of 512, in bf16.
    assert cached_token_bytes(known, ParallelLayout()) == 2 * 2 * (50 * 16 * 256 + 10 * 4 * 512)
    # With fewer heads than ranks each has one; of two stages each has half of both kinds.
    assert cached_token_bytes(known, ParallelLayout(tp=8, pp=2)) == 2 * 2 * (25 * 2 * 256 + 5 * 512)


def test_the_parameters_of_deepseek_v3_by_hand():
    hidden, heads, layers = 7168, 128, 61
    queries = 1536 * (hidden + 1 + heads * 192)
    keys_and_values = hidden * (512 + 64) + 512 * (1 + heads * (128 + 128))
    attention = queries + keys_and_values + heads * 128 * hidden
    dense, expert = 3 * hidden * 18432, 3 * hidden * 2048
    # 256 routed, one shared; the router and its bias.
    mixture = 257 * expert + 256 * (hidden + 1)
    norms = (2 * layers + 1) * hidden
    whole = 2 * 129280 * hidden + layers * attention + 3 * dense + 58 * mixture + norms
    assert whole == PUBLISHED["deepseek-v3"]


def is_of_megatron(known):
    """Whether megatron-core's own layers have all tensors; the recipes below have the others."""
    is_other = known.post_norms or known.attention_sinks or known.kv_lora_rank is not None
    return not is_other and not known.linear_layers


@pytest.mark.parametrize("name", sorted(name for name, known in known_models().items() if is_of_megatron(known)))
def test_a_named_model_is_described_as_megatron_core_builds_it(name):
    # Two layers tell as much as all.
    known = dataclasses.replace(known_models()[name], num_layers=2)
    assert model_spec(known) == describe(make_whole(known))


SMALL = ModelConfig(
    num_layers=3,
    hidden_size=32,
    ffn_hidden_size=24,
    num_attention_heads=8,
    num_query_groups=2,
    head_dim=6,
    max_context=32,
    vocab_size=29,
    vocab_divisible_by=4,
)


def test_any_small_model_is_described_as_megatron_core_builds_it():
    on_off = (False, True)
    for tied, bias, norm, shared, experts in itertools.product(on_off, on_off, on_off, (None, 20), (None, 4)):
        if experts is None and shared is not None:
            continue
        known = dataclasses.replace(
            SMALL,
            tied_embeddings=tied,
            qkv_bias=bias,
            qk_norm=norm,
            num_experts=experts,
            shared_ffn_hidden_size=shared,
            shared_expert_gate=shared is not None and tied,
            router_bias=tied != bias,
            dtype="fp32" if norm else "bf16",
        )
        whole = make_whole(known)
        assert model_spec(known) == describe(whole, vocab_divisible_by=4), known


MODEL = ModelConfig(num_layers=2, hidden_size=32, ffn_hidden_size=24, num_attention_heads=4, max_context=8)
LATENT = dict(kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8)
LINEAR = dict(
    **dict(linear_layers=(0,), linear_key_heads=2, linear_value_heads=4, linear_conv_kernel=4),
    **dict(linear_key_head_dim=6, linear_value_head_dim=10),
)
WINDOWED = dict(
    **dict(window=4, window_layers=(0,), local_rotary_base=9.0, attention_scale=1.0, head_dim=8, num_query_groups=4),
    **dict(global_head_dim=12, global_query_groups=2, keys_as_values=True, value_norm=True, layer_scalars=True),
)
RECIPES = [
    MODEL,
    dataclasses.replace(MODEL, num_query_groups=2, head_dim=12, vocab_divisible_by=5, qk_norm=True, dtype="bf16"),
    dataclasses.replace(MODEL, tied_embeddings=True, qkv_bias=True),
    dataclasses.replace(MODEL, post_norms=True, zero_centered_norms=True, qk_norm=True, dtype="bf16"),
    dataclasses.replace(MODEL, num_experts=4, post_norms=True, dtype="bf16"),
    dataclasses.replace(MODEL, num_experts=4, linear_bias=True, attention_sinks=True),
    dataclasses.replace(MODEL, linear_bias=True),
    dataclasses.replace(MODEL, pre_norms=False, post_norms=True, qk_norm=True, qk_norm_over="projection"),
    dataclasses.replace(
        MODEL, num_experts=4, router_score="sigmoid", router_bias=True, shared_ffn_hidden_size=20, dtype="bf16"
    ),
    dataclasses.replace(MODEL, **LINEAR, num_query_groups=2, attention_output_gate=True, qk_norm=True),
    dataclasses.replace(MODEL, **LINEAR, num_experts=4, zero_centered_norms=True, dtype="bf16"),
    dataclasses.replace(MODEL, **WINDOWED, post_norms=True, qk_norm=True, dtype="bf16"),
    dataclasses.replace(MODEL, **{**WINDOWED, "keys_as_values": False}),
    dataclasses.replace(
        MODEL, **WINDOWED, num_experts=4, expert_norms=True, shared_ffn_hidden_size=20, post_norms=True, dtype="bf16"
    ),
    dataclasses.replace(MODEL, **LATENT, post_norms=True),
    dataclasses.replace(MODEL, **LATENT, pre_norms=False, post_norms=True),
    dataclasses.replace(
        MODEL, **LATENT, q_lora_rank=10, num_experts=4, num_dense_layers=1, dense_ffn_hidden_size=40, dtype="bf16"
    ),
]


ADAPTERS = (
    None,
    LoRAConfig(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")),
    LoRAConfig(rank=2, alpha=2.0, targets=("qkv_proj", "gate_up_proj")),
    LoRAConfig(rank=2, alpha=2.0, targets=("in_proj_qkv", "in_proj_a", "out_proj", "k_proj")),
)
CASES = [
    (model, has_value_head, lora)
    for model, has_value_head, lora in itertools.product(RECIPES, (False, True), ADAPTERS)
    if lora is None or (model.num_experts is None and model.kv_lora_rank is None)
]


def described(world):
    world.make_groups([(0,)])
    return [
        describe_model(world, model, vocab_size=29, has_value_head=has_value_head, lora=lora)
        for model, has_value_head, lora in CASES
    ]


def test_a_recipes_model_is_described_as_it_is_built():
    (specs,) = run_ranks(described, 1)
    expected = [
        whole_spec(dataclasses.replace(model, vocab_size=29), has_value_head=has_value_head, lora=lora)
        for model, has_value_head, lora in CASES
    ]
    assert specs == expected
    assert len({spec.digest() for spec in specs}) == len(specs)
