"""One checkpoint as another format without the engine: the least that the protocols of conversion ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybridflow.checkpoint.formats.registry import for_export, make_target, open_source
from hybridflow.checkpoint.formats.source import Source, Target
from hybridflow.reshard.views import TORCH_DTYPES


def write_target(source: Source, target: Target, out: Path) -> Path:
    """Write all of a target at once, each tensor in the target's dtype."""
    folder = out.parent if target.is_single_file else out
    folder.mkdir(parents=True, exist_ok=target.is_single_file)
    writers = {file: target.open(out if target.is_single_file else out / file, file) for file in target.files}
    hashes: dict[str, dict[str, str]] = {file: {} for file in target.files}
    for name in source.tensors:
        parts = target.parts(name, source.read(name))
        for (file, key), part in zip(target.places(name), parts, strict=True):
            hashes[file][key] = writers[file].write(key, part.to(TORCH_DTYPES[target.files[file][key].dtype]))
        source.release()
    for file, writer in writers.items():
        assert hashes[file].keys() == target.files[file].keys(), file
        writer.sync()
        writer.close()
    target.finish(folder, hashes)
    return out


def convert(source: Source | Path, format: str, out: Path, **options: Any) -> Path:
    """Write a checkpoint, or the one at a path, as another format."""
    made = open_source(source) if isinstance(source, Path) else source
    made = for_export(made) if format == "hf" else made
    return write_target(made, make_target(format, made, **options), out)
