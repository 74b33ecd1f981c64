"""What a run learned from the samples of its archive: of each token its advantage and the trainer's log-probability.

    <folder>/learned/step-000003-000003-rank-00000.h5      of one step, written in that step
    <folder>/learned/step-000001-000010-rank-00000.h5      of all steps up to a checkpoint, in the place of these

Datasets of one number for each sample: ``step``, ``prompt_index``, ``index``, ``length``; and of all samples one behind
the other: ``advantages``, ``old_log_probs`` (NaN where the algorithm has none). No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridflow.data.arrays import read_arrays, read_slices, write_arrays
from hybridflow.errors import CheckpointError
from hybridflow.observe.files import writing
from hybridflow.rollout.archive import Key, SegmentName, find_segments

_FOLDER = "learned"
_FORMAT = "hybridflow-learned-1"
_SAMPLE_TYPES = dict.fromkeys(("step", "prompt_index", "index", "length"), np.int64)
_TOKEN_TYPES = dict.fromkeys(("advantages", "old_log_probs"), np.float32)
_TYPES = {**_SAMPLE_TYPES, **_TOKEN_TYPES}


class Learned(NamedTuple):
    """What a step learned from a sample.

    Attributes:
        advantages: ``[response]``.
        old_log_probs: The trainer's log-probabilities of the tokens before the update, ``[response]``.
    """

    advantages: NDArray[np.float32]
    old_log_probs: NDArray[np.float32]


def write_learned(folder: Path, step: int, rank: int, rows: Sequence[tuple[int, int, Learned]]) -> None:
    """Write what a rank's replica learns from in a step.

    Args:
        folder: Folder of the archive; made if absent.
        step: The step.
        rank: The rank.
        rows: Prompt index, index, and what is learned from the sample; without any token nothing is written.

    Raises:
        WriteError: The file system refuses.
    """
    if not any(len(found.advantages) for *_, found in rows):
        return
    arrays = {
        "step": [step] * len(rows),
        "prompt_index": [prompt_index for prompt_index, *_ in rows],
        "index": [index for _, index, _ in rows],
        "length": [len(found.advantages) for *_, found in rows],
        "advantages": np.concatenate([found.advantages for *_, found in rows]),
        "old_log_probs": np.concatenate([found.old_log_probs for *_, found in rows]),
    }
    _write(folder, SegmentName(step, step, rank), {name: np.asarray(arrays[name], _TYPES[name]) for name in _TYPES})


def merge_learned(folder: Path, rank: int, last_step: int) -> None:
    """Put the files that a rank has of single steps into one. For that rank, which writes none meanwhile.

    Raises:
        CheckpointError: One is damaged.
        WriteError: The file system refuses.
    """
    names = [each for each in find_segments(folder / _FOLDER) if each.rank == rank and each.last <= last_step]
    covered = [each for each in names if each.last > each.first]
    single = [each for each in names if each.last == each.first]
    # A killed writer has left those that a longer file holds too.
    left = [each for each in single if not any(longer.holds(each.first) for longer in covered)]
    if len(left) > 1:
        parts = [read_arrays(folder / _FOLDER / str(each), _TYPES, _FORMAT) for each in left]
        whole = {name: np.concatenate([part[name] for part in parts]) for name in _TYPES}
        _write(folder, SegmentName(left[0].first, left[-1].last, rank), whole)
    elif left:
        single.remove(left[0])
    with writing(folder / _FOLDER):
        for name in single:
            (folder / _FOLDER / str(name)).unlink()


class LearnedIndex:
    """Where what was learned in some steps lies. Each file's list of samples is read once, for all look-ups.

    Args:
        folder: Folder of the archive.
        steps: The steps.

    Raises:
        CheckpointError: A file is damaged.
    """

    def __init__(self, folder: Path, steps: Collection[int]) -> None:
        self._folder, self._steps = folder / _FOLDER, sorted(steps)
        self._samples = self._look()

    def find(self, keys: Collection[Key]) -> dict[Key, Learned]:
        """Return what was learned from samples of these steps, as far as it is there.

        Raises:
            CheckpointError: A file is damaged.
        """
        try:
            return self._find(keys)
        except CheckpointError:
            if all((self._folder / str(name)).exists() for name in self._samples):
                raise
            # The run goes on, and has put files of single steps into one.
            self._samples = self._look()
            return self._find(keys)

    def _look(self) -> dict[SegmentName, dict[str, Any]]:
        found = {}
        for name in find_segments(self._folder):
            if any(name.holds(step) for step in self._steps):
                samples = read_arrays(self._folder / str(name), _SAMPLE_TYPES, _FORMAT)
                samples["end"] = np.cumsum(samples["length"])
                rows = np.flatnonzero(np.isin(samples["step"], self._steps))
                found[name] = {kind: column[rows] for kind, column in samples.items()}
        return found

    def _find(self, keys: Collection[Key]) -> dict[Key, Learned]:
        steps, prompts = ([key[place] for key in keys] for place in (0, 1))
        found: dict[Key, Learned] = {}
        for name, samples in self._samples.items():
            # Few of many samples are asked for, and only these are looked at one by one.
            rows = np.flatnonzero(np.isin(samples["step"], steps) & np.isin(samples["prompt_index"], prompts))
            places = [samples[kind][rows].tolist() for kind in ("step", "prompt_index", "index", "length", "end")]
            wanted = {
                (step, prompt_index, index): slice(end - length, end)
                for step, prompt_index, index, length, end in zip(*places, strict=True)
                if (step, prompt_index, index) in keys
            }
            if wanted:
                slices = {kind: (dtype, list(wanted.values())) for kind, dtype in _TOKEN_TYPES.items()}
                tokens = read_slices(self._folder / str(name), slices, _FORMAT)
                columns = zip(tokens["advantages"], tokens["old_log_probs"], strict=True)
                found |= {key: Learned(*own) for key, own in zip(wanted, columns, strict=True)}
        return found


def drop_learned(folder: Path, *, after: int | None) -> None:
    """Remove what was learned in steps after one, which the run will make anew; None: all. For one rank.

    Raises:
        OSError: The file system refuses.
    """
    for name in find_segments(folder / _FOLDER):
        if after is None or name.last > after:
            (folder / _FOLDER / str(name)).unlink()
    for path in (folder / _FOLDER).glob(".*.tmp"):
        path.unlink()


def _write(folder: Path, name: SegmentName, arrays: dict[str, Any]) -> None:
    path = folder / _FOLDER / str(name)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_arrays(path, arrays, _FORMAT)
