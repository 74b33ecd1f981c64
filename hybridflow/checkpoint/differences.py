"""Whether two checkpoints hold the same, whatever their formats and layouts: tensor by tensor, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.checkpoint.formats.lora import check_adapter, is_adapter, settings_of
from hybridflow.checkpoint.formats.source import Source
from hybridflow.checkpoint.manifest import NAME, WEIGHT, TensorEntry
from hybridflow.checkpoint.model_dir import ModelDir
from hybridflow.errors import ConfigError
from hybridflow.families.config_json import spelled_out
from hybridflow.sections import to_dict

_BLOCK_ELEMENTS = 1 << 20
_WITHOUT_EFFECT = ("init_std", "dtype")
_BITS = {2: torch.int16, 4: torch.int32}


class AllKinds:
    """Everything of a model directory: weights by their names, moments and master weights with their kind before it.

    Raises:
        CheckpointError: The directory is damaged.
        ConfigError: It is none.
    """

    def __init__(self, path: Path) -> None:
        if not (path / NAME).is_file():
            raise ConfigError(f"{path}: has no optimizer's state to compare; leave --optimizer out")
        self._dir = ModelDir(path)
        self._where = {
            name if kind == WEIGHT else f"{kind}:{name}": (kind, name)
            for kind, tensors in self._dir.manifest.tensors.items()
            for name in tensors
        }
        self.tensors = {key: self._dir.manifest.tensors[kind][name] for key, (kind, name) in self._where.items()}

    def read(self, tensor: str) -> Tensor:
        """See ``Source``."""
        return self._dir.read(*self._where[tensor])

    def release(self) -> None:
        """See ``Source``."""
        self._dir.release()


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A tensor that both checkpoints have in one shape.

    Attributes:
        name: Logical name.
        one: What it is in the first.
        other: What it is in the second.
        num_unequal: Elements of unequal value; two NaNs are equal, and so are 0 and -0.
        num_not_finite: Unequal elements where one side or both are infinite or NaN.
        max_abs: Largest |a - b| of the others, in fp64.
        relative: ``max_abs`` over the largest finite |a| or |b|; 0 where ``max_abs`` is.
        is_same_bits: Whether dtype and every bit agree.
    """

    name: str
    one: TensorEntry
    other: TensorEntry
    num_unequal: int
    num_not_finite: int
    max_abs: float
    relative: float
    is_same_bits: bool

    @property
    def badness(self) -> tuple[int, float, float, bool]:
        """Return a sort key that is larger for a worse difference."""
        return self.num_not_finite, self.relative, self.max_abs, not self.is_same_bits

    def to_dict(self) -> dict[str, Any]:
        """Return the values, ready for JSON."""
        return {
            "tensor": self.name,
            "shape": list(self.one.shape),
            "dtypes": [self.one.dtype, self.other.dtype],
            "num_unequal": self.num_unequal,
            "num_not_finite": self.num_not_finite,
            "max_abs": self.max_abs,
            "relative": self.relative,
        }


@dataclass(frozen=True, kw_only=True)
class Differences:
    """How two checkpoints differ.

    Attributes:
        num_tensors: Number of tensors that both have, in one shape.
        num_parameters: Elements of these.
        only_one: Names of tensors that the first has alone.
        only_other: The same of the second.
        shapes: Tensors of two shapes: name, the first's, the second's.
        compared: The tensors in both that are not the same bits, the worst first.
        settings: Settings of the model: name, the first's value, the second's.
    """

    num_tensors: int
    num_parameters: int
    only_one: tuple[str, ...]
    only_other: tuple[str, ...]
    shapes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    compared: tuple[Compared, ...]
    settings: tuple[tuple[str, Any, Any], ...]

    @property
    def is_equal(self) -> bool:
        """Return whether nothing at all differs."""
        return not (self.only_one or self.only_other or self.shapes or self.compared or self.settings)

    @property
    def is_equal_but_for_dtype(self) -> bool:
        """Return whether only number formats differ: every value is the same number."""
        others = self.only_one or self.only_other or self.shapes or self.settings
        alike = (each.num_unequal == 0 and each.one.dtype != each.other.dtype for each in self.compared)
        return bool(self.compared) and not others and all(alike)

    def to_dict(self) -> dict[str, Any]:
        """Return the values, ready for JSON."""
        return {
            "equal": self.is_equal,
            "equal_but_for_dtype": self.is_equal_but_for_dtype,
            "num_tensors": self.num_tensors,
            "num_parameters": self.num_parameters,
            "settings": {key: [mine, theirs] for key, mine, theirs in self.settings},
            "only_in_one": list(self.only_one),
            "only_in_other": list(self.only_other),
            "shapes": {name: [list(mine), list(theirs)] for name, mine, theirs in self.shapes},
            "tensors": [each.to_dict() for each in self.compared],
        }


