"""Hugging Face's ``config.json`` to and from the settings of a model, by the tables. Refuses what is not computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.families.family import Family
from hybridflow.families.model import ModelConfig, RotaryScaling, check_model
from hybridflow.families.quantization import read_quantization
from hybridflow.families.tables import BY_TYPE, FAMILIES
from hybridflow.families.vision import ORIGIN, language_model, with_language_model
from hybridflow.sections import read_section, to_dict

_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
_MAX_LAYERS = 10_000
_OLDER = (
    "rope_theta",
    "rope_scaling",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_LISTED = ("upper_layers", "last_layers", "even_layers", "most_layers", "most_but_last")
"""Kinds of windows whose layers a list may tell."""
_YARN_NUMBERS = ("mscale", "mscale_all_dim")
_ROTARY_NUMBERS = (
    *("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"),
    *_YARN_NUMBERS,
)
_FULL, _LINEAR = "full_attention", "linear_attention"
_ATTENTION_INTERVAL = 4
"""Of layers, where a file with linear attention has neither a list of them nor an interval."""
_STRETCHED = ("yarn", "longrope")
"""Kinds of scaling whose files have the stretched context, as the model's longest sequence."""
_PROPORTIONAL = "proportional"
_ROTARY_LISTS = ("short_factor", "long_factor")
_ROTARY_KEYS = {
    *_ROTARY_NUMBERS,
    *_ROTARY_LISTS,
    *("rope_type", "type", "rope_theta", "original_max_position_embeddings", "partial_rotary_factor", "truncate"),
    # Of text the three positions are one, in whatever sections of the pairs.
    *("mrope_section", "mrope_interleaved"),
}


_COMPUTED = {"is_causal": (True, None)}
"""Keys of every family and the values that are computed; models that embed texts see those behind."""

_RANDOM = ("attention_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop", "router_jitter_noise")


class NotComputedError(ConfigError):
    """A ``config.json`` asks for what the layers here do not compute; those of ``transformers`` may."""


@dataclass(frozen=True, kw_only=True)
class Described:
    """A model of a known family.

    Attributes:
        family: Its table.
        model: Its settings, the vocabulary included.
        has_value_head: Whether it gives a number instead of logits.
    """

    family: Family
    model: ModelConfig
    has_value_head: bool


def read_config(values: Mapping[str, Any], *, where: str) -> Described:
    """Read the settings of a parsed ``config.json``; of a vision-language model those of its language model.

    Args:
        values: The parsed file.
        where: What messages call it.

    Raises:
        ConfigError: The family is unknown, or a key is missing or ill-typed.
        NotComputedError: A key asks for what is not computed here.
    """
    try:
        return _read(values, where)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: is malformed: {type(error).__name__}: {error}; expected the keys of a model of transformers: "
            "restore it from a copy"
        ) from error


def _read(values: Mapping[str, Any], where: str) -> Described:
    values = language_model(values)
    family = _family(values, where)
    values = _with_aliases(family, values, where)
    # A null is an answer: no soft-cap, no window. Only what is left out has the default.
    given = {**family.defaults, **values}
    _check_given(family, given, where)
    read_quantization(values, family, where=where)
    for key, allowed in {**_COMPUTED, **family.computed}.items():
        if key in given and given[key] not in allowed:
            if key in _RANDOM:
                raise ConfigError(f"{where}: {key}={given[key]!r}: nothing random is computed; set it to 0 in the file")
            raise NotComputedError(
                f"{where}: {key}={given[key]!r} is not computed for {family.name}; only "
                f"{', '.join(map(repr, allowed))} is: choose another model"
            )
    model = {setting: given[key] for key, setting in family.keys.items() if given.get(key) is not None}
    model |= family.always
    model |= _mixture(family, given, model, where)
    model |= _rotary(family, given, where)
    model |= _window(family, given, where)
    model |= _global_heads(family, given, where)
    model |= _no_rope(family, given, model)
    model |= _linear(family, given, where)
    if "query_pre_attn_scalar" in family.defaults and given.get("query_pre_attn_scalar") is not None:
        model["attention_scale"] = float(given["query_pre_attn_scalar"]) ** -0.5
    model["dtype"] = dtype_of(given)
    settings = read_section(ModelConfig, model, source=where)
    try:
        check_model(settings, "model")
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return Described(
        family=family,
        model=settings,
        has_value_head=has_value_head(values, where, causal=(family.causal,), scorer=family.scorer),
    )


