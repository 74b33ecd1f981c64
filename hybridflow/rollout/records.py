"""What is known of each sequence's tokens beside the tokens themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from hybridflow.rollout.request import FinishReason, Request, Response


class Records:
    """Log-probabilities and versions of the tokens in slots, ``[slots, capacity]`` each.

    Args:
        num_slots: Slots.
        capacity: Most tokens of a sequence.
    """

    def __init__(self, num_slots: int, capacity: int) -> None:
        self._log_probs = np.zeros((2, num_slots, capacity), np.float32)
        self._versions = np.zeros((num_slots, capacity), np.int32)
        self._aside: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def seat(self, slot: int, number: int, request: Request) -> None:
        """Give a slot to a sequence that is new, was begun before, or had been put aside."""
        self._log_probs[:, slot] = 0
        if number in self._aside:
            log_probs, versions = self._aside.pop(number)
            self._log_probs[:, slot], self._versions[slot] = log_probs, versions
        elif request.begun is not None:
            span = slice(len(request.prompt), len(request.prompt) + len(request.begun.tokens))
            self._log_probs[0, slot, span] = request.begun.log_probs.numpy()
            self._log_probs[1, slot, span] = request.begun.sampled_log_probs.numpy()
            self._versions[slot, span] = request.begun.versions.numpy()

    def put_aside(self, slot: int, number: int) -> None:
        """Take a sequence out of its slot for a while."""
        self._aside[number] = self._log_probs[:, slot].copy(), self._versions[slot].copy()

    def drop(self, number: int) -> None:
        """Drop a sequence that was put aside."""
        self._aside.pop(number, None)

    def add(
        self,
        slots: np.ndarray,
        positions: np.ndarray,
        log_probs: np.ndarray | np.float32,
        sampled: np.ndarray | np.float32,
        version: int,
    ) -> None:
        """Record tokens sampled at some positions with weights of a version; ``[samples]`` each."""
        self._log_probs[0, slots, positions] = log_probs
        self._log_probs[1, slots, positions] = sampled
        self._versions[slots, positions] = version

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays that decoding several tokens writes."""
        log_probs, sampled = self._log_probs
        return {"log_probs": log_probs, "sampled_log_probs": sampled, "versions": self._versions}

    def score(self, slots: np.ndarray, positions: np.ndarray, log_probs: np.ndarray) -> None:
        """Record scored prompt tokens at some positions; ``[scored]`` each."""
        self._log_probs[0, slots, positions] = log_probs

    def log_probs(self, slot: int, first: int, stop: int) -> torch.Tensor:
        """Return the log-probabilities of the tokens at some positions of a slot, ``[stop - first]``."""
        return torch.from_numpy(self._log_probs[0, slot, first:stop].copy())

    def response(
        self, slot: int, request: Request, tokens: np.ndarray, finish: FinishReason, error: str | None = None
    ) -> Response:
        """Return what was sampled in a slot, whose known tokens are ``tokens`` (``[known]``)."""
        return _response(self._log_probs[:, slot], self._versions[slot], request, tokens, finish, error)

    def response_aside(self, number: int, request: Request, tokens: np.ndarray) -> Response | None:
        """Return what was sampled before of a sequence without a slot, or None if nothing was."""
        if number in self._aside:
            return _response(*self._aside[number], request, tokens, "paused")
        return request.begun and replace(request.begun, finish="paused")


def _response(
    log_probs: np.ndarray,
    versions: np.ndarray,
    request: Request,
    tokens: np.ndarray,
    finish: FinishReason,
    error: str | None = None,
) -> Response:
    begin, end = len(request.prompt), len(tokens)
    both = torch.from_numpy(log_probs[:, :end].copy())
    return Response(
        tokens=torch.from_numpy(tokens[begin:].astype(np.int64)),
        log_probs=both[0, begin:],
        sampled_log_probs=both[1, begin:],
        versions=torch.from_numpy(versions[begin:end].copy()),
        prompt_log_probs=both[0, 1:begin] if request.params.with_prompt_log_probs else None,
        finish=finish,
        error=error,
    )
