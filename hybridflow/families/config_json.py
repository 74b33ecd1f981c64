"""Hugging Face's ``config.json`` to and from the settings of a model, by the tables. Refuses what is not computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.families.family import Family
from hybridflow.families.model import Model, RotaryScaling, check_model
from hybridflow.families.tables import FAMILIES
from hybridflow.sections import read_section

_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
_ROTARY_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
_ROTARY_LISTS = ("short_factor", "long_factor")
_ROTARY_KEYS = {
    *_ROTARY_NUMBERS,
    *_ROTARY_LISTS,
    *("rope_type", "type", "rope_theta", "original_max_position_embeddings", "partial_rotary_factor"),
}


@dataclass(frozen=True, kw_only=True)
class Described:
    """A model of a known family.

    Attributes:
        family: Its table.
        model: Its settings, the vocabulary included.
        has_value_head: Whether it gives a number instead of logits.
    """

    family: Family
    model: Model
    has_value_head: bool


def read_config(values: Mapping[str, Any], *, where: str) -> Described:
    """The settings that a ``config.json`` stands for.

    Args:
        values: The parsed file.
        where: What messages call it.

    Raises:
        ConfigError: The family is unknown, a key is missing or ill-typed, or asks for what is not computed here.
    """
    family = _family(values, where)
    # A null is an answer: no soft-cap, no window. Only what is left out has the default.
    given = {**family.defaults, **values}
    for key, allowed in family.computed.items():
        if key in values and values[key] not in allowed:
            raise ConfigError(
                f"{where}: {key}={values[key]!r} is not computed for {family.name}; only "
                f"{', '.join(map(repr, allowed))} is: choose another model"
            )
    model = {setting: given[key] for key, setting in family.keys.items() if given.get(key) is not None}
    model |= family.always
    model |= _rotary(given, where)
    model |= _window(family, given)
    if given.get("query_pre_attn_scalar") is not None:
        model["attention_scale"] = float(given["query_pre_attn_scalar"]) ** -0.5
    dtype = given.get("dtype", given.get("torch_dtype"))
    model["dtype"] = _DTYPES.get(str(dtype), "fp32" if dtype is None else "bf16")
    settings = read_section(Model, model, source=where)
    check_model(settings, f"{where}: model")
    return Described(
        family=family,
        model=settings,
        has_value_head=_has_value_head(family, values, where),
    )


def _family(values: Mapping[str, Any], where: str) -> Family:
    name = values.get("model_type")
    if name not in FAMILIES:
        raise ConfigError(
            f"{where}: model_type={name!r}: not a family known here; expected one of {', '.join(FAMILIES)}, or add a "
            "table for it (docs/checkpoints.md)"
        )
    return FAMILIES[name]


def _has_value_head(family: Family, values: Mapping[str, Any], where: str) -> bool:
    architectures = values.get("architectures") or [family.causal]
    if architectures == [family.causal]:
        return False
    labels = values.get("num_labels", len(values.get("id2label") or {0: "", 1: ""}))
    if architectures != [family.scorer] or labels != 1:
        raise ConfigError(
            f"{where}: architectures={architectures} with {labels} labels; expected [{family.causal!r}], or "
            f"[{family.scorer!r}] with one label"
        )
    return True


def _rotary(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Base and scaling, from the flat keys of older files or from ``rope_parameters``."""
    told = {**(given.get("rope_scaling") or {}), **(given.get("rope_parameters") or {})}
    base = next((each["rope_theta"] for each in (told, given) if each.get("rope_theta") is not None), 10000.0)
    if float(told.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError(f"{where}: partial_rotary_factor={told['partial_rotary_factor']} is not computed; only 1 is")
    kind = told.get("rope_type", told.get("type", "default"))
    if kind == "default":
        return {"rotary_base": float(base)}
    if kind == "su":  # what the first Phi-3 files call it
        kind = "longrope"
    strangers = [
        f"{key}={value!r}"
        for key, value in told.items()
        if key not in _ROTARY_KEYS and value is not None and (key, value) != ("truncate", True)
    ]
    if strangers:
        raise ConfigError(f"{where}: rope_parameters: {', '.join(strangers)} is not computed; choose another model")
    # As ``transformers`` has it: the model's own key goes before that of the scaling.
    context = given["max_position_embeddings"]
    original = given.get("original_max_position_embeddings", told.get("original_max_position_embeddings", context))
    scaling = {key: told[key] for key in _ROTARY_NUMBERS if told.get(key) is not None}
    if kind in ("yarn", "longrope"):
        scaling.setdefault("factor", context / original)
    scaling |= {key: [float(item) for item in told[key]] for key in _ROTARY_LISTS if told.get(key) is not None}
    scaling = {key: float(value) if isinstance(value, int) else value for key, value in scaling.items()}
    scaling |= {"kind": kind, "original_context": None if kind == "linear" else original}
    read_section(RotaryScaling, scaling, source=f"{where}: rope_parameters")
    return {"rotary_base": float(base), "rotary_scaling": scaling}


def _window(family: Family, given: Mapping[str, Any]) -> dict[str, Any]:
    """The sliding window and its layers."""
    width, num_layers = given.get("sliding_window"), given.get("num_hidden_layers", 0)
    if family.window == "none" or width is None:
        return {}
    if family.window == "all":
        return {"window": width}
    if given.get("layer_types"):
        layers = [layer for layer, kind in enumerate(given["layer_types"]) if kind == "sliding_attention"]
    elif family.window == "even_layers":
        layers = list(range(0, num_layers, 2))
    else:
        first = given.get("max_window_layers", 28) if given.get("use_sliding_window", False) else num_layers
        layers = list(range(first, num_layers))
    return {"window": width, "window_layers": layers} if layers else {}
