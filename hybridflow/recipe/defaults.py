"""What a recipe leaves out, and what it becomes. No torch."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hybridflow.config.algorithm import AlgorithmTraits
from hybridflow.config.data import DataConfig
from hybridflow.config.recipe import CRITICS
from hybridflow.config.rewards import REWARD_KINDS
from hybridflow.config.trainer import TrainerConfig
from hybridflow.data.files import is_gzip
from hybridflow.data.prompts import value_of
from hybridflow.data.readers import format_of
from hybridflow.errors import ConfigError, DataError, LayoutError
from hybridflow.foreign import open_regular
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.recipe.nested import inner, put_under
from hybridflow.sections import parse_yaml, read_section, shorten

NEEDED = ("algorithm", "model", "data")
"""Keys without a default."""

_SHORT = {"model": "path", "data": "train", "reward": "function"}
"""Sections that a recipe may give as one text: the value of this key."""

_CRITIC_LR = 1e-5
_LORA_FACTOR = 10
"""Adapters are usually trained at about ten times the rate of the weights."""

_MOST_CONTEXT = 4096
"""Memory is planned for the longest sequence, and models take far longer ones than most data has."""
_MOST_NEW_TOKENS = 256
_ONLINE_SAMPLES, _OFFLINE_ROWS = 128, 32
_FEWEST_STEPS, _STEPS = 20, 200
_MOST_COUNTED_BYTES = 1 << 30
_MOST_FIRST_BYTES = 1 << 24
_MOST_CHUNKS = 4096
"""MiB of text that are counted: what is compressed may be far longer than its file."""


def in_full(values: Mapping[Any, Any], overrides: Sequence[str]) -> tuple[dict[Any, Any], list[str]]:
    """Return values and overrides in which a model, data or a reward given as one text is a section."""
    found = {
        key: {_SHORT[key]: value} if key in _SHORT and isinstance(value, str) else value
        for key, value in values.items()
    }
    return found, [_override_in_full(override) for override in overrides]


def _override_in_full(override: str) -> str:
    key, equals, text = override.partition("=")
    if key in _SHORT and equals:
        value = parse_yaml(text, f"override {shorten(override)!r}")
        if isinstance(value, str):
            return f"{key}={{{_SHORT[key]}: {json.dumps(value, ensure_ascii=False)}}}"
    return override


def brings_its_own(overrides: Sequence[str]) -> bool:
    """Return whether overrides name both a model directory and training data."""
    keys = {override.partition("=")[0] for override in overrides}
    places = {f"data.{name}" for name in ("train", "mixture", "spool", "kafka")}
    return bool(keys & {"model", "model.path"}) and bool(keys & {"data", *places})


def check_needed(values: Mapping[Any, Any], source: str, *, has_model: bool) -> None:
    """Refuse a recipe that lacks a key without a default.

    Args:
        values: The nested mapping.
        source: What messages call it.
        has_model: Whether a program has the model in memory.

    Raises:
        ConfigError: Names all that is missing.
    """
    missing = [key for key in NEEDED if key not in values and not (key == "model" and has_model)]
    if missing:
        raise ConfigError(
            f"{source}: {', '.join(missing)}: missing; a recipe needs algorithm, model and data, as in `algorithm=grpo "
            "model=DIRECTORY data=FILE.jsonl`, and reward=MODULE:FUNCTION unless responses are compared with answers"
        )
    model = values.get("model")
    shape = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "max_context")
    if not has_model and isinstance(model, Mapping) and not {"path", *shape} & {*model}:
        raise ConfigError(
            f"{source}: model.path: missing; name the directory of a model, or give {', '.join(shape)} of a model that "
            "begins from the seed"
        )


def fill_in(
    values: dict[str, Any], traits: AlgorithmTraits, *, name: str, num_ranks: int, has_context: bool
) -> dict[str, Any]:
    """Set the keys that a recipe leaves out.

    Args:
        values: The nested mapping, with the settings of its model's directory; it is changed.
        traits: Of its algorithm.
        name: Of the recipe's file, or what else may name the run.
        num_ranks: Ranks that a launcher has started, or that the machine has room for.
        has_context: Whether the recipe says how long a sequence may be; else the model's directory alone does.

    Returns:
        Dotted key -> value of what was set.
    """
    found: dict[str, Any] = {}

    def put(key: str, value: Any) -> None:
        if value is not None and put_under(values, key, value):
            found[key] = value

    put("name", re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._") or "run")
    put("cluster.ranks", _ranks(values, num_ranks))
    _fill_in_actor(values, traits, put)
    for role in CRITICS:
        if role in traits.needs or isinstance(values.get(role), Mapping):
            is_beside = inner(values, f"{role}.ranks") is None and inner(values, "actor.ranks") is None
            layout = inner(values, "actor.update") if is_beside else _replicas(values, f"{role}.ranks")
            put(f"{role}.layout", layout)
            put(f"{role}.optimizer.lr", _CRITIC_LR)
    if traits.group_size > 1:
        put("rollout.group_size", traits.group_size)
    context = inner(values, "model.max_context")
    if not has_context and context > _MOST_CONTEXT:
        values["model"]["max_context"] = found["model.max_context"] = context = _MOST_CONTEXT
    if type(context) is int:
        put("rollout.max_new_tokens", 1 if _is_silent(values, traits) else max(1, min(_MOST_NEW_TOKENS, context // 2)))
    put("trainer.global_batch_size", _batch_size(values, traits))
    put("trainer.steps", _steps(values, traits))
    put("trainer.micro_batch_tokens", TrainerConfig.micro_batch_tokens)
    return found


def _is_silent(values: Mapping[str, Any], traits: AlgorithmTraits) -> bool:
    """Return whether the run samples nothing, see ``Recipe.scores_held_out``."""
    scorers = (*(f"reward.{kind}" for kind in REWARD_KINDS), "rollout.environment")
    is_scored = inner(values, "data.held_out") is not None and any(inner(values, key) is not None for key in scorers)
    return traits.is_offline and not (traits.imitates and is_scored)


def _fill_in_actor(values: dict[str, Any], traits: AlgorithmTraits, put: Callable[[str, Any], None]) -> None:
    has_update = inner(values, "actor.update") is not None
    put("actor.update", _replicas(values, "actor.ranks"))
    alone = inner(values, "actor.rollout_ranks")
    if isinstance(alone, list) and alone and not has_update:
        put("actor.rollout", {"dp": len(alone)})
    has_adapters = inner(values, "actor.lora") is not None
    put("actor.optimizer.lr", traits.lr * (_LORA_FACTOR if has_adapters else 1))


def _ranks(values: Mapping[str, Any], num_ranks: int) -> int | None:
    """Return the number of ranks: what the actor's layout fills, or those that are there.

    None where other keys say which ranks there are.
    """
    if values.get("fallbacks") or inner(values, "actor.ranks") or inner(values, "actor.rollout_ranks"):
        return None
    update = inner(values, "actor.update")
    if update is None:
        return num_ranks
    try:
        return read_section(ParallelLayout, update, source="actor.update").world_size
    except (ConfigError, LayoutError):
        return None


def _replicas(values: Mapping[str, Any], key: str) -> dict[str, int] | None:
    """Return a layout of data-parallel replicas on the ranks of a role.

    Args:
        values: The recipe.
        key: Names the ranks; without it the role has all but those that only generate.
    """
    ranks, everyone = inner(values, key), inner(values, "cluster.ranks")
    if isinstance(ranks, list):
        return {"dp": len(ranks)} if ranks else None
    apart = inner(values, "actor.rollout_ranks")
    size = (1 if everyone is None else everyone) if type(everyone) in (int, type(None)) else None
    if size is None or not isinstance(apart, list | None):
        return None
    left = size - len(apart or ())
    return {"dp": left} if left > 0 else None


def _batch_size(values: Mapping[str, Any], traits: AlgorithmTraits) -> int:
    """Return the samples of a step: a multiple of groups, pairs and mini-batches."""
    per_row = 2 if traits.is_paired else 1
    given = (inner(values, "rollout.group_size"), inner(values, "trainer.mini_batch_size"))
    unit = math.lcm(per_row, *(size for size in given if type(size) is int and size > 0))
    samples = _OFFLINE_ROWS * per_row if traits.is_offline else _ONLINE_SAMPLES
    return math.ceil(samples / unit) * unit


def _steps(values: Mapping[str, Any], traits: AlgorithmTraits) -> int:
    """Return the steps of one epoch, where the rows of the data can be counted."""
    rows, batch = _num_rows(values), inner(values, "trainer.global_batch_size")
    if rows is None or type(batch) is not int or batch < 1:
        return _STEPS
    group = inner(values, "rollout.group_size")
    is_two = traits.is_paired or (traits.has_preferences and _is_of_pairs(values))
    per_row = 2 if is_two else group if type(group) is int else 1
    return max(_FEWEST_STEPS, math.ceil(rows * per_row / batch))


def _num_rows(values: Mapping[str, Any]) -> int | None:
    """Return the number of lines of a JSONL file, compressed or not; None for other data, and for much of it."""
    path, made = inner(values, "data.train"), inner(values, "data.arithmetic.num_train")
    try:
        if not isinstance(path, str) or format_of(path, inner(values, "data.file_format")) != "jsonl":
            return None
    except DataError:
        # Who reads it tells of it.
        return None
    if type(made) is int and not os.path.exists(path):
        return made
    try:
        if os.path.getsize(path) > _MOST_COUNTED_BYTES:
            return None
        with open_regular(path) as file:
            text = gzip.GzipFile(fileobj=file) if is_gzip(path) else file
            chunks = iter(lambda: text.read(1 << 20), b"")
            counts = [chunk.count(b"\n") for chunk in itertools.islice(chunks, _MOST_CHUNKS)]
    except (OSError, EOFError, ValueError, zlib.error):
        return None
    return sum(counts) if len(counts) < _MOST_CHUNKS else None


def _is_of_pairs(values: Mapping[str, Any]) -> bool:
    """Return whether the data's first row is a pair, which is two examples where single responses are learned from."""
    path, name = inner(values, "data.train"), inner(values, "data.chosen_field")
    if not os.path.exists(path):
        # What is made for preferences are pairs.
        return True
    try:
        with open_regular(path) as file:
            text = gzip.GzipFile(fileobj=file) if is_gzip(path) else file
            row = json.loads(text.readline(_MOST_FIRST_BYTES))
    except (OSError, EOFError, ValueError, RecursionError, zlib.error):
        return False
    name = name if isinstance(name, str) else DataConfig.chosen_field
    return isinstance(row, dict) and value_of(row, name) is not None


def num_gpus() -> int:
    """Return the GPUs of this machine that this process may use, without torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip() not in ("", "-1")])
    return len([each for each in Path("/dev").glob("nvidia*") if each.name.removeprefix("nvidia").isdecimal()])


def defaults_text(defaults: Mapping[str, Any]) -> str:
    """Return the keys that a recipe left out and what they became, one a line."""
    width = max(map(len, defaults), default=0)
    shown = {key: one_line("key", value).removeprefix("key: ") for key, value in defaults.items()}
    return "\n".join(["left out of the recipe, and set to", *(f"  {key:<{width}}  {shown[key]}" for key in shown)])


def one_line(key: str, value: Any) -> str:
    """Return a key and its value as a line of YAML."""
    is_flow = isinstance(value, Mapping | list)
    text: str = yaml.safe_dump(
        {key: value}, default_flow_style=is_flow, width=1 << 20, sort_keys=False, allow_unicode=True
    )
    return text.strip()[1:-1] if is_flow else text.strip()
