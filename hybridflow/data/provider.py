"""``DataProvider``: rows of files, of a mixture of them, or of a data set in memory, for a program of a user's own."""

from __future__ import annotations

import tempfile
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

from hybridflow.config.data import DataConfig, DataSourceConfig, FileFormat, check_data
from hybridflow.config.recipe import Recipe
from hybridflow.data.part import Given
from hybridflow.data.prepare import Everyone
from hybridflow.data.problems import FOLDER, StoredProblems, Stores, open_problems, open_stores, shape_of, template_of
from hybridflow.data.prompts import Example, prompt_tokens, value_of
from hybridflow.data.shaping import Shape
from hybridflow.data.tokenizer import Tokenizer, open_tokenizer
from hybridflow.errors import ConfigError, DataError
from hybridflow.sections import read_section

_DEADLINE_S = 600.0

Batch = list[dict[str, Any]]


class DataProvider:
    """Rows in a shuffled order that one integer remembers; given to a trainer, its source of problems.

    At the first use the rows are checked, rendered and put into a store on disk, by several processes where there is
    much to do; then any row is read by its number, in memory that does not grow. The order depends on ``seed`` and the
    rows alone: ranks take turns in it, so a run that goes on with another ``dp_size`` repeats and skips nothing.

    Iterating gives this rank's batches, lists of rows (``dict``), from where the one before has ended. With a
    ``tokenizer`` each row has its prompt's token ids as ``prompt_ids``. A trainer draws rows in steps of its own, and
    does not read what is for iterating alone: ``batch_size``, ``num_epochs``, ``dp_rank``, ``dp_size``,
    ``prefetch_factor`` and ``tokenizer``.

    Args:
        data_path: A file, a pattern with ``*``, an address such as ``s3://…``, a directory that ``datasets`` has
            saved; several of them; or rows in memory: a ``datasets.Dataset``, or any iterable of mappings.
        file_format: ``jsonl``, ``parquet``, ``hdf5`` or ``datasets``; None: what the name tells.
        batch_size: Rows of a batch, of each rank.
        seed: Seed of the order; None: 1, or that of the trainer.
        dp_rank: Index of this rank among those that share the data.
        dp_size: How many share it.
        weights: How often each of several paths is drawn from; None: as often as it has rows.
        tokenizer: A tokenizer, or the path of one.
        chat_template: File of the jinja template for rows with ``messages``; None: the tokenizer's own.
        max_prompt_tokens: Rows with a longer prompt are left out.
        on_bad_row: ``error``, or ``skip``.
        num_epochs: How often each row is given; None: without end. If the last turn has fewer rows than ranks, rows of
            the next epoch fill it up to one for each.
        prefetch_factor: Batches that are read ahead; 0: none.
        num_workers: Processes that prepare the rows of large files.
        cache_dir: Where prepared rows stay for the next run; None: they are removed with this object.
        fields: Other keys of a recipe's section ``data``, such as ``prompt_field``.

    Raises:
        ConfigError: An argument is none of these.
        DataError: At the first use: a file cannot be read, or a row cannot be used.
    """

    def __init__(
        self,
        data_path: Any,
        file_format: FileFormat | None = None,
        prefetch_factor: int = 4,
        num_workers: int = 8,
        *,
        batch_size: int = 1,
        seed: int | None = None,
        dp_rank: int = 0,
        dp_size: int = 1,
        weights: Sequence[float] | None = None,
        tokenizer: Tokenizer | str | Path | None = None,
        chat_template: str | Path | None = None,
        max_prompt_tokens: int | None = None,
        on_bad_row: str = "error",
        num_epochs: int | None = None,
        cache_dir: str | Path | None = None,
        **fields: Any,
    ) -> None:
        for name, value, least in (
            *(("batch_size", batch_size, 1), ("dp_size", dp_size, 1), ("num_epochs", num_epochs, 1)),
            *(("dp_rank", dp_rank, 0), ("prefetch_factor", prefetch_factor, 0)),
        ):
            if value is not None and (type(value) is not int or value < least):
                raise ConfigError(f"DataProvider: {name}={value!r}; give an integer of at least {least}")
        if dp_rank >= dp_size:
            raise ConfigError(f"DataProvider: dp_rank={dp_rank} of dp_size={dp_size}; ranks are counted from 0")
        if max_prompt_tokens is not None and tokenizer is None:
            raise ConfigError("DataProvider: max_prompt_tokens counts tokens; give the tokenizer too")
        if num_epochs is not None and weights is not None:
            raise ConfigError("DataProvider: with weights each source has epochs of its own; leave num_epochs out")
        self._sources = _sources(data_path, file_format, weights)
        self._data = _section(
            chat_template=chat_template,
            max_prompt_tokens=max_prompt_tokens,
            on_bad_row=on_bad_row,
            num_workers=num_workers,
            cache_dir=cache_dir,
            **fields,
        )
        if self._data.images_field is not None:
            raise ConfigError("DataProvider: images_field: prompts are text here; read images by a recipe's data.train")
        self._tokenizer = open_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
        self._seed, self._batch_size, self._num_epochs = seed, batch_size, num_epochs
        self._dp_rank, self._dp_size, self._prefetch = dp_rank, dp_size, prefetch_factor
        self._next_prompt_index = 0
        self._rows: _Rows | None = None

    @property
    def num_rows(self) -> int:
        """Return the number of rows in all sources, without those that are left out."""
        return self._opened().num_rows

    @property
    def sha256(self) -> str:
        """Return the sha256 of the rows in their order."""
        return self._opened().sha256

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's batches from here on; a batch read ahead and not taken comes again."""
        rows = self._opened()
        if self._prefetch == 0:
            turns: Iterator[tuple[Batch, int]] = self._turns(rows, self._next_prompt_index)
        else:
            turns = _ahead(self._turns(rows, self._next_prompt_index), self._prefetch)
        for batch, after in turns:
            self._next_prompt_index = after
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the order, the same on all ranks that have taken as many batches; JSON."""
        return {"next_prompt_index": self._next_prompt_index, "sha256": self.sha256, "seed": self._own_seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; with any ``dp_size``, ``dp_rank`` and ``batch_size``.

        Args:
            state: From ``state_dict``.

        Raises:
            DataError: It is of other rows or of another seed, or none.
        """
        prompt_index, sha256, seed = (state.get(name) for name in ("next_prompt_index", "sha256", "seed"))
        if type(prompt_index) is not int or prompt_index < 0:
            raise DataError(
                f"DataProvider: next_prompt_index={prompt_index!r} is no state of one; give what state_dict gave"
            )
        if sha256 != self.sha256:
            raise DataError(
                f"DataProvider: the state is of other rows: sha256 {sha256}, these have {self.sha256}; restore the "
                "files, or begin anew"
            )
        # A state of an older version has none.
        if seed not in (self._own_seed, None):
            raise DataError(
                f"DataProvider: the state is of seed={seed}, this one has seed={self._own_seed}, which "
                f"draws the rows in another order; give seed={seed}, or begin anew"
            )
        self._next_prompt_index = prompt_index

    def problems(
        self, tokenizer: Tokenizer, recipe: Recipe, everyone: Everyone | None = None, needs_answer: bool = False
    ) -> StoredProblems:
        """Return the problems of a trainer; see ``placement.job.Problems``. Collective: ``everyone``.

        Args:
            tokenizer: The trainer's.
            recipe: What it runs: the kind of rows, and how long they may be.
            everyone: Its ranks.
            needs_answer: Whether its reward compares a response with the answer.

        Raises:
            DataError: A row is none of that kind, lacks its answer, or is too long, and ``on_bad_row`` is ``error``.
        """
        shape = replace(shape_of(replace(recipe, data=self._data), tokenizer), needs_answer=needs_answer)
        folder = Path(recipe.run_dir) / FOLDER
        seed = recipe.seed if self._seed is None else self._seed
        return open_problems(self._sources, shape, tokenizer, folder, seed=seed, everyone=everyone)

    def close(self) -> None:
        """Remove what was prepared, where there is no ``cache_dir``; the next use prepares it again."""
        if self._rows is not None:
            self._rows.close()
        self._rows = None

    def __enter__(self) -> DataProvider:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _own_seed(self) -> int:
        """Return the seed of the order where no trainer has another."""
        return 1 if self._seed is None else self._seed

    def _opened(self) -> _Rows:
        if self._rows is None:
            tokenizer = self._tokenizer
            shape = Shape(
                data=self._data,
                kind="rows",
                template=template_of(self._data, tokenizer),
                tokenizer=None if tokenizer is None else str(tokenizer.path),
                num_rows=None if tokenizer is None else tokenizer.vocab_size,
            )
            self._rows = _Rows(self._sources, shape, tokenizer, self._own_seed)
        return self._rows

    def _turns(self, rows: _Rows, prompt_index: int) -> Iterator[tuple[Batch, int]]:
        """Yield this rank's part of each turn of all ranks, with the prompt index that comes after the turn."""
        end = None if self._num_epochs is None else self._num_epochs * rows.num_rows
        while end is None or prompt_index < end:
            whole = self._batch_size * self._dp_size
            # A row for each rank at least, those that are missing from the next epoch: a batch is never empty.
            count = whole if end is None else min(whole, max(end - prompt_index, self._dp_size))
            first, last = (prompt_index + count * rank // self._dp_size for rank in (self._dp_rank, self._dp_rank + 1))
            prompt_index += count
            yield [rows[each] for each in range(first, last)], prompt_index


class _Rows:
    """The rows of a provider by the prompt index."""

    def __init__(
        self, sources: Sequence[DataSourceConfig | Given], shape: Shape, tokenizer: Tokenizer | None, seed: int
    ) -> None:
        self._shape, self._tokenizer = shape, tokenizer
        folder = tempfile.mkdtemp(prefix="hybridflow-rows-")
        # Also where nobody closes it.
        self._remove = weakref.finalize(self, rmtree, folder, ignore_errors=True)
        stores = open_stores(sources, shape, Path(folder))
        self._stores = Stores(stores, [source.weight for source in sources], seed)
        self.num_rows, self.sha256 = self._stores.num_rows, self._stores.sha256

    def __getitem__(self, prompt_index: int) -> dict[str, Any]:
        stored = self._stores.stored(self._stores.place(prompt_index))
        prompt = value_of(stored.row, self._shape.data.prompt_field)
        if self._tokenizer is None or not isinstance(prompt, str):
            return stored.row
        example = Example(prompt=prompt, answer="", begins=stored.begins, place=stored.place)
        return {**stored.row, "prompt_ids": list(prompt_tokens(example, self._tokenizer))}

    def close(self) -> None:
        """Close the stores, and remove those that are this object's own."""
        self._stores.close()
        self._remove()


def _ahead(turns: Iterator[tuple[Batch, int]], most: int) -> Iterator[tuple[Batch, int]]:
    """Yield the same, read ahead by a thread, which ends when the consumer does."""
    reader = ThreadPoolExecutor(1, thread_name_prefix="DataProvider")
    ready = deque(reader.submit(next, turns, None) for _ in range(most))
    is_stuck = False
    try:
        while True:
            is_stuck = not wait([ready[0]], timeout=_DEADLINE_S).done
            if is_stuck:
                raise DataError(f"DataProvider: no row within {_DEADLINE_S:g} s; look at the file system")
            turn = ready.popleft().result()
            if turn is None:
                return
            ready.append(reader.submit(next, turns, None))
            yield turn
    finally:
        reader.shutdown(wait=not is_stuck, cancel_futures=True)


def _sources(
    data_path: Any, file_format: FileFormat | None, weights: Sequence[float] | None
) -> tuple[DataSourceConfig | Given, ...]:
    is_path = isinstance(data_path, str | Path)
    is_several = isinstance(data_path, list | tuple) and all(isinstance(each, str | Path) for each in data_path)
    if is_several and not data_path:
        raise ConfigError("DataProvider: data_path is an empty list; name at least one file")
    if not is_path and not is_several:
        if not hasattr(data_path, "__iter__") or isinstance(data_path, Mapping):
            raise ConfigError(
                f"DataProvider: data_path is {type(data_path).__name__}; give a path, several, or an iterable of rows"
            )
        if weights is not None or file_format is not None:
            raise ConfigError("DataProvider: weights and file_format are for files; leave them out for rows in memory")
        return (Given(data_path, "the rows given"),)
    paths = [data_path] if is_path else list(data_path)
    if weights is not None and len(weights) != len(paths):
        raise ConfigError(f"DataProvider: {len(weights)} weights for {len(paths)} paths; give one for each")
    values = [None] * len(paths) if weights is None else list(weights)
    sources = [
        {"path": str(path), "weight": weight, "file_format": file_format}
        for path, weight in zip(paths, values, strict=True)
    ]
    return tuple(read_section(DataSourceConfig, source, source="DataProvider") for source in sources)


def _section(**values: Any) -> DataConfig:
    as_text = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
    data = read_section(DataConfig, {"train": "given", "held_out": "none", **as_text}, source="DataProvider")
    check_data(data)
    return data
