"""Rows of directories that ``save_to_disk`` has written: the one door to ``datasets``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hybridflow.data.files import needing
from hybridflow.data.parquet import nested_columns, untabled
from hybridflow.errors import DataError

_ROWS_AT_ONCE = 1024


def count_saved_rows(path: str, max_row_bytes: int) -> int:
    """Count the rows of a directory. Raises DataError: it is no such directory."""
    return len(_loaded(path))


def read_saved(path: str, start: int, stop: int, max_row_bytes: int) -> Iterator[Mapping[str, Any]]:
    """Read the rows from ``start`` to ``stop``.

    Raises:
        DataError: The directory is damaged.
    """
    rows = _loaded(path)
    features = rows.features
    columns = nested_columns(features.arrow_schema)
    _keep_files(features)
    tables = rows.with_format("arrow")
    for first in range(start, stop, _ROWS_AT_ONCE):
        try:
            block = features.decode_batch(tables[first : min(first + _ROWS_AT_ONCE, stop)].to_pydict())
        # The package raises what Arrow does, and what it does itself.
        except Exception as error:
            raise DataError(f"{path}: row {first} or after: {type(error).__name__}: {error}; copy it anew") from error
        for values in zip(*block.values(), strict=True):
            yield untabled(dict(zip(block, values, strict=True)), columns, parses=False)


def _keep_files(feature: Any) -> None:
    """Have images stay the bytes of their files: as pixels they are no JSON."""
    if type(feature).__name__ == "Image":
        feature.decode = False
    inner = getattr(feature, "feature", None)
    parts = feature.values() if isinstance(feature, dict) else feature if isinstance(feature, list) else []
    for each in parts if inner is None else [inner]:
        _keep_files(each)


def _loaded(path: str) -> Any:
    with needing(f"{path}: reading it", "datasets", "data"):
        import datasets
    try:
        found = datasets.load_from_disk(path)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"{path}: is no directory that datasets has saved: {type(error).__name__}: {reason:.200}; name what "
            f"save_to_disk has written, a file, or a pattern such as {path.rstrip('/')}/*.parquet"
        ) from error
    if isinstance(found, datasets.DatasetDict):
        raise DataError(f"{path}: holds the splits {', '.join(found)}; name one of them: {path.rstrip('/')}/SPLIT")
    return found.with_format(None)
