"""Small models for tests, in any layout."""

from __future__ import annotations

from dataclasses import replace

import torch

from hybridflow.config.roles import LoRAConfig
from hybridflow.families.model import ModelConfig, RotaryScaling
from hybridflow.layout.mesh import DeviceMesh
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.gpt import Transformer, build_transformer
from hybridflow.models.shapes import LAYER_SCALAR
from hybridflow.models.weights import initialize
from hybridflow.parallel.megatron import collection, rank_sets
from hybridflow.parallel.world import World
from hybridflow.rollout.request import Request, SamplingParams, expand
from tests.support.described import describe_model

TINY = ModelConfig(
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=8,
    max_context=48,
    vocab_divisible_by=4,
    qkv_bias=True,
)
# For eight stages.
DEEP = replace(TINY, num_layers=8)
# What Gemma 2 has and Llama has not, with windows and caps small enough to matter, and a stretched rotary embedding.
CAPPED = ModelConfig(
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=48,
    num_attention_heads=8,
    num_query_groups=2,
    head_dim=12,
    max_context=48,
    vocab_divisible_by=5,
    rotary_scaling=RotaryScaling(kind="yarn", factor=4.0, original_context=12, beta_fast=4.0, beta_slow=0.5),
    zero_centered_norms=True,
    post_norms=True,
    activation="gelu_tanh",
    tied_embeddings=True,
    scaled_embeddings=True,
    attention_scale=0.2,
    attention_softcap=1.5,
    logit_softcap=4.0,
    window=4,
    window_layers=(0, 2),
)
MIXTURE = ModelConfig(
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=24,
    num_attention_heads=8,
    num_query_groups=4,
    max_context=48,
    vocab_divisible_by=4,
    qk_norm=True,
    window=6,
    num_experts=4,
    experts_per_token=2,
    normalized_experts=False,
)
# A shared expert, and a router as GLM-4.5 has; the gate is that of Qwen2-MoE.
BESIDE = replace(
    MIXTURE,
    num_layers=2,
    num_dense_layers=1,
    dense_ffn_hidden_size=32,
    shared_ffn_hidden_size=16,
    shared_expert_gate=True,
    router_score="sigmoid",
    router_bias=True,
    routed_scaling=1.5,
    normalized_experts=True,
)
# What GPT-OSS has: sinks, windows in some layers, biases of all products, and bounds of the gate that many values meet.
BOUNDED = replace(
    MIXTURE,
    num_layers=2,
    qk_norm=False,
    qkv_bias=True,
    linear_bias=True,
    attention_sinks=True,
    window_layers=(0,),
    activation="quick_gelu",
    glu_clamp=0.02,
    glu_offset=1.0,
    normalized_experts=True,
)
# What OLMo 2 and 3 have: norms of queries and keys over all heads, and none before attention and feed-forward block.
WIDE = replace(
    TINY, num_layers=2, qkv_bias=False, qk_norm=True, qk_norm_over="projection", pre_norms=False, post_norms=True
)
# What DeepSeek-V3 has beside, and its attention.
SHARED = replace(
    BESIDE,
    num_query_groups=None,
    qk_norm=False,
    kv_lora_rank=20,
    q_lora_rank=28,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=12,
    router_groups=2,
    router_groups_per_token=1,
)
# What Qwen3.5 has: linear attention in most layers, with two value heads for each key head, and gated attention. Its
# epsilon is large, since outputs near 0 have the rounding errors of larger terms, which a norm would show.
LINEAR = ModelConfig(
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=48,
    num_attention_heads=8,
    num_query_groups=2,
    head_dim=12,
    rotary_dim=4,
    max_context=48,
    vocab_divisible_by=4,
    qk_norm=True,
    zero_centered_norms=True,
    attention_output_gate=True,
    linear_layers=(0, 1, 2),
    linear_key_heads=2,
    linear_value_heads=4,
    linear_key_head_dim=4,
    linear_value_head_dim=5,
    linear_conv_kernel=4,
    norm_eps=1e-3,
)
# What Gemma 4 has: other heads in layers without a window, whose keys are the values too; values normalized; a number
# on the output of each layer; experts beside a dense block, with norms of their own.
GLOBAL = ModelConfig(
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=24,
    num_attention_heads=8,
    num_query_groups=4,
    head_dim=6,
    global_head_dim=12,
    global_query_groups=2,
    keys_as_values=True,
    max_context=48,
    vocab_divisible_by=4,
    rotary_base=1e6,
    local_rotary_base=1e4,
    rotary_scaling=RotaryScaling(kind="proportional", rotated_share=0.5),
    qk_norm=True,
    value_norm=True,
    post_norms=True,
    layer_scalars=True,
    attention_scale=1.0,
    activation="gelu_tanh",
    tied_embeddings=True,
    scaled_embeddings=True,
    logit_softcap=4.0,
    window=6,
    window_layers=(0,),
    num_experts=4,
    experts_per_token=2,
    shared_ffn_hidden_size=16,
    expert_norms=True,
)
VOCAB = 29


