"""The sizes of a model from a known name, a directory, or a list of them. No torch."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.model_info import read_model_info
from hybridflow.errors import ConfigError
from hybridflow.families.model import ModelConfig
from hybridflow.models.shapes import known_models
from hybridflow.reshard.spec import ITEM_BYTES

_USUAL_HEAD = 128
_SIZES = {
    **{"layers": "num_layers", "hidden": "hidden_size", "heads": "num_attention_heads", "groups": "num_query_groups"},
    **{"head": "head_dim", "ffn": "ffn_hidden_size", "vocab": "vocab_size", "gated": "", "tied": "tied_embeddings"},
}
"""Sizes that may be given by name, and what the settings of a model call them."""

Matrix = tuple[int, int, bool]
"""Inputs and outputs of a product, and whether tp cuts the outputs; it cuts the inputs otherwise."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, and what else decides its time.

    Attributes:
        model: Its settings, the vocabulary included.
        gated: Whether feed-forward blocks have a gate.
        item_bytes: Of a weight or an activation: 2 in bf16, 4 in fp32.
        has_value_head: Whether the output layer has one column, as of a critic or scorer, and not the vocabulary.
    """

    model: ModelConfig
    gated: bool = True
    item_bytes: int = 2
    has_value_head: bool = False

    @property
    def tied(self) -> bool:
        """Return whether input and output embedding are one."""
        return self.model.tied_embeddings and not self.has_value_head

    @property
    def compressing(self) -> tuple[Matrix, ...]:
        """Return the matrices of a layer's latent attention (arXiv 2405.04434) that are whole on each rank."""
        hidden, keys, queries = self.model.hidden_size, self.model.kv_lora_rank, self.model.q_lora_rank
        if keys is None:
            return ()
        return (*([] if queries is None else [(hidden, queries, True)]), (hidden, keys + self.model.rotary_size, True))

    def block(self, width: int) -> tuple[Matrix, ...]:
        """Return the matrices of a feed-forward block, or an expert, that is so wide inside; none if it is 0 wide."""
        if not width:
            return ()
        hidden = self.model.hidden_size
        return ((hidden, width * (1 + self.gated), True), (width, hidden, False))

    @property
    def dense_width(self) -> int:
        """Return the width inside the feed-forward block of a layer without experts; 0 if all layers have experts."""
        return self.model.ffn_size(0) or 0

    @property
    def shared_width(self) -> int:
        """Return the width inside the shared expert; 0 if there is none."""
        return self.model.shared_ffn_hidden_size or 0

    @property
    def linear_attention(self) -> tuple[Matrix, ...]:
        """Return the matrices of linear attention (arXiv 2412.06464), in a layer that has it."""
        model = self.model
        if not model.linear_layers:
            return ()
        return ((model.hidden_size, model.linear_rows, True), (model.linear_values, model.hidden_size, False))

    @property
    def state_products(self) -> int:
        """Return the multiplications of a token with the states of a layer that has linear attention."""
        return 3 * self.model.linear_values * (self.model.linear_key_head_dim or 0)

    @property
    def attention_layers(self) -> int:
        """Return the layers with keys and values."""
        return self.model.num_layers - len(self.model.linear_layers)

    def mean_heads(self, of: Callable[[ModelConfig], float]) -> float:
        """Return the mean over the layers with keys of what depends on their heads.

        Args:
            of: Gives it of a model whose layers with keys all have the same heads.
        """
        if not self.model.has_global_heads:
            return of(self.model)
        return sum(share * of(kind) for kind, share in _kinds(self.model))

    def mean_attention(self, attention: float, linear: float) -> float:
        """Return the mean over the layers of what a layer with attention and one with linear attention have."""
        return linear + (attention - linear) * self.attention_layers / self.model.num_layers

    def mean_layer(self, dense: float, sparse: float) -> float:
        """Return the mean over the layers of what a layer without and one with experts have."""
        sparse_layers = 0 if self.model.num_experts is None else self.model.num_layers - self.model.num_dense_layers
        return dense + (sparse - dense) * sparse_layers / self.model.num_layers

    @property
    def layer_weights(self) -> float:
        """Return the weights of a layer, on average, without experts, norms and biases."""
        dense, shared = (weights_of(self.block(width)) for width in (self.dense_width, self.shared_width))
        attention = self.mean_heads(lambda each: weights_of(attention_of(each)))
        attention = self.mean_attention(attention, weights_of(self.linear_attention))
        return attention + self.mean_layer(dense, shared) + self.whole_weights

    @property
    def whole_weights(self) -> float:
        """Return those of them that tp does not cut: what compresses for latent attention, and the router."""
        router = self.model.hidden_size * (self.model.num_experts or 0)
        return weights_of(self.compressing) + self.mean_layer(0, router)

    @property
    def expert_weights(self) -> float:
        """Return the weights of all experts of a layer, on average over the layers."""
        return self.mean_layer(0, self.layer_experts)

    @property
    def layer_experts(self) -> int:
        """Return the weights of all experts of a layer that has experts."""
        return (self.model.num_experts or 0) * weights_of(self.block(self.model.ffn_hidden_size))

    @property
    def table_weights(self) -> int:
        """Return the weights of one embedding."""
        return self.model.known_vocab_size * self.model.hidden_size

    @property
    def output_weights(self) -> int:
        """Return the weights of the output layer."""
        return self.model.hidden_size if self.has_value_head else self.table_weights

    @property
    def active_weights(self) -> float:
        """Return the weights of a layer that a token is multiplied with, on average over the layers."""
        share = 0 if self.model.num_experts is None else self.model.experts_per_token / self.model.num_experts
        return self.layer_weights + share * self.expert_weights

    def cached_bytes(self, tp: int, *, fp8: bool = False) -> int:
        """Return what a rank keeps of a token in all layers: keys and values, or what they are made from."""
        numbers = self.mean_heads(lambda each: each.cached_size(tp))
        return round(self.attention_layers * numbers) * (1 if fp8 else self.item_bytes)

    def state_bytes(self, tp: int) -> int:
        """Return what a rank keeps of a sequence in all layers with linear attention."""
        return len(self.model.linear_layers) * self.model.linear_state // tp * ITEM_BYTES["fp32"]

    def training_flops(self, tokens: int, sequence: int) -> float:
        """Return the operations of forward and backward passes as Megatron-LM counts them.

        Attention counts whole, not its causal half, and nothing counts for recomputation (arXiv 2104.04473). Of experts
        those count that a token goes to.
        """
        scores = 2 * sequence * self.mean_heads(lambda each: each.num_attention_heads * widths_of(each))
        layer = 2 * self.active_weights + self.mean_attention(scores, 2 * self.state_products)
        return 3 * tokens * (self.model.num_layers * layer + 2 * self.output_weights)


