"""The tensors of well-known models from arithmetic alone: no torch, so that a login node can plan with them.

Gives what ``specs.describe`` reads off megatron-core's own model, tensor by tensor and in its order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hybridflow.families.family import EMBEDDING, EXPERT_BIAS, OUTPUT, VALUE_HEAD
from hybridflow.families.model import ModelConfig
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.reshard.spec import ITEM_BYTES, DType, ModelSpec, Place, TensorSpec, stage_of

CHUNK_TOKENS = 1024
"""Rows of logits that are in fp32 at one time."""

DELTA_CHUNK = 64
"""Tokens of a sequence that linear attention takes at one time."""

DELTA_TOKENS = 4096
"""Tokens of sequences that training takes through it at one time; more where one sequence has more."""

LAYER_SCALAR = "layer_scalar"
"""End of the name of what a layer's output is scaled by, which belongs to the weights and is no parameter."""

EXPERT_NORMS = (
    *("shared_input_layernorm", "shared_output_layernorm"),
    *("routed_input_layernorm", "routed_output_layernorm"),
)
"""Norms of the shared expert and of the routed ones, where they have their own."""

ALIGNED_ROWS = 8
"""The rows of each expert begin at a multiple of it; see ``models.grouped``."""


def known_models() -> dict[str, ModelConfig]:
    """Return well-known models by name, with what decides their tensors and their cost.

    The figures are those of each model's public ``config.json`` (``num_hidden_layers``, ``hidden_size``,
    ``intermediate_size`` or ``moe_intermediate_size``, ``num_attention_heads``, ``num_key_value_heads``, ``head_dim``,
    ``vocab_size``) in the Hugging Face repositories of their makers.
    """
    return dict(_MODELS)


def cached_token_bytes(model: ModelConfig, layout: ParallelLayout) -> int:
    """Return the keys and values of a token on a rank of the pipeline stage that has the most of them, in bytes."""
    sizes: Counter[int] = Counter()
    for layer in range(model.num_layers):
        if layer not in model.linear_layers:
            stage = stage_of(layer, layout, model.num_layers, f"layout {layout}")
            sizes[stage] += model.of_layer(layer).cached_size(layout.tp)
    return max(sizes.values()) * ITEM_BYTES[model.dtype]


def state_bytes(model: ModelConfig, layout: ParallelLayout) -> int:
    """Return the states of linear attention of a sequence on a rank of the stage that has the most, in bytes."""
    counts = Counter(stage_of(layer, layout, model.num_layers, f"layout {layout}") for layer in model.linear_layers)
    return max(counts.values(), default=0) * model.linear_state // layout.tp * ITEM_BYTES["fp32"]


def model_spec(model: ModelConfig, *, has_value_head: bool = False) -> ModelSpec:
    """Return how every tensor of a model is cut.

    Args:
        model: Its settings, the vocabulary included.
        has_value_head: Values instead of logits; its embedding is not tied then.
    """
    is_tied = model.tied_embeddings and not has_value_head
    embedding = TensorSpec(
        name=EMBEDDING,
        shape=(model.known_vocab_size, model.hidden_size),
        dtype=model.dtype,
        tp_dim=0,
        place="embedding",
        also_held_by="output" if is_tied else None,
        padded_to=model.vocab_divisible_by,
    )
    tensors = [embedding]
    for layer in range(model.num_layers):
        tensors += _attention(model, layer)
        tensors += _feed_forward(model, layer)
    tensors.append(_whole("decoder.final_layernorm.weight", (model.hidden_size,), model.dtype, "output"))
    if has_value_head:
        tensors.append(_whole(VALUE_HEAD, (1, model.hidden_size), model.dtype, "output"))
    elif not is_tied:
        tensors.append(replace(embedding, name=OUTPUT, place="output"))
    for layer in range(model.num_layers):
        tensors += _buffers(model, layer)
    return ModelSpec(tensors=tuple(tensors), num_layers=model.num_layers)


