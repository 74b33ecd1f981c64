"""Sizes of a causal language model of ``transformers`` that no table describes, from its ``config.json``. No torch.

The module of ``transformers`` computes such a model, so these sizes decide nothing but plans: layouts, memory, lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.families.config_json import Described, NotComputedError, dtype_of, has_value_head, read_config
from hybridflow.families.model import ModelConfig
from hybridflow.families.model_info import ModelInfo
from hybridflow.families.tables import BY_TYPE
from hybridflow.families.vision import vision_model
from hybridflow.sections import read_section

_SPELLINGS = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "vocab_size": ("vocab_size",),
    "max_context": (
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "max_sequence_length",
        "seq_length",
        "n_ctx",
        "model_max_length",
    ),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_query_groups": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "ffn_hidden_size": ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim"),
    "head_dim": ("head_dim",),
}
"""Setting -> its names among the configurations of ``transformers``, the most frequent first."""

_NEEDED = ("num_layers", "hidden_size", "vocab_size", "max_context")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_CAUSAL, _WITH_TEXT = ("*ForCausalLM", "*LMHeadModel"), ("*ForConditionalGeneration",)
_SCORER = "*ForSequenceClassification"


def longest_sequence(values: Mapping[str, Any]) -> int | None:
    """Return how many tokens a sequence may have by a parsed ``config.json``; None: it does not say."""
    return _size(values, _SPELLINGS["max_context"])


def has_no_table(values: Mapping[str, Any]) -> bool:
    """Return whether no table describes the model of a parsed ``config.json``: its type, or what it computes."""
    try:
        return _read_by_table(values, str(values.get("model_type"))) is None
    except ConfigError:
        return False


def read_info(values: Mapping[str, Any], *, where: str, assets: Path | None = None) -> ModelInfo:
    """Read what a parsed ``config.json`` says of its model, by a table where one describes it.

    Args:
        values: The parsed file.
        where: What messages call it.
        assets: Where the small files are that travel along. A vision-language model in memory has none, so that
            an export would find its other tensors nowhere: it runs in ``transformers``.

    Raises:
        ConfigError: It is malformed, or neither a causal language model nor a scorer.
    """
    is_whole = assets is None and vision_model(values) is not None
    described = None if is_whole else _read_by_table(values, where)
    if described is None:
        return read_other_config(values, where=where, assets=assets)
    is_coded = values.get("quantization_config") is not None
    return ModelInfo(described.model, described.has_value_head, described.family.name, assets, is_coded=is_coded)


def _read_by_table(values: Mapping[str, Any], where: str) -> Described | None:
    """Return the settings by the table of the family; None: there is none, or it does not compute the model.

    Raises:
        ConfigError: It is malformed.
    """
    name = values.get("model_type")
    if isinstance(name, str) and name.isprintable() and name not in BY_TYPE and vision_model(values) is None:
        return None
    try:
        return read_config(values, where=where)
    except NotComputedError:
        return None


def read_other_config(values: Mapping[str, Any], *, where: str, assets: Path | None = None) -> ModelInfo:
    """Read the sizes of a parsed ``config.json`` for which ``has_no_table`` holds.

    Args:
        values: The parsed file.
        where: What messages call it.
        assets: Where the small files are that travel along.

    Raises:
        ConfigError: A size is missing or ill-typed, or it is neither a causal language model nor a scorer.
    """
    try:
        return _read(values, where, assets)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: is malformed: {type(error).__name__}: {error}; expected the keys of a model of transformers: "
            "restore it from a copy"
        ) from error


def _read(values: Mapping[str, Any], where: str, assets: Path | None) -> ModelInfo:
    name = str(values["model_type"])
    if values.get("quantization_config") is not None:
        raise ConfigError(
            f"{where}: quantization_config: quantized weights are not trained; name the model that was quantized, as "
            "it was before"
        )
    # Of a model with vision or audio the sizes are those of its part for text, which alone is trained.
    text = values.get("text_config")
    if isinstance(text, Mapping):
        values = {**text, **values}
    found = {setting: _size(values, names) for setting, names in _SPELLINGS.items()}
    kinds = values.get("layers_block_type")
    if found["num_layers"] is None and isinstance(kinds, list):
        # Nemotron-H tells what each layer is, as transformers 5 saves it.
        found["num_layers"] = len(kinds)
    for setting in _NEEDED:
        if found[setting] is None:
            raise ConfigError(
                f"{where}: {_SPELLINGS[setting][0]}: missing; model_type={name!r} has no table here, so config.json "
                "must tell its sizes: add the key"
            )
    sizes = {setting: value for setting, value in found.items() if value is not None}
    sizes.setdefault("num_attention_heads", 1)
    sizes.setdefault("ffn_hidden_size", 4 * sizes["hidden_size"])
    sizes |= _mixture(values, sizes)
    causal = _CAUSAL if text is None else (*_CAUSAL, *_WITH_TEXT)
    return ModelInfo(
        model=read_section(
            ModelConfig,
            {
                **sizes,
                "tied_embeddings": values.get("tie_word_embeddings") is True,
                "dtype": dtype_of(values),
                "implementation": "transformers",
            },
            source=where,
        ),
        has_value_head=has_value_head(values, where, causal=causal, scorer=_SCORER),
        family=name,
        assets=assets,
    )


def _mixture(values: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the sizes of experts; of a model without any none."""
    experts = _size(values, _EXPERTS)
    if experts is None or experts == 1:
        return {}
    width, dense = _size(values, ("moe_intermediate_size", "expert_ffn_hidden_size")), sizes["ffn_hidden_size"]
    width = dense if width is None else width
    shared = _size(values, ("shared_expert_intermediate_size",))
    if shared is None:
        shared = width * (_size(values, ("n_shared_experts", "moe_num_shared_experts")) or 0)
    found = {
        "ffn_hidden_size": width,
        "num_experts": experts,
        "experts_per_token": min(experts, _size(values, _CHOSEN_EXPERTS) or 2),
        "normalized_experts": False,
        "shared_ffn_hidden_size": shared or None,
    }
    num_dense = _size(values, ("first_k_dense_replace", "moe_layer_start_index"))
    if num_dense is not None and num_dense < sizes["num_layers"]:
        found |= {"num_dense_layers": num_dense, "dense_ffn_hidden_size": dense}
    return found


def _size(values: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """Return the first of some keys that is an integer above 0."""
    return next((value for name in names if type(value := values.get(name)) is int and value > 0), None)