def compare(
    one: Source | AllKinds,
    other: Source | AllKinds,
    settings: tuple[tuple[str, Any, Any], ...] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Differences:
    """Compare the tensors of two checkpoints.

    Args:
        one: The first.
        other: The second.
        settings: Settings that differ, see ``differing_settings``.
        progress: Told how many elements were compared, and how many there are.

    Raises:
        CheckpointError: One is damaged.
    """
    both = [name for name in one.tensors if name in other.tensors]
    alike = [name for name in both if one.tensors[name].shape == other.tensors[name].shape]
    sizes = [math.prod(one.tensors[name].shape) for name in alike]
    compared, done = [], 0
    for name, size in zip(alike, sizes, strict=True):
        found = _compare_tensor(name, one, other)
        one.release()
        other.release()
        if not found.is_same_bits:
            compared.append(found)
        done += size
        if progress is not None:
            progress(done, sum(sizes))
    compared.sort(key=lambda each: each.badness, reverse=True)
    return Differences(
        num_tensors=len(alike),
        num_parameters=sum(sizes),
        only_one=tuple(name for name in one.tensors if name not in other.tensors),
        only_other=tuple(name for name in other.tensors if name not in one.tensors),
        shapes=tuple(
            (name, one.tensors[name].shape, other.tensors[name].shape)
            for name in both
            if one.tensors[name].shape != other.tensors[name].shape
        ),
        compared=tuple(compared),
        settings=settings,
    )


def _compare_tensor(name: str, one: Source | AllKinds, other: Source | AllKinds) -> Compared:
    """Compare one tensor, block by block in fp64, which holds every difference of two fp32 numbers to 53 bits."""
    entries = one.tensors[name], other.tensors[name]
    a, b = one.read(name).reshape(-1), other.read(name).reshape(-1)
    num_unequal = num_not_finite = 0
    max_abs = largest = 0.0
    is_same_bits = a.dtype == b.dtype and torch.equal(*(each.view(_BITS[each.element_size()]) for each in (a, b)))
    for start in range(0, 0 if is_same_bits else len(a), _BLOCK_ELEMENTS):
        x, y = (each[start : start + _BLOCK_ELEMENTS].double() for each in (a, b))
        gaps = (x - y).abs_()
        if not math.isfinite(float(gaps.max())):
            # Only here some of x or y are not: what is left of each place is 0 in both, and makes no difference.
            is_finite = x.isfinite() & y.isfinite()
            num_strange = int((~is_finite & (x != y) & ~(x.isnan() & y.isnan())).sum())
            num_unequal, num_not_finite = num_unequal + num_strange, num_not_finite + num_strange
            largest = max(largest, _largest(x), _largest(y))
            x, y = (torch.where(is_finite, each, 0.0) for each in (x, y))
            gaps = (x - y).abs_()
        num_unequal += int(gaps.count_nonzero())
        max_abs = max(max_abs, float(gaps.max()))
        largest = max(largest, *(float(edge.abs()) for each in (x, y) for edge in each.aminmax()))
    return Compared(
        name=name,
        one=entries[0],
        other=entries[1],
        num_unequal=num_unequal,
        num_not_finite=num_not_finite,
        max_abs=max_abs,
        relative=max_abs / largest if max_abs else 0.0,
        is_same_bits=is_same_bits,
    )


def _largest(values: Tensor) -> float:
    """Return the largest finite magnitude; 0 where there is none."""
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if len(finite) else 0.0


def differing_settings(one: Source, other: Source) -> tuple[tuple[str, Any, Any], ...]:
    """Return the settings that make two models compute differently: name, the first's value, the second's.

    Left out is what no number depends on: the vocabulary's padding, the spread of initial weights, the dtype, which the
    tensors tell, and the longest sequence, unless LongRoPE computes other positions with it. Two ways to say the same
    are the same. Of two adapters the factor of B A is one of them.

    Raises:
        CheckpointError: An adapter has no settings.
        ConfigError: An adapter's settings ask for what is not computed.
    """
    values = [{"has_value_head": each.has_value_head, **to_dict(spelled_out(each.model))} for each in (one, other)]
    if is_adapter(one) and is_adapter(other):
        values = [{**told, "lora_scale": _scale(each)} for told, each in zip(values, (one, other), strict=True)]
    without_effect = _WITHOUT_EFFECT if _is_long(one) != _is_long(other) else (*_WITHOUT_EFFECT, "max_context")
    pairs = ((key, values[0][key], values[1][key]) for key in values[0] if key not in without_effect)
    return tuple((key, mine, theirs) for key, mine, theirs in pairs if mine != theirs)


def _is_long(source: Source) -> bool:
    """Return whether a model of LongRoPE has the divisors for longer sequences than those of pre-training."""
    scaling = source.model.rotary_scaling
    if scaling is None or scaling.kind != "longrope":
        return False
    assert scaling.original_context is not None, "checked with the model's settings"
    return source.model.max_context > scaling.original_context


def _scale(adapter: Source) -> float | dict[str, float]:
    """Return the factor of B A: one for all modules, or that of each by its name in Hugging Face."""
    settings = settings_of(adapter)
    modules = (factor.module.hf for factor in check_adapter(adapter).values() if factor.side == "B")
    scales = {module: settings.scale_of(module) for module in modules}
    return scales if len({*scales.values()}) > 1 else next(iter(scales.values()))
