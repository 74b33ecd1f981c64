"""What another run has sampled, in the place of sampling: ``rollout.replay``."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

from hybridflow.errors import DataError
from hybridflow.rollout.archive import Archived, list_segments, read_segment
from hybridflow.rollout.request import FinishReason, Request, Response


class Replay:
    """The samples of a run's archive, found by the numbers of their prompts in the data order.

    Every rank of a replica reads them for itself, and finds the same.

    Args:
        run_dir: Directory of the run that has an archive.

    Raises:
        DataError: It has none.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._folder = run_dir, run_dir / "rollouts"
        self._unread = deque(list_segments(self._folder))
        self._known: dict[tuple[int, int], Archived] = {}
        if not self._unread:
            raise DataError(
                f"rollout.replay: {self._folder} holds no archive; name the directory of a run that was made with "
                "rollout.archive=true"
            )

    def find(self, requests: Sequence[Request]) -> dict[tuple[int, int], Response]:
        """Return a response to each request, by prompt index and index. Earlier prompt indices are forgotten.

        Raises:
            DataError: One is not there, was sampled for another prompt, or is longer than it may be.
            CheckpointError: The archive is damaged.
        """
        found = {(ask.prompt_index, ask.index): ask for ask in requests}
        while self._unread and not found.keys() <= self._known.keys():
            samples = read_segment(self._folder, self._unread.popleft())
            self._known |= {(each.prompt_index, each.index): each for each in samples}
        responses = {key: self._response(ask) for key, ask in found.items()}
        first = min((prompt_index for prompt_index, _ in found), default=0)
        self._known = {key: sample for key, sample in self._known.items() if key[0] >= first}
        return responses

    def _response(self, ask: Request) -> Response:
        place = f"rollout.replay={self._run_dir}: prompt {ask.prompt_index}, sample {ask.index}"
        sample = self._known.get((ask.prompt_index, ask.index))
        if sample is None:
            raise DataError(
                f"{place}: is not in the archive; train for no more steps than that run made, on batches and groups no "
                "larger than its own"
            )
        if sample.prompt != ask.prompt.tolist():
            raise DataError(
                f"{place}: was sampled for another prompt; give that run's data, data order (seed) and tokenizer"
            )
        most = ask.params.max_new_tokens
        if len(sample.response) > most:
            raise DataError(f"{place}: has {len(sample.response)} tokens; raise rollout.max_new_tokens={most}")
        return Response(
            tokens=torch.tensor(sample.response, dtype=torch.int64),
            log_probs=torch.tensor(sample.log_probs, dtype=torch.float32),
            sampled_log_probs=torch.tensor(sample.sampled_log_probs, dtype=torch.float32),
            versions=torch.tensor(sample.versions, dtype=torch.int32),
            finish=cast(FinishReason, sample.finish),
        )