def _mixture(family: Family, given: Mapping[str, Any], model: dict[str, Any], where: str) -> dict[str, Any]:
    """Return what the keys of shared experts, dense layers and groups of experts mean together."""
    found: dict[str, Any] = {}
    if "mlp_layer_types" in family.defaults:
        model["num_dense_layers"] = _num_dense(given, where)
        found["num_dense_layers"] = model["num_dense_layers"]
    if given.get("n_shared_experts"):
        found["shared_ffn_hidden_size"] = given["n_shared_experts"] * model["ffn_hidden_size"]
    if "enable_moe_block" in family.defaults:
        if given.get("enable_moe_block"):
            found |= {"ffn_hidden_size": given["moe_intermediate_size"], "expert_norms": True}
            found["shared_ffn_hidden_size"] = model["ffn_hidden_size"]
        else:
            found |= {"num_experts": None, "experts_per_token": 2}
    if model.get("num_dense_layers") == 0:
        found["dense_ffn_hidden_size"] = None
    if model.get("router_groups") == 1:
        found |= {"router_groups": None, "router_groups_per_token": None}
    return found


def _num_dense(given: Mapping[str, Any], where: str) -> int:
    """Return the number of layers without experts, which are the first, by a list of all; there is one if it is none.

    Raises:
        NotComputedError: Such a layer comes behind one with experts.
    """
    num_layers, kinds = given["num_hidden_layers"], given["mlp_layer_types"]
    dense = 1 if kinds is None else kinds.count("dense")
    if kinds not in (None, ["dense"] * dense + ["sparse"] * (num_layers - dense)):
        raise NotComputedError(
            f"{where}: mlp_layer_types={kinds} is not computed; only {num_layers} of 'dense' and then 'sparse' are"
        )
    return dense


def dtype_of(values: Mapping[str, Any]) -> str:
    """Return the number format that a ``config.json`` names, in our words; others than fp32 become bf16.

    One that names none has fp32, as in ``transformers``, but bf16 if its weights lie in codes: so GPT-OSS is published.
    """
    dtype = values.get("dtype") or values.get("torch_dtype")
    if dtype is None:
        return "fp32" if values.get("quantization_config") is None else "bf16"
    return _DTYPES.get(str(dtype), "bf16")


def _family(values: Mapping[str, Any], where: str) -> Family:
    name = values.get("model_type")
    if not isinstance(name, str) or name not in BY_TYPE:
        raise ConfigError(
            f"{where}: model_type={name!r}: not a family known here; expected one of {', '.join(BY_TYPE)}, or add a "
            "table for it (docs/families.md)"
        )
    family = BY_TYPE[name]
    unsaid = [key for key in family.defaults if key not in values] if name in family.others else []
    if unsaid:
        raise NotComputedError(
            f"{where}: {unsaid[0]}: missing; nothing is known of what a {name} takes for it: add it to the file"
        )
    return family


def _check_given(family: Family, given: Mapping[str, Any], where: str) -> None:
    """Refuse a ``config.json`` that lacks a setting of every model, or whose layers cannot be counted."""
    needed = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    for key in (*needed, next(key for key, setting in family.keys.items() if setting == "ffn_hidden_size")):
        if given.get(key) is None:
            raise ConfigError(f"{where}: {key}: missing; expected an integer: restore it from a copy")
    num_layers = given["num_hidden_layers"]
    if isinstance(num_layers, bool) or not isinstance(num_layers, int) or not 1 <= num_layers <= _MAX_LAYERS:
        raise ConfigError(
            f"{where}: num_hidden_layers={num_layers!r}: expected an integer of 1 to {_MAX_LAYERS}; restore it from a "
            "copy"
        )


