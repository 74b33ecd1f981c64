"""The formats of checkpoints: which one lies at a path, and making a target of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hybridflow.checkpoint.formats import lora
from hybridflow.checkpoint.formats.hdf5 import MASTER, HDF5Source, HDF5Target, is_hdf5
from hybridflow.checkpoint.formats.huggingface import HuggingFaceSource, HuggingFaceTarget
from hybridflow.checkpoint.formats.megatron_dist import MegatronDistSource, MegatronDistTarget, is_torch_dist
from hybridflow.checkpoint.formats.megatron_legacy import MegatronLegacySource, is_legacy
from hybridflow.checkpoint.formats.named import NamedSource, NamedTarget, is_named
from hybridflow.checkpoint.formats.peft_dir import PeftSource, PeftTarget, base_of, is_peft
from hybridflow.checkpoint.formats.sharded import ShardedSource, ShardedTarget, find_base, find_model
from hybridflow.checkpoint.formats.source import Source, Target
from hybridflow.checkpoint.formats.whole import WholeSource, WholeTarget, is_part
from hybridflow.checkpoint.manifest import NAME
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.families.assets import ADAPTER_CONFIG, CONFIG, read_json
from hybridflow.families.config_json import Described, read_config
from hybridflow.families.hub_cache import download_hint
from hybridflow.foreign import names_in
from hybridflow.layout.parallel_layout import ParallelLayout
from hybridflow.reshard.spec import DType


class Readable(NamedTuple):
    """A format that can be read.

    Attributes:
        looks_like: What of it lies on disk, for messages.
        is_at: Whether it lies at a path.
        open: Gives the source.
    """

    looks_like: str
    is_at: Callable[[Path], bool]
    open: Callable[[Path], Source]


def _open_hf(path: Path) -> Source:
    """Open a directory of Hugging Face, by a table where its family has one."""
    return NamedSource(path) if is_named(path) else HuggingFaceSource(path)


# The first that lies at a path is taken, so the narrower stand first.
READABLE: dict[str, Readable] = {
    "megatron": Readable(f"{NAME}, or a run's checkpoint", lambda path: find_model(path) is not None, ShardedSource),
    "hf": Readable(f"{CONFIG} and safetensors", lambda path: (path / CONFIG).is_file(), _open_hf),
    "hdf5": Readable(f"an HDF5 file, or a directory with {MASTER}", is_hdf5, HDF5Source),
    "megatron-dist": Readable("Megatron's .metadata and .distcp files", is_torch_dist, MegatronDistSource),
    "megatron-legacy": Readable("Megatron's mp_rank_* directories", is_legacy, MegatronLegacySource),
}

OF_ADAPTERS = ("megatron", "peft")

WRITABLE: dict[str, Callable[..., Target]] = {
    "megatron": ShardedTarget,
    "hf": HuggingFaceTarget,
    "hdf5": HDF5Target,
    "peft": PeftTarget,
    "megatron-dist": MegatronDistTarget,
}
_TAKERS = {
    "layout": ("--layout", ("megatron", "hdf5")),
    "max_shard_bytes": ("--max-shard-gb", ("hf", "megatron-dist")),
}
"""Option -> its name in a command, and the formats that take it."""


def open_source(path: Path, *, base: Path | None = None) -> Source:
    """Open the checkpoint at a path, of whatever format it is.

    Args:
        path: Where.
        base: Model that the adapter at the path belongs to; None: the one that it names. Not used by other formats.

    Raises:
        CheckpointError: There is none, or it is damaged.
        ConfigError: It is of an unknown family, or asks for what is not computed.
    """
    if is_peft(path):
        return PeftSource(path, _described_at(base_of(path) if base is None else base))
    for readable in READABLE.values():
        if readable.is_at(path):
            return readable.open(path)
    if not path.exists():
        hint = download_hint(str(path))
        raise CheckpointError(f"{path}: found nothing, expected a checkpoint; name one that is there{hint}")
    if path.is_dir():
        names = names_in(path)
        found = (
            f"a directory with {', '.join(names[:8])}{' …' if len(names) > 8 else ''}"
            if names
            else "an empty directory"
        )
    else:
        found = "a file"
    looks_like = {name: readable.looks_like for name, readable in READABLE.items()} | {"peft": ADAPTER_CONFIG}
    formats = "; ".join(f"{name}: {each}" for name, each in looks_like.items())
    raise CheckpointError(f"{path}: found {found}, expected a checkpoint ({formats}); give the path of one")


def open_model(path: Path) -> Source:
    """Open the model at a path: of a run that trains adapters, its base with their updates in it.

    Raises:
        CheckpointError: There is none, or it is damaged.
        ConfigError: It is of an unknown family, asks for what is not computed, or is an adapter alone.
    """
    return with_base(open_source(path))


def with_base(source: Source) -> Source:
    """Return a model as it is; merge an adapter in a run's checkpoint into its base, which lies beside it.

    Raises:
        CheckpointError: The base is damaged.
        ConfigError: There is no base beside the adapter.
    """
    if not lora.is_adapter(source):
        return source
    base = find_base(source.path)
    if base is None:
        raise ConfigError(
            f"{source.path}: is a LoRA adapter without its base; merge it into that first: hybridflow convert BASE OUT "
            f"--to hf --merge-lora {source.path}"
        )
    return lora.MergedSource(open_source(base), source)


def for_export(source: Source, *, original: Path | None = None) -> Source:
    """Return a model as it is exported to Hugging Face: a vision-language model with its other tensors.

    Args:
        source: The model.
        original: Directory of the vision-language model; None: the one that training began with.

    Raises:
        CheckpointError: The directory is damaged, or of another model.
        ConfigError: It is not there.
    """
    return WholeSource(source, original) if is_part(source) else source


def _described_at(path: Path) -> Described:
    """Return family and settings of the model at a path; of a Hugging Face model the weights need not be there."""
    if (path / CONFIG).is_file():
        return read_config(read_json(path / CONFIG), where=str(path / CONFIG))
    return lora.described_of(open_source(path))


def open_merged(base: Source, adapter: Path) -> Source:
    """Open a checkpoint with the updates of an adapter in its weights.

    Args:
        base: The weights.
        adapter: Where the adapter is, in any format.

    Raises:
        CheckpointError: The adapter is damaged, or does not fit the base.
        ConfigError: It asks for what is not computed; or no adapter lies there, or the base is one.
    """
    found: Source = PeftSource(adapter, lora.described_of(base)) if is_peft(adapter) else open_source(adapter)
    for source, is_wanted in ((base, False), (found, True)):
        if lora.is_adapter(source) != is_wanted:
            kinds = ("an adapter", "a model") if is_wanted else ("a model", "an adapter")
            raise ConfigError(f"{source.path}: expected {kinds[0]}, found {kinds[1]}; give the base, and its adapter")
    return lora.MergedSource(base, found)


def make_target(
    format: str,
    source: Source,
    *,
    dtype: DType | None = None,
    layout: ParallelLayout | None = None,
    max_shard_bytes: int | None = None,
) -> Target:
    """Make the target to which a checkpoint is written.

    Args:
        format: One of ``WRITABLE``.
        source: The checkpoint.
        dtype: Number format to write; None: each tensor's own.
        layout: How the model is cut; None: it is not.
        max_shard_bytes: Most bytes of tensors in each file; None: the format's own.

    Raises:
        ConfigError: The format is unknown, cannot be written or takes no such option, or has no place for the model.
        LayoutError: The layout does not cut the model.
        ReshardError: The same, found at one tensor.
    """
    if format not in WRITABLE:
        raise ConfigError(f"format {format!r}: cannot be written; expected one of {', '.join(WRITABLE)}")
    if lora.is_adapter(source) and format not in OF_ADAPTERS:
        raise ConfigError(
            f"{source.path}: is a LoRA adapter, which format {format} has no place for; write "
            f"{' or '.join(OF_ADAPTERS)}, or merge it into its base: `hybridflow convert BASE OUT --to {format} "
            f"--merge-lora {source.path}`"
        )
    options = {"dtype": dtype, "layout": layout, "max_shard_bytes": max_shard_bytes}
    given = {name: value for name, value in options.items() if value is not None}
    for name, (option, takers) in _TAKERS.items():
        if name in given and format not in takers:
            told = f"{option}: format {format} has no such option"
            is_free = name == "layout" and format == "megatron-dist"
            why = ", Megatron loads this format in any layout" if is_free else ""
            raise ConfigError(f"{told}; leave it out{why}, or write {', '.join(takers)}")
    sizes = {} if max_shard_bytes is None else {"max_shard_bytes": max_shard_bytes}
    if source.model.implementation == "transformers":
        if format not in ("hf", "peft"):
            raise ConfigError(
                f"{source.path}: a {source.family} that runs in transformers has its tensors under the names there, "
                f"which have no place in format {format}; write hf"
            )
        return NamedTarget(source, dtype=dtype, **sizes) if format == "hf" else PeftTarget(source, dtype=dtype)
    if format == "hf" and isinstance(source, WholeSource):
        return WholeTarget(source, dtype=dtype, **sizes)
    assert format != "hf" or not is_part(source), "see for_export"
    return WRITABLE[format](source, **given)