@functools.lru_cache(maxsize=16)
def _kinds(model: ModelConfig) -> tuple[tuple[ModelConfig, float], ...]:
    """Return the models whose heads the layers have, and the share of the layers of each."""
    counts = Counter(model.of_layer(layer) for layer in range(model.num_layers))
    return tuple((kind, count / model.num_layers) for kind, count in counts.items())


def attention_of(model: ModelConfig) -> tuple[Matrix, ...]:
    """Return the matrices of attention that tp cuts, in a layer that has it; see ``Size.mean_heads``."""
    hidden, heads, keys = model.hidden_size, model.num_attention_heads, model.kv_lora_rank
    out = (heads * model.value_size, hidden, False)
    if keys is None:
        return ((hidden, model.query_rows + model.key_value_rows, True), out)
    kept = model.head_size - model.rotary_size + model.value_size
    queries = hidden if model.q_lora_rank is None else model.q_lora_rank
    return ((queries, heads * model.head_size, True), (keys, heads * kept, True), out)


def widths_of(model: ModelConfig) -> int:
    """Return the widths of a key and a value head together."""
    return model.head_size + model.value_size


def weights_of(matrices: tuple[Matrix, ...]) -> int:
    """Return the weights of matrices."""
    return sum(inputs * outputs for inputs, outputs, _ in matrices)


def model_size(text: str) -> Size:
    """Return the sizes of a model: a known one, one of a directory, or of a dense one given as ``name=value,…``.

    Raises:
        ConfigError: A name is not known, or a size is missing or no number.
        CheckpointError: The directory has no model that is known.
    """
    if "=" in text:
        return _given_size(text)
    return Size(model=named_model(text))


def named_model(text: str) -> ModelConfig:
    """Return a known model, or the one in a directory.

    Raises:
        ConfigError: The name is not known.
        CheckpointError: The directory has no model that is known.
    """
    path, known = Path(text), known_models()
    if text in known:
        return known[text]
    if not path.exists():
        raise ConfigError(
            f"--model {text}: not one of {', '.join(known)}, and no directory with a config.json; or give sizes: "
            "layers=32,hidden=4096,…"
        )
    return read_model_info(path if path.is_dir() else path.parent).model


def _given_size(text: str) -> Size:
    given: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in _SIZES or name in given:
            raise ConfigError(f"--model {text}: {name!r} is not one of {', '.join(_SIZES)}, each once")
        if name in ("gated", "tied"):
            if value not in ("true", "false"):
                raise ConfigError(f"--model {text}: {name}={value}; expected true or false")
            given[name] = value == "true"
        elif not re.fullmatch("[1-9][0-9]{0,9}", value):
            raise ConfigError(f"--model {text}: {name}={value}; expected a whole number of 1 or more")
        else:
            given[name] = int(value)
    missing = [name for name in ("layers", "hidden", "ffn", "vocab") if name not in given]
    if missing:
        raise ConfigError(f"--model {text}: {', '.join(missing)} missing; give each as name=number")
    given.setdefault("heads", max(1, given["hidden"] // given.get("head", _USUAL_HEAD)))
    given.setdefault("groups", given["heads"])
    if given["heads"] % given["groups"]:
        raise ConfigError(
            f"--model {text}: groups={given['groups']} does not divide heads={given['heads']}; choose a divisor"
        )
    given.setdefault("head", given["hidden"] // given["heads"])
    if given["head"] < 1:
        raise ConfigError(f"--model {text}: fewer than one dim for each of {given['heads']} heads; give head=N")
    gated = given.pop("gated", True)
    return Size(model=ModelConfig(max_context=1, **{_SIZES[name]: value for name, value in given.items()}), gated=gated)
