"""Rows in files of every format, and the examples that hybridflow reads from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridflow.config.data import DataConfig, DataSourceConfig
from hybridflow.data.files import find_files
from hybridflow.data.prompts import Example
from hybridflow.data.readers import cut, format_of, place_of, read
from hybridflow.data.shaping import Kind, Shape, read_examples

ENDINGS = {"jsonl": ".jsonl", "parquet": ".parquet", "hdf5": ".h5", "datasets": ""}


def examples_of_file(path: Path, data: DataConfig, kind: Kind = "problems") -> tuple[Example, ...]:
    """All examples of a file, in its order."""
    return tuple(read_examples(DataSourceConfig(path=str(path)), Shape(data=data, kind=kind)))


def read_file(path: Path | str, *, max_row_bytes: int = 1 << 20) -> list[tuple[str, Any]]:
    """Place and row of each row of a file, or what is wrong with it; blank lines are left out."""
    found = []
    for file in find_files(str(path)):
        for piece in cut(file, format_of(file.path, None), max_row_bytes=max_row_bytes):
            for number, row in enumerate(read(piece, max_row_bytes=max_row_bytes)):
                if row is not None:
                    found.append((place_of(piece, number), row))
    return found


def write_rows(stem: Path, rows: Sequence[dict[str, Any]], file_format: str) -> Path:
    """Write rows of equal fields by the format's own library; returns the path."""
    path = stem.with_name(stem.name + ENDINGS[file_format])
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    if file_format == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif file_format == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table(columns), path, row_group_size=7)
    elif file_format == "hdf5":
        import h5py

        with h5py.File(path, "w") as file:
            for name, values in columns.items():
                texts = all(isinstance(value, str) for value in values)
                file.create_dataset(name, data=values, dtype=h5py.string_dtype() if texts else None)
    else:
        import datasets

        datasets.Dataset.from_dict(columns).save_to_disk(path)
    return path


def write_repeated_text(path: Path, *, num_rows: int, num_bytes: int) -> None:
    """Write a column ``prompt`` in HDF5 whose rows all refer to one text, which lies in the file once."""
    import h5py

    with h5py.File(path, "w") as file:
        texts = ["x" * num_bytes, *[""] * (num_rows - 1)]
        start = file.create_dataset("prompt", data=texts, dtype=h5py.string_dtype()).id.get_offset()
    content = bytearray(path.read_bytes())
    content[start : start + 16 * num_rows] = content[start : start + 16] * num_rows
    path.write_bytes(content)
