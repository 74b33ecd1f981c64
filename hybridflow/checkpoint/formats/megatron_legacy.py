"""Checkpoints of Megatron-LM before ``torch_dist``: a pickled state dict for each tensor, pipeline and expert rank.

    DIR/latest_checkpointed_iteration.txt           10, or release
    DIR/iter_0000010/mp_rank_00_001/model_optim_rng.pt
                          tensor parallel rank, pipeline rank where there are several, then expert rank where there are

They are read through the restricted unpickler, and not written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridflow.checkpoint.formats.megatron_args import layout_of, read_args, to_model
from hybridflow.checkpoint.formats.megatron_dist import FUSED_NORMS, LATEST, find_iteration
from hybridflow.checkpoint.formats.source import Source, num_blocks
from hybridflow.checkpoint.formats.unpickle import MappedFile, StoredTensor, TorchArchive
from hybridflow.checkpoint.manifest import TensorEntry
from hybridflow.errors import CheckpointError, ConfigError, HybridflowError
from hybridflow.families.assets import identity_of
from hybridflow.families.family import EMBEDDING, OUTPUT
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.models.shapes import model_spec
from hybridflow.reshard.spec import TensorSpec
from hybridflow.reshard.views import DTYPE_NAMES

_FILES = ("model_optim_rng.pt", "model_rng.pt")
_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.(.+)")
# An expert's tensor in a SequentialMLP, and in a TEGroupedMLP, which numbers the weights of one module.
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(?P<index>\d{1,6})\.(?P<rest>.+)")
_GROUPED = re.compile(r"mlp\.experts\.(?P<rest>linear_fc[12]\.weight)(?P<index>\d{1,6})")
_FUSED = {fused: norm for norm, fused in FUSED_NORMS.items()}


class _Held(NamedTuple):
    """A rank's part of a logical tensor."""

    path: Path
    name: str
    tensor: StoredTensor


