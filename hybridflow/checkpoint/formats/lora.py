"""LoRA adapters as logical tensors: what their settings mean, how their factors are named and cut, and merging them.

Where a logical weight is made of several linear modules of Hugging Face, each has factors of its own:

    decoder.layers.0.self_attention.linear_qkv.lora.q.A     [rank, in]
    decoder.layers.0.self_attention.linear_qkv.lora.q.B     [out, rank]
    decoder.layers.0.self_attention.linear_proj.lora.A      the sole module of its weight: no part is named

The weight that they stand for is W + scale * B A (arXiv 2106.09685). The value head may also be there whole, under its
own name: PEFT trains it so beside the factors of a model with one label.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hybridflow.checkpoint.formats.huggingface import parts_of
from hybridflow.checkpoint.formats.source import Source, num_blocks
from hybridflow.checkpoint.manifest import TensorEntry
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.families.assets import (
    ADAPTER_CONFIG,
    CHAT_TEMPLATES,
    CONFIG,
    GENERATION,
    TOKENIZERS,
    is_of_model,
    parse_json,
)
from hybridflow.families.config_json import Described, describe
from hybridflow.families.family import VALUE_HEAD, Form
from hybridflow.families.model import ModelConfig
from hybridflow.models.adapters import FACTOR
from hybridflow.models.shapes import model_spec
from hybridflow.reshard.spec import Box, ModelSpec, TensorSpec
from hybridflow.reshard.views import DTYPE_NAMES

_PARTS: dict[Form, tuple[str, ...]] = {
    "qkv": ("q", "k", "v"),
    "stack": ("gate", "up"),
    "delta": ("qkv", "z", "b", "a"),
}
_BLOCK_ELEMENTS = 1 << 22
_WORDS = {"A": "lora_A", "B": "lora_B", "whole": "weight, which modules_to_save names"}
_MOST_BLOCKS = 1_000_000

# Settings that change what an adapter computes, with the values that are computed here.
_COMPUTED: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    # What "pissa", "olora", "corda", "loftq" and "lora_ga" train goes with a base whose weights they changed.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
    "use_rslora": (True, False, None),
    # The names that PEFT gives the head of a model with one label, of which only the second is there.
    "modules_to_save": (None, [], ["classifier", "score"], ["score", "classifier"], ["score"]),
}
# Settings that say where an adapter came from, or how it was trained, or which modules it has, which its tensors say.
_TOLD = frozenset(
    {
        *("base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "task_type", "peft_version"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("lora_dropout", "eva_config", "loftq_config", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
        *("r", "lora_alpha", "rank_pattern", "alpha_pattern"),
    }
)


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """What of ``adapter_config.json`` decides the weights.

    Attributes:
        rank: Rank of every factor that no pattern names.
        alpha: Numerator of the scale, of every module that no pattern names.
        is_rank_stabilized: Whether the scale is alpha / sqrt(rank) (arXiv 2312.03732) instead of alpha / rank.
        ranks: Ends of modules' names and their ranks; the first that fits counts.
        alphas: Ends of modules' names and their alphas; the first that fits counts.
        base: Where the weights are that it was trained on, as its author called it.
        has_head: Whether the value head comes with it.
    """

    rank: int
    alpha: float
    is_rank_stabilized: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    base: str | None
    has_head: bool

    def rank_of(self, module: str) -> int:
        """Return the rank of a module by its name in Hugging Face."""
        return next((rank for end, rank in self.ranks.items() if _fits(end, module)), self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of a module's B A."""
        alpha = next((alpha for end, alpha in self.alphas.items() if _fits(end, module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def _fits(end: str, module: str) -> bool:
    """Return whether a pattern names a module: in full after ``^``, else by its end."""
    return module == end[1:] if end.startswith("^") else f".{module}".endswith(f".{end}")


def read_settings(values: Mapping[str, Any], *, where: str) -> LoraSettings:
    """Read the settings of a parsed ``adapter_config.json``.

    Args:
        values: The parsed file.
        where: What messages call it.

    Raises:
        ConfigError: A setting is missing or ill-typed, or asks for what is not computed here.
    """
    for key, value in values.items():
        allowed = _COMPUTED.get(key, (None, False, {}, []))
        if key not in _TOLD and not any(
            value is each or (each == value and type(each) is type(value)) for each in allowed
        ):
            expected = " or ".join(json.dumps(each) for each in allowed)
            raise ConfigError(
                f"{where}: {key}={json.dumps(value)} is not computed; expected {expected}: "
                "merge the adapter with PEFT first"
            )
    for key in ("peft_type", "r", "lora_alpha"):
        if key not in values:
            raise ConfigError(f"{where}: {key} is missing; is it the {ADAPTER_CONFIG} of a LoRA adapter?")
    rank, base = values["r"], values.get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        raise ConfigError(f"{where}: base_model_name_or_path={json.dumps(base)}; expected text")
    return LoraSettings(
        rank=_rank(rank, f"{where}: r"),
        alpha=_alpha(values["lora_alpha"], f"{where}: lora_alpha"),
        is_rank_stabilized=bool(values.get("use_rslora")),
        ranks={end: _rank(each, f"{where}: {at}") for end, each, at in _patterns(values, "rank_pattern", where)},
        alphas={end: _alpha(each, f"{where}: {at}") for end, each, at in _patterns(values, "alpha_pattern", where)},
        base=base,
        has_head=bool(values.get("modules_to_save")),
    )


def _patterns(values: Mapping[str, Any], key: str, where: str) -> Iterator[tuple[str, object, str]]:
    """Yield ends of names, their values, and where. PEFT allows any regular expression, which could run for ever."""
    given = values.get(key) or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}: {key}={json.dumps(given)}; expected a mapping from modules' names")
    for pattern, value in given.items():
        end = pattern.replace(r"\.", ".")
        if not re.fullmatch(r"\^?[\w.]+", end):
            raise ConfigError(
                f"{where}: {key}: {pattern!r} is not computed; only names of modules, or their ends, are: write it out"
            )
        yield end, value, f"{key}: {pattern}"


def _rank(value: object, where: str) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{where}={json.dumps(value)}; expected an integer of at least 1")
    return value


def _alpha(value: object, where: str) -> float:
    # In this order of comparisons also NaN and integers beyond every float are refused.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e30 < value < 1e30:
        raise ConfigError(f"{where}={json.dumps(value)}; expected a number")
    return float(value)


class Module(NamedTuple):
    """A linear module that an adapter may have factors for.

    Attributes:
        hf: Its name in Hugging Face, such as ``model.layers.0.self_attn.q_proj``.
        weight: The logical tensor that has its weight.
        part: Which part of that: q, k, v, gate or up, or of linear attention qkv, z, b or a; None: all of it.
        form: Form of the rule.
        out: Rows of its weight as Hugging Face has it.
        width: Columns of its weight.
    """

    hf: str
    weight: TensorSpec
    part: str | None
    form: Form
    out: int
    width: int


class Factor(NamedTuple):
    """A tensor of an adapter.

    Attributes:
        module: The module that has the factor.
        side: A or B; or all of the weight, of a head that was trained in full.
    """

    module: Module
    side: Literal["A", "B", "whole"]

    @property
    def name(self) -> str:
        """Return its logical name."""
        if self.side == "whole":
            return self.module.weight.name
        stem = self.module.weight.name.removesuffix(".weight")
        return ".".join(filter(None, (stem, "lora", self.module.part, self.side)))

    @property
    def form(self) -> Form:
        """Return how it enters its logical view: B as the rows of its weight, where these are fused."""
        if self.side == "B" and self.module.part == "qkv":
            return "delta_channels"
        return self.module.form if self.side == "B" and self.module.form in ("halves", "fused_qkv") else "same"

    def shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape in Hugging Face."""
        module = self.module
        return {"A": (rank, module.width), "B": (module.out, rank), "whole": (module.out, module.width)}[self.side]

    def logical_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape in the logical view."""
        out, last = self.shape(rank)
        return (2, out // 2, last) if self.form == "halves" else (out, last)


def linear_modules(described: Described) -> list[Module]:
    """Return every linear module of a model, in its order.

    Raises:
        ConfigError: The model has more layers and experts than any could.
    """
    specs = {spec.name: spec for spec in _base_spec(described.model, described.has_value_head).tensors}
    found = []
    for logical, (form, names, shapes, _, expert, _) in parts_of(described).items():
        spec = specs[logical]
        if form in ("fused_delta", "delta_conv"):
            # No linear modules, or those of which each is a part of every part of ours.
            continue
        # PEFT adapts modules, and tensors that experts share are none.
        if expert is not None or not logical.endswith(".weight") or len(spec.shape) < 2 or spec.place == "embedding":
            continue
        parts = _PARTS.get(form, (None,))[: len(names)]
        for name, (out, width), part in zip(names, shapes, parts, strict=True):
            found.append(Module(name.removesuffix(".weight"), spec, part, form, out, width))
    return found


def _base_spec(model: ModelConfig, has_value_head: bool) -> ModelSpec:
    """Return the tensors of a model without an adapter. Its settings may come with no tensors that bound them."""
    if num_blocks(model) > _MOST_BLOCKS:
        raise ConfigError(
            f"num_layers={model.num_layers} num_experts={model.num_experts}: expected at most {_MOST_BLOCKS} together; "
            "give the settings that belong to the adapter"
        )
    return model_spec(model, has_value_head=has_value_head)


def is_adapter(source: Source) -> bool:
    """Return whether a checkpoint holds the factors of an adapter instead of a model's weights."""
    return any(FACTOR.fullmatch(name) for name in source.tensors)


def spec_of(source: Source) -> ModelSpec:
    """Return how the tensors of a checkpoint are cut; of an adapter B as the rows of its weight, A as its columns.

    Raises:
        CheckpointError: A tensor of an adapter is no factor of one of the model's weights.
    """
    base = _base_spec(source.model, source.has_value_head)
    if not is_adapter(source):
        return base
    weights = {spec.name: spec for spec in base.tensors}
    specs = []
    for name, entry in source.tensors.items():
        if name == VALUE_HEAD and VALUE_HEAD in weights:
            specs.append(dataclasses.replace(weights[VALUE_HEAD], dtype=entry.dtype))
            continue
        match = FACTOR.fullmatch(name)
        weight = None if match is None else weights.get(f"{match[1]}.weight")
        if match is None or weight is None or len(weight.shape) < 2:
            raise CheckpointError(f"{source.path}: {name} is no factor of a weight of its model; is it of another one?")
        specs.append(_factor_spec(name, entry, weight, is_a=match[3] == "A"))
    return ModelSpec(tensors=tuple(specs), num_layers=base.num_layers)


def _factor_spec(name: str, entry: TensorEntry, weight: TensorSpec, *, is_a: bool) -> TensorSpec:
    tp_dim, cuts_columns = None, weight.tp_dim == len(weight.shape) - 1
    if weight.tp_dim is not None and is_a == cuts_columns:
        tp_dim = 1 if is_a else len(entry.shape) - 2
    return TensorSpec(
        name=name,
        shape=entry.shape,
        dtype=entry.dtype,
        tp_dim=tp_dim,
        place=weight.place,
        padded_to=None if tp_dim is None else weight.padded_to,
        expert=weight.expert,
    )


def described_of(source: Source) -> Described:
    """Return the family and settings of a checkpoint, which give the modules that an adapter may name.

    Raises:
        ConfigError: No family has such models.
    """
    return describe(source.model, family=source.family, has_value_head=source.has_value_head)


def modules_of(source: Source) -> list[Module]:
    """Return the linear modules of a checkpoint: of its family, or of the tensors of a model in ``transformers``.

    Raises:
        ConfigError: No family has such models.
    """
    if source.model.implementation == "megatron":
        return linear_modules(described_of(source))
    found = []
    for name, entry in source.tensors.items():
        match = FACTOR.fullmatch(name)
        if match is not None and match[3] == "B" and f"{match[1]}.lora.A" in source.tensors:
            found.append(_plain_module(match[1], entry.shape[0], source.tensors[f"{match[1]}.lora.A"].shape[-1], entry))
        elif match is None and name.endswith(".weight") and len(entry.shape) == 2:
            found.append(_plain_module(name.removesuffix(".weight"), *entry.shape, entry))
    return found


def _plain_module(name: str, out: int, width: int, entry: TensorEntry) -> Module:
    weight = TensorSpec(name=f"{name}.weight", shape=(out, width), dtype=entry.dtype, tp_dim=None, place="embedding")
    return Module(name, weight, None, "same", out, width)


def check_adapter(source: Source) -> dict[str, Factor]:
    """Return the tensors of an adapter by their logical names, in the model's order.

    Raises:
        CheckpointError: They are not those of its settings and model.
        ConfigError: The settings ask for what is not computed.
    """
    return check_factors(str(source.path), source.tensors, modules_of(source), settings_of(source))


def check_factors(
    source: str, tensors: Mapping[str, TensorEntry], modules: Iterable[Module], settings: LoraSettings
) -> dict[str, Factor]:
    """Check that an adapter's tensors are complete and fit; return them by logical name, in the order of the modules.

    Args:
        source: What messages call the adapter.
        tensors: Its logical tensors.
        modules: Modules of its base.
        settings: Give the ranks.

    Raises:
        CheckpointError: There is none; one lacks its counterpart, has another shape, or its module is not in the base.
    """
    found: dict[str, Factor] = {}
    for module in modules:
        is_whole = settings.has_head and module.weight.name == VALUE_HEAD
        factors = [Factor(module, "whole")] if is_whole else [Factor(module, "A"), Factor(module, "B")]
        if is_whole or any(factor.name in tensors for factor in factors):
            found |= {factor.name: factor for factor in factors}
    for name in tensors:
        if name not in found:
            raise CheckpointError(
                f"{source}: {name} goes with no linear module of the base as {ADAPTER_CONFIG} has it; "
                "is the base another one?"
            )
    for name, factor in found.items():
        if name not in tensors:
            raise CheckpointError(f"{source}: {factor.module.hf} has no {_WORDS[factor.side]}; restore it from a copy")
        expected = factor.logical_shape(settings.rank_of(factor.module.hf))
        if tensors[name].shape != expected:
            raise CheckpointError(
                f"{source}: {name} of {factor.module.hf} is {list(tensors[name].shape)}, expected {list(expected)} by "
                "the base and the rank; is it the adapter of another model?"
            )
    if all(factor.side == "whole" for factor in found.values()):
        raise CheckpointError(f"{source}: has no factors; restore it from a copy")
    return found


class MergedSource(Source):
    """A checkpoint with an adapter's updates in its weights: W + scale * B A in fp32, rounded to the weight's dtype.

    One tensor at a time, computed when it is read. The attributes are the base's, see ``Source``, and ``adapter_path``.

    Args:
        base: The weights.
        adapter: Its factors, in whatever format; ``adapter_config.json`` is among its assets.

    Raises:
        CheckpointError: The adapter does not fit the base.
        ConfigError: The adapter asks for what is not computed, or the base does not say its family.
    """

    def __init__(self, base: Source, adapter: Source) -> None:
        self.path = base.path
        self.format = base.format
        self.family = base.family
        self.model = base.model
        self.has_value_head = base.has_value_head
        self.layout = base.layout
        self.tensors = base.tensors
        self.adapter_path = adapter.path
        self._base, self._adapter = base, adapter
        self._settings = settings_of(adapter)
        modules = modules_of(base)
        self._updates: dict[str, list[Module]] = {}
        for factor in check_factors(str(adapter.path), adapter.tensors, modules, self._settings).values():
            if factor.side == "B":
                self._updates.setdefault(factor.module.weight.name, []).append(factor.module)

    def read(self, tensor: str) -> Tensor:
        """See ``Source``; an updated tensor is new memory.

        Raises:
            ConfigError: A finite number would become infinite in the weight's dtype.
        """
        weight = self._base.read(tensor)
        if tensor == VALUE_HEAD and tensor in self._adapter.tensors:
            return _rounded(self._adapter.read(tensor), weight.dtype, tensor)
        if tensor not in self._updates:
            return weight
        merged = weight.clone(memory_format=torch.contiguous_format)
        for module in self._updates[tensor]:
            a, b = (self._adapter.read(Factor(module, side).name) for side in ("A", "B"))
            _add(_rows_of(merged, module, self.model), b, a.float(), self._settings.scale_of(module.hf), tensor)
        return merged

    def read_box(self, tensor: str, box: Box, dtype: torch.dtype) -> Tensor:
        """See ``Source``; of a tensor that is not updated, the base reads only the box."""
        is_updated = tensor in self._updates or tensor in self._adapter.tensors
        return super().read_box(tensor, box, dtype) if is_updated else self._base.read_box(tensor, box, dtype)

    def release(self) -> None:
        """See ``Source``."""
        self._base.release()
        self._adapter.release()

    def assets(self) -> dict[str, bytes]:
        """See ``Source``: the base's, with the tokenizer, chat template and generation settings of the adapter."""
        base, own = self._base.assets(), self._adapter.assets()
        own = {name: content for name, content in own.items() if name not in (ADAPTER_CONFIG, CONFIG)}
        if any(name in own for name in TOKENIZERS):
            # One tokenizer out of the files of two would be neither.
            base = {name: content for name, content in base.items() if is_of_model(name)}
        else:
            own = {name: content for name, content in own.items() if name in (GENERATION, *CHAT_TEMPLATES)}
        return {**base, **own}

    def identity(self) -> str:
        """See ``Source``: of both."""
        return hashlib.sha256(f"{self._base.identity()} {self._adapter.identity()}".encode()).hexdigest()


def settings_of(adapter: Source) -> LoraSettings:
    """Return the settings that travel with an adapter.

    Raises:
        CheckpointError: There are none, or they are no JSON.
        ConfigError: They ask for what is not computed here.
    """
    text = adapter.assets().get(ADAPTER_CONFIG)
    if text is None:
        raise CheckpointError(f"{adapter.path}: holds no {ADAPTER_CONFIG}; expected a LoRA adapter")
    where = str(adapter.path / ADAPTER_CONFIG)
    return read_settings(parse_json(text, where), where=where)


def _rows_of(weight: Tensor, module: Module, model: ModelConfig) -> Tensor:
    """Return a module's rows of a logical weight, as a view ``[blocks, rows, in]``."""
    if module.form == "qkv":
        if isinstance(module.weight.place, int):
            model = model.of_layer(module.weight.place)
        per_group = model.query_rows // model.query_groups
        start = {"q": 0, "k": per_group, "v": per_group + model.head_size}[module.part or ""]
        rows = per_group if module.part == "q" else model.head_size
        groups: Tensor = weight.unflatten(0, (model.query_groups, -1))
        return groups[:, start : start + rows]
    if module.form == "delta":
        values, heads = model.linear_values, model.linear_value_heads or 0
        sizes = [rows // (model.linear_key_heads or 1) for rows in (model.linear_channels, values, heads, heads)]
        parts = weight.unflatten(0, (model.linear_key_heads, -1)).split(sizes, 1)
        own: Tensor = parts[_PARTS["delta"].index(module.part or "")]
        return own
    if module.form == "stack":
        index = _PARTS["stack"].index(module.part or "")
        return weight[index : index + 1]
    return weight if weight.dim() == 3 else weight.unsqueeze(0)


def _add(rows: Tensor, b: Tensor, a: Tensor, scale: float, tensor: str) -> None:
    """Add scale * B A to rows ``[blocks, rows, in]``, a bounded number of elements at a time.

    Args:
        rows: In any dtype; changed.
        b: ``[…, rank]``, as many rows in the same order.
        a: ``[rank, in]``, fp32.
        scale: The factor.
        tensor: Name of the tensor that has the rows, for messages.
    """
    b = b.reshape(*rows.shape[:2], -1)
    step = max(1, _BLOCK_ELEMENTS // rows.shape[2])
    for block, factor in zip(rows, b, strict=True):
        for start in range(0, len(block), step):
            part = block[start : start + step]
            total = part.float() + scale * (factor[start : start + step].float() @ a)
            part.copy_(_rounded(total, part.dtype, tensor))


def _rounded(values: Tensor, dtype: torch.dtype, tensor: str) -> Tensor:
    rounded = values.to(dtype)
    if bool((rounded.isinf() & values.isfinite()).any()):
        raise ConfigError(
            f"{tensor}: with the adapter it holds a number beyond {torch.finfo(dtype).max:g}, the largest of its dtype "
            f"{DTYPE_NAMES[dtype]}; convert the base to another --dtype first"
        )
    return rounded
