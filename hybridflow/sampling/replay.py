"""What another run has sampled, in the place of sampling: ``rollout.replay``."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from hybridflow.errors import DataError
from hybridflow.rollout.archive import (
    FOLDER,
    Archived,
    SegmentName,
    not_archived,
    read_places,
    read_rows,
    replayed_segments,
)
from hybridflow.rollout.request import OBSERVED, Request, Response, SampleKey
from hybridflow.sampling.rollout_log import kept_response


class Replay:
    """The samples of a run's archive, found by the numbers of their prompts in the data order.

    Every rank of a replica reads them for itself, and finds the same.

    Args:
        run_dir: Directory of the run that has an archive.

    Raises:
        DataError: It has none.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._folder = run_dir, run_dir / FOLDER
        self._unread = deque(replayed_segments(run_dir))
        # Where each sample lies; its tokens are read when they are asked for.
        self._found: dict[SampleKey, tuple[SegmentName, int]] = {}
        self._places: dict[SegmentName, dict[str, Any]] = {}

    def find(self, requests: Sequence[Request]) -> dict[SampleKey, Response]:
        """Return a response to each request, by prompt index and index. Earlier prompt indices are forgotten.

        Raises:
            DataError: One is not there, was sampled for another prompt, or is longer than it may be.
            CheckpointError: The archive is damaged.
        """
        wanted = {ask.key: ask for ask in requests}
        self._look(wanted)
        rows: dict[SegmentName, list[int]] = {}
        for name, row in sorted(self._found[key] for key in wanted if key in self._found):
            rows.setdefault(name, []).append(row)
        samples = {
            each.key: each for name in rows for each in read_rows(self._folder, name, self._places[name], rows[name])
        }
        return {key: self._response(ask, samples.get(key)) for key, ask in wanted.items()}

    def _look(self, wanted: Collection[SampleKey]) -> None:
        """Find where the wanted samples lie, in as few segments as it takes, and forget what comes before them."""
        first = min((prompt_index for prompt_index, _ in wanted), default=0)
        self._found = {key: place for key, place in self._found.items() if key[0] >= first}
        while self._unread and not all(key in self._found for key in wanted):
            name = self._unread.popleft()
            places = self._places[name] = read_places(self._folder, name)
            keys = zip(places["prompt_index"].tolist(), places["index"].tolist(), strict=True)
            self._found |= {key: (name, row) for row, key in enumerate(keys) if key[0] >= first}
        held = {name for name, _ in self._found.values()}
        self._places = {name: places for name, places in self._places.items() if name in held}

    def _response(self, ask: Request, sample: Archived | None) -> Response:
        place = f"rollout.replay={self._run_dir}: prompt {ask.prompt_index}, sample {ask.index}"
        if sample is None:
            raise not_archived(self._run_dir, ask.key)
        if sample.prompt != ask.prompt.tolist():
            raise DataError(
                f"{place}: was sampled for another prompt; give that run's data, data order (seed) and tokenizer"
            )
        if OBSERVED in sample.versions:
            raise DataError(f"{place}: is a conversation with an environment; replay a run without one")
        most = ask.params.max_new_tokens
        if len(sample.response) > most:
            raise DataError(f"{place}: has {len(sample.response)} tokens; raise rollout.max_new_tokens={most}")
        return kept_response(
            sample.response, sample.log_probs, sample.sampled_log_probs, sample.versions, sample.finish
        )
