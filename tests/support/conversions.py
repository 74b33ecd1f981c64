"""One checkpoint as another format, file by file: the least that the protocols of conversion ask for."""

from __future__ import annotations

from pathlib import Path

from hybridflow.checkpoint.formats.registry import Options, make_target, open_source


def write_as(format: str, source: Path, folder: Path, options: Options) -> None:
    """Write the checkpoint at ``source`` into the new ``folder``."""
    made = open_source(source)
    target = make_target(format, made, options)
    folder.mkdir()
    hashes: dict[str, dict[str, str]] = {}
    for file in target.files:
        writer = target.open(folder / file, file)
        hashes[file] = {}
        for tensor in made.tensors:
            for _, key, values in target.parts(tensor, made.read(tensor), [file]):
                hashes[file][key] = writer.write(key, values)
        writer.sync()
        writer.close()
    target.finish(folder, hashes)
