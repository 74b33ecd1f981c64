"""What a run has sampled, for h5py: a file for each rank and stretch of steps, and one that joins them.

    <folder>/segments/step-000001-000010-rank-00003.h5     renamed into place when it is whole, never changed
    <folder>/all.h5                                        virtual datasets over all segments, by relative names

Datasets of one number for each sample: ``step``, ``prompt_index``, ``index``, ``finish`` (its place in ``FINISHES``),
``prompt_length``, ``response_length``, ``score`` (NaN where it is not known); and of all samples one behind the other:
``prompt_tokens``, ``response_tokens``, ``log_probs``, ``sampled_log_probs``, ``versions``. Where a segment is missing,
h5py gives -1, or NaN.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hybridflow.data.arrays import (
    attribute,
    join_arrays,
    lengths_of_arrays,
    read_arrays,
    read_slices,
    reading_hdf5,
    write_arrays,
)
from hybridflow.data.hdf5 import open_hdf5
from hybridflow.errors import CheckpointError, DataError
from hybridflow.observe.files import writing
from hybridflow.rollout.log_file import FINISHES, LoggedSample

if TYPE_CHECKING:
    from hybridflow.rollout.request import FinishReason, SampleKey

FOLDER = "rollouts"
"""Folder of the archive in the directory of a run."""
ALL = "all.h5"
FORMAT = "hybridflow-rollouts-3"
_SEGMENTS = "segments"
_NAME = re.compile(r"step-(\d{6,})-(\d{6,})-rank-(\d{5,})\.h5")
_DTYPES = {
    "step": np.int64,
    "prompt_index": np.int64,
    "index": np.int64,
    "finish": np.int8,
    "prompt_length": np.int64,
    "response_length": np.int64,
    "score": np.float32,
    "prompt_tokens": np.int32,
    "response_tokens": np.int32,
    "log_probs": np.float32,
    "sampled_log_probs": np.float32,
    "versions": np.int32,
}
_OF_SAMPLES = {kind: dtype for kind, dtype in _DTYPES.items() if dtype in (np.int64, np.int8) or kind == "score"}
_OF_TOKENS = {kind: dtype for kind, dtype in _DTYPES.items() if kind not in _OF_SAMPLES}


Key = tuple[int, int, int]
"""Step, prompt index, index."""


class SegmentName(NamedTuple):
    """A segment's name.

    Attributes:
        first: Its first step.
        last: Its last step.
        rank: Rank whose samples it holds.
    """

    first: int
    last: int
    rank: int

    def __str__(self) -> str:
        return f"step-{self.first:06d}-{self.last:06d}-rank-{self.rank:05d}.h5"

    def holds(self, step: int) -> bool:
        """Return whether it holds the samples that its rank made in a step."""
        return self.first <= step <= self.last


def list_segments(folder: Path) -> list[SegmentName]:
    """Return the segments of an archive, in order; none where there is no archive."""
    return find_segments(folder / _SEGMENTS)


def replayed_segments(run_dir: Path) -> list[SegmentName]:
    """Return the segments of the archive that ``rollout.replay`` names by its run. Raises DataError: there are none."""
    found = list_segments(run_dir / FOLDER)
    if not found:
        raise DataError(
            f"rollout.replay: {run_dir / FOLDER} holds no archive; name the directory of a run that was made with "
            "rollout.archive=true"
        )
    return found


def not_archived(run_dir: Path, key: SampleKey) -> DataError:
    """Return what to raise where the archive of a replayed run lacks a sample."""
    return DataError(
        f"rollout.replay={run_dir}: prompt {key[0]}, sample {key[1]}: is not in the archive; replay a run that was "
        "made with rollout.archive=true (another one keeps two prompts of a step), for no more steps than it made, on "
        "batches and groups no larger than its own"
    )


def find_segments(folder: Path) -> list[SegmentName]:
    """Return the files of a directory that are named as segments, in order; none where there is no directory."""
    found = (_NAME.fullmatch(each.name) for each in folder.iterdir()) if folder.is_dir() else ()
    return sorted(SegmentName(*(int(part) for part in each.groups())) for each in found if each is not None)


def write_segment(
    folder: Path,
    name: SegmentName,
    rows: Sequence[tuple[int, LoggedSample]],
    prompts: Mapping[int, Sequence[int]],
    scores: Mapping[Key, float],
) -> None:
    """Write a segment, whole or not at all.

    Args:
        folder: Folder of the archive; made if absent.
        name: Name of the segment.
        rows: Samples and their steps; without any nothing is written.
        prompts: Prompt index -> the prompt's tokens.
        scores: Step, prompt index, index -> score, of samples of which it is known.

    Raises:
        WriteError: The file system refuses.
    """
    rows = sorted(rows, key=lambda row: (row[0], row[1].key))
    if not rows:
        return
    asked = [prompts[each.prompt_index] for _, each in rows]
    arrays = {
        "step": [step for step, _ in rows],
        "prompt_index": [each.prompt_index for _, each in rows],
        "index": [each.index for _, each in rows],
        "finish": [FINISHES.index(each.finish) for _, each in rows],
        "prompt_length": [len(prompt) for prompt in asked],
        "response_length": [len(each.tokens) for _, each in rows],
        "score": [scores.get((step, each.prompt_index, each.index), math.nan) for step, each in rows],
        "prompt_tokens": [token for prompt in asked for token in prompt],
        "response_tokens": np.concatenate([each.tokens for _, each in rows]),
        "log_probs": np.concatenate([each.log_probs for _, each in rows]),
        "sampled_log_probs": np.concatenate([each.sampled_log_probs for _, each in rows]),
        "versions": np.concatenate([each.versions for _, each in rows]),
    }
    path = folder / _SEGMENTS / str(name)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_arrays(path, {key: np.asarray(values, _DTYPES[key]) for key, values in arrays.items()}, FORMAT)


class Archived(NamedTuple):
    """A sample of an archive.

    Attributes:
        step: Training step that it was sampled for.
        prompt_index: Number of its prompt in the data order.
        index: Its number among the samples of its prompt.
        finish: Why it ended.
        score: NaN where it is not known.
        prompt: Token ids.
        response: Token ids.
        log_probs: The sampler's log-probabilities of the response's tokens.
        versions: Version of the weights that sampled each token; ``request.OBSERVED``: none did.
        sampled_log_probs: Log-probabilities under the sampled distribution, penalties and cuts included.
    """

    step: int
    prompt_index: int
    index: int  # type: ignore[assignment]  # it hides tuple.index
    finish: FinishReason
    score: float
    prompt: list[int]
    response: list[int]
    log_probs: list[float]
    versions: list[int]
    sampled_log_probs: list[float]

    @property
    def key(self) -> SampleKey:
        """Return what tells it from others of its step."""
        return self.prompt_index, self.index


def read_segment(folder: Path, name: SegmentName) -> Iterator[Archived]:
    """Yield the samples of a segment, in order.

    Raises:
        CheckpointError: It is damaged.
    """
    arrays = read_arrays(folder / _SEGMENTS / str(name), _DTYPES, FORMAT)
    parts = _parts(arrays, range(len(arrays["step"])))
    for row in range(len(arrays["step"])):
        yield _archived(arrays, row, {kind: arrays[kind][parts[kind][row]] for kind in _OF_TOKENS})


def read_places(folder: Path, name: SegmentName) -> dict[str, Any]:
    """Return the numbers that a segment has of each sample, as arrays of numpy, without reading any token.

    Raises:
        CheckpointError: It is damaged.
    """
    return read_arrays(folder / _SEGMENTS / str(name), _OF_SAMPLES, FORMAT)


def read_rows(folder: Path, name: SegmentName, places: Mapping[str, Any], rows: Sequence[int]) -> list[Archived]:
    """Return some samples of a segment, and read the tokens of these alone.

    Args:
        folder: Folder of the archive.
        name: Name of the segment.
        places: Its ``read_places``.
        rows: Their places in the segment.

    Raises:
        CheckpointError: It is damaged.
    """
    if not rows:
        return []
    parts = _parts(places, rows)
    # Neighbors are read together: each read checks a whole chunk, which has the tokens of many samples.
    wanted = {kind: (dtype, _joined(parts[kind])) for kind, dtype in _OF_TOKENS.items()}
    tokens = {}
    for kind, found in read_slices(folder / _SEGMENTS / str(name), wanted, FORMAT).items():
        ends = np.cumsum([part.stop - part.start for part in parts[kind]])
        tokens[kind] = np.split(np.concatenate(found), ends[:-1])
    return [
        _archived(places, row, {kind: tokens[kind][place] for kind in _OF_TOKENS}) for place, row in enumerate(rows)
    ]


def _joined(parts: Sequence[slice]) -> list[slice]:
    """Return the same stretch of numbers in fewer parts."""
    joined: list[slice] = []
    for part in parts:
        if joined and joined[-1].stop == part.start:
            joined[-1] = slice(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return joined


def _parts(places: Mapping[str, Any], rows: Sequence[int]) -> dict[str, list[slice]]:
    """Return where the tokens of samples lie, in each dataset of tokens."""
    found = {}
    for kind in _OF_TOKENS:
        lengths = places["prompt_length" if kind == "prompt_tokens" else "response_length"]
        ends = np.cumsum(lengths)
        found[kind] = [slice(int(ends[row] - lengths[row]), int(ends[row])) for row in rows]
    return found


def _archived(places: Mapping[str, Any], row: int, tokens: Mapping[str, Any]) -> Archived:
    return Archived(
        step=int(places["step"][row]),
        prompt_index=int(places["prompt_index"][row]),
        index=int(places["index"][row]),
        finish=FINISHES[places["finish"][row]],
        score=float(places["score"][row]),
        prompt=tokens["prompt_tokens"].tolist(),
        response=tokens["response_tokens"].tolist(),
        log_probs=tokens["log_probs"].tolist(),
        versions=tokens["versions"].tolist(),
        sampled_log_probs=tokens["sampled_log_probs"].tolist(),
    )


def is_behind(folder: Path) -> bool:
    """Return whether ``all.h5`` lacks more than a tenth of the segments.

    To join takes milliseconds for each segment of the run. Joined at each save, a run of many saves would join most of
    its time.
    """
    with contextlib.suppress(CheckpointError), reading_hdf5(folder / ALL), open_hdf5(folder / ALL) as file:
        return 10 * len(list_segments(folder)) > 11 * len(json.loads(attribute(file, "parts")))
    return True


def join_segments(folder: Path) -> list[str]:
    """Write ``all.h5`` over the segments that are there.

    Returns:
        For each segment that cannot be read, and is left out, a line that says so.

    Raises:
        WriteError: The file system refuses.
    """
    parts, complaints = {}, []
    for name in map(str, list_segments(folder)):
        try:
            parts[f"{_SEGMENTS}/{name}"] = lengths_of_arrays(folder / _SEGMENTS / name, _DTYPES, FORMAT)
        except CheckpointError as error:
            complaints.append(f"{error}; {folder / ALL} does without it")
    with writing(folder / ALL):
        if parts:
            join_arrays(folder / ALL, parts, _DTYPES, FORMAT)
    return complaints


def drop_segments(folder: Path, *, after: int | None) -> None:
    """Remove what is in the archive of steps after one, which the run will take anew; None: all. For one rank.

    It also removes what killed writers left.

    Raises:
        OSError: The file system refuses.
    """
    dropped = [name for name in list_segments(folder) if after is None or name.last > after]
    if dropped or after is None:
        (folder / ALL).unlink(missing_ok=True)
    for name in dropped:
        (folder / _SEGMENTS / str(name)).unlink()
    for path in [*folder.glob(".*.tmp"), *(folder / _SEGMENTS).glob(".*.tmp")]:
        path.unlink()
