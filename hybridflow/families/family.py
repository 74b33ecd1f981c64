"""What a family of Hugging Face models is: how its ``config.json`` and its tensors' names and forms read in ours.

A family is data, one table in one file; ``tables.py`` lists them. ``config_json.py`` reads and writes settings by the
tables, ``hybridflow.checkpoint.formats.forms`` turns the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Form = Literal[
    "same",
    "stack",
    "halves",
    "qkv",
    "fused_qkv",
    "transposed",
    "transposed_halves",
    "interleaved",
    "delta",
    "fused_delta",
    "delta_conv",
    "delta_channels",
]
"""How the Hugging Face tensors of a rule make one logical tensor, whose view is that of ``reshard.spec``.

``same``: one tensor, as it is. ``stack``: gate and up, ``[ffn, hidden]`` each, become ``[2, ffn, hidden]``. ``halves``:
the same out of one tensor ``[2 * ffn, hidden]``. ``qkv``: query, key and value, weights or biases, become rows grouped
by query group: the group's queries, its key, its value. Where heads have output gates, each follows its head's query.
``fused_qkv``: the same out of one tensor with all queries, then all keys, then all values. ``transposed``: one tensor
``[in, out]``. ``transposed_halves``: gate and up out of one tensor ``[hidden, 2 * ffn]``. ``interleaved``: gate and up
by turns in the last dim, weights ``[hidden, 2 * ffn]`` or biases.

Of linear attention, all grouped by key head: the head's query and key, then of its value heads the values, their gates,
the betas and the decays. ``delta``: out of four tensors: all queries, keys and values; gates; betas; decays.
``fused_delta``: out of two that are grouped so: queries, keys, values and gates; betas and decays. ``delta_conv``: a
convolution ``[channels, 1, kernel]`` over all queries, keys and values becomes ``[channels, kernel]``, grouped.
``delta_channels``: one tensor of all queries, keys and values, grouped.
"""


EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

VALUE_HEAD = "value_head.weight"
"""Name of what gives one number in the place of logits."""

EXPERT_BIAS = "expert_bias"
ROUTER_BIASES = (EXPERT_BIAS, "e_score_correction_bias")
"""Names of the biases that choose experts, here and in ``transformers``. Rounded, they would choose others."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One logical tensor and the Hugging Face tensors that it is made of.

    ``{layer}`` stands for the layer in every name, ``{expert}`` for the expert, both counted from 0. Where the Hugging
    Face names have no ``{expert}``, the tensor has those of all experts in its first dim.

    Attributes:
        logical: Its name in ours.
        hf: Their names in a causal language model of ``transformers``.
        form: How the ones become the other.
    """

    logical: str
    hf: tuple[str, ...]
    form: Form = "same"

    @property
    def has_all_experts(self) -> bool:
        """Return whether the Hugging Face tensor is that of all experts of a layer."""
        return "{expert}" in self.logical and "{expert}" not in self.hf[0]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models.

    Attributes:
        name: Its ``model_type`` in ``config.json``.
        causal: Architecture of a language model.
        scorer: Architecture of a model with one number for each sequence: a value or reward head. None:
            ``transformers`` has none.
        keys: Keys of ``config.json`` and the ``Model`` settings that say the same.
        aliases: Other spellings of keys, which some versions of ``transformers`` write.
        defaults: Values of keys that a ``config.json`` may leave out, as ``transformers`` has them.
        always: ``Model`` settings that every model of the family has.
        computed: Keys of ``config.json`` and the values that are computed here; any other is refused by name.
        window: What decides which layers have the sliding window: nothing, ``sliding_window`` alone for all layers, the
            same where ``use_sliding_window`` switches it on, that for layers from ``max_window_layers`` on, these
            without a switch, every second layer from the first, all but each ``sliding_window_pattern``-th, or of these
            not the last either; a ``layer_types`` in ``config.json`` goes before the last five, but for the last layer
            of the last.
        global_rope: Whether layers without the window have rotary position embedding in a model with a
            ``sliding_window``.
        scalings: Kinds of rotary scaling that its files may ask for.
        rules: Every tensor of the language model.
        further_layers: End of a name by which a layer behind the last is told that predicts further tokens (multi-token
            prediction), and the key that counts such layers. They are skipped, and written as none.
        others: Further values of ``model_type`` whose models compute the same. What their classes take for a key that
            is left out is not known: their files have to say every key that has a default here.
        ignored: Regular expressions of tensors that hold nothing learned, such as tables of frequencies.
    """

    name: str
    causal: str
    scorer: str | None
    keys: Mapping[str, str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    always: Mapping[str, object] = field(default_factory=dict)
    computed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    window: Literal[
        "none", "all", "switched", "upper_layers", "last_layers", "even_layers", "most_layers", "most_but_last"
    ] = "none"
    global_rope: bool = True
    scalings: tuple[str, ...] = ("linear", "llama3", "yarn", "longrope")
    rules: tuple[Rule, ...]
    further_layers: tuple[str, str] | None = None
    others: tuple[str, ...] = ()
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)


