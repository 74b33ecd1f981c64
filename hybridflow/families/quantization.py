"""How the weights of a Hugging Face directory are coded in fewer bits, from ``quantization_config``. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hybridflow.errors import ConfigError
from hybridflow.families.assets import CONFIG, parse_json, to_json
from hybridflow.families.family import Family

_KEY = "quantization_config"
_REMEDY = "load the model in transformers with dequantize=True, save_pretrained it, and name the new directory"
_KEYS: dict[str, dict[str, tuple[object, ...] | None]] = {
    "fp8": {
        "fmt": ("e4m3", "float8_e4m3fn", None),
        "activation_scheme": ("dynamic", None),
        "expert_dtype": ("fp8", None),
        "scale_fmt": ("float", "ue8m0", None),
        **dict.fromkeys(("weight_block_size", "dequantize", "modules_to_not_convert", "ignored_layers")),
    },
    "mxfp4": dict.fromkeys(("dequantize", "modules_to_not_convert")),
}
"""Kind of code -> its keys and their values that are read; None: any. The files say which tensors are coded."""


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How weights are coded.

    Attributes:
        kind: ``fp8``: 8-bit floats e4m3, with one factor for each block. ``mxfp4``: 4-bit floats e2m1, with one power
            of two for 32 of them.
        block: Rows and columns that share a factor.
    """

    kind: Literal["fp8", "mxfp4"]
    block: tuple[int, int] = (1, 32)


def read_quantization(values: Mapping[str, Any], family: Family, *, where: str) -> Quantization | None:
    """Return how the weights that a parsed ``config.json`` describes are coded; None: they are not.

    Args:
        values: The parsed file.
        family: The family of its model.
        where: What messages call it.

    Raises:
        ConfigError: They are coded in a way that is not read; names the key and its value.
    """
    told = values.get(_KEY)
    if told is None:
        return None
    if not isinstance(told, Mapping):
        raise ConfigError(f"{where}: {_KEY}={told!r:.80}: expected an object with quant_method: {_REMEDY}")
    kind = told.get("quant_method")
    if kind not in ("fp8", "mxfp4"):
        raise ConfigError(
            f"{where}: {_KEY}.quant_method={kind!r} is not read; only 'fp8' and 'mxfp4' are: name the model that was "
            "quantized, as it was before"
        )
    for key, value in told.items():
        if key == "quant_method":
            continue
        if key not in _KEYS[kind]:
            known = ", ".join(_KEYS[kind])
            raise ConfigError(f"{where}: {_KEY}.{key}={value!r} is not known for {kind}; only {known} are: {_REMEDY}")
        allowed = _KEYS[kind][key]
        if allowed is not None and value not in allowed:
            expected = ", ".join(repr(each) for each in allowed if each is not None)
            raise ConfigError(f"{where}: {_KEY}.{key}={value!r} is not read; expected {expected}: {_REMEDY}")
    if kind == "mxfp4":
        if not any(rule.form == "interleaved" for rule in family.rules):
            raise ConfigError(
                f"{where}: {_KEY}.quant_method='mxfp4' is not read for {family.name}, only for gpt_oss: {_REMEDY}"
            )
        return Quantization(kind="mxfp4")
    block = told.get("weight_block_size")
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise ConfigError(
            f"{where}: {_KEY}.weight_block_size={block!r}: expected the rows and columns of a block, such as "
            f"[128, 128]; a factor for each tensor or channel is not read: {_REMEDY}"
        )
    return Quantization(kind="fp8", block=(block[0], block[1]))


def plain_assets(assets: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return a model's small files as they belong beside decoded weights: ``config.json`` tells of no codes.

    Args:
        assets: The files by name.

    Raises:
        CheckpointError: ``config.json`` is no JSON.
    """
    values = parse_json(assets[CONFIG], CONFIG) if CONFIG in assets else {}
    if values.pop(_KEY, None) is None:
        return dict(assets)
    if values.get("dtype") is None and values.get("torch_dtype") is None:
        values["dtype"] = "bfloat16"
    return {**assets, CONFIG: to_json(values)}
