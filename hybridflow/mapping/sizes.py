"""The sizes of a model from a known name, a directory, or a list of them. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.model_info import read_model_info
from hybridflow.errors import ConfigError
from hybridflow.families.model import ModelConfig
from hybridflow.models.shapes import known_models
from hybridflow.reshard.spec import ITEM_BYTES

_USUAL_HEAD = 128
_SIZES = ("layers", "hidden", "heads", "groups", "head", "ffn", "vocab", "gated", "tied")

Matrix = tuple[int, int, bool]
"""Inputs and outputs of a product, and whether tp cuts the outputs; it cuts the inputs otherwise."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The sizes of a mixture of experts.

    Attributes:
        number: Experts of each layer.
        per_token: Experts that a token goes to.
        ffn: Width inside each expert.
        shared: Width inside the shared expert; 0: there is none.
        dense_layers: Layers from the first that have a feed-forward block, of ``Size.ffn``, in the place of experts.
    """

    number: int
    per_token: int
    ffn: int
    shared: int = 0
    dense_layers: int = 0


@dataclass(frozen=True, kw_only=True)
class Latent:
    """The widths of latent attention (arXiv 2405.04434), whose query and key heads are ``Size.head`` wide.

    Attributes:
        keys: Width to which keys and values are compressed.
        queries: Width to which queries are compressed; 0: they are not.
        rotated: Part of each head that all heads share in keys.
        value: Width of each value head.
    """

    keys: int
    queries: int
    rotated: int
    value: int


@dataclass(frozen=True, kw_only=True)
class Linear:
    """The sizes of linear attention (arXiv 2412.06464), which some layers have in the place of attention.

    Attributes:
        layers: Such layers.
        rows: Rows of the projection to queries, keys, values, gates, betas and decays.
        values: Width of all value heads.
        key: Width of each query and key head.
        state: Numbers in fp32 that a layer keeps of a sequence.
    """

    layers: int
    rows: int
    values: int
    key: int
    state: int


@dataclass(frozen=True, kw_only=True)
class Wide:
    """The heads of layers without a window, where layers with one have others.

    Attributes:
        layers: Such layers.
        groups: As in ``Size``.
        head: As in ``Size``.
        key_parts: As in ``Size``.
    """

    layers: int
    groups: int
    head: int
    key_parts: int


@dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes of a model that decide its time.

    Attributes:
        layers: Transformer layers.
        hidden: Width of the activations between layers.
        heads: Query heads.
        groups: Key/value heads.
        head: Width of each query and key head.
        ffn: Width inside each dense feed-forward block.
        vocab: Vocabulary.
        gated: Whether feed-forward blocks have a gate.
        tied: Whether input and output embedding are one.
        item_bytes: Of a weight or an activation: 2 in bf16, 4 in fp32.
        columns: Of the output layer: 1 of a critic or scorer; None: the vocabulary.
        experts: A mixture's; None: a dense model.
        latent: Of latent attention; None: plain attention.
        linear: Of linear attention; None: no layer has it.
        query_parts: Vectors of each head that the projection to queries gives: 2 with an output gate.
        key_parts: Vectors of each key/value head that are projected: 1 where keys are the values.
        wide: Of layers with other heads than ``groups`` and ``head`` say; None: there are none.
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    head: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False
    item_bytes: int = 2
    columns: int | None = None
    experts: Experts | None = None
    latent: Latent | None = None
    linear: Linear | None = None
    query_parts: int = 1
    key_parts: int = 2
    wide: Wide | None = None

    @property
    def value_head(self) -> int:
        """Return the width of each value head."""
        return self.head if self.latent is None else self.latent.value

    @property
    def attention(self) -> tuple[Matrix, ...]:
        """Return the matrices of attention that tp cuts, in a layer that has it."""
        out = (self.heads * self.value_head, self.hidden, False)
        if self.latent is None:
            rows = (self.query_parts * self.heads + self.key_parts * self.groups) * self.head
            return ((self.hidden, rows, True), out)
        kept = self.head - self.latent.rotated + self.latent.value
        return (
            (self.latent.queries or self.hidden, self.heads * self.head, True),
            (self.latent.keys, self.heads * kept, True),
            out,
        )

    @property
    def compressing(self) -> tuple[Matrix, ...]:
        """Return the matrices of a layer's attention that are whole on each rank."""
        if self.latent is None:
            return ()
        queries = ((self.hidden, self.latent.queries, True),) if self.latent.queries else ()
        return (*queries, (self.hidden, self.latent.keys + self.latent.rotated, True))

    def block(self, width: int) -> tuple[Matrix, ...]:
        """Return the matrices of a feed-forward block, or an expert, that is so wide inside; none if it is 0 wide."""
        if not width:
            return ()
        return ((self.hidden, width * (1 + self.gated), True), (width, self.hidden, False))

    @property
    def linear_attention(self) -> tuple[Matrix, ...]:
        """Return the matrices of linear attention, in a layer that has it."""
        if self.linear is None:
            return ()
        return ((self.hidden, self.linear.rows, True), (self.linear.values, self.hidden, False))

    @property
    def state_products(self) -> int:
        """Return the multiplications of a token with the states of a layer that has linear attention."""
        return 0 if self.linear is None else 3 * self.linear.values * self.linear.key

    @property
    def attention_layers(self) -> int:
        """Return the layers with keys and values."""
        return self.layers - (0 if self.linear is None else self.linear.layers)

    def mean_heads(self, of: Callable[[Size], float]) -> float:
        """Return the mean over the layers with keys of what depends on their heads.

        Args:
            of: Gives it of a size whose layers with keys all have the same heads.
        """
        if self.wide is None:
            return of(self)
        share, plain = self.wide.layers / self.attention_layers, replace(self, wide=None)
        wide = replace(plain, groups=self.wide.groups, head=self.wide.head, key_parts=self.wide.key_parts)
        return share * of(wide) + (1 - share) * of(plain)

    def mean_attention(self, attention: float, linear: float) -> float:
        """Return the mean over the layers of what a layer with attention and one with linear attention have."""
        return linear + (attention - linear) * self.attention_layers / self.layers

    @property
    def sparse_layers(self) -> int:
        """Return the layers with experts."""
        return 0 if self.experts is None else self.layers - self.experts.dense_layers

    def mean_layer(self, dense: float, sparse: float) -> float:
        """Return the mean over the layers of what a layer without and one with experts have."""
        return dense + (sparse - dense) * self.sparse_layers / self.layers

    @property
    def layer_weights(self) -> float:
        """Return the weights of a layer, on average, without experts, norms and biases."""
        shared = 0 if self.experts is None else self.experts.shared
        blocks = self.mean_layer(weights_of(self.block(self.ffn)), weights_of(self.block(shared)))
        attention = self.mean_heads(lambda each: weights_of(each.attention))
        attention = self.mean_attention(attention, weights_of(self.linear_attention))
        return attention + blocks + self.whole_weights

    @property
    def whole_weights(self) -> float:
        """Return those of them that tp does not cut: what compresses for latent attention, and the router."""
        router = 0 if self.experts is None else self.hidden * self.experts.number
        return weights_of(self.compressing) + self.mean_layer(0, router)

    @property
    def expert_weights(self) -> float:
        """Return the weights of all experts of a layer, on average over the layers."""
        return self.mean_layer(0, self.layer_experts)

    @property
    def layer_experts(self) -> int:
        """Return the weights of all experts of a layer that has experts."""
        return 0 if self.experts is None else self.experts.number * weights_of(self.block(self.experts.ffn))

    @property
    def table_weights(self) -> int:
        """Return the weights of one embedding."""
        return self.vocab * self.hidden

    @property
    def output_weights(self) -> int:
        """Return the weights of the output layer."""
        return (self.vocab if self.columns is None else self.columns) * self.hidden

    @property
    def active_weights(self) -> float:
        """Return the weights of a layer that a token is multiplied with, on average over the layers."""
        share = 0 if self.experts is None else self.experts.per_token / self.experts.number
        return self.layer_weights + share * self.expert_weights

    def cached_bytes(self, tp: int, *, fp8: bool = False) -> int:
        """Return what a rank keeps of a token in all layers: keys and values, or what they are made from."""
        kept = 1 if fp8 else self.item_bytes
        if self.latent is not None:
            return self.layers * (self.latent.keys + self.latent.rotated) * kept
        numbers = self.mean_heads(lambda each: 2 * max(1, each.groups // tp) * each.head)
        return round(self.attention_layers * numbers) * kept

    def state_bytes(self, tp: int) -> int:
        """Return what a rank keeps of a sequence in all layers with linear attention."""
        return 0 if self.linear is None else self.linear.layers * self.linear.state // tp * ITEM_BYTES["fp32"]

    def training_flops(self, tokens: int, sequence: int) -> float:
        """Return the operations of forward and backward passes as Megatron-LM counts them.

        Attention counts whole, not its causal half, and nothing counts for recomputation (arXiv 2104.04473). Of experts
        those count that a token goes to.
        """
        scores = 2 * sequence * self.mean_heads(lambda each: each.heads * (each.head + each.value_head))
        layer = 2 * self.active_weights + self.mean_attention(scores, 2 * self.state_products)
        return 3 * tokens * (self.layers * layer + 2 * self.output_weights)


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
    return size_of(named_model(text))


def size_of(model: ModelConfig) -> Size:
    """Return the sizes of a model whose vocabulary is known."""
    experts, latent, linear = None, None, None
    if model.num_experts is not None:
        experts = Experts(
            number=model.num_experts,
            per_token=model.experts_per_token,
            ffn=model.ffn_hidden_size,
            shared=model.shared_ffn_hidden_size or 0,
            dense_layers=model.num_dense_layers,
        )
    if model.kv_lora_rank is not None:
        latent = Latent(
            keys=model.kv_lora_rank,
            queries=model.q_lora_rank or 0,
            rotated=model.rotary_size,
            value=model.value_size,
        )
    if model.linear_layers:
        kernel, key = model.linear_conv_kernel or 0, model.linear_key_head_dim or 0
        linear = Linear(
            layers=len(model.linear_layers),
            rows=model.linear_rows,
            values=model.linear_values,
            key=key,
            state=model.linear_channels * (kernel - 1) + model.linear_values * key,
        )
    wide = None
    if model.has_global_heads:
        (other,) = {model.of_layer(layer) for layer in range(model.num_layers) if not model.has_window(layer)}
        wide = Wide(
            layers=sum(not model.has_window(layer) for layer in range(model.num_layers)),
            groups=other.query_groups,
            head=other.head_size,
            key_parts=1 if other.keys_as_values else 2,
        )
    return Size(
        layers=model.num_layers,
        hidden=model.hidden_size,
        heads=model.num_attention_heads,
        groups=model.query_groups,
        head=model.head_size,
        ffn=model.ffn_hidden_size if experts is None else model.dense_ffn_hidden_size or 0,
        vocab=model.known_vocab_size,
        tied=model.tied_embeddings,
        experts=experts,
        latent=latent,
        linear=linear,
        query_parts=1 + model.attention_output_gate,
        wide=wide,
    )


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
    return Size(**given)
