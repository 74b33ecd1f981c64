"""Small directories of Hugging Face for tests: random weights of ``transformers``, and tokenizers trained here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

IMAGE_TOKEN = 40
END, START, PAD = "<|end|>", "<|start|>", "<|pad|>"
SIZES: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


def write_tokenizer(folder: Path, *, has_start: bool = False, more: Sequence[str] = (), **settings: Any) -> None:
    """A byte-level BPE tokenizer of digits and signs as ``tokenizer.json``, with its ``tokenizer_config.json``.

    It has 40 tokens, and behind them those of ``more``, which are special.
    """
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = [*"0123456789+=", "Ġ"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=40, special_tokens=[END, START, PAD], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([f"{a}+{b}={a + b}" for a in range(30) for b in range(30)], trainer)
    tokenizer.add_special_tokens(list(more))
    if has_start:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{START} $A", special_tokens=[(START, tokenizer.token_to_id(START))]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


def write_model(
    folder: Path, family: str = "Llama", kind: str = "ForCausalLM", *, seed: int = 0, **changes: Any
) -> torch.nn.Module:
    """A tiny model with every weight random, norms and biases too; returns it in evaluation mode."""
    shape = {**SIZES, "vocab_size": 45, "eos_token_id": 0, "bos_token_id": 1, "pad_token_id": 2}
    if family == "Qwen3":
        shape["head_dim"] = 12
    if kind == "ForSequenceClassification":
        shape["num_labels"] = 1
    config = getattr(transformers, f"{family}Config")(**{**shape, **changes})
    model = getattr(transformers, f"{family.removesuffix('Text')}{kind}")(config)
    randomize(model, seed, 0.2)
    model.save_pretrained(folder)
    return model.eval()


QWEN3_5_ROPE = dict(
    **dict(rope_type="default", rope_theta=5e3, partial_rotary_factor=0.5),
    **dict(mrope_section=[2, 1, 1], mrope_interleaved=True),
)
WITH_VISION: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Gemma3": (
        dict(sliding_window=5, sliding_window_pattern=2, query_pre_attn_scalar=24),
        dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=28),
        dict(mm_tokens_per_image=4),
    ),
    "Gemma4": (
        dict(sliding_window=5, global_head_dim=16, num_global_key_value_heads=1, attention_k_eq_v=True)
        | dict(layer_types=["sliding_attention", "full_attention"], hidden_size_per_layer_input=0),
        dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        | dict(head_dim=4, patch_size=4, position_embedding_size=16),
        {},
    ),
    "Qwen3VL": (
        dict(
            rope_parameters=dict(rope_type="default", rope_theta=5e3, mrope_section=[2, 2, 2], mrope_interleaved=True)
        ),
        dict(depth=2, hidden_size=8, intermediate_size=8, num_heads=2, out_hidden_size=32, num_position_embeddings=16)
        | dict(patch_size=4, deepstack_visual_indexes=[0]),
        {},
    ),
    # AutoModelForCausalLM would make its text model alone, whose files have other names. Its norm of outputs that are
    # nearly 0 magnifies what is rounded, the more the smaller the number that it adds.
    "Qwen3_5": (
        dict(layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=2)
        | dict(rope_parameters=QWEN3_5_ROPE)
        | dict(linear_key_head_dim=8, linear_value_head_dim=8, head_dim=16, rms_norm_eps=1e-3),
        dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=2, out_hidden_size=32, num_position_embeddings=16),
        {},
    ),
    "Qwen3_5Moe": (
        dict(layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=2)
        | dict(rope_parameters=QWEN3_5_ROPE)
        | dict(linear_key_head_dim=8, linear_value_head_dim=8, head_dim=16, num_experts=4, num_experts_per_tok=2)
        | dict(moe_intermediate_size=24, shared_expert_intermediate_size=16, rms_norm_eps=1e-3),
        dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=2, out_hidden_size=32, num_position_embeddings=16),
        {},
    ),
    "Qwen2_5_VL": (
        {"rope_parameters": dict(rope_theta=5e3, rope_type="default", mrope_section=[2, 1, 1]), "head_dim": None},
        dict(depth=2, hidden_size=8, intermediate_size=8, num_heads=2, out_hidden_size=32, patch_size=4)
        | dict(fullatt_block_indexes=[1]),
        {},
    ),
    "Mistral3": (
        {"model_type": "mistral", "sliding_window": None},
        dict(model_type="pixtral", hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
        | dict(head_dim=4, image_size=8, patch_size=4),
        {"tie_word_embeddings": False},
    ),
    "Qwen3VLMoe": (
        {"rope_parameters": dict(rope_theta=5e3, rope_type="default", mrope_section=[2, 2, 2], mrope_interleaved=True)}
        | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
        dict(depth=2, hidden_size=8, intermediate_size=8, num_heads=2, out_hidden_size=32, num_position_embeddings=16)
        | dict(patch_size=4, deepstack_visual_indexes=[0]),
        {},
    ),
    "Glm4vMoe": (
        {"rope_parameters": dict(rope_theta=5e3, mrope_section=[1, 1, 1], partial_rotary_factor=0.5)}
        | dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, first_k_dense_replace=1),
        dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=2, out_hidden_size=32, patch_size=4, image_size=8),
        {},
    ),
    "Glm4v": (
        {"rope_parameters": dict(rope_theta=5e3, mrope_section=[1, 1, 0], partial_rotary_factor=0.5), "head_dim": None},
        dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=2, out_hidden_size=32, patch_size=4, image_size=8),
        {},
    ),
}
"""Vision-language models -> what their language model, their vision tower and the whole have beside the sizes."""


def write_vision_model(folder: Path, name: str, *, seed: int = 0, **text: Any) -> torch.nn.Module:
    """A tiny vision-language model with random weights, and its processor's settings; returns it in evaluation mode."""
    of_text, vision, whole = WITH_VISION[name]
    sizes = {**SIZES, "head_dim": 12, "vocab_size": 45, "eos_token_id": 0, "bos_token_id": 1, "pad_token_id": 2}
    told = {key: each for key, each in {**sizes, **of_text, **text}.items() if each is not None or key not in sizes}
    if name.startswith("Qwen"):
        whole = {**whole, "image_token_id": IMAGE_TOKEN, "video_token_id": IMAGE_TOKEN + 1}
    config = getattr(transformers, f"{name}Config")(text_config=told, vision_config=vision, **whole)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    randomize(model, seed, 0.2)
    model.save_pretrained(folder)
    processor: dict[str, Any] = {"image_processor_type": "Gemma3ImageProcessor"}
    if name.startswith("Qwen"):
        processor = {
            **{"image_processor_type": "Qwen2VLImageProcessor", "patch_size": config.vision_config.patch_size},
            **{"merge_size": 2, "temporal_patch_size": 2, "size": {"shortest_edge": 64, "longest_edge": 4096}},
        }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model.eval()


def randomize(model: torch.nn.Module, seed: int, scale: float) -> None:
    """Give every weight a random value; norms and biases around 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            centre = float(parameter.dim() == 1)
            parameter.copy_(centre + scale * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + scale * torch.randn(buffer.shape, generator=generator))