def _with_aliases(family: Family, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the values with one spelling of each key."""
    known = dict(values)
    for alias, key in family.aliases.items():
        if alias in known and known.setdefault(key, known[alias]) != known[alias]:
            raise ConfigError(f"{where}: {alias}={known[alias]!r} contradicts {key}={known[key]!r}; remove one")
    return known


def has_value_head(values: Mapping[str, Any], where: str, *, causal: tuple[str, ...], scorer: str | None) -> bool:
    """Return whether a parsed ``config.json`` is of a model that gives a number instead of logits.

    Args:
        values: The parsed file.
        where: What messages call it.
        causal: Architectures of language models; an asterisk stands for anything.
        scorer: Architecture of models with labels, likewise; None: there is none.

    Raises:
        ConfigError: Its architecture is neither, or it has several labels.
    """
    architectures = values.get("architectures") or [causal[0]]
    labels = values.get("num_labels", len(values.get("id2label") or {0: "", 1: ""}))
    name = str(architectures[0]) if isinstance(architectures, list) and len(architectures) == 1 else ""
    if any(fnmatchcase(name, each) for each in causal):
        return False
    if scorer is not None and fnmatchcase(name, scorer) and labels == 1:
        return True
    other = "" if scorer is None else f", or a {scorer} with one label"
    raise ConfigError(
        f"{where}: architectures={architectures} with {labels} labels: expected one language model "
        f"({', '.join(causal)}){other}; choose another model"
    )


def _rotary(family: Family, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return bases and scaling, from the flat keys of older files or from ``rope_parameters``."""
    # As ``transformers`` has it: the older spelling goes before the newer.
    if "rope_local_base_freq" not in family.defaults:
        # Where both are null, the family's own count: of GPT-OSS they are stretched.
        usual = family.defaults.get("rope_parameters")
        told: Any = given.get("rope_scaling") or given.get("rope_parameters") or usual or {}
        return _one_rotary(family, given, dict(told), where)
    by_layer: dict[str, Any] = {**(given.get("rope_parameters") or _by_default(family))}
    full = {**(by_layer.pop("full_attention", None) or {}), **(given.get("rope_scaling") or {})}
    local = dict(by_layer.pop("sliding_attention", None) or {})
    base = local.pop("rope_theta", given["rope_local_base_freq"])
    if by_layer or {*local.items()} - {("rope_type", "default")}:
        raise NotComputedError(
            f"{where}: rope_parameters={given['rope_parameters']}: expected 'full_attention', and 'sliding_attention' "
            "of rope_type 'default'; others are not computed: choose another model"
        )
    return {**_one_rotary(family, given, full, where), "local_rotary_base": float(base)}


def _by_default(family: Family) -> Mapping[str, Any]:
    """Return the rotary settings of a family by kinds of layers, where a file has none."""
    found = family.defaults.get("rope_parameters")
    return found if isinstance(found, Mapping) else {}


def _one_rotary(family: Family, given: Mapping[str, Any], told: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the base and scaling that ``told`` asks for."""
    base = next((each["rope_theta"] for each in (told, given) if each.get("rope_theta") is not None), 10000.0)
    rotary: dict[str, Any] = {"rotary_base": float(base)}
    kind = told.get("rope_type", told.get("type", "default"))
    partial = told.get("partial_rotary_factor", given.get("partial_rotary_factor"))
    if kind == _PROPORTIONAL:
        partial = None  # a part of the scaling
    if partial is not None and float(partial) != 1.0:
        if "partial_rotary_factor" not in family.defaults and "rotary_dim" not in family.keys:
            raise NotComputedError(
                f"{where}: partial_rotary_factor={partial} is not computed for {family.name}; only 1 is: choose "
                "another model"
            )
        head = given.get("head_dim") or given["hidden_size"] // given["num_attention_heads"]
        rotary["rotary_dim"] = int(head * partial)
    elif partial is not None and "rotary_dim" in family.keys:
        rotary["rotary_dim"] = None  # the share goes before the dims
    if kind == "default":
        return rotary
    if kind == "su":  # what the first Phi-3 files call it
        kind = "longrope"
    if kind not in family.scalings:
        raise NotComputedError(
            f"{where}: rope_type={kind!r} is not computed for {family.name}; only 'default', "
            f"{', '.join(map(repr, family.scalings))} is: choose another model"
        )
    strangers = [
        f"{key}={value!r}"
        for key, value in told.items()
        if (key not in _ROTARY_KEYS or kind != "yarn" and key in _YARN_NUMBERS) and value is not None
    ]
    if strangers:
        raise NotComputedError(
            f"{where}: rope_parameters: {', '.join(strangers)} is not computed; choose another model"
        )
    # As ``transformers`` has it: the model's own key goes before that of the scaling.
    context = given["max_position_embeddings"]
    original = given.get("original_max_position_embeddings", told.get("original_max_position_embeddings", context))
    scaling = {key: told[key] for key in _ROTARY_NUMBERS if told.get(key) is not None}
    if kind in _STRETCHED:
        scaling.setdefault("factor", context / original)
    scaling |= {key: [float(item) for item in told[key]] for key in _ROTARY_LISTS if told.get(key) is not None}
    scaling = {key: float(value) if type(value) is int else value for key, value in scaling.items()}
    if kind == "yarn" and told.get("truncate") is not None:
        scaling["truncate"] = told["truncate"]
    scaling |= {"kind": kind, "original_context": None if kind in ("linear", _PROPORTIONAL) else original}
    if kind == _PROPORTIONAL and told.get("partial_rotary_factor") is not None:
        scaling["rotated_share"] = float(told["partial_rotary_factor"])
    read_section(RotaryScaling, scaling, source=f"{where}: rope_parameters")
    return {**rotary, "rotary_scaling": scaling}


def _global_heads(family: Family, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the heads of layers without the window, by keys of their own or by a list of what layers override.

    As ``transformers`` has it: the list goes before the keys, and without it the number of their key/value heads counts
    only where keys are values.

    Raises:
        NotComputedError: Some of these layers have other heads than the others.
    """
    if "global_head_dim" not in family.keys:
        return {}
    same = given["head_dim"], given["num_key_value_heads"]
    has_shared = bool(given.get("attention_k_eq_v"))
    own = given.get("num_global_key_value_heads") if has_shared else None
    found = given["global_head_dim"], same[1] if own is None else own
    windowed = _window(family, given, where).get("window_layers", ())
    told = given.get("per_layer_config")
    if told is not None:
        # Layers are numbers of as many digits as the last has.
        layers = {int(layer): each for layer, each in told.items() if each}
        others = [layer for layer in range(given["num_hidden_layers"]) if layer not in windowed]
        first = layers.get(others[0], {})
        if layers != (dict.fromkeys(others, first) if first else {}) or {*first} - {"head_dim", "num_key_value_heads"}:
            raise NotComputedError(
                f"{where}: per_layer_config={told} is not computed; only the same head_dim and num_key_value_heads of "
                "all layers of 'full_attention' are: choose another model"
            )
        found = first.get("head_dim", same[0]), first.get("num_key_value_heads", same[1])
        if found[1] != same[1] and not has_shared:
            raise NotComputedError(
                f"{where}: per_layer_config={told} with attention_k_eq_v={given.get('attention_k_eq_v')!r} is not "
                "computed; only equally many key/value heads in all layers are: choose another model"
            )
    if (found != same or has_shared) and not windowed:
        raise NotComputedError(
            f"{where}: layer_types={given.get('layer_types')} is not computed for {family.name}; only with some of "
            "'sliding_attention' is: choose another model"
        )
    settings = ("global_head_dim", "global_query_groups")
    return {name: None if size == each else size for name, size, each in zip(settings, found, same, strict=True)}


def _no_rope(family: Family, given: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layers without rotary embedding: those with a 0 in a list, else each at the end of an interval.

    Without ``global_rope`` they are those without the window that ``model`` has, if the file has a width.
    """
    if not family.global_rope and given["sliding_window"] is not None:
        layers = range(given["num_hidden_layers"])
        windowed = model.get("window_layers", layers if "window" in model else ())
        return {"no_rope_layers": [layer for layer in layers if layer not in windowed]}
    if "no_rope_layer_interval" not in family.defaults:
        return {}
    rotated = given.get("no_rope_layers")
    if rotated is None:
        rotated = [(layer + 1) % given["no_rope_layer_interval"] for layer in range(given["num_hidden_layers"])]
    return {"no_rope_layers": [layer for layer, flag in enumerate(rotated[: given["num_hidden_layers"]]) if not flag]}


def _linear(family: Family, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the layers with linear attention: those of a list, else all but each at the end of an interval."""
    if not _has_linear(family):
        return {}
    num_layers, kinds = given["num_hidden_layers"], given.get("layer_types")
    if kinds is None:
        interval = given.get("full_attention_interval", _ATTENTION_INTERVAL)
        kinds = [_LINEAR if (layer + 1) % interval else _FULL for layer in range(num_layers)]
    if len(kinds) != num_layers or {*kinds} - {_LINEAR, _FULL}:
        raise ConfigError(
            f"{where}: layer_types={kinds}: expected {num_layers} of {_LINEAR!r} or {_FULL!r}; others are not computed"
        )
    layers = [layer for layer, kind in enumerate(kinds) if kind == _LINEAR]
    if layers:
        return {"linear_layers": layers}
    return dict.fromkeys((setting for setting in family.keys.values() if setting.startswith("linear_")), None)


def _has_linear(family: Family) -> bool:
    return "linear_num_key_heads" in family.keys


def _window(family: Family, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the sliding window and its layers."""
    if _has_linear(family):
        return {}
    width, num_layers = given.get("sliding_window"), given["num_hidden_layers"]
    is_off = family.window in ("switched", "upper_layers") and not given.get("use_sliding_window")
    if family.window == "none" or is_off:
        width = None
    kinds = given.get("layer_types")
    is_listed = kinds is not None and width is not None and family.window in _LISTED
    pattern: Any = given.get("sliding_window_pattern")
    if isinstance(pattern, str) and width is not None and not is_listed:
        raise ConfigError(
            f"{where}: sliding_window_pattern={pattern!r} without layer_types: expected an integer, or a list of the "
            "kinds of all layers; add layer_types to the file"
        )
    layers: Iterable[int] = range(num_layers)
    if family.window == "even_layers":
        layers = range(0, num_layers, 2)
    elif family.window in ("upper_layers", "last_layers"):
        layers = range(given.get("max_window_layers", 28), num_layers)
    elif family.window == "most_layers":
        layers = (layer for layer in layers if (layer + 1) % pattern)
    elif family.window == "most_but_last":
        layers = (layer for layer in layers if (layer + 1) % pattern and layer < num_layers - 1)
    windowed = [] if width is None or is_listed else list(layers)
    if kinds is not None and (
        width is not None or family.window not in ("even_layers", "most_layers", "most_but_last")
    ):
        told = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]
        if family.window == "most_but_last" and num_layers - 1 in told:
            # As ``transformers`` has it.
            told.remove(num_layers - 1)
        if len(kinds) != num_layers or {*kinds} - {"full_attention", "sliding_attention"}:
            raise ConfigError(
                f"{where}: layer_types={kinds}: expected {num_layers} of 'full_attention' or 'sliding_attention'; "
                "others are not computed"
            )
        if told != windowed and not is_listed:
            raise NotComputedError(
                f"{where}: layer_types={kinds} is not computed for {family.name} with "
                f"sliding_window={given.get('sliding_window')!r}; remove it"
            )
        windowed = told
    if not windowed:
        return {}
    return {"window": width} if len(windowed) == num_layers else {"window": width, "window_layers": windowed}


def describe(model: ModelConfig, *, family: str | None, has_value_head: bool) -> Described:
    """Find the table that Hugging Face has for a model, and return the two together.

    Args:
        model: Its settings, the vocabulary included.
        family: Name of its family; None: the plainest that has such models.
        has_value_head: Whether it gives a number instead of logits.

    Raises:
        ConfigError: No family, or not this one, has such a model; names the settings in the way.
    """
    if family is not None and family not in FAMILIES:
        raise ConfigError(f"family {family!r}: not known here; expected one of {', '.join(FAMILIES)}")
    candidates = list(FAMILIES.values()) if family is None else [FAMILIES[family]]
    if has_value_head:
        candidates = [each for each in candidates if each.scorer is not None]
        if not candidates:
            raise ConfigError(
                f"family {family}: transformers has no such model with a value head; write another format"
            )
    strange = {}
    for candidate in candidates:
        described = Described(family=candidate, model=model, has_value_head=has_value_head)
        strange[candidate.name] = _unsaid(described)
        if not strange[candidate.name]:
            return described
    nearest = min(strange, key=lambda name: len(strange[name]))
    common = [key for key in strange[nearest] if all(key in keys for keys in strange.values())]
    values = ", ".join(f"{key}={getattr(model, key)!r}" for key in common or strange[nearest])
    if len(strange) == 1:
        raise ConfigError(f"family {nearest} has no models with {values}; expected settings that it has")
    lacking = f"no family of Hugging Face has models with {values}"
    if not common:
        lacking = f"no family of Hugging Face has all of the model's settings; the nearest, {nearest}, has not {values}"
    raise ConfigError(f"{lacking}; expected those of one of {', '.join(FAMILIES)}: write another format")


def update_config(original: Mapping[str, Any] | None, described: Described, *, dtype: str) -> dict[str, Any]:
    """Return the ``config.json`` to write beside a model's tensors; the inverse of ``read_config``.

    Rotary positions are written in both spellings: ``rope_parameters`` of transformers 5, and the flat keys that went
    before. With YaRN and LongRoPE ``max_position_embeddings`` is the stretched context, also of a model with another
    one: transformers 4 takes its ratio to the original context for the factor, whatever factor is written.

    Args:
        original: The one that traveled along; kept where it describes the model, with the spellings that older readers
            need. Its longest sequence grows with the model's, and stays where the model was trained with a shorter one.
            None: there is none.
        described: The model, as ``describe`` or ``read_config`` gave it.
        dtype: Number format of the tensors, as Hugging Face calls it.
    """
    config = _written(described)
    if original is not None:
        # What has tensors of the language model alone is one, such as a critic.
        original = _with_longest(language_model(original), described)
    if original is not None and describes(original, described):
        named = ("architectures", "model_type", "id2label", "label2id")
        head = {key: value for key, value in config.items() if key in named}
        # Code and labels do not travel along, and what is written lies in no codes.
        gone = ("auto_map", "num_labels", "id2label", "label2id", "quantization_config")
        kept = {key: value for key, value in original.items() if key not in gone}
        aliases = {key: config[key] for key in described.family.aliases.values() if key in config}
        config = {**aliases, **_with_older_rotary(kept, config, described), **head}
        if described.family.further_layers is not None and described.family.further_layers[1] in config:
            config[described.family.further_layers[1]] = 0
    elif original is not None:
        config |= {key: original[key] for key in _TOKENS if key in original}
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = dtype
    return config if "dtype" in config or "torch_dtype" in config else {**config, "dtype": dtype}


def update_vision_config(original: Mapping[str, Any], described: Described, *, dtype: str) -> dict[str, Any]:
    """Return the ``config.json`` of a whole vision-language model, to write beside its tensors.

    Args:
        original: The one that traveled along; its longest sequence grows with the model's, as in ``update_config``.
        described: The language model.
        dtype: Number format of the language model's tensors, as Hugging Face calls it.
    """
    key, text = "max_position_embeddings", language_model(original)
    longest = _with_longest(text, described)
    grown = {key: longest[key]} if longest.get(key) != text.get(key) else {}
    inner = {name: dtype for name in ("dtype", "torch_dtype") if name in (original.get("text_config") or ())}
    config = with_language_model(original, **grown, **inner)
    config.pop(ORIGIN, None)
    config |= {name: dtype for name in ("dtype", "torch_dtype") if name in config} or {"dtype": dtype}
    return config


def describes(original: Mapping[str, Any], described: Described) -> bool:
    """Return whether a ``config.json`` describes the model, apart from the head and what changes no weight."""
    try:
        found = read_config(original, where="config.json")
    except ConfigError:
        return False
    free = {key: getattr(described.model, key) for key in ("max_context", "init_std", "dtype")}
    model = replace(found.model, **free)
    return found.family is described.family and spelled_out(model) == spelled_out(described.model)


def _with_older_rotary(kept: Mapping[str, Any], config: Mapping[str, Any], described: Described) -> dict[str, Any]:
    """Return a ``config.json`` with the keys that older readers go by.

    Newer files lack these keys, and older readers would compute other positions without a word. All readers prefer
    ``rope_scaling`` to ``rope_parameters``, and what lies beside the one to what lies within the other.

    Args:
        kept: The original.
        config: What is written of the model where there is none.
        described: The model.
    """
    older = {key: config[key] for key in _OLDER if key in config}
    if kept.get("rope_scaling") is not None:
        return {**older, **kept}
    longest = kept.get("max_position_embeddings", described.family.defaults["max_position_embeddings"])
    if described.model.rotary_scaling is not None and longest != config["max_position_embeddings"]:
        older["rope_scaling"] = {**older["rope_scaling"], "factor": described.model.rotary_scaling.factor}
    return {**older, **kept, **{key: value for key, value in older.items() if kept.get(key) != value}}


def _with_longest(original: Mapping[str, Any], described: Described) -> dict[str, Any]:
    """Return a ``config.json`` for sequences as long as the model's; YaRN and LongRoPE say how long they are."""
    key, model = "max_position_embeddings", described.model
    longest = original.get(key, described.family.defaults[key])
    is_longer = not _is_stretched(model) and type(longest) is int and model.max_context > longest
    return {**original, key: model.max_context} if is_longer else {**original}


def spelled_out(model: ModelConfig) -> ModelConfig:
    """Return the same model with implied settings written out and unused settings at their defaults."""
    windowed = tuple(range(model.num_layers)) if model.window_layers is None else tuple(sorted(model.window_layers))
    has_window = model.window is not None and len(windowed) > 0
    has_two_rotations = has_window and (
        model.local_rotary_base != model.rotary_base or model.rotary_scaling is not None or model.has_global_heads
    )
    has_experts = model.num_experts is not None
    scaling = model.rotary_scaling
    return replace(
        model,
        num_query_groups=model.query_groups,
        head_dim=model.head_size,
        vocab_divisible_by=1,
        qkv_bias=model.qkv_bias or model.linear_bias,
        qk_norm_over=model.qk_norm_over if model.qk_norm else "head",
        attention_scale=model.plain_scale,
        rotary_dim=model.head_size if model.rotary_dim is None else model.rotary_dim,
        local_rotary_base=model.local_rotary_base if has_two_rotations else None,
        global_head_dim=None if model.global_head_dim == model.head_size else model.global_head_dim,
        global_query_groups=None if model.global_query_groups == model.query_groups else model.global_query_groups,
        no_rope_layers=tuple(sorted(model.no_rope_layers)),
        linear_layers=tuple(sorted(model.linear_layers)),
        window=model.window if has_window else None,
        window_layers=windowed if has_window else None,
        experts_per_token=model.experts_per_token if has_experts else 2,
        normalized_experts=model.normalized_experts if has_experts else True,
        rotary_scaling=None if scaling is None else replace(RotaryScaling(kind=scaling.kind), **_used(scaling)),
    )


_SCALING_KEYS = {
    "linear": ("factor",),
    "llama3": ("factor", "original_context", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_context", "beta_fast", "beta_slow", "truncate", "attention_factor", *_YARN_NUMBERS),
    "longrope": ("factor", "original_context", "attention_factor", "short_factor", "long_factor"),
    "proportional": ("factor", "rotated_share"),
}
"""The settings that each kind of rotary scaling uses."""


def _used(scaling: RotaryScaling) -> dict[str, Any]:
    return {key: getattr(scaling, key) for key in _SCALING_KEYS[scaling.kind]}


def _unsaid(described: Described) -> list[str]:
    """Return the settings that the family's ``config.json`` cannot express for this model."""
    try:
        found = read_config(_written(described), where="config.json").model
    except ConfigError:
        return [key for key in ("rotary_scaling",) if described.model.rotary_scaling is not None] or [
            *to_dict(described.model)
        ]
    if _is_stretched(described.model):
        found = replace(found, max_context=described.model.max_context)
    expected, read = to_dict(spelled_out(described.model)), to_dict(spelled_out(found))
    return [key for key in expected if expected[key] != read[key]]


def _is_stretched(model: ModelConfig) -> bool:
    return model.rotary_scaling is not None and model.rotary_scaling.kind in _STRETCHED


def _written(described: Described) -> dict[str, Any]:
    family, model = described.family, described.model
    config: dict[str, Any] = {
        "architectures": [family.scorer if described.has_value_head else family.causal],
        "model_type": family.name,
    }
    # The settings do not know special tokens; those that transformers would fill in may be outside the vocabulary.
    config |= dict.fromkeys(_TOKENS)
    config |= {key: allowed[0] for key, allowed in family.computed.items() if allowed[0] is not None}
    config |= {key: getattr(model, setting) for key, setting in family.keys.items()}
    config["num_key_value_heads"] = model.query_groups
    config["head_dim"] = model.head_size if model.kv_lora_rank is None else model.rotary_size
    config |= _written_mixture(family, model)
    if "global_head_dim" in family.keys and model.global_head_dim is None:
        config["global_head_dim"] = model.head_size
    if "query_pre_attn_scalar" in family.defaults:
        # An integer to transformers, so that not every scale can be said.
        config["query_pre_attn_scalar"] = max(1, round(model.plain_scale**-2))
    config |= _written_window(family, model)
    if _has_linear(family):
        config = {key: value for key, value in config.items() if value is not None or not key.startswith("linear_")}
        layers = range(model.num_layers)
        config["layer_types"] = [_LINEAR if layer in model.linear_layers else _FULL for layer in layers]
    config |= _written_rotary(family, model)
    if "no_rope_layer_interval" in family.defaults:
        config["no_rope_layers"] = [int(layer not in model.no_rope_layers) for layer in range(model.num_layers)]
    name = next(name for name, dtype in _DTYPES.items() if dtype == model.dtype)
    config |= {"dtype": name, "torch_dtype": name}
    if described.has_value_head:
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return config


def _written_mixture(family: Family, model: ModelConfig) -> dict[str, Any]:
    """Return the keys of shared experts, dense layers and groups, where the family has them; see ``_mixture``."""
    config: dict[str, Any] = {}
    if "n_shared_experts" in family.defaults:
        config["n_shared_experts"] = (model.shared_ffn_hidden_size or 0) // model.ffn_hidden_size
    if "first_k_dense_replace" in family.keys and model.dense_ffn_hidden_size is None:
        # A number to transformers, which nothing uses then.
        config["intermediate_size"] = model.ffn_hidden_size
    if "mlp_layer_types" in family.defaults:
        sparse = model.num_layers - model.num_dense_layers
        config["mlp_layer_types"] = ["dense"] * model.num_dense_layers + ["sparse"] * sparse
    if "enable_moe_block" in family.defaults:
        config["enable_moe_block"] = model.num_experts is not None
        if model.num_experts is None:
            config["top_k_experts"] = None
        else:
            config |= {
                "intermediate_size": model.shared_ffn_hidden_size,
                "moe_intermediate_size": model.ffn_hidden_size,
            }
    if "n_group" in family.keys and model.router_groups is None:
        config |= {"n_group": 1, "topk_group": 1}
    if family.further_layers is not None:
        config[family.further_layers[1]] = 0
    return config


def _written_window(family: Family, model: ModelConfig) -> dict[str, Any]:
    if family.window == "none":
        return {}
    if family.window == "all":
        return {"sliding_window": model.window}
    if family.window == "switched":
        return {"sliding_window": model.window, "use_sliding_window": model.window is not None}
    windowed = spelled_out(model).window_layers or ()
    kinds = ["sliding_attention" if layer in windowed else "full_attention" for layer in range(model.num_layers)]
    config: dict[str, Any] = {"layer_types": kinds, "sliding_window": model.window}
    if family.window in ("upper_layers", "last_layers"):
        config["max_window_layers"] = min(windowed, default=model.num_layers)
        if family.window == "upper_layers":
            config["use_sliding_window"] = bool(windowed)
    elif not windowed:
        # A model with rotary embedding in layers without the window always has a width, which no layer need use.
        has_width = family.global_rope or model.no_rope_layers
        config["sliding_window"] = family.defaults["sliding_window"] if has_width else None
    return config


def _written_rotary(family: Family, model: ModelConfig) -> dict[str, Any]:
    config = _written_one_rotary(model)
    if "rope_local_base_freq" in family.defaults:
        local = model.rotary_base if model.local_rotary_base is None else model.local_rotary_base
        by_layer = {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_theta": local, "rope_type": "default"},
        }
        if "rope_parameters" in family.defaults:
            # No reader of this family knows older keys.
            return {"rope_parameters": by_layer}
        config |= {"rope_local_base_freq": local, "rope_parameters": by_layer}
    share = 1.0 if model.rotary_dim is None else model.rotary_dim / model.head_size
    if family.defaults.get("partial_rotary_factor", 1.0) != 1.0 or share != 1.0:
        config["partial_rotary_factor"] = config["rope_parameters"]["partial_rotary_factor"] = share
    return config


def _written_one_rotary(model: ModelConfig) -> dict[str, Any]:
    base, scaling = model.rotary_base, model.rotary_scaling
    if scaling is None:
        return {
            "rope_theta": base,
            "rope_scaling": None,
            "rope_parameters": {"rope_theta": base, "rope_type": "default"},
        }
    told = {key: value for key, value in _used(scaling).items() if value is not None}
    if told.get("truncate"):
        # What is meant where it is left out; older readers do not know it.
        del told["truncate"]
    original = told.pop("original_context", None)
    if scaling.kind == _PROPORTIONAL:
        told["partial_rotary_factor"] = told.pop("rotated_share")
        if scaling.factor == 1:
            # What is meant where it is left out; transformers warns of it.
            del told["factor"]
    told |= {key: list(told[key]) for key in ("short_factor", "long_factor") if key in told}
    flat = {"rope_type": scaling.kind, "type": scaling.kind, **told}
    full = {"rope_type": scaling.kind, **told, "rope_theta": base}
    config: dict[str, Any] = {"rope_theta": base}
    # vLLM (LongRoPE) and older readers (both kinds) go by this ratio, whatever the factor is.
    stretched = None if original is None else round(scaling.factor * original)
    is_ratio = scaling.kind in _STRETCHED and stretched is not None and stretched / original == scaling.factor
    if is_ratio:
        config["max_position_embeddings"] = stretched
    if scaling.kind == "longrope":
        if is_ratio:
            # Older readers take no fourth key beside the two lists.
            del flat["factor"], full["factor"]
        # Where the models that have it keep it.
        config["original_max_position_embeddings"] = original
        del flat["rope_type"]
    elif original is not None:
        flat["original_max_position_embeddings"] = original
    if original is not None:
        full["original_max_position_embeddings"] = original
    return {**config, "rope_scaling": flat, "rope_parameters": full}