def _buffers(model: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    """Yield what belongs to the weights and is no parameter."""
    if model.layer_scalars:
        yield _whole(f"decoder.layers.{layer}.{LAYER_SCALAR}", (1,), model.dtype, layer)
    if model.num_experts is not None and model.router_bias and layer >= model.num_dense_layers:
        yield _whole(f"decoder.layers.{layer}.mlp.router.{EXPERT_BIAS}", (model.num_experts,), "fp32", layer)


def _attention(model: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    model = model.of_layer(layer)
    prefix, hidden, dtype = f"decoder.layers.{layer}", model.hidden_size, model.dtype
    if model.kv_lora_rank is not None:
        if model.pre_norms:
            yield _whole(f"{prefix}.input_layernorm.weight", (hidden,), dtype, layer)
        yield from _latent_attention(f"{prefix}.self_attention", model, layer, model.kv_lora_rank)
        return
    queries = model.num_attention_heads * model.head_size
    qkv = model.query_rows + model.key_value_rows
    if model.pre_norms:
        yield _whole(f"{prefix}.input_layernorm.weight", (hidden,), dtype, layer)
    prefix += ".self_attention"
    if layer in model.linear_layers:
        yield from _linear_attention(prefix, model, layer)
        return
    if model.attention_sinks:
        name = f"{prefix}.core_attention.softmax_offset"
        yield TensorSpec(name=name, shape=(model.num_attention_heads,), dtype=dtype, tp_dim=0, place=layer)
    yield TensorSpec(name=f"{prefix}.linear_proj.weight", shape=(hidden, queries), dtype=dtype, tp_dim=1, place=layer)
    if model.linear_bias:
        yield _whole(f"{prefix}.linear_proj.bias", (hidden,), dtype, layer)
    yield TensorSpec(name=f"{prefix}.linear_qkv.weight", shape=(qkv, hidden), dtype=dtype, tp_dim=0, place=layer)
    if model.qkv_bias or model.linear_bias:
        yield TensorSpec(name=f"{prefix}.linear_qkv.bias", shape=(qkv,), dtype=dtype, tp_dim=0, place=layer)
    if model.qk_norm:
        is_wide = model.qk_norm_over == "projection"
        widths = (queries, model.query_groups * model.head_size) if is_wide else (model.head_size, model.head_size)
        yield _whole(f"{prefix}.q_layernorm.weight", widths[:1], dtype, layer)
        yield _whole(f"{prefix}.k_layernorm.weight", widths[1:], dtype, layer)
    if model.post_norms:
        yield _whole(f"{prefix}.post_layernorm.weight", (hidden,), dtype, layer)


def _latent_attention(prefix: str, model: ModelConfig, layer: int, rank: int) -> Iterator[TensorSpec]:
    hidden, heads, dtype = model.hidden_size, model.num_attention_heads, model.dtype
    queries = heads * model.head_size
    keys_and_values = heads * (model.head_size - model.rotary_size + model.value_size)

    def cut(name: str, rows: int, columns: int, tp_dim: int = 0) -> TensorSpec:
        return TensorSpec(
            name=f"{prefix}.{name}.weight", shape=(rows, columns), dtype=dtype, tp_dim=tp_dim, place=layer
        )

    if model.q_lora_rank is None:
        yield cut("linear_q_proj", queries, hidden)
    else:
        yield _whole(f"{prefix}.linear_q_down_proj.weight", (model.q_lora_rank, hidden), dtype, layer)
        yield _whole(f"{prefix}.q_layernorm.weight", (model.q_lora_rank,), dtype, layer)
        yield cut("linear_q_up_proj", queries, model.q_lora_rank)
    yield _whole(f"{prefix}.linear_kv_down_proj.weight", (rank + model.rotary_size, hidden), dtype, layer)
    yield _whole(f"{prefix}.kv_layernorm.weight", (rank,), dtype, layer)
    yield cut("linear_kv_up_proj", keys_and_values, rank)
    yield cut("linear_proj", hidden, heads * model.value_size, tp_dim=1)
    if model.post_norms:
        yield _whole(f"{prefix}.post_layernorm.weight", (hidden,), dtype, layer)


def _linear_attention(prefix: str, model: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    heads, size, kernel = model.linear_value_heads, model.linear_value_head_dim, model.linear_conv_kernel
    assert heads and size and kernel, "see check_model"
    for name, shape, tp_dim in (
        ("dt_bias", (heads,), 0),
        ("A_log", (heads,), 0),
        ("in_proj.weight", (model.linear_rows, model.hidden_size), 0),
        ("conv1d.weight", (model.linear_channels, kernel), 0),
        ("out_norm.weight", (size,), None),
        ("out_proj.weight", (model.hidden_size, model.linear_values), 1),
    ):
        yield TensorSpec(name=f"{prefix}.{name}", shape=shape, dtype=model.dtype, tp_dim=tp_dim, place=layer)


def _feed_forward(model: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    prefix, hidden, dtype = f"decoder.layers.{layer}.mlp", model.hidden_size, model.dtype
    if model.pre_norms and not model.expert_norms:
        yield _whole(f"decoder.layers.{layer}.pre_mlp_layernorm.weight", (hidden,), dtype, layer)
    width = model.ffn_size(layer)
    if width is None:
        yield from _mixture(prefix, model, layer)
    else:
        yield from _gated(prefix, model, width, layer)
    if model.post_norms:
        yield _whole(f"{prefix}.post_layernorm.weight", (hidden,), dtype, layer)


def _mixture(prefix: str, model: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    """Yield router, experts, and shared experts."""
    hidden, dtype = model.hidden_size, model.dtype
    assert model.num_experts is not None, "a mixture has experts"
    yield _whole(f"{prefix}.router.weight", (model.num_experts, hidden), dtype, layer)
    if model.linear_bias:
        yield _whole(f"{prefix}.router.bias", (model.num_experts,), dtype, layer)
    if model.expert_norms:
        yield _whole(f"{prefix}.router.scale", (hidden,), dtype, layer)
        yield _whole(f"{prefix}.router.expert_scale", (model.num_experts,), dtype, layer)
    for index in range(model.num_experts):
        expert = index, model.num_experts
        yield from _gated(f"{prefix}.experts.{index}", model, model.ffn_hidden_size, layer, expert)
    if model.shared_expert_gate:
        yield _whole(f"{prefix}.shared_experts.gate_weight", (1, hidden), dtype, layer)
    if model.shared_ffn_hidden_size is not None:
        yield from _gated(f"{prefix}.shared_experts", model, model.shared_ffn_hidden_size, layer)
    for name in EXPERT_NORMS if model.expert_norms else ():
        yield _whole(f"{prefix}.{name}.weight", (hidden,), dtype, layer)


def _gated(
    prefix: str, model: ModelConfig, width: int, layer: int, expert: tuple[int, int] | None = None
) -> Iterator[TensorSpec]:
    """Yield gate and up, then down."""
    hidden = model.hidden_size
    for name, shape, bias in (
        ("linear_fc1", (2, width, hidden), (2, width)),
        ("linear_fc2", (hidden, width), (hidden,)),
    ):
        weight = TensorSpec(
            name=f"{prefix}.{name}.weight", shape=shape, dtype=model.dtype, tp_dim=1, place=layer, expert=expert
        )
        yield weight
        if model.linear_bias:
            tp_dim = 1 if len(bias) == 2 else None
            yield replace(weight, name=f"{prefix}.{name}.bias", shape=bias, tp_dim=tp_dim)


def _whole(name: str, shape: tuple[int, ...], dtype: DType, place: Place) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype, tp_dim=None, place=place)


def _known(
    family: dict[str, Any],
    num_layers: int,
    hidden_size: int,
    ffn_hidden_size: int,
    heads: int,
    groups: int = 8,
    **other: Any,
) -> ModelConfig:
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=ffn_hidden_size,
        num_attention_heads=heads,
        num_query_groups=groups,
        **{**_OF_ALL, **family, **other},
    )


_OF_ALL = {"head_dim": 128, "max_context": 4096, "dtype": "bf16"}
_LLAMA3 = {"vocab_size": 128256}
_QWEN2 = {"vocab_size": 151936, "qkv_bias": True}
_QWEN3 = {"vocab_size": 151936, "qk_norm": True}
_QWEN3_5 = {
    **{"vocab_size": 248320, "head_dim": 256, "qk_norm": True, "zero_centered_norms": True},
    **{"attention_output_gate": True, "linear_layers": tuple(layer for layer in range(32) if layer % 4 != 3)},
    **{"linear_key_heads": 16, "linear_value_heads": 32, "linear_conv_kernel": 4},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
}
_DEEPSEEK3 = {
    **{"head_dim": None, "kv_lora_rank": 512, "q_lora_rank": 1536},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    "vocab_size": 129280,
    **{"num_experts": 256, "experts_per_token": 8, "num_dense_layers": 3, "dense_ffn_hidden_size": 18432},
    **{"shared_ffn_hidden_size": 2048, "router_score": "sigmoid", "router_bias": True},
}
_MIXTRAL = {"num_experts": 8, "experts_per_token": 2}
_GEMMA3 = {"head_dim": 256, "vocab_size": 262208, "tied_embeddings": True, "qk_norm": True, "post_norms": True}
_GEMMA4 = {
    **{"head_dim": 256, "global_head_dim": 512, "vocab_size": 262144, "tied_embeddings": True, "keys_as_values": True},
    **{"qk_norm": True, "value_norm": True, "post_norms": True, "layer_scalars": True, "attention_scale": 1.0},
    **{"window": 1024, "rotary_base": 1e6, "local_rotary_base": 1e4},
}
_OLMO2 = {
    "vocab_size": 100352,
    "qk_norm": True,
    "qk_norm_over": "projection",
    "pre_norms": False,
    "post_norms": True,
}
_GLM4 = {"vocab_size": 151552, "post_norms": True}
_GPT_OSS = {
    "head_dim": 64,
    "vocab_size": 201088,
    "linear_bias": True,
    "attention_sinks": True,
    "experts_per_token": 4,
}

_MODELS = {
    "llama3-1b": _known(_LLAMA3, 16, 2048, 8192, 32, head_dim=64, tied_embeddings=True),
    "llama3-3b": _known(_LLAMA3, 28, 3072, 8192, 24, tied_embeddings=True),
    "llama3-8b": _known(_LLAMA3, 32, 4096, 14336, 32),
    "llama3-70b": _known(_LLAMA3, 80, 8192, 28672, 64),
    "llama3-405b": _known(_LLAMA3, 126, 16384, 53248, 128),
    "qwen2.5-0.5b": _known(_QWEN2, 24, 896, 4864, 14, 2, head_dim=64, tied_embeddings=True),
    "qwen2.5-1.5b": _known(_QWEN2, 28, 1536, 8960, 12, 2, tied_embeddings=True),
    "qwen2.5-7b": _known(_QWEN2, 28, 3584, 18944, 28, 4, vocab_size=152064),
    "qwen2.5-32b": _known(_QWEN2, 64, 5120, 27648, 40, 8, vocab_size=152064),
    "qwen2.5-72b": _known(_QWEN2, 80, 8192, 29568, 64, 8, vocab_size=152064),
    "qwen3-0.6b": _known(_QWEN3, 28, 1024, 3072, 16, 8, tied_embeddings=True),
    "qwen3-4b": _known(_QWEN3, 36, 2560, 9728, 32, 8, tied_embeddings=True),
    "qwen3-8b": _known(_QWEN3, 36, 4096, 12288, 32, 8),
    "qwen3-14b": _known(_QWEN3, 40, 5120, 17408, 40, 8),
    "qwen3-32b": _known(_QWEN3, 64, 5120, 25600, 64, 8),
    "qwen3.5-9b": _known(_QWEN3_5, 32, 4096, 12288, 16, 4),
    "qwen3-30b-a3b": _known(_QWEN3, 48, 2048, 768, 32, 4, num_experts=128, experts_per_token=8),
    "qwen3-235b-a22b": _known(_QWEN3, 94, 4096, 1536, 64, 4, num_experts=128, experts_per_token=8),
    "deepseek-v3": _known(_DEEPSEEK3, 61, 7168, 2048, 128, 128),
    "mixtral-8x7b": _known(_MIXTRAL, 32, 4096, 14336, 32, vocab_size=32000),
    "mixtral-8x22b": _known(_MIXTRAL, 56, 6144, 16384, 48, vocab_size=32768),
    "gemma3-1b": _known(_GEMMA3, 26, 1152, 6912, 4, 1, vocab_size=262144),
    "gemma3-4b": _known(_GEMMA3, 34, 2560, 10240, 8, 4),
    "gemma3-12b": _known(_GEMMA3, 48, 3840, 15360, 16, 8),
    "gemma3-27b": _known(_GEMMA3, 62, 5376, 21504, 32, 16, head_dim=128),
    "gemma4-31b": _known(
        *(_GEMMA4, 60, 5376, 21504, 32, 16),
        global_query_groups=4,
        window_layers=tuple(layer for layer in range(60) if layer % 6 != 5),
    ),
    "gemma4-26b-a4b": _known(
        *(_GEMMA4, 30, 2816, 704, 16, 8),
        global_query_groups=2,
        window_layers=tuple(layer for layer in range(30) if layer % 6 != 5),
        num_experts=128,
        experts_per_token=8,
        shared_ffn_hidden_size=2112,
        expert_norms=True,
    ),
    "olmo2-7b": _known(_OLMO2, 32, 4096, 11008, 32, 32),
    "olmo2-13b": _known(_OLMO2, 40, 5120, 13824, 40, 40),
    "olmo2-32b": _known(_OLMO2, 64, 5120, 27648, 40, 8),
    "glm4-9b": _known(_GLM4, 40, 4096, 13696, 32, 2, qkv_bias=True),
    "glm4-32b": _known(_GLM4, 61, 6144, 23040, 48, 2),
    "gpt-oss-20b": _known(_GPT_OSS, 24, 2880, 2880, 64, num_experts=32),
    "gpt-oss-120b": _known(_GPT_OSS, 36, 2880, 2880, 64, num_experts=128),
}
