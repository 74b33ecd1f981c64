"""Weights that lie in codes of 8 or 4 bits, decoded while they are read: any box, in memory of its size.

``fp8``: ``NAME`` holds 8-bit floats ``[rows, columns]``. ``NAME_scale_inv`` holds the factor of each block: a float, or
the exponent of a power of two in 8 bits. The first block begins at the first row and column; the last ones may be
narrower. A weight is its float times its block's factor.

``mxfp4``: ``NAME_blocks`` holds bytes ``[experts, out, in / 32, 16]``, two 4-bit floats each, the low half first.
``NAME_scales`` holds, plus 127, the exponent of each 32 weights ``[experts, out, in / 32]``. The tensor that
``transformers`` makes of them is ``NAME [experts, in, out]``.
"""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.checkpoint.manifest import TensorEntry
from hybridflow.checkpoint.tensor_file import TensorFile, bytes_of
from hybridflow.errors import CheckpointError
from hybridflow.families.quantization import Quantization
from hybridflow.reshard.spec import Box, DType
from hybridflow.reshard.views import TORCH_DTYPES

_FACTORS, _BLOCKS, _EXPONENTS = "_scale_inv", "_blocks", "_scales"
_POWERS = "F8_E8M0"
_GROUP_BYTES, _GROUP, _BIAS, _NOT_A_NUMBER = 16, 32, 127, 255
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_PAIRS = torch.tensor([[_FP4[byte & 15], _FP4[byte >> 4]] for byte in range(256)])
"""Byte -> its two floats."""

_ROWS = 128
"""So many rows of ``mxfp4`` are decoded at a time."""

Files = Mapping[str, TensorFile]


def coded_tensors(files: Files, how: Quantization, dtype: DType) -> dict[str, CodedTensor]:
    """Return name -> each tensor that lies in codes.

    Args:
        files: All files of the model. Codes and their scales may lie in two of them.
        how: How they are coded.
        dtype: What they are decoded to, unless another dtype is asked for.

    Raises:
        CheckpointError: Codes lack their scales, or either has another shape or dtype than it should.
    """
    found: dict[str, CodedTensor] = {}
    for file in files.values():
        for key in file.codes:
            if how.kind == "fp8" and not key.endswith(_FACTORS):
                found[key] = Fp8Tensor(files, file, key, how.block, dtype)
            elif how.kind == "mxfp4" and not key.endswith(_EXPONENTS):
                found[key.removesuffix(_BLOCKS)] = Mxfp4Tensor(files, file, key, dtype)
    _check_exponents(files, found)
    return found


class CodedTensor(abc.ABC):
    """One tensor that lies in codes, as ``TensorFile`` has those that lie as they are.

    Attributes:
        path: File that holds the codes, for messages.
        entries: What the decoded tensor is, by its name.
        scales: Name of its scales in the files.
    """

    def __init__(self, path: Path, name: str, entry: TensorEntry, scales: str) -> None:
        self.path, self.scales = path, scales
        self.entries = {name: entry}

    @abc.abstractmethod
    def read_box(self, box: Box, dtype: torch.dtype) -> Tensor:
        """Decode a box of the tensor: computed in fp32, and rounded to ``dtype`` once.

        Raises:
            CheckpointError: A scale is not a number.
        """

    def read(self, key: str) -> Tensor:
        """Decode the tensor."""
        entry = self.entries[key]
        return self.read_box(tuple((0, size) for size in entry.shape), TORCH_DTYPES[entry.dtype])

    def sha256(self, key: str) -> str:
        """Return the sha256 of the decoded tensor's bytes."""
        return hashlib.sha256(bytes_of(self.read(key))).hexdigest()

    def _not_a_number(self) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self.scales}: a scale is not a number; restore the file from a copy")


