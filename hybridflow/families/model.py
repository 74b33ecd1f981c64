"""The settings of one language model: a section of a recipe, and what a family's ``config.json`` is turned into."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal

from hybridflow.errors import ConfigError
from hybridflow.sections import MAY_CHANGE, Bounds, Count, ListedCount, Positive


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """Stretch the frequencies of the rotary position embedding for contexts longer than those of pre-training.

    Attributes:
        kind: Formula: position interpolation (arXiv 2306.15595), Llama 3.1, YaRN (arXiv 2309.00071), LongRoPE (arXiv
            2402.13753), or that of Gemma 4: position interpolation, where some pairs of dims do not turn.
        factor: Factor by which the context was stretched.
        original_context: Longest sequence of pre-training, in tokens. ``linear`` does not use it.
        low_freq_factor: For ``llama3``: wavelengths above ``original_context`` over this are stretched in full.
        high_freq_factor: For ``llama3``: wavelengths below ``original_context`` over this do not change.
        beta_fast: For ``yarn``: dims that turn more often than this within ``original_context`` do not change.
        beta_slow: For ``yarn``: dims that turn less often than this are stretched in full.
        truncate: For ``yarn``: whether these two bounds are rounded to whole pairs of dims.
        attention_factor: For ``yarn`` and ``longrope``: factor on queries and on keys. None means the paper's factor.
        mscale: For ``yarn``: weight of log(factor) in the factor on queries and keys. It needs ``mscale_all_dim``.
        mscale_all_dim: For ``yarn``: weight of log(factor) by which the factor is divided. Latent attention multiplies
            its scores by the square of that divisor.
        short_factor: For ``longrope``: divisor of each frequency where ``max_context`` is within ``original_context``.
        long_factor: For ``longrope``: divisor of each frequency for a longer ``max_context``.
        rotated_share: For ``proportional``: share of the pairs of dims that turn, the fastest ones.
    """

    kind: Literal["linear", "llama3", "yarn", "longrope", "proportional"]
    factor: Positive = 1.0
    original_context: Count | None = None
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True
    attention_factor: Positive | None = None
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    rotated_share: Annotated[float, Bounds(low=0.0, high=1.0)] = 1.0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Set the shape of a language model, key by key or by ``path``.

    Attributes:
        path: Hugging Face directory, or model directory of ours, that holds weights and settings. A run means the actor
            of its latest checkpoint, except for a critic. Only ``max_context``, ``vocab_divisible_by``, ``init_std``,
            ``dtype`` and the last two keys may differ from it. None means weights from the seed.
        num_layers: Transformer layers.
        hidden_size: Width of the activations between layers.
        ffn_hidden_size: Width inside each gated feed-forward block. With experts, the width inside each expert.
        num_attention_heads: Query heads.
        num_query_groups: Key/value heads. None means as many as attention heads.
        head_dim: Width of each head. None means ``hidden_size`` over ``num_attention_heads``.
        global_head_dim: Width of each head in layers without the window. None means the same as in layers with it.
        global_query_groups: Key/value heads in layers without the window. None means the same as in layers with it.
        max_context: Longest sequence in tokens. Prompt and response count together.
        vocab_size: True vocabulary. None means the tokenizer's.
        vocab_divisible_by: The padded vocabulary is a multiple of this times ``tp``.
        rotary_base: Base of the rotary position embedding.
        rotary_scaling: Stretching of the rotary position embedding. None means no stretching.
        rotary_dim: Dims at the beginning of each head that are rotated. None means all of them.
        rotary_interleaved: Whether neighboring dims are rotated together, instead of a dim of each half.
        local_rotary_base: Base, without stretching, in layers with a window. None means the same as in other layers.
        no_rope_layers: Layers without rotary position embedding (NoPE, arXiv 2305.19466), counted from 0.
        norm_eps: Number that RMSNorm adds to the mean square.
        zero_centered_norms: Whether norms multiply by 1 + weight instead of the weight.
        pre_norms: Whether the inputs of attention and feed-forward block are normalized.
        post_norms: Whether the outputs of attention and feed-forward block are normalized too, before they are added.
        activation: Activation of the feed-forward block's gate. ``quick_gelu`` means x * sigmoid(1.702 x).
        glu_clamp: Bound on the gate from above, and on what it multiplies from both sides. None means no bound.
        glu_offset: Number that is added to what the gate multiplies.
        tied_embeddings: Whether input and output embedding are one tensor.
        scaled_embeddings: Whether input embeddings are multiplied by the root of ``hidden_size``.
        qkv_bias: Whether the projections to query, key and value have a bias.
        linear_bias: Whether all linear layers between embedding and output have a bias, router and experts included.
        qk_norm: Whether queries and keys are normalized.
        qk_norm_over: What ``qk_norm`` normalizes together. ``projection`` means all heads of a token's query or key.
        value_norm: Whether values are normalized too, without a weight.
        keys_as_values: Whether layers without the window have no projection to values. Their values are their keys as
            they were projected, before norm and rotation.
        kv_lora_rank: Width to which latent attention (MLA, arXiv 2405.04434) compresses keys and values. None means
            plain attention. The next four keys are for latent attention.
        q_lora_rank: Width to which queries are compressed. None means that they are not.
        qk_nope_head_dim: Part of each query and key head without position.
        qk_rope_head_dim: Part with rotary position, which all heads share in keys.
        v_head_dim: Width of each value head.
        linear_layers: Layers with linear attention (Gated DeltaNet, arXiv 2412.06464) instead of attention. They are
            counted from 0. The next five keys are for them.
        linear_key_heads: Query and key heads.
        linear_value_heads: Value heads, a multiple of the key heads.
        linear_key_head_dim: Width of each query and key head.
        linear_value_head_dim: Width of each value head.
        linear_conv_kernel: Tokens that the convolution over queries, keys and values sees, its own included.
        attention_output_gate: Whether the output of each attention head is multiplied by the sigmoid of a gate, which
            the projection to queries gives beside the head's query.
        attention_scale: Factor on the attention scores. None means 1 / sqrt(head size).
        attention_sinks: Whether the weights of a head's scores share their sum of 1 with a learned number of the head
            (arXiv 2309.17453).
        attention_softcap: Cap on the attention scores s: they become cap * tanh(s / cap). None means no cap.
        logit_softcap: The same cap on the output's logits. None means no cap.
        window: Tokens that each token sees in ``window_layers``, itself included. None means all tokens before it.
        window_layers: Layers with that window, counted from 0. None means all layers.
        layer_scalars: Whether the output of each layer is multiplied by a number of its own. The numbers belong to the
            weights, and are not trained.
        num_experts: Experts of each layer. None means a dense feed-forward block.
        experts_per_token: Experts that each token goes to.
        normalized_experts: Whether the weights of a token's experts add up to 1. Otherwise they are shares of all
            experts'.
        router_score: Function that turns the router's logits into scores of experts. ``softmax`` is over all experts.
            ``sigmoid`` scores each by itself (arXiv 2412.19437).
        router_bias: Whether a bias for each expert is added to the scores when experts are chosen. It does not change
            their weights (arXiv 2408.15664). It needs ``router_score: sigmoid``.
        shared_ffn_hidden_size: Width inside the shared expert of each layer, which every token goes to. None means no
            shared expert.
        shared_expert_gate: Whether the shared expert's output is multiplied by the sigmoid of a learned product with
            its input, one number for each token.
        expert_norms: Whether the routed experts and the shared expert each have norms before and behind them. Then the
            router sees their input, normalized without a weight and multiplied by learned scales. A learned scale of
            each expert multiplies its weight. It needs a shared expert and ``post_norms``.
        num_dense_layers: Layers from the first with a dense feed-forward block instead of experts.
        dense_ffn_hidden_size: Width inside the feed-forward block of these layers.
        router_groups: Equal groups of experts. A token goes to experts of its best ``router_groups_per_token`` groups,
            by the sum of the two best scores of each (arXiv 2412.19437). None means no groups.
        router_groups_per_token: Groups that each token goes to.
        routed_scaling: Factor on the output of the routed experts. It and the groups need ``router_score: sigmoid``.
        init_std: Standard deviation of initial weights.
        dtype: Number format of weights and activations. Gradients are summed, and optimizer steps taken, in fp32. fp16
            is for generating alone.
        implementation: Code that computes the model. ``megatron`` knows the families of docs/families.md and cuts them
            in every layout. ``transformers`` computes any causal language model of a directory, whole on each rank. A
            directory of another family has ``transformers``.
        trust_remote_code: Whether Python files in the directory of a model in ``transformers`` may run.
    """

    # Where the weights come from makes no other model of it.
    path: str | None = field(default=None, compare=False)
    num_layers: Annotated[int, Bounds(low=1, high=1 << 14)]
    hidden_size: Count
    ffn_hidden_size: Count
    num_attention_heads: Count
    num_query_groups: Count | None = None
    head_dim: Count | None = None
    global_head_dim: Count | None = None
    global_query_groups: Count | None = None
    max_context: Count
    vocab_size: Count | None = None
    vocab_divisible_by: Count = field(default=1, metadata=MAY_CHANGE)
    rotary_base: Positive = 10000.0
    rotary_scaling: RotaryScaling | None = None
    rotary_dim: Count | None = None
    rotary_interleaved: bool = False
    local_rotary_base: Positive | None = None
    no_rope_layers: tuple[int, ...] = ()
    norm_eps: Positive = 1e-5
    zero_centered_norms: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    activation: Literal["silu", "gelu_tanh", "quick_gelu"] = "silu"
    glu_clamp: Positive | None = None
    glu_offset: float = 0.0
    tied_embeddings: bool = False
    scaled_embeddings: bool = False
    qkv_bias: bool = False
    linear_bias: bool = False
    qk_norm: bool = False
    qk_norm_over: Literal["head", "projection"] = "head"
    value_norm: bool = False
    keys_as_values: bool = False
    kv_lora_rank: Count | None = None
    q_lora_rank: Count | None = None
    qk_nope_head_dim: Count | None = None
    qk_rope_head_dim: Count | None = None
    v_head_dim: Count | None = None
    linear_layers: tuple[int, ...] = ()
    linear_key_heads: Count | None = None
    linear_value_heads: Count | None = None
    linear_key_head_dim: Count | None = None
    linear_value_head_dim: Count | None = None
    linear_conv_kernel: Count | None = None
    attention_output_gate: bool = False
    attention_scale: Positive | None = None
    attention_sinks: bool = False
    attention_softcap: Positive | None = None
    logit_softcap: Positive | None = None
    window: Count | None = None
    window_layers: tuple[int, ...] | None = None
    layer_scalars: bool = False
    num_experts: ListedCount | None = None
    experts_per_token: Count = 2
    normalized_experts: bool = True
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    router_bias: bool = False
    shared_ffn_hidden_size: Count | None = None
    shared_expert_gate: bool = False
    expert_norms: bool = False
    num_dense_layers: Annotated[int, Bounds(low=0)] = 0
    dense_ffn_hidden_size: Count | None = None
    router_groups: Count | None = None
    router_groups_per_token: Count | None = None
    routed_scaling: Positive = 1.0
    init_std: Positive = field(default=0.02, metadata=MAY_CHANGE)
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    implementation: Literal["megatron", "transformers"] = "megatron"
    trust_remote_code: bool = field(default=False, metadata=MAY_CHANGE)

    @property
    def query_groups(self) -> int:
        """Return the number of key/value heads."""
        return self.num_attention_heads if self.num_query_groups is None else self.num_query_groups

    @property
    def head_size(self) -> int:
        """Return the width of each query and key head."""
        if self.kv_lora_rank is not None:
            return (self.qk_nope_head_dim or 0) + (self.qk_rope_head_dim or 0)
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim

    @property
    def plain_scale(self) -> float:
        """Return the factor on the attention scores, without what a stretched context adds to it."""
        scale: float = self.head_size**-0.5 if self.attention_scale is None else self.attention_scale
        return scale

    @property
    def rotary_size(self) -> int:
        """Return the part of each query and key head that turns with its position."""
        sizes = (self.qk_rope_head_dim, self.rotary_dim, self.head_size)
        return next(size for size in sizes if size is not None)

    @property
    def value_size(self) -> int:
        """Return the width of each value head."""
        return self.head_size if self.v_head_dim is None else self.v_head_dim

    @property
    def query_rows(self) -> int:
        """Return the rows of the projection to queries: those of each head, and of its output gate."""
        return self.num_attention_heads * self.head_size * (1 + self.attention_output_gate)

    @property
    def key_value_rows(self) -> int:
        """Return the rows of the projections to keys and values."""
        return self.query_groups * self.head_size * (1 if self.keys_as_values else 2)

    @property
    def has_global_heads(self) -> bool:
        """Return whether attention has other sizes in layers without the window."""
        return any(getattr(self, name) for name in _GLOBAL)

    def has_window(self, layer: int) -> bool:
        """Return whether a layer has the window."""
        return self.window is not None and (self.window_layers is None or layer in self.window_layers)

    def of_layer(self, layer: int) -> ModelConfig:
        """Return the settings whose heads are those of one layer."""
        if not self.has_global_heads:
            return self
        if self.has_window(layer):
            return replace(self, global_head_dim=None, global_query_groups=None, keys_as_values=False)
        head, groups = self.global_head_dim, self.global_query_groups
        return replace(
            self,
            head_dim=self.head_dim if head is None else head,
            num_query_groups=self.num_query_groups if groups is None else groups,
            global_head_dim=None,
            global_query_groups=None,
        )

    @property
    def layer_kinds(self) -> set[ModelConfig]:
        """Return the settings of all layers, of which those with the same heads are one."""
        return {self.of_layer(layer) for layer in range(self.num_layers if self.has_global_heads else 1)}

    @property
    def linear_values(self) -> int:
        """Return the numbers of a token's values in a layer with linear attention; 0: there is no such layer."""
        return (self.linear_value_heads or 0) * (self.linear_value_head_dim or 0)

    @property
    def linear_channels(self) -> int:
        """Return the numbers of a token's queries, keys and values in a layer with linear attention."""
        return 2 * (self.linear_key_heads or 0) * (self.linear_key_head_dim or 0) + self.linear_values

    @property
    def linear_rows(self) -> int:
        """Return the rows of the projection of such a layer: queries, keys, values, gates of these, decays, betas."""
        return self.linear_channels + self.linear_values + 2 * (self.linear_value_heads or 0)

    @property
    def linear_state(self) -> int:
        """Return the numbers that such a layer keeps of a sequence: convolution inputs, matrices of value heads."""
        inputs = self.linear_channels * ((self.linear_conv_kernel or 1) - 1)
        return inputs + self.linear_values * (self.linear_key_head_dim or 0)

    def ffn_size(self, layer: int) -> int | None:
        """Return the width of the dense feed-forward block of a layer, or None if the layer has experts."""
        if self.num_experts is None:
            return self.ffn_hidden_size
        return self.dense_ffn_hidden_size if layer < self.num_dense_layers else None

    @property
    def known_vocab_size(self) -> int:
        """Return the vocabulary size of a model that has one: of a job, a directory, or ``Recipe.sized_model_of``."""
        assert self.vocab_size is not None, "only a recipe leaves it to the tokenizer"
        return self.vocab_size

    def cached_size(self, tp: int) -> int:
        """Return the numbers that a tensor-parallel rank caches of each token in each layer.

        Latent attention caches the compressed keys and values, whole on each rank.
        """
        if self.kv_lora_rank is not None:
            return self.kv_lora_rank + self.rotary_size
        return 2 * max(1, self.query_groups // tp) * self.head_size


_GLOBAL = ("global_head_dim", "global_query_groups", "keys_as_values")
"""Settings of layers without the window, where others have it."""

_MOST_EXPERTS = 1 << 16
"""A plan lists them one by one."""

FREE_SETTINGS = (
    *("path", "max_context", "vocab_divisible_by", "init_std", "dtype"),
    *("implementation", "trust_remote_code"),
)
"""Settings that may be other than where the weights come from; with any other these would be misread."""


def differing(model: ModelConfig, other: ModelConfig) -> list[str]:
    """Return the settings in which two models differ whose weights are to mean the same."""
    names = [item.name for item in fields(ModelConfig) if item.name not in FREE_SETTINGS]
    return [name for name in names if getattr(model, name) != getattr(other, name)]


def check_model(model: ModelConfig, owner: str) -> None:
    """Refuse settings that are right one by one and wrong together.

    Args:
        model: The settings.
        owner: What messages call them (``"model"``).

    Raises:
        ConfigError: Two settings contradict each other, or one is missing that another needs.
    """
    heads, groups = model.num_attention_heads, model.query_groups
    _check_latent(model, owner)
    _check_linear(model, owner)
    if model.kv_lora_rank is not None:
        if model.rotary_size % 2:
            raise ConfigError(
                f"{owner}.qk_rope_head_dim={model.qk_rope_head_dim}: rotary embeddings need an even size; add or take 1"
            )
    elif model.head_dim is not None:
        if model.head_dim % 2:
            raise ConfigError(
                f"{owner}.head_dim={model.head_dim}: rotary embeddings need an even size of each head; add or take 1"
            )
    elif model.hidden_size % heads or model.hidden_size // heads % 2:
        raise ConfigError(
            f"{owner}.hidden_size={model.hidden_size} over {owner}.num_attention_heads={heads}: "
            "rotary embeddings need an even, whole size of each head; make hidden_size a multiple of 2·heads, or give "
            f"{owner}.head_dim"
        )
    if heads % groups:
        raise ConfigError(
            f"{owner}.num_query_groups={groups} does not divide {owner}.num_attention_heads={heads}; choose a divisor"
        )
    rotated = model.rotary_dim
    if rotated is not None and (rotated % 2 or rotated > model.head_size):
        raise ConfigError(
            f"{owner}.rotary_dim={rotated}: expected an even number of dims, at most the head's {model.head_size}; "
            "change it"
        )
    if model.post_norms and model.linear_bias:
        raise ConfigError(
            f"{owner}.post_norms=true with {owner}.linear_bias=true is not computed: the biases would have to be added "
            "before the norms; set one of them to false"
        )
    _check_window(model, owner)
    _check_global(model, owner)
    _check_no_rope(model, owner)
    _check_experts(model, owner)
    if model.rotary_scaling is not None:
        _check_rotary(model, model.rotary_scaling, f"{owner}.rotary_scaling")


_LEAST_KERNEL = 2
_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def _check_latent(model: ModelConfig, owner: str) -> None:
    """Refuse parts of latent attention without the rest, and what it has not."""
    if model.kv_lora_rank is None:
        alone = [name for name in ("q_lora_rank", *_LATENT) if getattr(model, name) is not None]
        if alone:
            raise ConfigError(
                f"{owner}.{alone[0]}={getattr(model, alone[0])} without {owner}.kv_lora_rank: it belongs to latent "
                "attention; give kv_lora_rank too, or remove it"
            )
        return
    for name in _LATENT:
        if getattr(model, name) is None:
            raise ConfigError(f"{owner}.{name}: missing; latent attention (kv_lora_rank) needs it: give it")
    if model.head_dim not in (None, model.head_size):
        raise ConfigError(
            f"{owner}.head_dim={model.head_dim} with {owner}.kv_lora_rank={model.kv_lora_rank}: expected "
            f"qk_nope_head_dim + qk_rope_head_dim = {model.head_size}; remove head_dim"
        )
    if model.query_groups != model.num_attention_heads:
        raise ConfigError(
            f"{owner}.num_query_groups={model.num_query_groups} with {owner}.kv_lora_rank={model.kv_lora_rank}: latent "
            f"attention has a key for each of its {model.num_attention_heads} heads; remove num_query_groups"
        )
    others = (
        *("qk_norm", "qkv_bias", "linear_bias", "attention_sinks", "rotary_dim", "local_rotary_base"),
        *("rotary_interleaved", "no_rope_layers", "linear_layers", "attention_output_gate", "value_norm"),
    )
    for name in others:
        if getattr(model, name):
            raise ConfigError(
                f"{owner}.{name}={getattr(model, name)} with {owner}.kv_lora_rank={model.kv_lora_rank}: not computed "
                "in latent attention; remove one of them"
            )


_LINEAR = (
    *("linear_key_heads", "linear_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel",
)


def _check_linear(model: ModelConfig, owner: str) -> None:
    """Refuse parts of linear attention without the rest, and what is not computed beside it."""
    for name in _LINEAR:
        if (getattr(model, name) is None) == bool(model.linear_layers):
            raise ConfigError(
                f"{owner}.{name}={getattr(model, name)} with {owner}.linear_layers={list(model.linear_layers)}: layers "
                "with linear attention need all of their keys, and other models none; give or remove it"
            )
    if not model.linear_layers:
        return
    _check_layers(model, owner, "linear_layers")
    if len(set(model.linear_layers)) == model.num_layers:
        raise ConfigError(
            f"{owner}.linear_layers={list(model.linear_layers)}: none of {model.num_layers} layers has keys and "
            "values, which is not computed; leave one out"
        )
    keys, values, kernel = model.linear_key_heads or 0, model.linear_value_heads or 0, model.linear_conv_kernel or 0
    if values % keys:
        raise ConfigError(
            f"{owner}.linear_value_heads={values} is no multiple of {owner}.linear_key_heads={keys}; change one"
        )
    if kernel < _LEAST_KERNEL:
        raise ConfigError(
            f"{owner}.linear_conv_kernel={kernel}: expected at least {_LEAST_KERNEL}, a token and the one before it; "
            "raise it"
        )
    for name in ("linear_bias", "post_norms"):
        if getattr(model, name):
            raise ConfigError(
                f"{owner}.{name}=true with {owner}.linear_layers: not computed in linear attention; set it to false"
            )
    if not model.pre_norms:
        raise ConfigError(f"{owner}.pre_norms=false with {owner}.linear_layers is not computed; set it to true")


def _check_window(model: ModelConfig, owner: str) -> None:
    if model.window_layers is None:
        return
    if model.window is None:
        raise ConfigError(
            f"{owner}.window_layers={list(model.window_layers)} without {owner}.window; give its width in tokens, or "
            "remove the layers"
        )
    _check_layers(model, owner, "window_layers")


def _check_global(model: ModelConfig, owner: str) -> None:
    """Refuse heads of layers without the window where there is none, and what is not computed beside them."""
    given = [name for name in _GLOBAL if getattr(model, name)]
    if not given:
        return
    name = f"{owner}.{given[0]}={getattr(model, given[0])}"
    needed = ("window", *(("local_rotary_base", "attention_scale") if model.global_head_dim else ()))
    for key in needed:
        if getattr(model, key) is None:
            raise ConfigError(
                f"{name} without {owner}.{key}: layers of two kinds need it; give it, or remove the first"
            )
    others = (
        *("kv_lora_rank", "linear_layers", "no_rope_layers", "attention_output_gate", "qkv_bias", "linear_bias"),
        *("rotary_dim", "rotary_interleaved"),
    )
    for key in others:
        if getattr(model, key):
            raise ConfigError(f"{name} with {owner}.{key}={getattr(model, key)} is not computed; remove one of them")
    if model.qk_norm and model.qk_norm_over != "head":
        raise ConfigError(
            f"{name} with {owner}.qk_norm_over={model.qk_norm_over} is not computed; set it to head, or remove one"
        )
    if model.global_head_dim is not None and model.global_head_dim % 2:
        raise ConfigError(f"{name}: rotary embeddings need an even size of each head; add or take 1")
    scaling = model.rotary_scaling
    if scaling is not None and scaling.kind == "longrope":
        raise ConfigError(f"{name} with {owner}.rotary_scaling.kind=longrope is not computed; remove one of them")
    if model.global_query_groups is not None and model.num_attention_heads % model.global_query_groups:
        raise ConfigError(
            f"{owner}.global_query_groups={model.global_query_groups} does not divide {owner}.num_attention_heads="
            f"{model.num_attention_heads}; choose a divisor"
        )


def _check_layers(model: ModelConfig, owner: str, key: str) -> None:
    strangers = [layer for layer in getattr(model, key) if not 0 <= layer < model.num_layers]
    if strangers:
        raise ConfigError(f"{owner}.{key}: {strangers} not among layers 0 to {model.num_layers - 1}; remove them")


def _check_no_rope(model: ModelConfig, owner: str) -> None:
    _check_layers(model, owner, "no_rope_layers")
    if model.no_rope_layers and model.local_rotary_base is not None:
        raise ConfigError(
            f"{owner}.no_rope_layers={list(model.no_rope_layers)} with {owner}.local_rotary_base="
            f"{model.local_rotary_base:g}: layers of three kinds are not computed; remove one"
        )


_EXPERT_KEYS = {
    **{"router_score": "softmax", "router_bias": False, "shared_ffn_hidden_size": None, "shared_expert_gate": False},
    "expert_norms": False,
    **{"num_dense_layers": 0, "dense_ffn_hidden_size": None, "routed_scaling": 1.0},
    **{"router_groups": None, "router_groups_per_token": None},
}
"""Settings of mixtures alone, and their values elsewhere."""


def _check_experts(model: ModelConfig, owner: str) -> None:
    if model.num_experts is None:
        for key, plain in _EXPERT_KEYS.items():
            if getattr(model, key) != plain:
                raise ConfigError(
                    f"{owner}.{key}={getattr(model, key)!r} without {owner}.num_experts; give the number of experts, "
                    "or remove it"
                )
        return
    if model.router_score == "softmax" and (model.router_groups is not None or model.routed_scaling != 1):
        key = "routed_scaling" if model.router_groups is None else "router_groups"
        raise ConfigError(
            f"{owner}.{key}={getattr(model, key)} with {owner}.router_score='softmax' is not computed; only with "
            "'sigmoid' is: set router_score to sigmoid, or remove the key"
        )
    if model.expert_norms:
        needed = {
            **{"router_score": "softmax", "normalized_experts": True, "shared_expert_gate": False, "pre_norms": True},
            **{"post_norms": True, "num_dense_layers": 0, "linear_bias": False},
        }
        for key, value in needed.items():
            if getattr(model, key) != value:
                raise ConfigError(
                    f"{owner}.expert_norms=true with {owner}.{key}={getattr(model, key)!r} is not computed; only "
                    f"{value!r} is: change one"
                )
        if model.shared_ffn_hidden_size is None:
            raise ConfigError(
                f"{owner}.expert_norms=true without {owner}.shared_ffn_hidden_size is not computed; give the width of "
                "the shared expert, or remove the first"
            )
    if model.router_bias and model.router_score != "sigmoid":
        raise ConfigError(
            f"{owner}.router_bias=true with {owner}.router_score={model.router_score!r}: the bias is added to scores "
            "of sigmoid alone; set router_score to sigmoid, or router_bias to false"
        )
    if model.shared_expert_gate and model.shared_ffn_hidden_size is None:
        raise ConfigError(
            f"{owner}.shared_expert_gate=true without {owner}.shared_ffn_hidden_size; give the width of the shared "
            "expert, or set shared_expert_gate to false"
        )
    _check_dense_layers(model, owner)
    _check_router_groups(model, owner)
    if model.num_layers * model.num_experts > _MOST_EXPERTS:
        raise ConfigError(
            f"{owner}.num_layers={model.num_layers} × {owner}.num_experts={model.num_experts} = "
            f"{model.num_layers * model.num_experts} experts, more than {_MOST_EXPERTS}; lower one of the two"
        )
    if model.experts_per_token > model.num_experts:
        raise ConfigError(
            f"{owner}.experts_per_token={model.experts_per_token} is more than "
            f"{owner}.num_experts={model.num_experts}; lower the first or raise the second"
        )
    if model.experts_per_token == 1 and model.normalized_experts and model.router_score == "softmax":
        raise ConfigError(
            f"{owner}.experts_per_token=1 with {owner}.normalized_experts=true is not computed: the one weight would "
            "always be 1 and the router learn nothing; set normalized_experts to false, or choose more experts"
        )


def _check_dense_layers(model: ModelConfig, owner: str) -> None:
    if model.num_dense_layers >= model.num_layers:
        raise ConfigError(
            f"{owner}.num_dense_layers={model.num_dense_layers} leaves none of {model.num_layers} layers to experts; "
            "lower it, or remove num_experts"
        )
    if bool(model.num_dense_layers) != (model.dense_ffn_hidden_size is not None):
        raise ConfigError(
            f"{owner}.num_dense_layers={model.num_dense_layers} with {owner}.dense_ffn_hidden_size="
            f"{model.dense_ffn_hidden_size}: dense layers need a width, and the width needs layers; give both or none"
        )


def _check_router_groups(model: ModelConfig, owner: str) -> None:
    groups, chosen, experts = model.router_groups, model.router_groups_per_token, model.num_experts or 0
    if (groups is None) != (chosen is None):
        raise ConfigError(
            f"{owner}.router_groups={groups} with {owner}.router_groups_per_token={chosen}: one needs the other; give "
            "both or none"
        )
    if groups is None or chosen is None:
        return
    if experts % groups or chosen > groups or experts // groups < 2 or groups < 2:
        raise ConfigError(
            f"{owner}.router_groups={groups} with {owner}.num_experts={experts} and {owner}.router_groups_per_token="
            f"{chosen}: expected at least 2 groups of equally many experts, at least 2, and no more groups for a token "
            "than there are; change one"
        )
    most = experts // groups * chosen
    if model.experts_per_token > most:
        raise ConfigError(
            f"{owner}.experts_per_token={model.experts_per_token} is more than the {most} experts of "
            f"{owner}.router_groups_per_token={chosen} groups; lower the first or raise the second"
        )


def _check_rotary(model: ModelConfig, scaling: RotaryScaling, owner: str) -> None:
    if scaling.kind not in ("linear", "proportional") and scaling.original_context is None:
        raise ConfigError(
            f"{owner}.original_context: missing; {scaling.kind} needs it, give the longest sequence of pre-training"
        )
    if scaling.kind == "llama3" and scaling.low_freq_factor >= scaling.high_freq_factor:
        raise ConfigError(
            f"{owner}.low_freq_factor={scaling.low_freq_factor} is not below "
            f"{owner}.high_freq_factor={scaling.high_freq_factor}; lower the first or raise the second"
        )
    if scaling.kind == "proportional" and model.rotary_dim is not None:
        raise ConfigError(
            f"{owner}.kind=proportional with rotary_dim={model.rotary_dim}: its rotated_share says what turns; remove "
            "rotary_dim"
        )
    if scaling.kind == "yarn" and scaling.beta_slow > scaling.beta_fast:
        raise ConfigError(
            f"{owner}.beta_slow={scaling.beta_slow} is above {owner}.beta_fast={scaling.beta_fast}; lower the "
            "first or raise the second"
        )
    for key in ("short_factor", "long_factor"):
        found = len(getattr(scaling, key))
        expected = model.rotary_size // 2 if scaling.kind == "longrope" else 0
        if found != expected:
            raise ConfigError(
                f"{owner}.{key}: {found} numbers; {scaling.kind} with heads of {model.rotary_size} takes {expected}"
                + (", one for each pair of dims: give so many" if expected else ": remove it")
            )
        if any(divisor <= 0 for divisor in getattr(scaling, key)):
            raise ConfigError(f"{owner}.{key}: a number that is not above 0; frequencies are divided by them")