class MegatronLegacySource(Source):
    """A legacy checkpoint of Megatron-LM, see ``source.Source``.

    The checksum of every tensor is compared when it is read.

    Raises:
        CheckpointError: A file is missing, damaged or hostile, or a tensor is not that of the arguments.
        ConfigError: The arguments ask for what is not computed.
    """

    format = "megatron-legacy"

    def __init__(self, path: Path) -> None:
        self.path, self._folder = path, find_iteration(path)
        self._files: dict[Path, MappedFile] = {}
        first = min(self._folder.glob("mp_rank_*"), default=None)
        if first is None:
            raise CheckpointError(f"{self._folder}: has no mp_rank_* directory; give the path of a checkpoint")
        file = _file_of(first)
        args = read_args(self._load(file), file)
        self.model = to_model(args, where=f"{file}: args")
        self._layout = _layout(args, file)
        self.layout = str(self._layout)
        padded = args.get("padded_vocab_size")
        self._padded = padded if isinstance(padded, int) else None
        self._held = self._find_tensors()
        self._copies = self._held.pop(OUTPUT, {}) if self.model.tied_embeddings else {}
        self._specs = self._check_names()
        self.tensors: Mapping[str, TensorEntry] = {name: self._entry(name) for name in self._specs}

    def read(self, tensor: str) -> Tensor:
        """See ``Source``."""
        spec, held = self._specs[tensor], self._held[tensor]
        dim = spec.tp_dim
        parts = [held[tp].tensor.read() for tp in range(1 if dim is None else len(held))]
        if len(spec.shape) == 3:
            # Gate and up apart, as in the view of ``reshard.spec``.
            parts = [part.unflatten(0, (2, -1)) for part in parts]
        if tensor == EMBEDDING:
            self._check_copies(parts)
        whole = parts[0] if dim is None or len(parts) == 1 else torch.cat(parts, dim)
        # Behind the vocabulary there is padding.
        return whole if spec.padded_to is None else whole[: spec.shape[0]]

    def release(self) -> None:
        """See ``Source``."""
        for file in self._files.values():
            file.release()

    def identity(self) -> str:
        """See ``Source``."""
        return identity_of([self.path / LATEST, *sorted(self._files)])

    def _load(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = MappedFile(path)
        return TorchArchive(self._files[path]).load()

    def _find_tensors(self) -> dict[str, dict[int, _Held]]:
        """Return logical name -> tensor parallel index -> the part; layers are counted through the stages in order."""
        layout, found = self._layout, dict[str, dict[int, _Held]]()
        names = {
            (tp, pp, ep): _folder_name(tp, pp, ep, layout)
            for tp, pp, ep in product(range(layout.tp), range(layout.pp), range(layout.ep))
        }
        experts_each = 0 if self.model.num_experts is None else self.model.num_experts // layout.ep
        there = {folder.name for folder in self._folder.glob("mp_rank_*")}
        for name in sorted(there ^ set(names.values())):
            what = "missing" if name not in there else "not expected"
            raise CheckpointError(f"{self._folder / name}: {what} in layout {layout}, which args tell; restore it")
        for tp, ep in product(range(layout.tp), range(layout.ep)):
            files = [_file_of(self._folder / names[tp, pp, ep]) for pp in range(layout.pp)]
            dicts = [self._state_dicts(file) for file in files]
            first_layer = 0
            for chunk, pp in product(range(layout.vpp), range(layout.pp)):
                num_layers = 0
                for name, tensor in dicts[pp][chunk].items():
                    local = _LAYER.fullmatch(name)
                    num_layers = max(num_layers, int(local[1]) + 1 if local else 0)
                    logical = _logical_name(name, first_layer, ep * experts_each)
                    # Dense tensors are alike on all expert ranks.
                    if logical is None or ep > 0 and ".mlp.experts." not in logical:
                        continue
                    if not isinstance(tensor, StoredTensor) or found.setdefault(logical, {}).get(tp) is not None:
                        raise CheckpointError(f"{files[pp]}: {name}: is no tensor, or is there twice; restore the file")
                    found[logical][tp] = _Held(files[pp], name, tensor)
                first_layer += num_layers
            if first_layer != self.model.num_layers:
                raise CheckpointError(
                    f"{self._folder}: the files of tensor parallel rank {tp} hold {first_layer} layers, expected "
                    f"{self.model.num_layers} by args; restore them from one copy"
                )
        return found

    def _state_dicts(self, path: Path) -> list[dict[str, Any]]:
        """Return a file's state dicts, one for each virtual stage."""
        found = self._load(path)
        if to_model(read_args(found, path), where=f"{path}: args") != self.model:
            raise CheckpointError(f"{path}: its args describe another model than those of the first file; restore it")
        keys = ["model"] if self._layout.vpp == 1 else [f"model{chunk}" for chunk in range(self._layout.vpp)]
        for key in keys:
            dicts = found.get(key)
            if isinstance(dicts, dict) and "language_model" in dicts:
                raise CheckpointError(
                    f"{path}: holds language_model, the names of Megatron-LM before megatron-core; expected those of "
                    "GPTModel: convert it with Megatron-LM's tools first (--use-mcore-models)"
                )
            if not isinstance(dicts, dict) or not all(isinstance(name, str) for name in dicts):
                raise CheckpointError(f"{path}: has no state dict {key!r}; restore the file from a copy")
        return [found[key] for key in keys]

    def _check_names(self) -> dict[str, TensorSpec]:
        """Check that all expected tensors are there on every tensor parallel rank, and no others."""
        model = self.model
        if model.vocab_size is None or num_blocks(model) > len(self._held):
            raise CheckpointError(
                f"{self._folder}: holds {len(self._held)} tensors, too few for its args, or these have no vocabulary"
            )
        specs = {spec.name: spec for spec in model_spec(model).tensors}
        for name in [*specs, *self._held]:
            held = self._held.get(name, {})
            if name not in specs:
                part = next(iter(held.values()))
                raise CheckpointError(
                    f"{part.path}: {part.name}: not expected by args; give a checkpoint of megatron-core's GPTModel"
                )
            if len(held) != self._layout.tp:
                raise CheckpointError(
                    f"{self._folder}: {name}: found on {len(held)} of {self._layout.tp} tensor parallel ranks; restore "
                    "the files from a copy"
                )
        return specs

    def _entry(self, name: str) -> TensorEntry:
        spec, held = self._specs[name], self._held[name]
        tp = self._layout.tp
        expected = list(spec.shape)
        if spec.padded_to is not None:
            rows = held[0].tensor.shape[0] if held[0].tensor.shape else 0
            padded = rows * tp if self._padded is None else self._padded
            expected[0] = max(padded, spec.shape[0])
        if spec.tp_dim is not None:
            expected[spec.tp_dim] //= tp
        if len(expected) == 3:
            expected = [expected[0] * expected[1], *expected[2:]]
        dtypes = {part.tensor.dtype for part in held.values()}
        for part in held.values():
            if list(part.tensor.shape) != expected or part.tensor.dtype not in DTYPE_NAMES or len(dtypes) > 1:
                raise CheckpointError(
                    f"{part.path}: {part.name}: found {part.tensor.dtype} {list(part.tensor.shape)}, expected "
                    f"one of {', '.join(DTYPE_NAMES.values())} {expected} by args, alike on all ranks; restore the "
                    "file from a copy"
                )
        return TensorEntry(DTYPE_NAMES[dtypes.pop()], spec.shape)

    def _check_copies(self, parts: list[Tensor]) -> None:
        """Check that a second copy of tied embeddings, on the last stage, is the same bit for bit."""
        for tp, copy in self._copies.items():
            if copy.tensor.shape != tuple(parts[tp].shape) or not torch.equal(copy.tensor.read(), parts[tp]):
                raise CheckpointError(
                    f"{copy.path}: {copy.name} is not equal to {EMBEDDING}, though args say that they are tied; "
                    "restore the file from a copy"
                )


def is_legacy(path: Path) -> bool:
    """Return whether a directory, or its latest iteration, is such a checkpoint."""
    return path.is_dir() and any(find_iteration(path).glob("mp_rank_*"))


def _layout(args: Mapping[str, Any], path: Path) -> ParallelLayout:
    for name in ("decoder_first_pipeline_num_layers", "pipeline_model_parallel_layout", "encoder_num_layers_per_stage"):
        if args.get(name) is not None:
            raise ConfigError(f"{path}: args: {name}={args[name]!r} is not read; load and save it without")
    try:
        layout = layout_of(args)
    except (HybridflowError, TypeError) as error:
        raise CheckpointError(f"{path}: args: {error}; restore the file from a copy") from error
    if layout.etp is not None:
        raise ConfigError(f"{path}: args: expert_tensor_parallel_size={layout.etp} is not read; only {layout.tp} is")
    return layout


def _folder_name(tp: int, pp: int, ep: int, layout: ParallelLayout) -> str:
    name = f"mp_rank_{tp:02d}"
    name += f"_{pp:03d}" if layout.pp > 1 else ""
    return name + (f"_{ep:03d}" if layout.ep > 1 else "")


def _file_of(folder: Path) -> Path:
    for name in _FILES:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(f"{folder / _FILES[0]}: missing; restore it from a copy")


def _logical_name(name: str, first_layer: int, first_expert: int) -> str | None:
    """Return the whole model's name for one of a rank's state dict; None where it holds nothing learned."""
    if name.endswith("_extra_state") or name.endswith("rotary_pos_emb.inv_freq"):
        return None
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    rest = _FUSED.get(match[2], match[2])
    expert = _EXPERT.fullmatch(rest) or _GROUPED.fullmatch(rest)
    if expert is not None:
        rest = f"mlp.experts.{first_expert + int(expert['index'])}.{expert['rest']}"
    return f"decoder.layers.{first_layer + int(match[1])}.{rest}"
