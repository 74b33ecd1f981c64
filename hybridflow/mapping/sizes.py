"""The sizes of a model from a known name, a directory, or a list of them. No torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.model_info import read_model_info
from hybridflow.errors import ConfigError
from hybridflow.mapping.estimate import Experts, Latent, Size
from hybridflow.models.shapes import ModelShape, named_shapes, shape_of

_USUAL_HEAD = 128
_SIZES = ("layers", "hidden", "heads", "groups", "head", "ffn", "vocab", "gated", "tied")


def model_size(text: str) -> Size:
    """Return the sizes of a model: a known one, one of a directory, or of a dense one given as ``name=value,…``.

    Raises:
        ConfigError: A name is not known, or a size is missing or no number.
        CheckpointError: The directory has no model that is known.
    """
    if "=" in text:
        return _given_size(text)
    return size_of(model_shape(text))


def size_of(shape: ModelShape) -> Size:
    """Return the sizes of a shape."""
    experts, latent = None, None
    if shape.num_experts is not None:
        experts = Experts(
            number=shape.num_experts,
            per_token=shape.experts_per_token,
            ffn=shape.ffn_hidden_size,
            shared=shape.shared_ffn_hidden_size or 0,
            dense_layers=shape.num_dense_layers,
        )
    if shape.kv_lora_rank is not None:
        latent = Latent(
            keys=shape.kv_lora_rank,
            queries=shape.q_lora_rank or 0,
            rotated=shape.qk_rope_head_dim,
            value=shape.v_head_dim,
        )
    return Size(
        layers=shape.num_layers,
        hidden=shape.hidden_size,
        heads=shape.num_attention_heads,
        groups=shape.num_query_groups,
        head=shape.head_dim,
        ffn=shape.ffn_hidden_size if experts is None else shape.dense_ffn_hidden_size,
        vocab=shape.vocab_size,
        tied=shape.tied_embeddings,
        experts=experts,
        latent=latent,
    )


def model_shape(text: str) -> ModelShape:
    """Return the shape of a known model, or of one in a directory.

    Raises:
        ConfigError: The name is not known.
        CheckpointError: The directory has no model that is known.
    """
    path, shapes = Path(text), named_shapes()
    if text in shapes:
        return shapes[text]
    if not path.exists():
        raise ConfigError(
            f"--model {text}: not one of {', '.join(shapes)}, and no directory with a config.json; or give sizes: "
            "layers=32,hidden=4096,…"
        )
    model = read_model_info(path if path.is_dir() else path.parent).model
    return shape_of(model)


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