COMMON_KEYS = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_context",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_embeddings",
    "initializer_range": "init_std",
}
"""The keys that nearly all families share."""

NO_DROPOUT = {"attention_dropout": (0.0,), "hidden_act": ("silu",)}

EMBEDDINGS = (
    Rule(logical=EMBEDDING, hf=("model.embed_tokens.weight",)),
    Rule(logical="decoder.final_layernorm.weight", hf=("model.norm.weight",)),
    Rule(logical=OUTPUT, hf=("lm_head.weight",)),
    Rule(logical=VALUE_HEAD, hf=("score.weight",)),
)
"""Of each of these a model has those that belong to it: tied embeddings have no output layer, scorers have a head."""


def in_layer(ours: str, *theirs: str, form: Form = "same") -> Rule:
    """Return the rule of a tensor of each layer, by its names within the layer."""
    return Rule(
        logical=f"decoder.layers.{{layer}}.{ours}",
        hf=tuple(f"model.layers.{{layer}}.{name}" for name in theirs),
        form=form,
    )


def gated_block(
    ours: str, theirs: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Rule, Rule]:
    """Return the rules of a gated feed-forward block, or of an expert.

    Args:
        ours: What the block is called within our layer.
        theirs: What it is called within a Hugging Face layer.
        gate: What its gate projection is called there.
        up: The same of its up projection.
        down: The same of its down projection.
    """
    first = in_layer(f"{ours}.linear_fc1.weight", f"{theirs}.{gate}.weight", f"{theirs}.{up}.weight", form="stack")
    return first, in_layer(f"{ours}.linear_fc2.weight", f"{theirs}.{down}.weight")


NORMS = (
    in_layer("input_layernorm.weight", "input_layernorm.weight"),
    in_layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
)

ATTENTION = (
    in_layer("self_attention.linear_qkv.weight", *(f"self_attn.{part}_proj.weight" for part in "qkv"), form="qkv"),
    in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)

QKV_BIAS = (in_layer("self_attention.linear_qkv.bias", *(f"self_attn.{part}_proj.bias" for part in "qkv"), form="qkv"),)

QK_NORM = tuple(in_layer(f"self_attention.{part}_layernorm.weight", f"self_attn.{part}_norm.weight") for part in "qk")

POST_NORMS = (
    in_layer("self_attention.post_layernorm.weight", "post_attention_layernorm.weight"),
    in_layer("mlp.post_layernorm.weight", "post_feedforward_layernorm.weight"),
)
"""Of blocks whose outputs are normalized."""

FUSED_FEED_FORWARD = (
    in_layer("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", form="halves"),
    in_layer("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
)

FEED_FORWARD = gated_block("mlp", "mlp")

DENSE = (*EMBEDDINGS, *NORMS, *ATTENTION, *FEED_FORWARD)
"""Every tensor of a model shaped like Llama."""


def experts(block: str = "mlp", *projections: str) -> tuple[Rule, ...]:
    """Return the rules of a mixture of experts, which takes the place of the feed-forward block.

    Args:
        block: What the block is called within a Hugging Face layer.
        projections: What an expert's gate, up and down projections are called, if not as in ``gated_block``.
    """
    return (
        in_layer("mlp.router.weight", f"{block}.gate.weight"),
        *gated_block("mlp.experts.{expert}", f"{block}.experts.{{expert}}", *projections),
    )


GATED_SHARED_EXPERT = (
    *gated_block("mlp.shared_experts", "mlp.shared_expert"),
    in_layer("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
)
"""The shared expert of Qwen's mixtures."""

MIXTURE_KEYS = {
    "intermediate_size": "dense_ffn_hidden_size",
    "moe_intermediate_size": "ffn_hidden_size",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "first_k_dense_replace": "num_dense_layers",
    "n_group": "router_groups",
    "topk_group": "router_groups_per_token",
    "routed_scaling_factor": "routed_scaling",
    "norm_topk_prob": "normalized_experts",
}
"""Keys of DeepSeek-V3's mixtures, which others have too: groups of experts behind dense first layers."""

MIXTURE = (
    *FEED_FORWARD,
    *experts(),
    in_layer("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias"),
    *gated_block("mlp.shared_experts", "mlp.shared_experts"),
)
"""Their tensors."""