class Fp8Tensor(CodedTensor):
    """A tensor in ``fp8``, see the module.

    Args:
        files: All files.
        file: The one that holds the codes.
        key: Name of codes and tensor.
        block: Rows and columns of a block.
        dtype: See ``coded_tensors``.
    """

    def __init__(self, files: Files, file: TensorFile, key: str, block: tuple[int, int], dtype: DType) -> None:
        codes = file.codes[key]
        if codes.dtype != "F8_E4M3" or len(codes.shape) != 2:
            raise CheckpointError(
                f"{file.path}: {key}: found {codes.dtype} {list(codes.shape)}, expected F8_E4M3 with 2 dims by "
                "quant_method fp8; convert it first"
            )
        super().__init__(file.path, key, TensorEntry(dtype, codes.shape), key + _FACTORS)
        self._file, self._key, self._block = file, key, block
        held = [each for each in files.values() if self.scales in (*each.entries, *each.codes)]
        if not held:
            raise CheckpointError(
                f"{file.path}: {key}: its scales {self.scales} are missing; restore them from a copy of the model"
            )
        self._scale_file = held[0]
        expected = tuple(-(-size // width) for size, width in zip(codes.shape, block, strict=True))
        factors = held[0].codes.get(self.scales)
        found = held[0].entries[self.scales].shape if factors is None else factors.shape
        if factors is not None and factors.dtype != _POWERS:
            raise CheckpointError(
                f"{held[0].path}: {self.scales}: found {factors.dtype}, expected floats or {_POWERS}; convert it first"
            )
        if found != expected:
            raise CheckpointError(
                f"{held[0].path}: {self.scales}: found shape {list(found)}, expected {list(expected)}, one scale for "
                f"each block of {list(block)} in {list(codes.shape)}; restore it, or the weight_block_size, from a copy"
            )

    def read_box(self, box: Box, dtype: torch.dtype) -> Tensor:
        """See ``CodedTensor``."""
        (top, bottom), (left, right) = box
        high, wide = self._block
        result = torch.empty(bottom - top, right - left, dtype=dtype)
        if result.numel() == 0:
            return result
        codes = self._file.read_codes(self._key)[top:bottom, left:right]
        first, last = left // wide, -(-right // wide)
        read = self._scale_file.read if self.scales in self._scale_file.entries else self._scale_file.read_codes
        scales = read(self.scales)[top // high : -(-bottom // high), first:last].float()
        if not bool(scales.isfinite().all()):
            raise self._not_a_number()
        columns = slice(left - first * wide, right - first * wide)
        for index, row in enumerate(scales):
            # The rows of the box that lie in this row of blocks.
            begin = max(top, (top // high + index) * high) - top
            end = min(bottom, (top // high + index + 1) * high) - top
            factors = row.repeat_interleave(wide)[columns]
            result[begin:end] = codes[begin:end].float().mul_(factors)
        return result


class Mxfp4Tensor(CodedTensor):
    """A tensor of all experts in ``mxfp4``, see the module.

    Args:
        files: All files.
        file: The one that holds the codes.
        key: Name of the codes.
        dtype: See ``coded_tensors``.
    """

    def __init__(self, files: Files, file: TensorFile, key: str, dtype: DType) -> None:
        codes, name = file.codes[key], key.removesuffix(_BLOCKS)
        shape = codes.shape
        if codes.dtype != "U8" or name == key or len(shape) != 4 or shape[-1] != _GROUP_BYTES:
            raise CheckpointError(
                f"{file.path}: {key}: found {codes.dtype} {list(shape)}, expected U8 [experts, out, in / 32, 16] under "
                f"a name that ends in {_BLOCKS}, by quant_method mxfp4; convert it first"
            )
        entry = TensorEntry(dtype, (shape[0], shape[2] * _GROUP, shape[1]))
        super().__init__(file.path, name, entry, name + _EXPONENTS)
        self._file, self._key = file, key
        held = [each for each in files.values() if self.scales in each.codes]
        if not held:
            raise CheckpointError(
                f"{file.path}: {key}: its scales {self.scales} are missing; restore them from a copy of the model"
            )
        self._scale_file, found = held[0], held[0].codes[self.scales]
        if found.dtype != "U8" or found.shape != shape[:3]:
            raise CheckpointError(
                f"{held[0].path}: {self.scales}: found {found.dtype} {list(found.shape)}, expected U8 "
                f"{list(shape[:3])}, one scale for each 32 weights of {key}; restore it from a copy"
            )

    def read_box(self, box: Box, dtype: torch.dtype) -> Tensor:
        """See ``CodedTensor``."""
        experts, (left, right), (top, bottom) = box
        first, last = left // _GROUP, -(-right // _GROUP)
        inside = slice(left - first * _GROUP, right - first * _GROUP)
        codes = self._file.read_codes(self._key)[slice(*experts), top:bottom, first:last]
        scales = self._scale_file.read_codes(self.scales)[slice(*experts), top:bottom, first:last]
        if bool((scales == _NOT_A_NUMBER).any()):
            raise self._not_a_number()
        result = torch.empty(experts[1] - experts[0], bottom - top, right - left, dtype=dtype)
        for one, its_codes, its_scales in zip(result, codes, scales, strict=True):
            for start in range(0, bottom - top, _ROWS):
                rows = slice(start, start + _ROWS)
                values = _PAIRS[its_codes[rows].int()].flatten(-2)
                values *= torch.exp2(its_scales[rows].float() - _BIAS)[..., None]
                one[rows] = values.flatten(1)[:, inside]
        return result.transpose(1, 2)


def _check_exponents(files: Files, found: Mapping[str, CodedTensor]) -> None:
    """Refuse scales among the codes that scale none."""
    used = {each.scales for each in found.values()}
    for file in files.values():
        for key in file.codes.keys() - used - found.keys():
            if key.endswith((_EXPONENTS, _FACTORS)):
                is_factor = key.endswith(_FACTORS)
                codes = key.removesuffix(_FACTORS) if is_factor else key.removesuffix(_EXPONENTS) + _BLOCKS
                raise CheckpointError(f"{file.path}: {key}: its codes {codes} are missing; restore them from a copy")
