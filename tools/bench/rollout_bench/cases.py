"""What is asked of every engine, and what it costs at least: models, lengths, operations and bytes. No torch."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CONTEXT = 1024
"""Longest sequence of the models, in tokens."""

CROWD_CACHE_TOKENS = 6 * (32 + 192)
"""Room in the cache for the requests of ``crowd_lengths``: six of the longest."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama.

    Attributes:
        hidden: Width.
        ffn: Width of the gate, and of the up projection.
        layers: How many.
        heads: Of queries.
        kv_heads: Of keys and values.
        vocab: Rows of the embedding.
        is_tied: Whether the output has the embedding's weights.
    """

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    is_tied: bool = False

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    @property
    def layer_matrix(self) -> int:
        """Elements of the matrices of one layer."""
        attention = self.hidden * self.head * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.ffn

    @property
    def output_matrix(self) -> int:
        """Elements of the output's matrix."""
        return self.hidden * self.vocab

    @property
    def num_parameters(self) -> int:
        """Of the whole model, embedding and norms included."""
        norms = (2 * self.layers + 1) * self.hidden
        return self.layers * self.layer_matrix + (1 if self.is_tied else 2) * self.output_matrix + norms

    def llama_config(self) -> dict[str, Any]:
        """As arguments of the ``LlamaConfig`` of transformers."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": CONTEXT,
            "tie_word_embeddings": self.is_tied,
        }


CPU_SIZES = {
    "2m": Shape(hidden=128, ffn=352, layers=8, heads=4, kv_heads=4, vocab=512),
    "5m": Shape(hidden=256, ffn=704, layers=6, heads=8, kv_heads=4, vocab=512),
    "40m": Shape(hidden=512, ffn=1408, layers=8, heads=8, kv_heads=4, vocab=16000),
    "150m": Shape(hidden=768, ffn=2048, layers=16, heads=12, kv_heads=4, vocab=32000),
}
GPU_SIZES = {
    "0.5b": Shape(hidden=896, ffn=4864, layers=24, heads=14, kv_heads=2, vocab=151936, is_tied=True),
    "1b": Shape(hidden=2048, ffn=8192, layers=16, heads=32, kv_heads=8, vocab=128256, is_tied=True),
    "1.5b": Shape(hidden=1536, ffn=8960, layers=28, heads=12, kv_heads=2, vocab=151936, is_tied=True),
    "3b": Shape(hidden=3072, ffn=8192, layers=28, heads=24, kv_heads=8, vocab=128256, is_tied=True),
    "8b": Shape(hidden=4096, ffn=14336, layers=32, heads=32, kv_heads=8, vocab=128256),
}
SIZES = CPU_SIZES | GPU_SIZES


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of each request's prompt and response."""

    prompts: tuple[int, ...]
    responses: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens to be generated."""
        return sum(self.responses)


def equal_lengths(device: str) -> Lengths:
    """As many tokens of every request; on a GPU the batch whose decoding the bandwidth bounds."""
    num, most = (128, 512) if device == "cuda" else (64, 128)
    return Lengths(prompts=(32,) * num, responses=(most,) * num)


def tailed_lengths(num: int = 256, *, middle: int = 80, spread: float = 0.8, most: int = 512) -> Lengths:
    """Log-normal responses, the same in every run: half of them longer than ``middle`` tokens, none than ``most``."""
    random_numbers = random.Random(1)
    drawn = (math.exp(random_numbers.gauss(math.log(middle), spread)) for _ in range(num))
    return Lengths(prompts=(32,) * num, responses=tuple(max(8, min(most, int(each))) for each in drawn))


def crowd_lengths() -> Lengths:
    """Ten times more tokens than ``CROWD_CACHE_TOKENS``."""
    return tailed_lengths(150, middle=48, most=192)


def prompt_index_prompts(lengths: Sequence[int], vocab: int, seed: int) -> list[list[int]]:
    """Random token ids, none of them one of the first three, which models reserve."""
    random_numbers = random.Random(seed)
    return [[random_numbers.randrange(3, vocab) for _ in range(length)] for length in lengths]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What generating takes at the very least.

    Attributes:
        flops: Floating-point operations, of matrix products and attention.
        weight_bytes: Weights read, all of them for each token of the longest response.
        cache_bytes: Keys and values written once and read for each token decoded.
    """

    flops: int
    weight_bytes: int
    cache_bytes: int

    def limit_s(self, flop_per_s: float, bytes_per_s: float) -> float:
        """Seconds under which no machine of these rates does it: computing and reading may overlap."""
        return max(self.flops / flop_per_s, (self.weight_bytes + self.cache_bytes) / bytes_per_s)

    def binds(self, flop_per_s: float, bytes_per_s: float) -> str:
        """Which of the two is the limit."""
        is_bandwidth = (self.weight_bytes + self.cache_bytes) / bytes_per_s > self.flops / flop_per_s
        return "bandwidth" if is_bandwidth else "matrix products"


def work_of(shape: Shape, lengths: Lengths, element_bytes: int) -> Work:
    """What requests take that are all computed at once, each prompt in one piece.

    The last token of a response is sampled, and goes through no model. Of prompts only the last token is projected to
    the vocabulary.
    """
    matrices = shape.layers * shape.layer_matrix
    per_token_bytes = 2 * shape.layers * shape.kv_heads * shape.head * element_bytes
    flops = num_cached = 0
    for prompt, response in zip(lengths.prompts, lengths.responses, strict=True):
        computed = prompt + response - 1
        # Each token looks at itself and all before it.
        seen = computed * (computed + 1) // 2
        flops += 2 * computed * matrices + 2 * response * shape.output_matrix
        flops += 4 * shape.layers * shape.heads * shape.head * seen
        num_cached += prompt + seen - prompt * (prompt + 1) // 2
    weights = (matrices + shape.output_matrix) * element_bytes * max(lengths.responses)
    return Work(flops=flops, weight_bytes=weights, cache_bytes=num_cached * per_token_bytes)