def layouts_of(size: int, model: ModelConfig = TINY) -> list[ParallelLayout]:
    """Every TP×PP×DP factorisation of a number of ranks that the model allows."""
    sizes = [size_of for size_of in range(1, size + 1) if size % size_of == 0]
    return [
        ParallelLayout(tp=tp, pp=pp, dp=size // (tp * pp))
        for tp in sizes
        for pp in sizes
        if size % (tp * pp) == 0 and model.num_attention_heads % tp == 0 and model.num_layers % pp == 0
    ]


def place(world: World, layout: ParallelLayout, ranks: tuple[int, ...] | None = None):
    """A mesh, and this rank's groups in it."""
    ranks = ranks if ranks is not None else tuple(range(layout.world_size))
    mesh = DeviceMesh(name=str(layout), layout=layout, ranks=ranks, ranks_per_node=world.ranks_per_node)
    world.make_groups(rank_sets([mesh], world.size))
    return mesh, collection(world, mesh) if world.rank in mesh else None


def make_model(
    world: World,
    layout: ParallelLayout,
    *,
    model: ModelConfig = TINY,
    seed: int = 3,
    std: float = 0.1,
    has_value_head: bool = False,
    lora: LoRAConfig | None = None,
) -> tuple[Transformer, DeviceMesh, object, object]:
    """This rank's part of a model with weights from (seed, name): larger than usual, so that differences show.

    Adapters add something from the start; the ranks' parts of a factor are alike.
    """
    mesh, groups = place(world, layout)
    known = dict(vocab_size=VOCAB, has_value_head=has_value_head, lora=lora)
    spec = describe_model(world, model, **known)
    built = build_transformer(model, layout, groups, world.device, **known)
    initialize(built, spec, mesh, world.rank, seed=seed, std=std)
    generator = torch.Generator().manual_seed(seed)
    for name, factor in built.named_parameters():
        if name.endswith(".B"):
            factor.data.normal_(std=std, generator=generator)
    return built, mesh, groups, spec


def vary_vectors(model: Transformer) -> None:
    """Change biases and norms: they begin as 0 and 1, which hides one that is left out, or added by each rank."""
    generator = torch.Generator().manual_seed(11)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            # On all ranks alike, since some are whole on each.
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith(LAYER_SCALAR):
            buffer += 0.1 * torch.randn(1, generator=generator)


def samples(count: int, seed: int = 0) -> tuple[list[torch.Tensor], list[int]]:
    """Sequences of unequal length and the length of each one's prompt."""
    generator = torch.Generator().manual_seed(seed)
    sequences, prompts = [], []
    for _ in range(count):
        prompt = int(torch.randint(1, 9, (1,), generator=generator))
        length = prompt + int(torch.randint(1, 12, (1,), generator=generator))
        sequences.append(torch.randint(0, VOCAB, (length,), generator=generator))
        prompts.append(prompt)
    return sequences, prompts


def nine_requests(params: SamplingParams) -> list[Request]:
    """Three responses to each of three prompts of unequal length; the fifth is greedy."""
    prompts = [torch.tensor([7, 8, 9]), torch.tensor([3]), torch.tensor([11, 12, 13, 14, 15])]
    requests = [
        each
        for prompt_index, prompt in enumerate(prompts)
        for each in expand(Request(prompt=prompt, params=params, prompt_index=prompt_index), 3)
    ]
    requests[4] = replace(requests[4], params=replace(params, greedy=True))
    return requests
